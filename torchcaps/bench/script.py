"""Argument parser of the modules that are started by hand, as `python -m torchcaps.bench.NAME`."""

import argparse


def script_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m torchcaps.bench.NAME`; its help prints the description with its line breaks."""
    return argparse.ArgumentParser(
        prog=f"python -m torchcaps.bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
