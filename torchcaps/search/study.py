"""The study of a search, in a storage of Optuna's, and its trials, each a training that reports its metric.

The storage is `study.db` in the folder of the search, or what `--storage` names: a journal file or the URL of a
database. Any number of processes can work on one study; the locks in its folder keep them apart.
"""

import gc
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from lightning import Callback, LightningModule, Trainer

from torchcaps.data import DataError
from torchcaps.recipes.values import plain
from torchcaps.runs.places import newest_intact
from torchcaps.search.plan import Plan, check
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import make_folder, take_folder
from torchcaps.utils.signals import Stopped, StopSignals

with needs("search"):
    import optuna
    from optuna.exceptions import OptunaError
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

EXPECTED_STORAGE = "expected a journal file of Optuna's, or the URL of a database, such as sqlite:///FILE"
STARTS = 3  # of a trial that leaves no checkpoint, before it counts as failed


def open_search(plan: Plan, runs: Path, resume: bool, where: str | None) -> tuple[Plan, optuna.Study]:
    """Begin a search or go on with one, after all checks. Return its plan and its study.

    The errors are those of `check`, and a ValueError if it cannot go on or the storage cannot be opened.

    Args:
        plan: the search, without its folder and its seed.
        runs: folder of the recipe's runs.
        resume: go on with the newest search there.
        where: a storage that processes share, in which a search begins or goes on; None for a storage in the folder.
    """
    seed, folder = check(plan), runs / "search_shared"  # checked before there is a folder or a study
    if where is None and resume:
        studies = sorted(runs.glob("search_*/study.db"), key=lambda path: (len(str(path)), path))  # by number
        if not studies:
            raise ValueError(f"no search under {runs}: leave out --resume to begin one")
        folder = studies[-1].parent
    elif where is None:
        folder = take_folder(runs, "search")
    study = open_study(plan, where or f"sqlite:///{folder.absolute() / 'study.db'}")
    make_folder(folder)
    values = [plan.recipe.config, {**plain(plan.recipe.search or {}), "trials": None}]
    overrides = [f"--{'.'.join(x.path)}{'+' * x.adds}={x.value}" for x in plan.overrides]
    now = {"values": json.dumps(values, default=str), "overrides": shlex.join(overrides)}
    then = study.user_attrs.get("began with", now)
    if then != now:
        raise ValueError(
            f"the search in {folder} began with other overrides or values of the recipe: give the same as then "
            f"(overrides: {then['overrides'] or 'none'}), or begin a new one"
        )
    if not study.user_attrs and any(folder.glob("trial_*")):
        raise ValueError(f"{folder} has trials of a search in another storage: move it away, or give other --runs")
    study.set_user_attr("began with", now)
    return replace(plan, seed=seed, folder=folder), study


