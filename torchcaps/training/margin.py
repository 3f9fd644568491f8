"""A schedule for the margin of the spread loss: a callback that recipes list under `trainer.callbacks`."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from torchcaps.nn import SpreadLoss
from torchcaps.utils.arguments import CountOrZero, Fraction, checked


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

    @checked
    def __init__(self, first: Fraction = 0.2, last: Fraction = 0.9, hold: CountOrZero = 20):
        if first > last:
            raise ValueError(f"first must be at most last, got {first:g} and {last:g}")
        self.first, self.last, self.hold = first, last, hold

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epochs = trainer.max_epochs or 0
        if epochs < 1:
            raise ValueError("SpreadMargin needs to know how long training lasts: set trainer.max_epochs")
        self.margin_of(pl_module).fill_(self.margin(trainer.current_epoch, epochs))

    def margin_of(self, model: Any) -> Tensor:
        """Return the margin of a model's loss, or raise a TypeError if it has none."""
        if not isinstance(model.loss, SpreadLoss):
            raise TypeError(
                f"SpreadMargin needs a SpreadLoss as model.loss, but the loss is a {type(model.loss).__name__}"
            )
        return model.loss.margin

    def margin(self, epoch: int, epochs: int) -> float:
        """Return the margin in an epoch, counted from 0, of a training of `epochs` epochs."""
        hold = min(self.hold, (epochs - 1) // 2)
        grown = (epoch - hold) / max(epochs - max(2 * hold, 1), 1)
        return self.first + (self.last - self.first) * min(max(grown, 0.0), 1.0)
