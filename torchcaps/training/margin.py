"""The margin of the spread loss, which grows while a network trains."""

from typing import Any

from lightning import Callback, LightningModule, Trainer

from torchcaps.nn import SpreadLoss


class SpreadMargin(Callback):
    """Raise the margin of a spread loss from epoch to epoch, linearly.

    Args:
        first, last: margins.
        hold: so many epochs at the beginning have the first margin, and as many at the end the last one. In a training
            that is no longer than both, the margin steps up in the middle.

    Raises:
        TypeError: the model's loss is not a `SpreadLoss`.

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
            raise TypeError(f"SpreadMargin raises the margin of a SpreadLoss, and the loss is a {type(loss).__name__}")
        epochs = trainer.max_epochs or 0
        if epochs < 1:
            raise ValueError("SpreadMargin needs to know how long training lasts: set trainer.max_epochs")
        loss.margin.fill_(self.margin(trainer.current_epoch, epochs))

    def margin(self, epoch: int, epochs: int) -> float:
        """The margin in an epoch, counted from 0, of so many."""
        hold = min(self.hold, (epochs - 1) // 2)
        grown = (epoch - hold) / max(epochs - 2 * hold, 1)
        return self.first + (self.last - self.first) * min(max(grown, 0.0), 1.0)