def open_study(plan: Plan, where: str) -> optuna.Study:
    """Open the study of a search in a journal file or in the database at a URL. All are made if they do not exist."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    bad_trials = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
    named = re.sub("//.*@", "//", where)  # without the password of a database
    if os.path.exists(where):
        _check_journal(Path(where))
    try:
        study = optuna.create_study(
            storage=where if "://" in where else optuna.storages.JournalStorage(JournalFileBackend(where)),
            study_name=plan.recipe.folder.as_posix(),
            direction=plan.direction,
            pruner=bad_trials if plan.prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
    except Exception as error:  # of the file system, of SQLAlchemy or of a driver
        raise ValueError(
            f"the storage {named} cannot be opened ({type(error).__name__}: {one_line(error)}): {EXPECTED_STORAGE}"
        ) from error
    if study.direction.name.lower() != plan.direction:
        raise ValueError(f"this search began with another mode: {plan.metric} is to {plan.direction} now")
    return study


def _check_journal(path: Path) -> None:
    """Check what Optuna does not: it waits for the writer of a FIFO, and goes on in the middle of a line."""
    if not path.is_file():
        raise ValueError(f"the storage {path} is not a regular file: {EXPECTED_STORAGE}")
    with path.open("rb") as journal:
        if journal.read(1) not in (b"", b"{"):  # such as a database, which a URL names, and of which nothing may be cut
            raise ValueError(f"the storage {path} is no journal file of Optuna's: {EXPECTED_STORAGE}")
        journal.seek(max(0, path.stat().st_size - 1))
        if journal.read(1) not in (b"", b"\n"):
            raise ValueError(
                f"the storage {path} ends within a line: if no process is writing to it, remove this line to go on"
            )


def run_study(plan: Plan, study: optuna.Study, signals: StopSignals) -> Iterator[int]:
    """Run the trials that no other process has taken: first those that were stopped or killed, then new ones.

    Yield the number of each trial that has ended; until the next one is asked for, no other process yields. Raise
    `Stopped` after a signal (the trial under way can continue), and errors that every other trial would fail from too.
    """
    alone = FileLock(plan.folder / "lock")
    while True:
        with alone:
            taken = _take(plan, study)
        if taken is None:
            return
        trial, lock = taken
        try:
            _run(plan, trial, signals)
        finally:
            lock.release()
        with alone:
            yield trial.number


def _take(plan: Plan, study: optuna.Study) -> tuple[optuna.Trial, FileLock] | None:
    """Take a trial that no process works on, and its lock. Return None if all are taken."""
    for begun in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if plan.folder_of(begun.number).is_dir():  # else another machine has it, whose files are not here
            lock = FileLock(plan.folder_of(begun.number) / "lock")
            with suppress(Timeout):
                lock.acquire(timeout=0)
                if not study.trials[begun.number].state.is_finished():
                    return optuna.Trial(study, begun._trial_id), lock  # Optuna has no public way to go on with a trial
                lock.release()  # it ended in this moment
    number = len(study.get_trials(deepcopy=False))
    if number >= plan.trials:
        return None
    # A sampler of its own for each trial: what it chooses follows from the trials before, however often the search was
    # stopped.
    seed = np.random.SeedSequence([plan.seed, number]).generate_state(1)[0]
    study.sampler = optuna.samplers.TPESampler(seed=int(seed))
    # The folder first: a trial without one would be taken for another machine's, and never end.
    folder = plan.folder_of(number)
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    new = study.ask(dict(plan.values)).number
    if new != number:  # another machine has taken that one in this moment
        with suppress(OSError):
            if is_new:
                folder.rmdir()
        plan.folder_of(new).mkdir(exist_ok=True)
    return _take(plan, study)  # the new one


def _run(plan: Plan, trial: optuna.Trial, signals: StopSignals) -> None:
    """Train a trial, and tell the study how it ended."""
    metric, state = None, TrialState.COMPLETE
    starts = trial.user_attrs.get("starts", 0) + 1
    trial.set_user_attr("starts", starts)
    try:
        if starts > STARTS and newest_intact(plan.folder_of(trial.number).glob("version_*/checkpoints"))[0] is None:
            reason = trial.user_attrs.get("ended", "perhaps killed")
            raise RuntimeError(f"its training began {STARTS} times and ended before a checkpoint: {reason}")
        metric = _train(plan, trial, signals)
    except Stopped:
        trial.set_user_attr("starts", starts - 1)
        raise
    except optuna.TrialPruned:
        state = TrialState.PRUNED
    except Exception as error:  # a trial may fail in any way: out of memory, or values that do not fit each other
        for_all = isinstance(error, OSError | OptunaError)
        if isinstance(error, DataError | ImportError):  # not from its values, probably, if no trial is complete
            for_all = not trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if for_all:  # all trials would fail from it
            trial.set_user_attr("ended", one_line(error))
            raise
        trial.set_user_attr("error", one_line(error) or type(error).__name__)
        state = TrialState.FAIL
    if torch.cuda.is_available():
        gc.collect()  # a training is full of cycles, which keep memory of the GPU
    trial.study.tell(trial, metric, state)


def _train(plan: Plan, trial: optuna.Trial, signals: StopSignals) -> float:
    """Train a trial to its end, from its newest checkpoint if it has one. Return the metric of its last validation."""
    folder = plan.folder_of(trial.number)
    resumed, _ = newest_intact(folder.glob("version_*/checkpoints"))
    training = plan.training(
        {name: trial.params[name] for name in plan.values}, folder=folder, signals=signals, resumed=resumed
    )
    trainer: Any = training.trainer
    trial.set_user_attr("recipe", training.values)
    reports = Reports(trial, plan.metric)
    trainer.callbacks.insert(0, reports)
    trainer.fit(training.model, training.datamodule, ckpt_path=resumed, weights_only=True)
    if not reports.reported:
        raise ValueError("the training ended before its first validation: train longer, or validate more often")
    return reports.reported[-1]


class Reports(Callback):
    """Report a metric to a trial after every validation, and end the training if the trial shall end early."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self.trial, self.metric = trial, metric
        self.reported: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"reported": self.reported}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reported = state_dict["reported"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value, epoch = float(trainer.callback_metrics[self.metric]), trainer.current_epoch + 1
        if not math.isfinite(value):
            raise FloatingPointError(f"{self.metric} is {value} after epoch {epoch}")
        self.reported.append(float(f"{value:.7g}"))  # float32 has no more digits
        self.trial.report(self.reported[-1], len(self.reported) - 1)
        self.trial.set_user_attr("epochs", epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned
