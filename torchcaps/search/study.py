"""The study of a search, in a storage of Optuna's, and the loop over its trials.

The storage is `study.db` in the folder of the search, or what `--storage` names: a journal file or the URL of a
database. Any number of processes can work on one study; the locks in its folder keep them apart.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torchcaps.recipes.values import plain
from torchcaps.search.plan import Plan, check
from torchcaps.search.trial import run_trial
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
    study = open_study(plan, where or _own_storage(plan.folder))
    if then := study.user_attrs.get(BEGAN):
        plan = replace(plan, overrides=plan.overrides or tuple(then["overrides"]))
    elif any(plan.folder.glob("trial_*")):
        raise ValueError(f"{plan.folder} has trials of a search in another storage: move it away, or give other --runs")
    now = _about(plan)
    if others := [name for name in then or () if then[name] != now[name]]:
        raise ValueError(
            f"the search in {plan.folder} began with other {' and '.join(others)}: give the same as then (overrides: "
            f"{shlex.join(then['overrides']) or 'none'}), or begin a new one"
        )
    if where is not None or resume:
        plan = replace(plan, seed=check(plan))
    plan.folder.mkdir(parents=True, exist_ok=True)
    study.set_user_attr(BEGAN, now)
    return plan, study


def open_study(plan: Plan, where: str) -> optuna.Study:
    """Open the study of a search in a journal file or in the database at a URL. What does not exist is made."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    bad_trials = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
    try:
        return optuna.create_study(
            storage=RDBStorage(where) if "://" in where else JournalStorage(JournalFileBackend(where)),
            study_name=plan.recipe.folder.as_posix(),
            direction="maximize" if plan.mode == "max" else "minimize",
            pruner=bad_trials if plan.prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
    except Exception as error:  # of the file system, of SQLAlchemy or of a driver
        raise ValueError(
            "the storage cannot be opened: give a journal file of Optuna's or the URL of a database "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error


def _own_storage(folder: Path) -> str:
    """Return the URL of the storage in the folder of a search."""
    return URL.create("sqlite", database=str(folder.absolute() / STUDY)).render_as_string()


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
        Stopped, DataError, ImportError, OSError: see `run_trial`.
    """
    alone = FileLock(plan.folder / "lock")
    while True:
        with alone:
            taken = _take(plan, study)
        if taken is None:
            return
        trial, lock = taken
        try:
            run_trial(plan, trial, signals)
        except (OptunaError, SQLAlchemyError) as error:
            raise OSError(f"the storage of the search failed: {one_line(error)}") from error
        finally:
            lock.release()
        with alone:
            after(trial.number)


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
