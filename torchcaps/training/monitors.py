"""Check, before the first step, that callbacks such as EarlyStopping monitor a metric that will be logged, and look for
its best value."""

from typing import Any, Literal

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from torchcaps.training.checkpoints import MONITORS_OF_NEWEST
from torchcaps.training.names import PACKAGES
from torchcaps.utils.checks import nearest


class ChecksMonitors(Callback):
    """Raise a ValueError if a callback takes the worst value for the best, or monitors a metric that is never logged:
    Lightning would say so only after the first epoch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a fit
        logged = logged_metrics(pl_module)
        known = all(type(callback).__module__.partition(".")[0] in PACKAGES for callback in callbacks)
        for callback in callbacks:
            name = getattr(callback, "monitor", None)
            if name is None:
                continue
            monitors = f"{type(callback).__name__} monitors {name!r}"
            if isinstance(callback, ModelCheckpoint) and name in MONITORS_OF_NEWEST:
                continue
            if known and name not in logged:  # other callbacks may log metrics of their own
                raise ValueError(f"{monitors}, which is not logged{nearest(str(name), logged)}")
            if name in logged and getattr(callback, "mode", None) not in (None, best := mode_of(name)):
                raise ValueError(f"{monitors} and takes the worst value for the best: set its mode to {best}")
            if str(name).startswith("val/") and not validates(trainer, data):
                raise ValueError(
                    f"{monitors}, and there is no validation: {how_to_validate(trainer, data)}, or monitor 'train/loss'"
                )


def mode_of(metric: str) -> Literal["max", "min"]:
    """Return whether the highest or the lowest value of a metric is the best."""
    return "max" if "accuracy" in metric or "dice" in metric else "min"


def logged_metrics(model: Any) -> list[str]:
    """Return the names of the metrics that a `Classifier` logs in training and validation."""
    what = [
        "loss",
        *({"numbers": [], "masks": ["dice"]}.get(model.target, ["accuracy"])),
        *(["reconstruction_error"] if model.reconstruction_weight else []),
    ]
    divergence = [] if model.feedback is None else ["train/divergence"]
    return [
        *(f"{stage}/{name}" for stage in ("train", "val") for name in what),
        "train/loss_step",
        "train/loss_epoch",
        *divergence,
    ]


def how_to_validate(trainer: Any, data: Any) -> str:
    """Return which value gives a training that has no validation one."""
    if trainer.limit_val_batches == 0:
        return "set trainer.limit_val_batches to more than 0"
    images = getattr(data, "images", data)  # an encoder's, which have the options
    place = "data" if images is data else "data.images"
    if getattr(images, "split", None) is not None:
        return f"take a {place}.split that has a part `val`"
    return f"set {place}.{'val_share' if hasattr(images, 'val_share') else 'val_size'} to more than 0"


def validates(trainer: Any, data: Any) -> bool:
    """Return whether there are batches to validate on. The data must be set up."""
    return trainer.limit_val_batches != 0 and bool(data.val_dataloader())
