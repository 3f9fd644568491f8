"""A callback that interrupts a training."""

import signal

from lightning import Callback


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


class Interrupt(Callback):
    """In step `step`, after its gradients: send the process a signal, or with SIGKILL end it in its tracks.

    Args:
        rank: of the process that gets it; None: each does.
        real: SIGKILL is one, for processes that are not the tests' own.
    """

    def __init__(self, step: int, by: str = "SIGTERM", rank: int | None = None, real: bool = False):
        self.step, self.by, self.rank, self.real = step, by, rank, real
        self.done = False

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank) and not self.done:
            self.done = True  # a step may be of several batches
            if self.by == "SIGKILL" and not self.real:
                raise Killed
            signal.raise_signal(getattr(signal, self.by))  # here and now: another thread would take its time
