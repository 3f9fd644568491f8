"""The process in which the queue trains a row: it resumes the run, tests it at its end, and adds to results.csv."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from torchcaps.recipes.values import options_of
from torchcaps.reproduce.plan import PlannedRun
from torchcaps.reproduce.results import Result, add_results, in_unit, known_results
from torchcaps.runs.checkpoint import Checkpoint
from torchcaps.runs.places import newest_intact
from torchcaps.training.build import Training
from torchcaps.training.values import Values
from torchcaps.utils.checks import one_line
from torchcaps.utils.files import make_folder, read_json, write_text_whole
from torchcaps.utils.machine import commit, hardware
from torchcaps.utils.quiet import quiet_lightning
from torchcaps.utils.signals import StopSignals


def work(run: PlannedRun, root: Path) -> None:
    """Train a row and test it, as the main function of a process. Errors are written to `failed.txt`, and all output to
    `log.txt`, in the folder of the run."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches only the queue, which then asks this process to stop
    folder = run.folder(root)
    make_folder(folder)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        # The process of a queue that was killed has the lock until it has saved.
        with FileLock(folder / "lock"), StopSignals() as signals, quiet_lightning():
            if {result.key for result in known_results(root, packaged=False)}.issuperset(run.keys):
                return  # it finished the run
            (folder / "failed.txt").unlink(missing_ok=True)
            _train(run, root, signals)
    except Exception as error:
        write_text_whole(folder / "failed.txt", f"{type(error).__name__}: {one_line(error)}")
        raise


def steps_done(run: PlannedRun, root: Path) -> int:
    """Return the number of steps that the newest checkpoint of a run has taken."""
    checkpoint, _ = newest_intact(run.folder(root).glob("version_*/checkpoints"))
    return 0 if checkpoint is None else Checkpoint.read(checkpoint).step


def _stop_without_parent() -> None:
    """Stop this process, with a checkpoint, when the queue has ended or was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _train(run: PlannedRun, root: Path, signals: StopSignals) -> None:
    folder, recipe = run.folder(root), run.load()
    checkpoint, problem = newest_intact(folder.glob("version_*/checkpoints"))
    if problem:
        print(f"{problem}: resuming from {checkpoint or 'the beginning'}", file=sys.stderr)
    training = Training(Values.of(recipe, run.changes), folder, signals, checkpoint)
    assert training.run_folder is not None
    for old in folder.glob("version_*/checkpoints"):
        if checkpoint is not None and old != checkpoint.parent:
            shutil.rmtree(old)  # only the checkpoints of the part that is resumed are needed
    about = {"commit": commit(), "hardware": hardware(), "began": time.time()}
    part = training.run_folder / "part.json"
    write_text_whole(part, json.dumps(about))
    try:
        training.trainer.fit(training.model, training.datamodule, ckpt_path=checkpoint, weights_only=True)
    except Exception:
        training.give_back_folder()  # of a part that has trained nothing, for example because the data is missing
        raise
    finally:
        if part.exists():
            write_text_whole(part, json.dumps({**about, "ended": time.time()}))
    parts = _parts(folder)
    results = [_test(run, "", training, training, parts)]
    for data in run.tested_on:
        other = Training(Values.of(recipe, {**run.changes, "data": data}))
        other.model.load_state_dict(training.model.state_dict())
        results.append(_test(run, data, training, other, parts))
    add_results(root / "results.csv", results)


def _parts(folder: Path) -> list[dict[str, Any]]:
    """Return `part.json` of all parts of a run, in order. A part that was killed has ended with its newest file."""
    parts = []
    for path in folder.glob("version_*/part.json"):
        written = max(file.stat().st_mtime for file in path.parent.rglob("*"))
        parts.append({"ended": written, **read_json(path, dict)})
    return sorted(parts, key=lambda part: part["began"])


def _test(run: PlannedRun, data: str, trained: Training, tested: Training, parts: list[dict[str, Any]]) -> Result:
    """Test the network of `trained` on the data of `tested`, and return the result."""
    (metrics,) = tested.trainer.test(tested.model, tested.datamodule, verbose=False)
    recipe = run.load()
    commits = (re.sub("([0-9a-f]{12})[0-9a-f]{28}", r"\1", part["commit"]) for part in parts)
    return Result(
        recipe=run.recipe,
        overrides=shlex.join(run.overrides),
        data=data,
        seed=run.seed,
        value=in_unit(metrics, recipe.unit),
        unit=recipe.unit,
        parameters=sum(p.numel() for p in trained.model.network.parameters()),
        published="" if data or recipe.is_small else recipe.published,
        command=shlex.join(["torchcaps", "train", *run.recipe.split(), *options_of(run.changes)]),
        commit=" then ".join(dict.fromkeys(commits)),
        hardware="; ".join(dict.fromkeys(part["hardware"] for part in parts)),
        precision=str(trained.trainer.precision),
        date=datetime.now(UTC).date().isoformat(),
        hours=round(sum(part["ended"] - part["began"] for part in parts) / 3600, 4),
    )
