"""List the models, their sizes, and the data sets for which the package has trained weights."""

import argparse
import re
import textwrap

from torchcaps.cli.table import print_table

HEADER, WIDTH = ("model", "parameters", "trained on", ""), 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps models`."""
    parser.add_argument("pattern", nargs="?", default="*", help="as in a shell, e.g. 'capsnet*' (default: all)")


def run(options: argparse.Namespace) -> None:
    """Print a line per model, without making its weights."""
    import torch

    from torchcaps.models import create_model, list_models
    from torchcaps.models.pretrained import list_weights
    from torchcaps.models.registry import describe_model

    rows = []
    for name in list_models(options.pattern):
        with torch.device("meta"):
            model = create_model(name)
        count = sum(p.numel() for p in model.parameters())
        what = re.sub(r"[:,;]? [\d,]+ parameters.*", "", describe_model(name))
        rows.append((name, f"{count:,}", ", ".join(list_weights(name)), what))
    if not rows:
        raise ValueError(f"no model matches {options.pattern!r}: there are {', '.join(list_models())}")
    left = WIDTH - sum(max(map(len, column)) + 2 for column in list(zip(HEADER, *rows, strict=True))[:3])
    print_table(HEADER, [(*row[:3], textwrap.shorten(row[3], left, placeholder=" ...")) for row in rows])
