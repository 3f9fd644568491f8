"""Progress of a training as lines of text: `torchcaps train` prints them if its output is not a terminal."""

import sys
import time
from datetime import timedelta
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar


class ProgressLines(ProgressBar):
    """Print a line on stderr every `seconds`: the epoch, the step, the estimated time left, and the newest metrics.

    Args:
        seconds: least time between two lines.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self.seconds = seconds
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False  # Lightning calls this in all processes but the first

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = self._printed_at = time.monotonic()
        self._first = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now - self._printed_at < self.seconds or not self._enabled:
            return
        self._printed_at = now
        step, steps = trainer.global_step, trainer.estimated_stepping_batches
        epochs = "" if trainer.max_epochs in (None, -1) else f" of {trainer.max_epochs}"
        parts = [f"epoch {trainer.current_epoch + 1}{epochs}", f"step {step:,}"]
        if steps != float("inf"):
            left = (now - self._start) / (step - self._first or 1) * (steps - step)
            parts[1] += f" of {steps:,}"
            parts.append(f"{timedelta(seconds=round(left))} left")
        parts += [f"{name} {float(value):.4f}" for name, value in trainer.progress_bar_metrics.items()]
        print(", ".join(parts), file=sys.stderr, flush=True)
