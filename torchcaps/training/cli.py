"""A recipe as a parser: every value of it can be overridden on the command line."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from torchcaps.data import ImageData
from torchcaps.recipes import Published
from torchcaps.training.classifier import Classifier


class RecipeCLI(LightningCLI):
    """Builds the trainer, the model and the data of a recipe; runs nothing.

    Args:
        files: the recipe's files, from the most general to its own.
        overrides: arguments such as `--trainer.max_epochs 5`.
        run_folder: where logs and checkpoints go; None writes nothing.
    """

    model: Classifier
    datamodule: ImageData

    def __init__(self, files: list[Path], overrides: list[str], run_folder: Path | None):
        arguments = [argument for file in files for argument in ("--config", str(file))] + overrides
        super().__init__(
            Classifier,
            ImageData,
            subclass_mode_data=True,
            run=False,
            args=arguments,
            trainer_defaults=_outputs(run_folder),
            parser_kwargs={"exit_on_error": False, "prog": "torchcaps train RECIPE", "description": None},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            **({"save_config_callback": None} if run_folder is None else {}),
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(Published, "recipe")
        parser.add_argument("--extends", type=str | None, default=None, help="recipe that this one changes")


def _outputs(run_folder: Path | None) -> dict[str, Any]:
    """CSV and TensorBoard logs, the configuration and checkpoints, all in one folder."""
    if run_folder is None:
        return {"logger": False, "enable_checkpointing": False}
    place = {"save_dir": str(run_folder.parent), "name": "", "version": run_folder.name}
    return {
        "logger": [
            {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": place},
            {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": place},
        ],
        "callbacks": [ModelCheckpoint(dirpath=run_folder / "checkpoints", filename="{epoch}-{step}", save_last=True)],
    }
