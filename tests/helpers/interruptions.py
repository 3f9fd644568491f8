"""A Lightning callback that interrupts a training, the options that set it, and the checkpoint that is left."""

import signal
from pathlib import Path
from typing import Any

import torch
from lightning import Callback


class Killed(BaseException):
    """Stands for SIGKILL: no code handles this exception."""


class Interrupt(Callback):
    """Send the process a signal in a given training step, after its backward pass.

    Args:
        step: global step in which the signal is sent.
        by: name of the signal, or "error" for a ValueError.
        rank: rank of the process that gets the signal; None for all processes.
        real: send a real SIGKILL, in processes other than the tests' own; otherwise SIGKILL raises `Killed`.
    """

    def __init__(self, step: int, by: str = "SIGTERM", rank: int | None = None, real: bool = False):
        self.step, self.by, self.rank, self.real = step, by, rank, real
        self.done = False

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank) and not self.done:
            self.done = True  # with gradient accumulation, a step has several backward passes
            if self.by == "error":
                raise ValueError("nothing can be learned from this")
            if self.by == "SIGKILL" and not self.real:
                raise Killed
            signal.raise_signal(getattr(signal, self.by))  # handled at once, in this thread


def interrupt(step: int, by: str, **more: Any) -> list[str]:
    """Return the options of `torchcaps train` for an `Interrupt`."""
    options = [f"--trainer.callbacks.{name}={value}" for name, value in {"step": step, "by": by, **more}.items()]
    return ["--allow_code", "--trainer.callbacks+=interruptions.Interrupt", *options]


def newest(runs: str) -> dict[str, Any]:
    """Return the newest checkpoint of a folder of runs."""
    path = max(Path(runs).rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(path, weights_only=True)
