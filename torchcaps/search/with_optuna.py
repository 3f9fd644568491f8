"""A search with Optuna: trials one after the other, whose values follow from the results of those before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchcaps.recipes.search import Choices, Range
from torchcaps.search.plan import Plan
from torchcaps.search.trial import COMPLETE, FAILED, PRUNED, Trial, read_trials, run_trial
from torchcaps.utils.extras import needs
from torchcaps.utils.signals import StopSignals

with needs("search"):
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
    from optuna.trial import TrialState

STUDY = "study.db"  # in the folder of the search: for `optuna-dashboard` and `optuna.load_study`
STATES = {COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL}


def search_with_optuna(plan: Plan, signals: StopSignals, after: Callable[[Trial], None]) -> None:
    """Run the trials that are left.

    Args:
        plan: the search.
        signals: signals that ask to stop.
        after: function that is called with every trial that has ended.

    Raises:
        Stopped, DataError, ImportError, OSError: see `run_trial`.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: _distribution(space) for name, space in plan.search.values.items()}
    study = _study(plan, distributions)
    for number in range(len(study.trials), plan.trials):
        # A sampler of its own for each trial: what it chooses follows from the trials before, however often the search
        # was stopped.
        study.sampler = optuna.samplers.TPESampler(seed=plan.seed_of(number))
        asked = study.ask(distributions)
        trial = run_trial(plan, number, asked.params, _report(asked), signals)
        value = trial.metric if trial.state == COMPLETE else None
        study.tell(asked, value, STATES[trial.state])
        after(trial)


def _study(plan: Plan, distributions: dict[str, BaseDistribution]) -> optuna.Study:
    """Make a study of the trials that are finished.

    It is made anew from the files of the trials: what a killed process has left in it may be half of a trial.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    for old in plan.folder.glob(f"{STUDY}*"):
        old.unlink()
    study = optuna.create_study(
        storage=_url(plan.folder / STUDY),
        study_name=f"{plan.recipe.name} {plan.folder.name}",
        direction="maximize" if plan.search.mode == "max" else "minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
        if plan.search.prune
        else optuna.pruners.NopPruner(),
    )
    for number, trial in enumerate(read_trials(plan)):
        if trial.number != number or not trial.is_finished or set(trial.values) != set(distributions):
            break  # the first one that was stopped
        study.add_trial(
            optuna.trial.create_trial(
                state=STATES[trial.state],
                value=None if trial.state == FAILED else trial.metric,
                params=trial.values,
                distributions=distributions,
                intermediate_values=dict(enumerate(trial.reported)),
            )
        )
    return study


def _report(asked: optuna.Trial) -> Callable[[list[float]], bool]:
    def report(reported: list[float]) -> bool:
        asked.report(reported[-1], len(reported) - 1)
        return asked.should_prune()

    return report


def _distribution(space: Range | Choices) -> BaseDistribution:
    if isinstance(space, Choices):
        return CategoricalDistribution(space.values)
    if space.is_whole:
        return IntDistribution(int(space.low), int(space.high), log=space.log, step=int(space.step or 1))
    return FloatDistribution(space.low, space.high, log=space.log, step=space.step)


def _url(file: Path) -> Any:
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(file.absolute())).render_as_string(hide_password=False)
