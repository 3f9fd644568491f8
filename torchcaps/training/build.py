"""Builds the trainer, the model and the data of a recipe and of overrides such as `--trainer.max_epochs 5`.

The commands of `torchcaps` (`torchcaps.cli`) and the queue of `torchcaps reproduce` build their trainings here.
"""

import inspect
import math
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning import seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchcaps.data import DataError, EncodedImages, ImageNet, LabeledData
from torchcaps.nn import CapsuleHead, RoutingPool2d
from torchcaps.recipes import Recipe
from torchcaps.recipes.modules import OwnModules
from torchcaps.recipes.values import ARGUMENTS
from torchcaps.routing import Routing
from torchcaps.training.checkpoints import NEWEST, KeepsValues, LastCheckpoints, WholeCheckpointIO
from torchcaps.training.classifier import Classifier
from torchcaps.training.errors import innermost, refused, where
from torchcaps.training.margin import SpreadMargin
from torchcaps.training.monitors import ChecksMonitors
from torchcaps.training.names import Names, Refused, import_name
from torchcaps.training.overrides import Override, read_overrides, with_override
from torchcaps.training.parts import build_part, untrained
from torchcaps.training.progress import ProgressLines
from torchcaps.training.report import Report
from torchcaps.training.trainer import Trainer
from torchcaps.utils.checks import counted, nearest, one_line
from torchcaps.utils.files import take_folder, write_text_whole, writing
from torchcaps.utils.signals import StopSignals

# Overrides with which any recipe runs in seconds.
SMOKE = (
    "--data.batch_size=2",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--trainer.log_every_n_steps=1",
)

# Callbacks of Lightning that would not do what they promise here.
UNUSABLE: dict[type, str] = {
    StochasticWeightAveraging: "the weights that it averages at the end would be in no checkpoint",
    LearningRateFinder: "it needs a learning rate that is an attribute of the model: use torchcaps search",
}

# Learning rate of the features of a library's network, pretrained or not, as a part of the optimizer's.
FEATURES_LR = {True: 0.1, False: 0.5}

DEVICES = {  # what Lightning expects of the values that its errors name in code
    "devices": "auto, or a number of at least 1, or, of GPUs, a list of their indices",
    "accelerator": "auto, cpu, or one that this machine has",
}

LEAST = {  # numbers of the trainer that Lightning does not check
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "max_epochs": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "num_nodes": 1,
    "num_sanity_val_steps": -1,
    "reload_dataloaders_every_n_epochs": 0,
}


