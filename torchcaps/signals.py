"""Signals that ask a command to stop: it ends with the status that schedulers expect, and says how to go on."""

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

# SIGUSR1 is what SLURM sends before the time is up (`--signal=USR1@120`).
NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


class Stopped(BaseException):
    """A signal asked to stop.

    Attributes:
        name: of the signal.
        status: that the process is to end with.
    """

    def __init__(self, number: int) -> None:
        self.name, self.status = signal.Signals(number).name, 128 + number
        super().__init__(f"stopped by {self.name}")


class StopSignals:
    """While it is entered, a signal raises `Stopped` where the program stands; while `waits` is true, the first one
    is only noted in `received`, for whoever can stop at a better place, and the second one raises."""

    def __init__(self) -> None:
        self.waits = False
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only that one gets signals
            known = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
            # What is ignored stays so: SIGINT by what a script has put in the background.
            self._before = {n: signal.getsignal(n) for n in known if signal.getsignal(n) is not signal.SIG_IGN}
        self.install()
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before": {}}  # of this process

    def install(self) -> None:
        """Handle the signals, whoever has handled them since."""
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.waits or self.received is not None:
            raise Stopped(number)
        self.received = number
        name = signal.Signals(number).name
        print(f"torchcaps: {name}: stopping after this step; once more to stop at once", file=sys.stderr, flush=True)
