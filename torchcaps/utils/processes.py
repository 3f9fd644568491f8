"""Processes that train together: all of them end if one of them fails, and one of them says why."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchcaps.utils.checks import whole_number
from torchcaps.utils.signals import Stopped

if TYPE_CHECKING:
    from lightning import Trainer

RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")  # variables that torchrun, SLURM and Lightning set
LAUNCHERS = (*RANKS, "JSM_NAMESPACE_RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK")  # variables that hold numbers
FOR_USERS = ("DataError", "ValueError", "CannotResume", "FloatingPointError")  # errors whose message is for the user
PATIENCE = 3.0  # seconds in which the first process reports an error that all have
GRACE = 60.0  # seconds in which it reports that another has ended, which it cannot while it waits for data from it


def rank() -> int:
    """Return the index of this process among those that train together, 0 if it is alone."""
    ranks = (whole_number(os.environ.get(name, "")) for name in RANKS)
    return next((number for number in ranks if number is not None), 0)


def should_print(error: BaseException) -> bool:
    """Return whether this process should print the error that ends it. Of several processes that fail, one does."""
    if isinstance(error.__cause__ or error, ChildProcessError) and rank():
        return False  # the first process notices it too, or is the one that has ended
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        try:
            # The processes share a store, which one of them holds, or torchrun.
            from torchcaps.utils.private import shared_store

            return shared_store().add("torchcaps/reports", 1) == 1
        except RuntimeError:
            return False  # the process that holds it has ended, and has said why
    if rank():
        time.sleep(PATIENCE)  # where the first one fails too, all are stopped meanwhile
    return True


@contextmanager
def stop_all_on_error(trainer: "Trainer") -> Iterator[None]:
    """Within this context, whatever ends one of the trainer's processes ends those that it has started.

    Raises:
        ChildProcessError: another process has ended.
        ValueError: a spawned process has raised an error whose message is for the user; the message is the same.
    """
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    _let_lightning_wait()
    try:
        yield
    except BaseException as error:
        launcher: Any = trainer.strategy.launcher
        if trainer.is_global_zero and launcher is not None:
            # Those that fail too may be about to say why. Those that wait for this one do not handle a signal: they are
            # killed, which harms nothing, because they write nothing.
            limit = time.monotonic() + (0 if isinstance(error, Stopped) else PATIENCE)
            while time.monotonic() < limit and any(map(_runs, launcher.procs)):
                time.sleep(0.05)
            launcher.kill(signal.SIGTERM if isinstance(error, Stopped) else signal.SIGKILL)
        if isinstance(error, ProcessExitedException) and error.exit_code > 128:
            raise Stopped(error.exit_code - 128) from error  # a spawned process got a signal, and has stopped
        if isinstance(error, ProcessRaisedException):
            name, _, message = error.msg.strip().rpartition("\n")[2].partition(": ")
            if name.rpartition(".")[2] in FOR_USERS:
                raise ValueError(message) from error
        if lost_peer(error):
            raise ChildProcessError(
                f"one of {trainer.world_size} processes has ended, and with it the others: see what it has said"
            ) from error
        raise


@functools.cache
def _let_lightning_wait() -> None:
    """Make Lightning wait before it kills this process because one that it has started has ended. Its thread looks
    every 5 s, and would often be faster than this process says what happened. There is no public way to tell it."""
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    kill = _ChildProcessObserver._terminate_all

    def later(observer: _ChildProcessObserver) -> None:
        time.sleep(GRACE)
        kill(observer)

    _ChildProcessObserver._terminate_all = later  # type: ignore[assignment]


def _runs(process: Any) -> bool:
    return process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()


def lost_peer(error: BaseException) -> bool:
    """Return whether an error says that another process no longer answers, not what is wrong in this one."""
    from torch.distributed import DistError
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    if isinstance(error, DistError | ProcessExitedException):
        return True
    known = ("gloo", "closed by peer", "reset by peer")
    return isinstance(error, RuntimeError | ProcessRaisedException) and any(words in str(error) for words in known)
