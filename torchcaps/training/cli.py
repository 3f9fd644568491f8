"""A recipe as a parser: every value of it can be overridden on the command line."""

import logging
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from torchcaps.data import DataError, ImageNet, LabelledData
from torchcaps.recipes import Published
from torchcaps.training.classifier import Classifier

# Overrides that make any recipe a matter of seconds.
SMOKE = (
    "--data.batch_size=2",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--trainer.log_every_n_steps=1",
)

# What Lightning says to everybody about choices that are ours, and about its own internals.
NOISE = (
    ".*does not have many workers.*",  # batches of tensors in memory need none
    "Total length of `list` across ranks is zero.*",  # no validation set is a choice
    ".*isinstance\\(treespec, LeafSpec\\).*",
    "LightningCLI's args parameter is intended to run from within Python.*",
    "Experiment logs directory .* exists and is not empty.*",  # two loggers share it
)


class Checkpoint(ModelCheckpoint):
    """Keeps the last epoch, and what an interrupted run had reached; not what a failed run had, for that may be
    the failure."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            super().on_exception(trainer, pl_module, exception)


class RecipeCLI(LightningCLI):
    """Builds the trainer, the model and the data of a recipe; runs nothing.

    Args:
        files: the recipe's files, from the most general to its own.
        overrides: arguments such as `--trainer.max_epochs 5`.
        run_folder: where logs and checkpoints go, `.../version_N`; None writes nothing.
        smoke: take two steps of two samples, if the overrides do not say otherwise.
    """

    model: Classifier
    datamodule: LabelledData

    def __init__(self, files: list[Path], overrides: list[str], run_folder: Path | None, smoke: bool = False):
        self.run_folder, self.smoke = run_folder, smoke
        if smoke:
            overrides = [*SMOKE, *overrides]
        for package in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(package).setLevel(logging.WARNING)
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        super().__init__(
            Classifier,
            LabelledData,
            subclass_mode_data=True,
            run=False,
            args=[argument for file in files for argument in ("--config", str(file))] + overrides,
            trainer_defaults={"logger": _loggers(run_folder)},
            parser_kwargs={
                "exit_on_error": False,
                "allow_abbrev": False,
                "prog": "torchcaps train RECIPE",
                "description": None,
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=None if run_folder is None else SaveConfigCallback,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(Published, "recipe")
        parser.add_argument("--extends", type=str | None, default=None, help="recipe that this one changes")

    def before_instantiate_classes(self) -> None:
        data = self.config.data.init_args
        if self.smoke and "max_texts" in data and data.max_texts is None:
            data.max_texts = 8  # all would be embedded before the first step

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        data, classes = self.datamodule, self.model.classes
        some = isinstance(data, ImageNet)  # of whose classes a few may do
        with suppress(DataError):  # those of folders that are not there; that is said when they are read
            if data.classes > classes or (data.classes < classes and not some):
                raise ValueError(
                    f"{type(data).__name__} has {data.classes} classes here, and the model is for {classes}: set "
                    f"model.classes and the network's own to {data.classes}, or choose other data"
                )

    def arguments(self) -> dict[str, Any]:
        """All values, as `config.yaml` of a run has them."""
        return yaml.safe_load(self.parser.dump(self.config, skip_none=False))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        wanted = self.config_init["trainer"]
        callbacks = list(wanted["callbacks"] or [])
        if wanted["enable_progress_bar"] is not False:
            callbacks.append(TQDMProgressBar())
        if self.run_folder is None:
            kwargs["enable_checkpointing"] = False
        elif wanted["enable_checkpointing"] is not False:
            folder = self.run_folder / "checkpoints"
            callbacks.append(Checkpoint(folder, filename="{epoch}-{step}", save_last=True, save_on_exception=True))
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)


def _loggers(run_folder: Path | None) -> Any:
    if run_folder is None:
        return False
    version = int(run_folder.name.removeprefix("version_"))
    place = {"save_dir": str(run_folder.parent), "name": "", "version": version}
    return [
        {"class_path": f"lightning.pytorch.loggers.{name}", "init_args": dict(place)}
        for name in ("CSVLogger", "TensorBoardLogger")
    ]
