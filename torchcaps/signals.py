"""Signals that ask a command to stop: it ends with the status that schedulers expect, and says how to go on."""

import math
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Self

# SIGHUP is sent when a terminal closes, SIGUSR1 by SLURM before the time is up (`--signal=USR1@120`).
NAMES = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1")
NUMBERS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class Stopped(SystemExit):
    """A signal asked to stop. Where nobody handles this, the process ends with the status that goes with the signal.

    Attributes:
        status: 128 and the number of the signal.
        said: the message for the user.
    """

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)
        self.said = f"stopped by {signal.Signals(number).name}"


class StopSignals:
    """While it is entered, a signal raises `Stopped` where the program stands; while `waits` is true, the first one
    is only noted in `received`, for whoever can stop at a better place, and the second one raises."""

    def __init__(self) -> None:
        self.waits = False
        self.received: int | None = None
        self._last = -math.inf  # when the newest came
        self._patient = False  # whether a second one is not heeded either
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only that one gets signals
            handlers = {number: signal.getsignal(number) for number in NUMBERS}
            # What is ignored stays so: SIGHUP under nohup, SIGINT in what a script has put in the background.
            self._before = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}
        self.install()
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __getstate__(self) -> dict[str, Any]:
        # In a process that a training spawns: the first process, which is asked too, tells this one to stop as well.
        return {**self.__dict__, "_before": dict.fromkeys(NUMBERS, signal.SIG_DFL), "_patient": True}

    def install(self) -> None:
        """Handle the signals, whoever has handled them since."""
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._last < 1:
            return  # `timeout` sends its signal twice
        self._last = time.monotonic()
        if self._patient and self.received is not None:
            return
        if not self.waits or self.received is not None:
            raise Stopped(number)
        self.received = number
        name = signal.Signals(number).name
        with suppress(OSError):  # the terminal may be gone
            print(
                f"torchcaps: {name}: stopping after this step; once more to stop at once", file=sys.stderr, flush=True
            )