class Training:
    """The trainer, the model and the data of a recipe. Building them runs nothing.

    With `allow_code` the recipe may name any class or function, also of modules in its own folder; see
    `torchcaps.recipes.modules`. Without it, only those that `torchcaps.training.names` knows, and nothing else is run.

    Args:
        recipe: recipe whose values are parsed.
        overrides: command-line arguments such as `--trainer.max_epochs 5`; they take precedence over the recipe.
        folder: folder of the runs of this recipe; logs and checkpoints go to a new `version_N` in it. None writes none.
        smoke: take two steps of two samples, unless the overrides set these numbers; the folder is then `smoke_N`.
        signals: signals that ask the training to stop.
        allow_code: whether the recipe and the overrides may name classes and functions of any package.
        checkpoint: checkpoint whose weights will be loaded, so that no pretrained ones need be.

    Raises:
        ValueError: a value cannot be used; the message is one line for the user of the command.

    Attributes:
        parser: the parser of recipes.
        config: all values, as the parser has read them.
        values: all values, as they stand in a run's `config.yaml`.
        trainer, model, datamodule: what is built of them.
        run_folder: folder of this run, or None if it writes no logs and checkpoints.
    """

    def __init__(
        self,
        recipe: Recipe,
        overrides: list[str],
        folder: Path | None = None,
        smoke: bool = False,
        signals: StopSignals | None = None,
        allow_code: bool = False,
        checkpoint: Path | None = None,
    ):
        self.recipe, self.folder, self.smoke, self.signals = recipe, folder, smoke, signals or StopSignals()
        self.run_folder: Path | None = None
        self.allow_code, self.checkpoint = allow_code, checkpoint
        self.overrides = [*(SMOKE if smoke else ()), *overrides]
        self.parser = recipe_parser(logs=folder is not None)
        self.config = self._parsed()
        self._check_numbers()
        seed = self.config.seed_everything  # True for any, False for none
        if seed is not False:
            self.config.seed_everything = seed_everything(None if seed is True else seed, workers=True)
        self._build()

    def _parsed(self) -> Namespace:
        """Parse the values of the recipe with the overrides."""
        names = Names(self.allow_code)
        self.own_modules = OwnModules(self.recipe.name, self.recipe.files, self.allow_code)
        done: list[Override] = []
        try:
            values = self.recipe.config
            names.check(values)
            for override in read_overrides(self.overrides):
                done.append(override)
                values = with_override(values, override, names)
                names.check(values)
            return self.parser.parse_object(values)
        except (Refused, ArgumentError, RecursionError) as error:
            path, said = (error.path, str(error)) if isinstance(error, Refused) else refused(error)
            said = self.own_modules.why_not(error.__cause__) or said
            if [name for name in path if name not in ARGUMENTS][:3] == ["model", "loss", "weight"]:
                said = (
                    'class weights are given as --model.class_weights balanced, or as "[1, 19]" with one for each class'
                )
            raise ValueError(f"{where(path, self.recipe.name, done)}: {said}") from error

    def _build(self) -> None:
        """Build the trainer, the model and the data."""
        try:
            read = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
            Names(self.allow_code).check(read)  # again, as the parser has read them
            for part in (self.config.data, self.config.model.network):
                if "init_args" not in part:
                    part.init_args = Namespace()  # of a class whose constructor takes no arguments
            data = self.config.data.init_args
            if self.smoke and "max_texts" in data and data.max_texts is None:
                data.max_texts = 8  # otherwise all texts would be embedded before the first step
            if self.checkpoint is None:  # otherwise the values are those of a run, which was fitted
                self._fit_to_data()
            self.values: dict[str, Any] = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
            config = self.config.clone()
            if self.checkpoint is not None:  # no pretrained weights, which those of the checkpoint replace
                config.model.network = Namespace(untrained(config.model.network.as_dict()))
            built = self.parser.instantiate(config)
            self.model: Classifier = built.model.train()  # weights of the package come in evaluation mode
            self.datamodule: LabeledData = built.data
            self.trainer = self._trainer(built.trainer.as_dict())
            self._check_classes()
            self._check_optimizer()
            self._check_callbacks()
        except Exception as error:
            self.give_back_folder()
            if self.allow_code and not isinstance(error, ValueError):
                raise  # perhaps an error in the user's own modules
            if isinstance(error, OSError | ImportError):
                raise
            said = innermost(error) or f"the training cannot be built: {type(error).__name__}"
            raise ValueError(said) from error  # without the lines that jsonargparse adds

    def _fit_to_data(self) -> None:
        """Write what the files of the user's own data determine into the values of the recipe: first arguments of the
        data and of the network, then the rest of the model."""
        data_values, model_values = self.config.data, self.config.model
        if import_name(data_values.class_path).facts is LabeledData.facts:
            return  # a published data set: its recipes have all values
        _check_kind(model_values.network, data_values.init_args)
        arguments = model_values.network.init_args
        if "size" in arguments and arguments.size is None:
            arguments.size = data_values.init_args.size  # a library's network takes images of the size asked for
        data, network = _build_for_each_other(data_values, model_values.network)
        model_values.classes = data.classes
        of_library = model_values.network.class_path == "torchcaps.models.library_network"
        rate = model_values.optimizer.get("init_args", {}).get("lr")
        one_cycle = model_values.scheduler and "max_lr" in model_values.scheduler.get("init_args", {})
        chosen = model_values.features_lr is not None or one_cycle
        if of_library and arguments.trainable == "all" and not chosen and isinstance(rate, float):
            model_values.features_lr = rate * FEATURES_LR[bool(arguments.pretrained)]
        if arguments.get("decoder") is True and not model_values.reconstruction_weight:
            arguments["decoder"] = False  # nothing would train it
        loss, options = model_values.loss, inspect.signature(torch.nn.CrossEntropyLoss).parameters
        given = loss.get("init_args", {})
        plain = all(given.get(name, option.default) == option.default for name, option in options.items())
        of_logits = plain and loss.class_path == "torch.nn.CrossEntropyLoss"
        if of_logits and not getattr(network, "gives_logits", True):
            model_values.loss = Namespace(class_path="torchcaps.MarginLoss")  # it gives activations in [0, 1]
        _set(data_values.init_args, data.found())

    def _check_numbers(self) -> None:
        """Check the seed, and values of the trainer that Lightning does not check."""
        seed, trainer = self.config.seed_everything, self.config.trainer
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed_everything must be from 0 to {2**32 - 1}, got {seed}")
        for name in ("strategy", "plugins"):
            if "deepspeed" in str(trainer[name]).lower():
                raise ValueError(
                    f"trainer.{name} cannot be DeepSpeed, whose checkpoints are folders that no command reads: use "
                    "trainer.strategy ddp, or fsdp on GPUs"
                )
        known = [name for name in ("auto", *StrategyRegistry.available_strategies()) if "deepspeed" not in name]
        if isinstance(trainer.strategy, str) and trainer.strategy not in known:
            raise ValueError(f"trainer.strategy: there is no {trainer.strategy!r}{nearest(trainer.strategy, known)}")
        if isinstance(trainer.max_time, str) and not re.fullmatch(r"\d+(:\d\d){3}", trainer.max_time.strip()):
            raise ValueError(
                "trainer.max_time must be days, hours, minutes and seconds, such as 00:01:30:00 for 90 minutes, "
                f"got {trainer.max_time!r}"
            )
        for name, least in LEAST.items():
            if trainer[name] is not None and not trainer[name] >= least:
                raise ValueError(f"trainer.{name} must be at least {least}, got {trainer[name]}")
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches"):
            value = trainer[name]
            if value is not None and not 0 <= value <= (math.inf if isinstance(value, int) else 1):
                raise ValueError(
                    f"trainer.{name} must be a number of batches, or a fraction of them from 0.0 to 1.0, got {value}"
                )
        if trainer.limit_train_batches == 0:
            raise ValueError("trainer.limit_train_batches must be above 0, got 0: to test alone, use `torchcaps test`")
        if isinstance(trainer.val_check_interval, int | float) and not trainer.val_check_interval > 0:
            raise ValueError(
                "trainer.val_check_interval must be a number of batches, at least 1, or a fraction of an epoch, above "
                f"0.0 and at most 1.0, got {trainer.val_check_interval}"
            )

    def _check_optimizer(self) -> None:
        """Build the optimizer and the schedule once, so that wrong values are found before any data is read."""
        try:
            built = self.model.configure_optimizers()
        except (TypeError, ValueError) as error:
            raise ValueError(f"model.optimizer or model.scheduler cannot be built: {one_line(error)}") from None
        if isinstance(built, dict) and isinstance(built["lr_scheduler"]["scheduler"], ReduceLROnPlateau):
            raise ValueError(
                "model.scheduler cannot be ReduceLROnPlateau, which needs a metric: choose another schedule"
            )
        if isinstance(built, dict) and "max_lr" in built["optimizer"].param_groups[0]:
            rates = {"model.features_lr"} if self.model.features_lr is not None else set()
            rates |= {".".join(override.path) for override in read_overrides(self.overrides)} & {"model.optimizer.lr"}
            if rates:
                raise ValueError(
                    f"{' and '.join(sorted(rates))} cannot change anything: this model.scheduler sets all learning "
                    "rates; give --model.scheduler.max_lr"
                )

    def _check_callbacks(self) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Report) and isinstance(self.trainer.strategy.launcher, _MultiProcessingLauncher):
                raise ValueError(
                    "trainer.callbacks cannot have Report in spawned processes, which keep what it finds to "
                    "themselves: use trainer.strategy ddp"
                )
            if isinstance(callback, SpreadMargin):
                callback.margin_of(self.model)
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                raise ValueError(
                    "ModelCheckpoint cannot have a dirpath: checkpoints lie in the folder of the run, where commands "
                    "and resumed runs find them; leave it out"
                )
            for kind, why in UNUSABLE.items():
                if isinstance(callback, kind):
                    raise ValueError(f"trainer.callbacks cannot have {type(callback).__name__}: {why}")

    def _check_classes(self) -> None:
        data, classes = self.datamodule, self.model.classes
        images = data.images if isinstance(data, EncodedImages) else data
        some = isinstance(images, ImageNet)  # may have only some of the model's classes
        with suppress(DataError):  # missing files are reported when the data is read
            if not hasattr(data, "classes"):
                raise ValueError(
                    f"{type(data).__name__} is a base of data sets and has no data: choose a data set such as "
                    "torchcaps.data.MNIST"
                )
            if data.classes > classes or (data.classes < classes and not some):
                raise ValueError(
                    f"{type(data).__name__} has {counted(data.classes, 'class', 'classes')}, but the model has "
                    f"{classes}: set model.classes and the network's classes to {data.classes}, or choose other data"
                )

    def _trainer(self, arguments: dict[str, Any]) -> Trainer:
        """Build the trainer of its arguments in the recipe, and the folder of its run if it writes one."""
        if self.folder is not None and not arguments["fast_dev_run"]:
            self.run_folder = self._take_folder(self.folder)
        if arguments["logger"] is True:
            arguments["logger"] = _loggers(self.run_folder) if self.run_folder else False
        callbacks = self._callbacks(arguments)
        if not any(isinstance(callback, Checkpoint) for callback in callbacks):
            arguments["enable_checkpointing"] = False  # otherwise Lightning adds a callback of its own
        given = arguments["plugins"] or []
        plugins = [*(given if isinstance(given, list) else [given]), WholeCheckpointIO()]
        try:
            return Trainer(**{**arguments, "callbacks": callbacks, "plugins": plugins})
        except (TypeError, MisconfigurationException) as error:  # raised by the Trainer for a wrong value
            said = str(error).replace("gpu backend", "gpu accelerator")
            for name, expected in DEVICES.items():
                if name in said:
                    raise ValueError(f"trainer.{name} must be {expected}, got {arguments[name]!r}") from None
            raise ValueError(said) from error

    def _callbacks(self, arguments: dict[str, Any]) -> list[Any]:
        """Return the callbacks of the recipe, and those of every training."""
        given = arguments["callbacks"] or []
        callbacks = list(given) if isinstance(given, list) else [given]
        if self.run_folder is None:
            callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        for callback in callbacks:
            if isinstance(callback, Report):
                callback.folder = self.run_folder
                small = ["--small"] if self.recipe.is_small else []
                resumed = [] if self.checkpoint is None else ["--ckpt_path", str(self.checkpoint)]
                allowed = ["--allow_code"] if self.allow_code else []
                callback.describe(self.recipe.name, [*small, *self.overrides, *allowed, *resumed])
        callbacks.append(ChecksMonitors())
        if arguments["enable_progress_bar"] is not False and not any(isinstance(x, ProgressBar) for x in callbacks):
            callbacks.append(TQDMProgressBar() if sys.stdout.isatty() else ProgressLines())
        if self.run_folder is not None and arguments["enable_checkpointing"] is not False:
            callbacks.append(LastCheckpoints(self.run_folder / "checkpoints", self.signals))
            callbacks.append(KeepsValues(self.values, self.own_modules.files))
        return callbacks

    def what(self) -> str:
        """Return in one line what is trained: the network, its routing, its parameters, the classes and the images."""
        values, network = self.config.model.network, self.model.network
        arguments = values.init_args
        name = arguments.get("name") or values.class_path.rpartition(".")[2]
        name += f" of {counted(arguments.depth, 'layer')}" if "depth" in arguments else ""
        routings: dict[str, None] = {}  # in order
        for module in network.modules():
            if isinstance(module, CapsuleHead | RoutingPool2d):
                routings[f"a {type(module).__name__}"] = None
            elif isinstance(module, Routing):
                routings[type(module).__name__] = None
        parameters = sum(p.numel() for p in network.parameters())
        trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
        shape = getattr(self.datamodule, "shape", None)
        return "".join(
            (
                name,
                f" with {', '.join(routings)}" if routings else "",
                f": {parameters:,} parameters",
                f", {trained:,} of them trained" if trained < parameters else "",
                f", {counted(self.model.classes, 'class', 'classes')}",
                f", images of {'x'.join(map(str, shape))}" if shape else "",
                f"; its features at a learning rate of {rate:g}" if (rate := self.model.features_lr) else "",
            )
        )

    def report(self) -> Report | None:
        """Return the report on this training, if its recipe asks for one."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, Report)), None)

    def best_checkpoint(self) -> Path | None:
        """Return the checkpoint with the best value of a metric, if the recipe has a callback that keeps one."""
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor not in NEWEST and callback.best_model_path:
                return Path(callback.best_model_path)
        return None

    def give_back_folder(self) -> None:
        """Remove the folder of a run that has no checkpoint and no metrics yet."""
        folder = self.run_folder
        if folder is not None and not (folder / "metrics.csv").exists() and not any(folder.glob("checkpoints/*")):
            shutil.rmtree(folder, ignore_errors=True)  # only the first process has made it

    def _take_folder(self, folder: Path) -> Path:
        kind = "smoke" if self.smoke else "version"
        rank = getattr(rank_zero_only, "rank", 0)
        if rank:  # a placeholder: the first process takes the folder, and broadcasts it when all are connected
            return folder / f"{kind}_of_the_first_process"
        taken = take_folder(folder, kind)
        write_text_whole(taken / "config.yaml", self.parser.dump(self.config, skip_unset=False))
        return taken


def recipe_parser(logs: bool) -> ArgumentParser:
    """Return the parser of the values of a recipe.

    Args:
        logs: whether the trainer writes logs, unless the recipe says it.
    """
    parser = ArgumentParser(exit_on_error=False, dump_header=[f"lightning.pytorch=={lightning.__version__}"])
    parser.add_argument("--seed_everything", type=bool | int, default=True)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, fail_untyped=False)
    parser.set_defaults({"trainer.logger": logs, "trainer.enable_model_summary": False})  # see `Training.what`
    parser.add_class_arguments(Classifier, "model", fail_untyped=False)
    parser.add_subclass_arguments(LabeledData, "data", fail_untyped=False, required=True)
    return parser


def _check_kind(network: Namespace, data: Namespace) -> None:
    """Check that a network of ours that reads texts, or pictures, has such data."""
    if not network.class_path.startswith("torchcaps."):
        return
    reads_texts = "layers" in network.init_args and "width" in network.init_args
    has_texts = "size" not in data
    if reads_texts != has_texts:
        kind, other = ("texts", "pictures") if reads_texts else ("pictures", "texts")
        name = network.class_path.rpartition(".")[2]
        raise ValueError(f"{name} is a network of {kind}, and the data has {other}: choose another --model")


def _build_for_each_other(data_values: Namespace, network_values: Namespace) -> tuple[LabeledData, nn.Module]:
    """Build the user's own data and a network for it, whose parameters have no values. Set the arguments of the network
    that the data determines. If the network takes images of one shape only, set this shape for the data."""
    arguments = network_values.init_args
    for _ in range(2):  # the second time with the shape that the network takes
        data = build_part(LabeledData, data_values)
        facts = data.facts()
        _set(arguments, {name: value for name, value in facts.items() if name in arguments})
        network = _without_values(network_values)
        channels, size, *_ = getattr(network, "image_shape", None) or (None, None)
        if channels in (None, facts.get("in_channels")) and size in (None, facts.get("image_size")):
            break
        _set(data_values.init_args, {"channels": channels, "size": size})
    return data, network


def _without_values(network: Namespace) -> nn.Module:
    """Build a network whose parameters have shapes but no values, and are not downloaded."""
    values = untrained(network.as_dict())
    try:
        with torch.device("meta"):
            return build_part(nn.Module, values)
    except NotImplementedError:  # a few networks of torchvision read values while they are built
        return build_part(nn.Module, values)


def _set(arguments: Namespace, values: dict[str, Any]) -> None:
    for name, value in values.items():
        arguments[name] = value


def _loggers(run_folder: Path) -> list[Logger]:
    place: dict[str, Any] = {"save_dir": run_folder.parent, "name": "", "version": run_folder.name}
    return [_CSVLogger(**place), TensorBoardLogger(**place)]


class _CSVLogger(CSVLogger):
    """Lightning's logger, whose errors name the file."""

    def save(self) -> None:
        with writing(Path(self.log_dir) / "metrics.csv"):
            super().save()
