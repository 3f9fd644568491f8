"""The queue of `torchcaps reproduce`: it trains rows one by one, each in its own process, and lists what is left.

The queue can be stopped or killed at any time. The same command resumes it. Several queues on one folder share the
work: each takes runs that no other queue has.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from filelock import FileLock, Timeout

from torchcaps.reproduce.plan import PlannedRun
from torchcaps.reproduce.results import known_results, seeds_in_words, summary
from torchcaps.reproduce.work import steps_done, work
from torchcaps.utils.files import make_folder, read_text

HEADER = ("row", "published", "ours", "still to train", "steps taken", "")


def missing(root: Path, runs: Sequence[PlannedRun], again: bool = False) -> list[PlannedRun]:
    """Return those of the runs that have no result yet, in their order. Those that failed last time come last. With
    `again`, results that come with the package do not count."""
    done = {result.key for result in known_results(root, packaged=not again)}
    left = [run for run in runs if not done.issuperset(run.keys)]
    return sorted(left, key=lambda run: _failure(run, root) != "")


def table(root: Path, runs: Sequence[PlannedRun], again: bool = False) -> list[tuple[str, ...]]:
    """Return a line of cells for each row, with the columns of HEADER: the published number, ours, and what is left."""
    results, left = known_results(root, packaged=not again), missing(root, runs, again)
    lines: list[tuple[str, ...]] = []
    for recipe, one_run in {run.recipe: run for run in runs}.items():
        of_row = [run for run in left if run.recipe == recipe]
        steps = "; ".join(f"{count:,} (seed {run.seed})" for run in of_row if (count := steps_done(run, root)))
        failures = [f"failed: {failure[:160]}" for run in of_row if (failure := _failure(run, root))]
        published = one_run.load().published_in_short
        ours = summary(results, recipe, one_run.keys[0][1], in_short=True)
        seeds = seeds_in_words([run.seed for run in of_row]) if of_row else ""
        row = " ".join((recipe, *one_run.overrides))
        lines.append((row, published, ours, seeds, steps, failures[0] if failures else ""))
    return lines


def reproduce(
    root: Path,
    runs: Sequence[PlannedRun],
    hours: float | None,
    threads: int,
    progress: Callable[[str], None],
    again: bool = False,
) -> None:
    """Train those of the runs that have no result, one after the other.

    Args:
        root: folder of all runs.
        runs: the runs.
        hours: time after which the current run is saved and stopped, to be resumed next time, or None for no limit.
        threads: number of threads of a run.
        progress: function that prints a line for the user.
        again: whether to train also those whose results come with the package.
    """
    end = None if hours is None else time.monotonic() + 3600 * hours
    tried: set[PlannedRun] = set()
    while taken := _take(root, runs, tried, again):
        run, lock = taken
        tried.add(run)
        try:
            progress(f"{run}: from step {steps_done(run, root):,}; log: {run.folder(root) / 'log.txt'}")
            process = _start(run, root, threads)
            if _finish(process, None if end is None else max(end - time.monotonic(), 0)):
                step = f"{steps_done(run, root):,}"
                progress(f"{run}: stopped at step {step} by --hours {hours:g}; the same command continues")
                return
            if process.exitcode:
                status = f"status {process.exitcode}, perhaps killed for lack of memory"
                progress(f"{run}: failed: {_failure(run, root) or status}")
            for result in known_results(root, packaged=False):
                if result.key in run.keys:
                    place = f"{run} on {result.data}" if result.data else str(run)
                    progress(f"{place}: {result.value:.2f} % {result.unit} (published: {result.published or 'none'})")
        finally:
            lock.release()
    left = len(missing(root, runs, again))
    done = (
        "all rows are done" if again else "all rows have a result; --again trains those that come with the package, too"
    )
    progress(f"runs without a result: {left}, failed or in another queue" if left else done)


def _take(
    root: Path, runs: Sequence[PlannedRun], tried: set[PlannedRun], again: bool = False
) -> tuple[PlannedRun, FileLock] | None:
    """Return the next run that no other queue has, and its lock, which this queue has now; None if there is none."""
    for run in missing(root, runs, again):
        if run in tried:
            continue
        make_folder(run.folder(root))
        lock = FileLock(run.folder(root) / "queue.lock")
        with suppress(Timeout):
            lock.acquire(timeout=0)
            if run in missing(root, runs, again):
                return run, lock
            lock.release()  # another queue has finished it in this moment
    return None


def _failure(run: PlannedRun, root: Path) -> str:
    """Return the error of a run that failed last time, or an empty text."""
    with suppress(ValueError):
        return read_text(run.folder(root) / "failed.txt")
    return ""


def _start(run: PlannedRun, root: Path, threads: int) -> BaseProcess:
    # Libraries read these when they are loaded. PASSIVE: threads that spin while they wait slow down all others.
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
    process = get_context("spawn").Process(target=work, args=(run, root))
    process.start()
    return process


def _finish(process: BaseProcess, seconds: float | None = None) -> bool:
    """Wait until a process ends, or ask it to save and stop after `seconds` or if the wait is interrupted. Return
    whether the seconds passed before it ended."""
    try:
        process.join(seconds)
        return process.is_alive()
    finally:
        if process.is_alive():
            process.terminate()
        process.join()
