"""The queue of `torchcaps reproduce`: trains rows one after the other, each in its own process, and lists what is left.

The queue can be stopped or killed at any time. The same command resumes it.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from torchcaps.reproduce.pace import read_pace
from torchcaps.reproduce.plan import Run, load_run_recipe, plan
from torchcaps.reproduce.results import known_results, read_results, summary
from torchcaps.reproduce.work import TAKEN, as_begun, steps_done, work

HEADER = ("row", "published", "ours", "seeds left", "steps", "hours left", "")


def missing(root: Path, papers: Sequence[str]) -> list[Run]:
    """Return the runs that have no result yet, in the order of the plan. Those that failed last time come last."""
    done = {result.key for result in known_results(root)}
    hours: dict[str, float] = {}
    for run in plan(papers):
        if pace := read_pace(root, run):
            hours[run.recipe] = pace[0] * pace[1] / 3600
    wanted = [run for run in plan(papers, hours) if not done.issuperset(run.keys)]
    left = [run for run in (as_begun(run, root) for run in wanted) if not done.issuperset(run.keys)]
    return sorted(left, key=lambda run: (run.folder(root) / "failed.txt").exists())


def table(root: Path, papers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a line of cells for each row, with the columns of HEADER: the published number, ours, and what is left."""
    results, left = known_results(root), missing(root, papers)
    lines: list[tuple[str, ...]] = []
    for recipe in dict.fromkeys(run.recipe for run in plan(papers)):
        runs = [run for run in left if run.recipe == recipe]
        taken = [steps_done(run, root) for run in runs]
        pace = read_pace(root, runs[0]) if runs else None
        steps = " ".join(f"{count:,}" for count in taken if count) + (f" of {pace[1]:,}" if pace and any(taken) else "")
        hours = f"{sum(max(pace[1] - count, 0) for count in taken) * pace[0] / 3600:.1f}" if pace else "not measured"
        failed = [run.folder(root) / "failed.txt" for run in runs]
        notes = [path.read_text(encoding="utf-8")[:160] for path in failed if path.exists()]
        lines.append(
            (
                recipe,
                load_run_recipe(recipe).published,
                summary(results, recipe),
                " ".join(str(run.seed) for run in runs),
                steps,
                hours if runs else "0",
                f"failed: {notes[0]}" if notes else "",
            )
        )
    return lines


def measure(root: Path, papers: Sequence[str], threads: int, say: Callable[[str], None]) -> None:
    """Measure the pace of each row, by a few steps, if it is not known for this hardware."""
    seen = set()
    for run in missing(root, papers):
        if run.recipe not in seen and read_pace(root, run) is None:
            say(f"measuring {run.recipe}")
            _finish(_start(run, root, threads, measure_only=True))
        seen.add(run.recipe)


def reproduce(root: Path, papers: Sequence[str], hours: float | None, threads: int, say: Callable[[str], None]) -> None:
    """Train all runs without a result, one after the other.

    Args:
        root: folder of all runs.
        papers: papers, tables or recipes, or nothing for all.
        hours: time after which the current run is saved and stopped, to be resumed next time, or None for no limit.
        threads: number of threads of a run.
        say: function that prints a line for the user.
    """
    end = None if hours is None else time.monotonic() + 3600 * hours
    tried: set[Run] = set()
    while left := [run for run in missing(root, papers) if run not in tried]:
        run = left[0]
        tried.add(run)
        if read_pace(root, run) is None:
            _finish(_start(run, root, threads, measure_only=True))
        pace, taken = read_pace(root, run), steps_done(run, root)
        about = f", about {timedelta(seconds=round((pace[1] - taken) * pace[0]))} left" if pace else ""
        say(f"{run}: from step {taken:,}{about}; log: {run.folder(root) / 'log.txt'}")
        process = _start(run, root, threads, measure_only=False)
        if _finish(process, None if end is None else max(end - time.monotonic(), 0)):
            say(f"{run}: stopped after {hours:g} hours at step {steps_done(run, root):,}; the same command continues")
            return
        if process.exitcode == 0:
            for result in read_results(root / "results.csv"):
                if result.key in run.keys:
                    of = f" on {result.data}" if result.data else ""
                    say(f"{run}{of}: {result.value:.2f} % {result.unit} (published: {result.published or 'none'})")
        elif process.exitcode == TAKEN:
            say(f"{run}: another process is at it")
        elif (run.folder(root) / "failed.txt").exists():
            say(f"{run}: failed: {(run.folder(root) / 'failed.txt').read_text(encoding='utf-8')}")
        else:
            say(f"{run}: ended with status {process.exitcode}, perhaps killed for lack of memory")
    left = missing(root, papers)
    say("all rows are done" if not left else f"{len(left)} runs have no result: they failed or run in another process")


def _start(run: Run, root: Path, threads: int, measure_only: bool) -> BaseProcess:
    # Libraries read these when they are loaded. PASSIVE: threads that spin while they wait slow down all others.
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
    process = get_context("spawn").Process(target=work, args=(run, root, measure_only))
    process.start()
    return process


def _finish(process: BaseProcess, seconds: float | None = None) -> bool:
    """Wait until a process ends. After `seconds`, or if the wait is interrupted, ask it to save and stop.

    Returns:
        Whether the seconds passed before the process ended.
    """
    try:
        process.join(seconds)
        return process.is_alive()
    finally:
        if process.is_alive():
            process.terminate()
        process.join()
