"""The study of a search, in a storage of Optuna's, and the loop over its trials.

The storage is `study.db` in the folder of the search, or what `--storage` names: a journal file or the URL of a
database. Any number of processes can work on one study; the locks in its folder keep them apart.
"""

import gc
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from torchcaps.data import DataError
from torchcaps.recipes.values import plain
from torchcaps.search.plan import Plan, check
from torchcaps.search.trial import train
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import take_folder
from torchcaps.utils.signals import StopSignals

with needs("search"):
    import optuna
    from optuna.exceptions import OptunaError
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
    from sqlalchemy import URL
    from sqlalchemy.exc import SQLAlchemyError

STUDY = "study.db"  # in the folder of a search without --storage
BEGAN = "began"  # the attribute of a study that says what it began with


def open_search(plan: Plan, runs: Path, resume: bool, where: str | None) -> tuple[Plan, optuna.Study]:
    """Begin a search or go on with one, after all checks. Return its plan and its study.

    Args:
        plan: the search, without its folder and its seed.
        runs: folder of the recipe's runs.
        resume: go on with the newest search there.
        where: a storage that processes share, in which a search begins or goes on; None for a storage in the folder.

    Raises:
        ValueError: something cannot work; the message is one line.
        DataError: the data is missing or damaged.
    """
    if where is not None:
        plan = replace(plan, folder=runs / "search_shared")
    elif resume:
        plan = replace(plan, folder=_newest(runs))
    else:
        seed = check(plan)  # before there is a folder
        plan = replace(plan, seed=seed, folder=take_folder(runs, "search"))
    own = URL.create("sqlite", database=str(plan.folder.absolute() / STUDY)).render_as_string()
    storage = open_storage(where or own)
    if where is not None and _name(plan) not in optuna.get_all_study_names(storage):
        check(plan)  # before there is a study
    study = open_study(plan, storage)
    then = study.user_attrs.get(BEGAN, {})
    if then:
        plan = replace(plan, overrides=plan.overrides or tuple(then["overrides"]))
    elif any(plan.folder.glob("trial_*")):
        raise ValueError(f"{plan.folder} has trials of a search in another storage: move it away, or give other --runs")
    now = _about(plan)
    if others := [name for name in then if then[name] != now[name]]:
        raise ValueError(
            f"the search in {plan.folder} began with other {' and '.join(others)}: give the same as then (overrides: "
            f"{shlex.join(then['overrides']) or 'none'}), or begin a new one"
        )
    if where is not None or resume:
        plan = replace(plan, seed=check(plan))
    plan.folder.mkdir(parents=True, exist_ok=True)
    study.set_user_attr(BEGAN, now)
    return plan, study


def open_storage(where: str) -> JournalStorage | RDBStorage:
    """Open a journal file or the database at a URL. Files are made if they do not exist."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = RDBStorage(where) if "://" in where else JournalStorage(JournalFileBackend(where))
        storage.get_all_studies()
    except Exception as error:  # of the file system, of SQLAlchemy or of a driver
        raise ValueError(
            "the storage cannot be opened: give a journal file of Optuna's or the URL of a database "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error
    return storage


def open_study(plan: Plan, storage: JournalStorage | RDBStorage) -> optuna.Study:
    """Open the study of a search, which is made if it does not exist."""
    bad_trials = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
    return optuna.create_study(
        storage=storage,
        study_name=_name(plan),
        direction="maximize" if plan.mode == "max" else "minimize",
        pruner=bad_trials if plan.prune else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )


def _name(plan: Plan) -> str:
    return plan.recipe.folder.as_posix()


def _newest(runs: Path) -> Path:
    """Return the folder of the newest search in the folder of a recipe's runs."""
    folders = [path.parent for path in runs.glob(f"search_*/{STUDY}") if path.parent.name[len("search_") :].isdigit()]
    if not folders:
        raise ValueError(f"no search under {runs}: leave out --resume to begin one")
    return max(folders, key=lambda folder: int(folder.name[len("search_") :]))


def _about(plan: Plan) -> dict[str, Any]:
    """Return what must stay the same while a search goes on, by its name in a message."""
    head = plain(plan.recipe.search)  # type: ignore[arg-type]
    about = {
        "overrides": plan.overrides,
        "lines in the head `search`": {key: value for key, value in head.items() if key != "trials"},
        "values in the recipe": plan.recipe.config,
    }
    return json.loads(json.dumps(about, default=str))  # as the storage gives it back


def run_study(plan: Plan, study: optuna.Study, signals: StopSignals, after: Callable[[int], None]) -> None:
    """Run the trials that no other process has taken: first those that were stopped or killed, then new ones.

    Args:
        plan: the search.
        study: its study.
        signals: signals that ask to stop.
        after: function that is called with the number of every trial that has ended; no other process calls it then.

    Raises:
        Stopped: a signal asked to stop; the trial under way can continue.
        DataError, ImportError, OSError: what every other trial would fail from too.
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
        except (OptunaError, SQLAlchemyError) as error:
            raise OSError(f"the storage of the search failed: {one_line(error)}") from error
        finally:
            lock.release()
        with alone:
            after(trial.number)


def _run(plan: Plan, trial: optuna.Trial, signals: StopSignals) -> None:
    """Choose the values of a trial, unless it was begun before, train it, and tell the study how it ended."""
    # A sampler of its own for each trial: what it chooses follows from the trials before, however often the search was
    # stopped.
    seed = np.random.SeedSequence([plan.seed, trial.number]).generate_state(1)[0]
    trial.study.sampler = optuna.samplers.TPESampler(seed=int(seed))
    for name, space in plan.values.items():
        trial._suggest(name, space)  # as `Study.ask` does
    metric, state = None, TrialState.COMPLETE
    try:
        metric = train(plan, trial, signals)
    except optuna.TrialPruned:
        state = TrialState.PRUNED
    except (DataError, ImportError, OSError, OptunaError, SQLAlchemyError):
        raise
    except Exception as error:  # a trial may fail in any way: out of memory, or values that do not fit each other
        known = isinstance(error, ValueError | FloatingPointError)
        trial.set_user_attr("error", one_line(error) if known else f"{type(error).__name__}: {one_line(error)}")
        state = TrialState.FAIL
    finally:
        if torch.cuda.is_available():
            gc.collect()  # a training is full of cycles
            torch.cuda.empty_cache()
    trial.study.tell(trial, metric, state)


def _take(plan: Plan, study: optuna.Study) -> tuple[optuna.Trial, FileLock] | None:
    """Take a trial that no process works on, and its lock. Return None if all are taken."""
    for begun in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if plan.folder_of(begun.number).is_dir():  # else another machine has it, whose files are not here
            lock = FileLock(plan.folder_of(begun.number) / "lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                continue
            if not study.trials[begun.number].state.is_finished():
                return optuna.Trial(study, begun._trial_id), lock  # Optuna has no public way to go on with a trial
            lock.release()  # it ended in this moment
    if len(study.get_trials(deepcopy=False)) >= plan.trials:
        return None
    trial = study.ask()
    plan.folder_of(trial.number).mkdir()
    lock = FileLock(plan.folder_of(trial.number) / "lock")
    lock.acquire()
    return trial, lock
