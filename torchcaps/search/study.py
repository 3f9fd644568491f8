"""The study of a search, in a storage of Optuna's, and the loop over its trials.

The storage is `study.db` in the folder of the search, or what `--storage` names: a journal file or the URL of a
database. Any number of processes can work on one study; the locks in its folder keep them apart.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torchcaps.recipes.values import plain
from torchcaps.search.head import Search
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
    study = storage = None
    if where is not None:
        plan, storage = replace(plan, folder=runs / "search_shared"), _open_storage(where)
    elif resume:
        plan = replace(plan, folder=_newest(runs))
        storage = _open_storage(_storage_of(plan.folder))
    if storage is not None:
        with suppress(KeyError):  # no search has begun there
            study = optuna.load_study(study_name=_name(plan), storage=storage, pruner=_pruner(plan.search))
    if study is not None:
        plan = _as_begun(plan, study)
    plan = replace(plan, seed=check(plan))
    if storage is None:
        plan = replace(plan, folder=take_folder(runs, "search"))
        storage = _open_storage(_storage_of(plan.folder))
    return plan, study or _begin(plan, storage)


def _open_storage(where: str) -> JournalStorage | RDBStorage:
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


def _storage_of(folder: Path) -> str:
    """Return the URL of the storage in the folder of a search."""
    return URL.create("sqlite", database=str((folder / STUDY).absolute())).render_as_string()


def _newest(runs: Path) -> Path:
    """Return the folder of the newest search in the folder of a recipe's runs."""
    numbered = {path.parent.name.removeprefix("search_"): path.parent for path in runs.glob(f"search_*/{STUDY}")}
    numbers = [int(number) for number in numbered if number.isdigit()]
    if not numbers:
        raise ValueError(f"no search under {runs}: leave out --resume to begin one")
    return numbered[str(max(numbers))]


def _begin(plan: Plan, storage: Any) -> optuna.Study:
    """Make the study of a search, and note what it begins with."""
    if any(plan.folder.glob("trial_*")):
        raise ValueError(f"{plan.folder} has trials of a search in another storage: move it away, or give other --runs")
    plan.folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=storage,
        study_name=_name(plan),
        direction="maximize" if plan.search.mode == "max" else "minimize",
        pruner=_pruner(plan.search),
        load_if_exists=True,  # another machine may have made it in this moment
    )
    study.set_user_attr(BEGAN, _about(plan))
    return study


def _as_begun(plan: Plan, study: optuna.Study) -> Plan:
    """Return the plan with the overrides that its study began with, if it has none.

    Raises:
        ValueError: the study began with something else; the message names it. The number of trials may be another one.
    """
    then = study.user_attrs.get(BEGAN)
    if then is None:  # another machine begins it in this moment
        return plan
    plan = replace(plan, overrides=plan.overrides or then["overrides"])
    for what, value in _about(plan).items():
        if then.get(what) != value:
            shown = f" {then[what]}, and now they are {value}" if what == "overrides" else ""
            raise ValueError(
                f"the search in {plan.folder} began with other {what}{shown}: give the same as then, or begin a new one"
            )
    return plan


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


def _name(plan: Plan) -> str:
    return plan.recipe.folder.as_posix()


def _pruner(search: Search) -> optuna.pruners.BasePruner:
    if search.prune:
        return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
    return optuna.pruners.NopPruner()


def _about(plan: Plan) -> dict[str, Any]:
    """Return what must stay the same while a search goes on."""
    head = plain(plan.recipe.search)  # type: ignore[arg-type]
    about = {
        "overrides": plan.overrides,
        "lines in the head `search`": {key: value for key, value in head.items() if key != "trials"},
        "values in the recipe": plan.recipe.config,
    }
    return json.loads(json.dumps(about, default=str))  # as the storage gives it back
