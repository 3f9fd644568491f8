"""Test a trained network."""

import argparse

from torchcaps.cli.checkpoints import build_run, find_run
from torchcaps.cli.errors import bad_data
from torchcaps.cli.recipe_commands import add_checkpoint, add_recipe, check_test, run_test
from torchcaps.utils.processes import ends_together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps test`."""
    add_recipe(parser, run=True)
    add_checkpoint(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print the test metrics of a checkpoint."""
    training = build_run(options, overrides, find_run(options, overrides, options.ckpt_path), "network.")
    check_test(training)
    with bad_data(), ends_together(training.trainer):
        run_test(training)
