"""A Lightning callback that interrupts a training."""

import signal

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
