"""List the models and their sizes."""

import argparse

from torchcaps.cli.errors import BadInput
from torchcaps.cli.table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps models`."""
    parser.add_argument("pattern", nargs="?", default="*", help="as in a shell, e.g. 'capsnet*' (default: all)")


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print a line per model, without making its weights."""
    import torch

    from torchcaps.models import create_model, list_models
    from torchcaps.models.registry import describe_model

    rows = []
    for name in list_models(options.pattern):
        with torch.device("meta"):
            model = create_model(name)
        rows.append((name, f"{sum(p.numel() for p in model.parameters()):,}", describe_model(name)))
    if not rows:
        raise BadInput(f"no model matches {options.pattern!r}: there are {', '.join(list_models())}")
    print_table(("model", "parameters", ""), rows)
