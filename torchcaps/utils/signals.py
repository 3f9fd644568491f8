"""Signals that ask a command to stop, such as Ctrl-C. Trainings save and stop after a step; other work stops."""

import math
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType
from typing import Any, Self

# SIGHUP is sent when a terminal closes, SIGUSR1 by SLURM before a time limit (`--signal=USR1@120`).
SIGNAL_NAMES = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1")
NUMBERS = [getattr(signal, name) for name in SIGNAL_NAMES if hasattr(signal, name)]


class Stopped(SystemExit):
    """Raised when a signal asks to stop. If it is not caught, the process exits with `status`.

    Attributes:
        status: exit status, 128 + the number of the signal.
        message: what the user is told.
    """

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)
        self.message = f"stopped by {signal.Signals(number).name}"


class StopSignals:
    """A context in which a signal raises `Stopped`.

    While `waits` is true, the first signal is only stored in `received`, so that a training can finish its step and
    save. The second signal raises.

    Attributes:
        waits: whether the first signal is only stored.
        received: number of the stored signal, or None.
    """

    def __init__(self) -> None:
        self.waits = False
        self.received: int | None = None
        self._last = -math.inf  # time of the latest signal
        self._ignores_second_signal = False
        self._depth = 0  # number of frames outside of this context
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            handlers = {number: signal.getsignal(number) for number in NUMBERS}
            # Ignored signals stay ignored: SIGHUP under nohup, SIGINT in background jobs of a script.
            self._before = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}
        self._depth = len(_files(sys._getframe(1)))
        self.install()
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __getstate__(self) -> dict[str, Any]:
        # A process spawned by a training ignores second signals: the first process, which gets them too, stops it.
        return {**self.__dict__, "_before": dict.fromkeys(NUMBERS, signal.SIG_DFL), "_ignores_second_signal": True}

    def install(self) -> None:
        """Install the handlers, also after other code has replaced them."""
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._last < 1:
            return  # `timeout` sends its signal twice
        self._last = time.monotonic()
        if self._ignores_second_signal and self.received is not None:
            return
        if not self.waits or self.received is not None:
            if self._imports(frame):  # it may lose an exception and go on with half a library, or abort the process
                self._last = -math.inf
                again = threading.Timer(0.1, os.kill, (os.getpid(), number))
                again.daemon = True
                again.start()
                return
            raise Stopped(number)
        self.received = number
        if self._ignores_second_signal:
            return  # of several processes one speaks
        name = signal.Signals(number).name
        with suppress(OSError):  # the terminal may be gone; `print` fails if the signal came within another `print`
            os.write(2, f"torchcaps: {name}: stopping after this step; once more to stop at once\n".encode())

    def _imports(self, frame: FrameType | None) -> bool:
        """Return whether a module is being imported within this context."""
        files = _files(frame)
        return any(file.startswith("<frozen importlib") for file in files[: len(files) - self._depth])


def _files(frame: FrameType | None) -> list[str]:
    """Return the files of a frame and of those that called it."""
    return [caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)]
