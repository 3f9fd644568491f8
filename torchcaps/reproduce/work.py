"""One row, trained in a process of its own: resumed where it stopped, tested at its end, its result written down."""

import json
import os
import re
import shlex
import shutil
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

from torchcaps.files import write_text_whole
from torchcaps.machine import commit, processor
from torchcaps.quiet import quiet_lightning
from torchcaps.recipes import load_recipe
from torchcaps.reproduce.plan import Run
from torchcaps.reproduce.results import Result, add_results, known_results, unit_of, value_of
from torchcaps.signals import StopSignals
from torchcaps.training.checkpoints import newest_whole
from torchcaps.training.cli import RecipeCLI

TAKEN = 75  # the status of a process whose run another one has


def work(run: Run, root: Path, measure_only: bool) -> None:
    """Train a row and test it, or only measure how long that takes. Ends the process, with status 0 if all is done."""
    if hasattr(os, "setsid"):
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
        with FileLock(folder / "lock", timeout=60), StopSignals() as signals, quiet_lightning():
            if {result.key for result in known_results(root)}.issuperset(run.keys):
                return  # another queue has finished it while this one waited
            (folder / "failed.txt").unlink(missing_ok=True)
            if measure_only:
                _measure(run, root)
            else:
                _train(run, root, signals)
    except Timeout:
        sys.exit(TAKEN)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        write_text_whole(folder / "failed.txt", said)
        raise


def steps_done(run: Run, root: Path) -> int:
    """How many steps the newest checkpoint of a run has."""
    checkpoint, _ = newest_whole(run.folder(root).glob("version_*/checkpoints"))
    if checkpoint is None:
        return 0
    return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"]


def read_pace(root: Path, run: Run) -> tuple[float, int] | None:
    """Seconds of a step and the number of steps of a row, if they were measured on this hardware with its threads."""
    paces = _paces(root / "pace" / f"{run.recipe}.json")
    return tuple(paces[_hardware()]) if _hardware() in paces else None


def _paces(path: Path) -> dict[str, list[Any]]:
    """Seconds and steps by hardware."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


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
            seconds_per_step = statistics.median(seconds) * trainer.accumulate_grad_batches
            raise self.Measured(seconds_per_step, int(trainer.estimated_stepping_batches))


def _measure(run: Run, root: Path) -> None:
    overrides = [*_overrides(run), "--trainer.enable_model_summary=false", "--trainer.enable_progress_bar=false"]
    cli = RecipeCLI(load_recipe(run.recipe), overrides)
    cli.trainer.callbacks.append(_Pace())  # type: ignore[attr-defined]
    try:
        cli.trainer.fit(cli.model, cli.datamodule)
    except _Pace.Measured as measured:
        path = root / "pace" / f"{run.recipe}.json"
        text = json.dumps({**_paces(path), _hardware(): measured.args})
        write_text_whole(path, text)


def _train(run: Run, root: Path, signals: StopSignals) -> None:
    folder = run.folder(root)
    overrides = _as_begun(run, folder)
    recipe = load_recipe(run.recipe)
    checkpoint, problem = newest_whole(folder.glob("version_*/checkpoints"))
    if problem:
        print(f"{problem}: going on from {checkpoint or 'the beginning'}", file=sys.stderr)
    cli = RecipeCLI(recipe, overrides, folder, signals=signals)
    assert cli.run_folder is not None
    for old in folder.glob("version_*/checkpoints"):
        if checkpoint is not None and old != checkpoint.parent:
            shutil.rmtree(old)  # of parts before the one that this goes on from
    with _noted(cli.run_folder):
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint, weights_only=True)
    results = [_result(run, "", overrides, cli, cli, folder)]
    for data in run.tested_on:
        other = RecipeCLI(recipe, [*overrides, f"--data={data}"])
        other.model.load_state_dict(cli.model.state_dict())
        results.append(_result(run, data, overrides, cli, other, folder))
    add_results(root / "results.csv", results)


def _overrides(run: Run) -> list[str]:
    # With several GPUs, Lightning would begin the queue anew for each.
    chosen = [f"--seed_everything={run.seed}", *run.overrides, "--trainer.devices=1"]
    if load_recipe(run.recipe).bfloat16:
        chosen.append("--trainer.precision=bf16-mixed")
    return chosen


def _as_begun(run: Run, folder: Path) -> list[str]:
    """The arguments that a run was begun with, which it keeps whatever the plan says since."""
    begun = folder / "overrides.json"
    if not begun.exists():
        text = json.dumps(_overrides(run))
        write_text_whole(begun, text)
    return json.loads(begun.read_text(encoding="utf-8"))


@contextmanager
def _noted(part: Path) -> Iterator[None]:
    """Write down with which code and on what this part of a run is trained, and from when to when."""
    about = {"commit": commit(), "hardware": _hardware(), "began": time.time()}

    def note() -> None:
        write_text_whole(part / "part.json", json.dumps(about))

    note()
    yield
    about["ended"] = time.time()
    note()


def _parts(folder: Path) -> list[dict[str, Any]]:
    """What is known of the parts of a run. One that was stopped or killed ended with what it wrote last."""
    parts = []
    for path in sorted(folder.glob("version_*/part.json"), key=lambda path: path.stat().st_mtime):
        written = max(file.stat().st_mtime for file in path.parent.rglob("*"))
        parts.append({"ended": written, **json.loads(path.read_text(encoding="utf-8"))})
    return parts


def _result(run: Run, data: str, overrides: list[str], trained: RecipeCLI, tested: RecipeCLI, folder: Path) -> Result:
    (metrics,) = tested.trainer.test(tested.model, tested.datamodule, verbose=False)
    number = load_recipe(run.recipe).published
    parts = _parts(folder)
    return Result(
        recipe=run.recipe,
        overrides=shlex.join(run.overrides),
        data=data,
        seed=run.seed,
        value=value_of(metrics["test/accuracy"], number),
        unit=unit_of(number),
        parameters=sum(p.numel() for p in trained.model.network.parameters()),
        published=number if not data else "",
        command=shlex.join(["torchcaps", "train", run.recipe, *overrides]),
        commit=" ".join(dict.fromkeys(re.sub("([0-9a-f]{12})[0-9a-f]{28}", r"\1", part["commit"]) for part in parts)),
        hardware="; ".join(dict.fromkeys(part["hardware"] for part in parts)),
        precision=str(trained.trainer.precision),
        date=datetime.now(UTC).date().isoformat(),
        hours=round(sum(part["ended"] - part["began"] for part in parts) / 3600, 4),
    )


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
