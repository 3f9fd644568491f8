"""One row, trained in a process of its own: resumed where it stopped, tested at its end, its result written down."""

import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning import Callback, LightningModule, Trainer

from torchcaps.files import write_whole
from torchcaps.machine import commit, processor
from torchcaps.recipes import find_recipe, published
from torchcaps.reproduce.plan import Run
from torchcaps.reproduce.results import Result, add_results, known_results, unit_of, value_of
from torchcaps.signals import Stopped, StopSignals
from torchcaps.training.checkpoints import newest_whole
from torchcaps.training.cli import RecipeCLI

TAKEN = 75  # the status of a process whose run another one has


def work(run: Run, root: Path, measure_only: bool) -> None:
    """Train a row and test it, or only measure how long that takes. Ends the process, with status 0 if all is done."""
    os.setsid()  # Ctrl-C is for the queue, which then asks this process to stop
    folder = run.folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        # Longer than a process takes to stop whose queue was killed.
        with FileLock(folder / "lock", timeout=60), StopSignals() as signals:
            if {result.key for result in known_results(root)}.issuperset(run.keys):
                return  # another queue has finished it while this one waited
            (folder / "failed.txt").unlink(missing_ok=True)
            if measure_only or read_pace(root, run) is None:
                _measure(run, root)
            if not measure_only:
                _train(run, root, signals)
    except Timeout:
        sys.exit(TAKEN)
    except Stopped:
        raise
    except BaseException as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        write_whole(folder / "failed.txt", lambda unfinished: unfinished.write_text(said, encoding="utf-8"))
        raise


def steps_done(run: Run, root: Path) -> int:
    """How many steps the newest checkpoint of a run has."""
    checkpoint, _ = newest_whole(run.folder(root).glob("version_*/checkpoints"))
    if checkpoint is None:
        return 0
    return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"]


def read_pace(root: Path, run: Run) -> tuple[float, int] | None:
    """Seconds of a step and the number of steps of a row, if they were measured on this hardware with its threads."""
    try:
        pace = json.loads(_pace_file(root, run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (pace["seconds"], pace["steps"]) if pace["hardware"] == _hardware() else None


def _pace_file(root: Path, run: Run) -> Path:
    return root / "pace" / f"{run.recipe}.json"


def _stop_without_parent() -> None:
    """When the queue is gone, however that came, stop as it would have asked to."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class _Pace(Callback):
    """Takes a few steps and raises what it measured."""

    STEPS = 5

    class Measured(Exception):
        pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.times = [time.perf_counter()]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > self.STEPS:
            seconds = [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]
            raise self.Measured(statistics.median(seconds), int(trainer.estimated_stepping_batches))


def _measure(run: Run, root: Path) -> None:
    overrides = [*_overrides(run), "--trainer.enable_model_summary=false", "--trainer.enable_progress_bar=false"]
    cli = RecipeCLI(find_recipe(run.recipe), overrides, None)
    cli.trainer.callbacks.append(_Pace())  # type: ignore[attr-defined]
    try:
        cli.trainer.fit(cli.model, cli.datamodule)
    except _Pace.Measured as measured:
        seconds, steps = measured.args
        pace = json.dumps({"seconds": seconds, "steps": steps, "hardware": _hardware()})
        write_whole(_pace_file(root, run), lambda unfinished: unfinished.write_text(pace, encoding="utf-8"))


def _train(run: Run, root: Path, signals: StopSignals) -> None:
    folder = run.folder(root)
    overrides = _as_begun(run, folder)
    files = find_recipe(run.recipe)
    checkpoint, problem = newest_whole(folder.glob("version_*/checkpoints"))
    if problem:
        print(f"{problem}: going on from {checkpoint or 'the beginning'}", file=sys.stderr)
    cli = RecipeCLI(files, overrides, folder, signals=signals)
    assert cli.run_folder is not None
    with _noted(folder, cli.run_folder):
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint, weights_only=True)
    results = [_result(run, "", overrides, cli, cli, folder)]
    for data in run.tested_on:
        other = RecipeCLI(files, [*overrides, f"--data={data}"], None)
        other.model.load_state_dict(cli.model.state_dict())
        results.append(_result(run, data, overrides, cli, other, folder))
    add_results(root / "results.csv", results)


def _overrides(run: Run) -> list[str]:
    chosen = [f"--seed_everything={run.seed}", *run.overrides]
    if published(run.recipe).bfloat16:
        chosen.append("--trainer.precision=bf16-mixed")
    return chosen


def _as_begun(run: Run, folder: Path) -> list[str]:
    """The arguments that a run was begun with, which it keeps whatever the plan says since."""
    begun = folder / "overrides.json"
    if not begun.exists():
        text = json.dumps(_overrides(run))
        write_whole(begun, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))
    return [*json.loads(begun.read_text(encoding="utf-8")), "--trainer.devices=1"]


@contextmanager
def _noted(folder: Path, run_folder: Path) -> Iterator[None]:
    """Write down with which code and on what each part of a run was trained, and from when to when."""
    part = {"folder": run_folder.name, "commit": commit(), "hardware": _hardware(), "began": time.time()}
    with (folder / "parts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(part) + "\n")
    yield
    part = {"folder": run_folder.name, "ended": time.time()}
    with (folder / "parts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(part) + "\n")


def _parts(folder: Path) -> list[dict[str, Any]]:
    """What is known of the parts of a run. One that was killed ended with its last checkpoint."""
    parts: dict[str, dict[str, Any]] = {}
    for line in (folder / "parts.jsonl").read_text(encoding="utf-8").splitlines():
        part = json.loads(line)
        parts.setdefault(part["folder"], {}).update(part)
    for name, part in parts.items():
        if "ended" not in part:
            saved = list((folder / name / "checkpoints").glob("*.ckpt"))
            part["ended"] = max((path.stat().st_mtime for path in saved), default=part["began"])
    return list(parts.values())


def _result(run: Run, data: str, overrides: list[str], trained: RecipeCLI, tested: RecipeCLI, folder: Path) -> Result:
    (metrics,) = tested.trainer.test(tested.model, tested.datamodule, verbose=False)
    number = published(run.recipe).number
    parts = _parts(folder)
    command = ["torchcaps", "train", run.recipe, *(o for o in overrides if o != "--trainer.devices=1")]
    return Result(
        recipe=run.recipe,
        data=data,
        seed=run.seed,
        value=value_of(metrics["test/accuracy"], number),
        unit=unit_of(number),
        published=number if not data else "",
        command=" ".join(command),
        commit=" ".join(dict.fromkeys(part["commit"][:12] for part in parts)),
        hardware="; ".join(dict.fromkeys(part["hardware"] for part in parts)),
        precision=str(trained.trainer.precision),
        date=datetime.now(UTC).date().isoformat(),
        hours=round(sum(part["ended"] - part["began"] for part in parts) / 3600, 2),
    )


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
