"""Checks of a training before it reads any data: what its parser and Lightning do not check, or not in words for
users."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchcaps.data import DataError, EncodedImages, ImageNet, LabeledData
from torchcaps.recipes.values import own_arguments
from torchcaps.training.classifier import Classifier
from torchcaps.training.margin import SpreadMargin
from torchcaps.training.overrides import Override
from torchcaps.training.report import Report
from torchcaps.training.trainer import Trainer
from torchcaps.training.values import Values
from torchcaps.utils.checks import counted, nearest, one_line

# Callbacks of Lightning that would not do what they promise here.
UNUSABLE: dict[type, str] = {
    StochasticWeightAveraging: "the weights that it averages at the end would be in no checkpoint",
    LearningRateFinder: "it needs a learning rate that is an attribute of the model: use torchcaps search",
}

SMALLEST = {  # numbers of the trainer that Lightning does not check
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


def check_trainer(seed: Any, trainer: Any) -> None:
    """Check the seed, and values of the trainer that Lightning does not check, or not in words for users."""
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
    for name, least in SMALLEST.items():
        if trainer[name] is not None and not trainer[name] >= least:
            raise ValueError(f"trainer.{name} must be at least {least}, got {trainer[name]}")
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches"):
        value = trainer[name]
        if value is not None and not 0 <= value <= (math.inf if isinstance(value, int) else 1):
            raise ValueError(
                f"trainer.{name} must be a number of batches, or a fraction of them from 0.0 to 1.0, got {value}"
            )
    if 0 in (trainer.max_epochs, trainer.max_steps):
        raise ValueError("trainer.max_epochs and max_steps must be above 0: to test alone, use `torchcaps test`")
    if trainer.limit_train_batches == 0:
        raise ValueError("trainer.limit_train_batches must be above 0, got 0: to test alone, use `torchcaps test`")
    if isinstance(trainer.val_check_interval, int | float) and not trainer.val_check_interval > 0:
        raise ValueError(
            "trainer.val_check_interval must be a number of batches, at least 1, or a fraction of an epoch, above "
            f"0.0 and at most 1.0, got {trainer.val_check_interval}"
        )
    _check_devices(trainer.accelerator, trainer.devices)


def _check_devices(accelerator: Any, devices: Any) -> None:
    """Check that this machine has an accelerator, and that devices are counted or listed."""
    names = AcceleratorRegistry.available_accelerators()
    available = [name for name in names if AcceleratorRegistry[name]["accelerator"].is_available()]
    available += ["auto", *(["gpu"] if {"cuda", "mps"} & {*available} else [])]
    if isinstance(accelerator, str) and accelerator not in available:
        raise ValueError(
            f"trainer.accelerator must be auto, cpu, or one that this machine has, got {accelerator!r}: leave it out"
        )
    counts = isinstance(devices, int) and (devices >= 1 or devices == -1)
    indices = isinstance(devices, list) or (isinstance(devices, str) and re.fullmatch(r"\d+(,\d+)*,?|-1", devices))
    if devices != "auto" and not counts and (not indices or devices == "0"):
        raise ValueError(
            "trainer.devices must be auto, or a number of at least 1, or, of GPUs, a list of their indices, got "
            f"{devices!r}"
        )


def check_optimizer(model: Classifier, overrides: Sequence[Override]) -> None:
    """Build the optimizer and the schedule once, so that wrong values are found before any data is read."""
    try:
        built = model.configure_optimizers()
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.optimizer or model.scheduler cannot be built: {one_line(error)}") from None
    if isinstance(built, dict) and isinstance(built["lr_scheduler"]["scheduler"], ReduceLROnPlateau):
        raise ValueError("model.scheduler cannot be ReduceLROnPlateau, which needs a metric: choose another schedule")
    if isinstance(built, dict) and "max_lr" in built["optimizer"].param_groups[0]:
        rates = {"model.features_lr"} if model.features_lr is not None else set()
        rates |= {".".join(override.path) for override in overrides} & {"model.optimizer.lr"}
        if rates:
            raise ValueError(
                f"{' and '.join(sorted(rates))} cannot change anything: this model.scheduler sets all learning "
                "rates; give --model.scheduler.max_lr"
            )


def check_classes(model: Classifier, data: LabeledData) -> None:
    """Check that the data has the classes that the model has."""
    classes = model.classes
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


def check_shares(given: Values, values: dict[str, Any]) -> None:
    """Check that no share of the samples is asked for where a split has decided all parts."""
    then, now = (own_arguments(x.get("data")) for x in (given.recipe.config, values))
    for override in given.overrides:
        name = override.path[-1]
        of_data = override.path[0] == "data" and name in ("val_share", "test_share")
        if of_data and now.get("split") is not None and now.get(name) != then.get(name):
            raise ValueError(f"--{'.'.join(override.path)} has no effect on the split of {now['split']}: leave it out")


def check_callbacks(trainer: Trainer, model: Classifier) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Report) and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            raise ValueError(
                "trainer.callbacks cannot have Report in spawned processes, which keep what it finds to "
                "themselves: use trainer.strategy ddp"
            )
        if isinstance(callback, SpreadMargin):
            callback.margin_of(model)
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            raise ValueError(
                "ModelCheckpoint cannot have a dirpath: checkpoints lie in the folder of the run, where commands "
                "and resumed runs find them; leave it out"
            )
        for kind, why in UNUSABLE.items():
            if isinstance(callback, kind):
                raise ValueError(f"trainer.callbacks cannot have {type(callback).__name__}: {why}")
