"""Test a checkpoint of a recipe."""

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.checkpoints import find_checkpoint
from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.cli.recipe import add_recipe, build
from torchcaps.files import write_text_whole

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.training.cli import RecipeCLI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps test`."""
    add_recipe(parser)
    parser.add_argument(
        "--ckpt_path", required=True, help="checkpoint to test, or `last` for the newest of this recipe"
    )
    parser.add_argument(
        "--predictions", type=Path, metavar="FILE", help="also write each image's label and prediction, as CSV"
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print the test metrics of a checkpoint, and write its predictions if they are asked for."""
    cli = build(options, overrides)
    _, state = find_checkpoint(options, cli, options.ckpt_path, "network.")
    cli.model.load_state_dict(state)
    if options.predictions:
        _collect_predictions(options.predictions, cli)
    with bad_data():
        print_test(cli)
    if cli.model.predictions:
        print(f"predictions: {_write_predictions(options.predictions, cli.model.predictions, cli.datamodule.names)}")


def print_test(cli: "RecipeCLI") -> None:
    """Test the model and print the metrics, in one process of several."""
    tested = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    if not tested:
        raise BadInput("no batch to test on: set trainer.limit_test_batches to more than 0")
    (metrics,) = tested
    if cli.trainer.is_global_zero:
        for name, value in metrics.items():
            print(f"{name}: {value:.4f}")


def _collect_predictions(file: Path, cli: "RecipeCLI") -> None:
    if cli.model.labels_per_image != 1:
        raise BadInput("--predictions is for images of one class each, and this recipe's have several")
    if cli.trainer.world_size > 1:
        raise BadInput("--predictions needs all images in one process: add --trainer.devices 1")
    if file.is_dir():
        raise BadInput(f"--predictions {file} is a folder: give the path of a .csv file")
    cli.model.predictions = []


def _write_predictions(file: Path, predictions: list["Tensor"], names: Sequence[str]) -> Path:
    import torch

    rows = torch.cat(predictions, 1).T.tolist()
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(("label", "prediction"))
    writer.writerows((names[label], names[prediction]) for label, prediction in rows)
    return write_text_whole(file, written.getvalue())
