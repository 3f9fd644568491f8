"""A schedule for the margin of the spread loss: a callback that recipes list under `trainer.callbacks`."""

from typing import Any

from lightning import Callback, LightningModule, Trainer

from torchcaps.nn import SpreadLoss


class SpreadMargin(Callback):
    """Raise the margin of the model's `SpreadLoss` linearly from epoch to epoch.

    Args:
        first, last: margins at the beginning and at the end of training.
        hold: number of epochs at the beginning that have the first margin, and at the end that have the last one. If
            training takes no more than twice this number, the margin steps up in the middle.

    Raises:
        TypeError: the model's loss is not a `SpreadLoss`.
        ValueError: an argument is out of range, or `trainer.max_epochs` is not set.

    Reference:
        Hinton et al. 2018, section 5: 0.2 to 0.9; held for 20 epochs in the code of Li et al. 2018.
    """

    def __init__(self, first: float = 0.2, last: float = 0.9, hold: int = 20):
        if not 0 <= first <= last or hold < 0:
            raise ValueError(f"expected 0 <= first <= last and hold at least 0, got {first}, {last} and {hold}")
        self.first, self.last, self.hold = first, last, hold

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss: Any = pl_module.loss
        if not isinstance(loss, SpreadLoss):
            raise TypeError(f"SpreadMargin needs a SpreadLoss as model.loss, but the loss is a {type(loss).__name__}")
        epochs = trainer.max_epochs or 0
        if epochs < 1:
            raise ValueError("SpreadMargin needs to know how long training lasts: set trainer.max_epochs")
        loss.margin.fill_(self.margin(trainer.current_epoch, epochs))

    def margin(self, epoch: int, epochs: int) -> float:
        """Return the margin in an epoch, counted from 0, of a training of `epochs` epochs."""
        hold = min(self.hold, (epochs - 1) // 2)
        grown = (epoch - hold) / max(epochs - 2 * hold, 1)
        return self.first + (self.last - self.first) * min(max(grown, 0.0), 1.0)
