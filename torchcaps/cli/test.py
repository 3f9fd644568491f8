"""Test a checkpoint of a recipe."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.checkpoints import find_checkpoint
from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.cli.recipe_commands import add_recipe, build_training, check_test, run_test
from torchcaps.utils.files import write_csv_whole
from torchcaps.utils.processes import ends_together

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.training.build import Training


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
    training = build_training(options, overrides)
    check_test(training)
    _, state = find_checkpoint(options, training, options.ckpt_path, "network.")
    training.model.load_state_dict(state)
    if options.predictions:
        _collect_predictions(options.predictions, training)
    with bad_data(), ends_together(training.trainer):
        run_test(training)
    if training.model.predictions and training.trainer.is_global_zero:
        names = training.datamodule.names
        print(f"predictions: {_write_predictions(options.predictions, training.model.predictions, names)}")


def _collect_predictions(file: Path, training: "Training") -> None:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    if training.model.labels_per_image != 1:
        raise BadInput("--predictions is for images of one class each, and this recipe's have several")
    if isinstance(training.trainer.strategy.launcher, _MultiProcessingLauncher):
        raise BadInput("--predictions cannot be collected from spawned processes: set --trainer.strategy ddp")
    if file.is_dir():
        raise BadInput(f"--predictions {file} is a folder: give the path of a .csv file")
    training.model.predictions = []


def _write_predictions(file: Path, predictions: list["Tensor"], names: Sequence[str]) -> Path:
    import torch

    rows = torch.cat(predictions, 1).T.tolist()
    named = ((names[label], names[prediction]) for label, prediction in rows)
    return write_csv_whole(file, ("label", "prediction"), named)
