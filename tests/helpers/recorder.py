"""A module that records the images which a Trainer passes, and a quiet Trainer."""

from typing import Any

import lightning
import torch
from torch import Tensor


class Recorder(lightning.LightningModule):
    """Trains one number and records the images of every batch, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[Tensor]] = {"train": [], "val": [], "test": []}

    def training_step(self, batch: tuple[Tensor, ...], index: int) -> Tensor:
        self.seen["train"].append(batch[0])
        return (self.weight - batch[1].float().mean()) ** 2

    def validation_step(self, batch: tuple[Tensor, ...], index: int) -> None:
        self.seen["val"].append(batch[0])

    def test_step(self, batch: tuple[Tensor, ...], index: int) -> None:
        self.seen["test"].append(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def small_trainer(epochs: int = 1, **options: Any) -> lightning.Trainer:
    """Return a Trainer on the CPU that writes and shows nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet, **options)
