"""How far a training is, where there is no terminal to draw a bar on."""

import sys
import time
from datetime import timedelta
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar


class ProgressLines(ProgressBar):
    """A line on stderr every so often: the epoch, the step, the newest metrics, and about how long it will take.

    Args:
        seconds: between lines.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self.seconds = seconds
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False  # Lightning asks all processes but the first to

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = self._said = time.monotonic()
        self._first = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now - self._said < self.seconds or not self._enabled:
            return
        self._said = now
        step, steps = trainer.global_step, trainer.estimated_stepping_batches
        epochs = "" if trainer.max_epochs in (None, -1) else f" of {trainer.max_epochs}"
        parts = [f"epoch {trainer.current_epoch + 1}{epochs}", f"step {step:,}"]
        if steps != float("inf"):
            left = (now - self._start) / (step - self._first or 1) * (steps - step)
            parts[1] += f" of {steps:,}"
            parts.append(f"{timedelta(seconds=round(left))} left")
        parts += [f"{name} {float(value):.4f}" for name, value in trainer.progress_bar_metrics.items()]
        print(", ".join(parts), file=sys.stderr, flush=True)
