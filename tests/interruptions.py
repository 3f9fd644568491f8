"""A callback that interrupts a training."""

import os
import signal

from lightning import Callback


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


class Interrupt(Callback):
    """In step `step`, after its gradients: send the process a signal, or with SIGKILL end it in its tracks."""

    def __init__(self, step: int, by: str = "SIGTERM"):
        self.step, self.by = step, by

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.step:
            if self.by == "SIGKILL":
                raise Killed
            os.kill(os.getpid(), getattr(signal, self.by))
