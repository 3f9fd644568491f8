"""Test a trained network."""

import argparse
from typing import TYPE_CHECKING

from torchcaps.cli.arguments import add_checkpoint, add_recipe, find_run
from torchcaps.cli.table import as_text, print_table
from torchcaps.utils.processes import stop_all_on_error

if TYPE_CHECKING:
    from torchcaps.training.build import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps test`."""
    add_recipe(parser, run=True)
    add_checkpoint(parser)


def run(options: argparse.Namespace) -> None:
    """Print the test metrics of a checkpoint."""
    training = find_run(options).training(options.overrides)
    check_test(training)
    with stop_all_on_error(training.trainer):
        print_test(training)


def check_test(training: "Training") -> None:
    """Check that there are batches to test on, before any training."""
    if training.trainer.limit_test_batches == 0:
        raise ValueError("no batch to test on: set trainer.limit_test_batches to more than 0")


def print_test(training: "Training") -> dict[str, float]:
    """Test the model, print the metrics and return them; of several processes only the first one prints."""
    metrics, report = training.test(), training.report()
    if training.trainer.is_global_zero:
        for name, value in metrics.items():
            print(f"{name}: {as_text(value)}")
        if report and (results := report.results):
            print_table(results.header, results.rows)
            if results.line:
                print(results.line)
    return metrics
