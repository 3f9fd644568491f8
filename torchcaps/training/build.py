"""Builds the trainer, the model and the data of a recipe and of overrides such as `--trainer.max_epochs 5`.

The commands of `torchcaps` (`torchcaps.cli`) and the queue of `torchcaps reproduce` build their trainings here.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from torchcaps.data import DataError, ImageNet, LabeledData
from torchcaps.files import take_folder, write_text_whole
from torchcaps.recipes import Recipe
from torchcaps.recipes.modules import OwnModules
from torchcaps.signals import StopSignals
from torchcaps.training.checkpoints import LastCheckpoints, WholeCheckpointIO
from torchcaps.training.classifier import Classifier
from torchcaps.training.errors import explain_parsing, innermost
from torchcaps.training.progress import ProgressLines
from torchcaps.training.trainer import Trainer

# Overrides with which any recipe runs in seconds.
SMOKE = (
    "--data.batch_size=2",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--trainer.log_every_n_steps=1",
)


class Training(LightningCLI):
    """The trainer, the model and the data of a recipe. Building them runs nothing.

    The recipe may name classes and functions of modules in its own folder; see `torchcaps.recipes.modules`.

    Lightning parses the recipe and builds the objects in its constructor, which calls the methods below in their order:
    `parse_arguments`, `before_instantiate_classes` and `instantiate_classes`, which calls `instantiate_trainer`.

    Args:
        recipe: recipe whose values are parsed.
        overrides: command-line arguments such as `--trainer.max_epochs 5`; they take precedence over the recipe.
        folder: folder of the runs of this recipe; logs and checkpoints go to a new `version_N` in it. None writes none.
        smoke: take two steps of two samples, unless the overrides set these numbers; the folder is then `smoke_N`.
        signals: signals that ask the training to stop.

    Raises:
        ValueError: a value cannot be used; the message is one line for the user of the command.

    Attributes:
        run_folder: folder of this run, or None if it writes no logs and checkpoints.
    """

    model: Classifier
    datamodule: LabeledData

    def __init__(
        self,
        recipe: Recipe,
        overrides: list[str],
        folder: Path | None = None,
        smoke: bool = False,
        signals: StopSignals | None = None,
    ):
        self.recipe, self.folder, self.smoke, self.signals = recipe, folder, smoke, signals or StopSignals()
        self.run_folder: Path | None = None
        self.own_modules = OwnModules(recipe)
        self.overrides = [*(SMOKE if smoke else ()), *overrides]
        super().__init__(
            Classifier,
            LabeledData,
            trainer_class=Trainer,
            subclass_mode_data=True,
            run=False,
            args=["--config", yaml.safe_dump(recipe.config), *self.overrides],
            trainer_defaults={"logger": folder is not None},
            parser_kwargs={
                "exit_on_error": False,
                "allow_abbrev": False,
                "prog": "torchcaps train RECIPE",
                "description": None,
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=None if folder is None else _SaveConfig,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except Exception as error:  # the user's modules may raise any exception
            said = self.own_modules.why_not(error)
            if said is None and isinstance(error, (ArgumentError, TypeError, ValueError)):
                said = explain_parsing(error, parser, self.recipe, self.overrides)
            if said is None:
                raise
            raise ValueError(said) from error
        self.own_modules.check_names(self.config.as_dict())

    def before_instantiate_classes(self) -> None:
        data = self.config.data.init_args
        if self.smoke and "max_texts" in data and data.max_texts is None:
            data.max_texts = 8  # otherwise all texts would be embedded before the first step

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
            self._check_classes()
        except ValueError as error:
            self.give_back_folder()
            raise ValueError(innermost(error)) from error  # without the lines that jsonargparse adds

    def _check_classes(self) -> None:
        data, classes = self.datamodule, self.model.classes
        some = isinstance(data, ImageNet)  # may have only some of the model's classes
        with suppress(DataError):  # missing files are reported when the data is read
            if data.classes > classes or (data.classes < classes and not some):
                raise ValueError(
                    f"{type(data).__name__} has {data.classes} classes, but the model has {classes}: set model.classes "
                    f"and the classes of the network to {data.classes}, or choose other data"
                )

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        wanted = self.config_init["trainer"]
        callbacks = list(wanted["callbacks"] or [])
        if self.folder is None or wanted["fast_dev_run"]:
            callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        plugins = [*(wanted["plugins"] or []), WholeCheckpointIO()]
        if wanted["enable_progress_bar"] is not False:
            callbacks.append(TQDMProgressBar() if sys.stdout.isatty() else ProgressLines())
        if self.folder is not None and not wanted["fast_dev_run"]:
            self.run_folder = self._take_folder(self.folder)
            self.save_config_kwargs = {"folder": self.run_folder, "save_to_log_dir": False}
            if wanted["logger"] is True:
                kwargs["logger"] = _loggers(self.run_folder)
        if self.run_folder is not None and wanted["enable_checkpointing"] is not False:
            callbacks.append(LastCheckpoints(self.run_folder / "checkpoints", self.signals))
        elif not any(isinstance(callback, Checkpoint) for callback in callbacks):
            kwargs["enable_checkpointing"] = False
        try:
            return super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)
        except (TypeError, MisconfigurationException) as error:  # raised by the Trainer for a wrong value
            raise ValueError(str(error)) from error

    def arguments(self) -> dict[str, Any]:
        """Return all values, as they stand in a run's `config.yaml`."""
        return yaml.safe_load(self.parser.dump(self.config, skip_none=False))

    def give_back_folder(self) -> None:
        """Remove the folder of a run that has not begun."""
        if self.run_folder is not None:
            with suppress(OSError):  # it is empty, and only the first process has made it
                self.run_folder.rmdir()

    def _take_folder(self, folder: Path) -> Path:
        kind = "smoke" if self.smoke else "version"
        rank = getattr(rank_zero_only, "rank", 0)
        if rank:  # a placeholder: the first process takes the folder, and broadcasts it when all are connected
            return folder / f"{kind}_of_the_first_process"
        return take_folder(folder, kind)


class _SaveConfig(SaveConfigCallback):
    """Write all values of a run to its folder, whichever loggers it has."""

    def __init__(self, *arguments: Any, folder: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.folder = folder

    def save_config(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        write_text_whole(self.folder / self.config_filename, text)


def _loggers(run_folder: Path) -> list[Logger]:
    place: dict[str, Any] = {"save_dir": run_folder.parent, "name": "", "version": run_folder.name}
    return [CSVLogger(**place), TensorBoardLogger(**place)]
