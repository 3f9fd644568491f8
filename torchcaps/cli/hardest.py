"""List the classes that a classifier confuses most often, as a class_list of ImageNet."""

import argparse
from pathlib import Path

from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.utils.files import write_text_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps hardest`."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="CSV file with columns label and prediction, as `torchcaps test --predictions` writes it",
    )
    parser.add_argument("--classes", type=int, required=True, metavar="N", help="number of classes to list")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write the list to (default: print it)")


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Write or print the list."""
    from torchcaps.data.hardest import class_list, read_predictions

    if options.classes < 1:
        raise BadInput(f"--classes must be at least 1, got {options.classes}")
    with bad_data():
        text = class_list(*read_predictions(options.file), options.classes)
    if not options.out:
        print(text, end="")
        return
    if options.out.is_dir():
        raise BadInput(f"--out {options.out} is a folder: give the path of a text file")
    print(f"classes: {write_text_whole(options.out, text)}")
