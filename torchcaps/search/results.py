"""What a search leaves in its folder after every trial: the table of the trials, their pictures, the best recipe."""

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from torchcaps.explain.axes import write
from torchcaps.search.plan import Plan
from torchcaps.utils.files import write_csv_whole, write_text_whole

ARGUMENTS = ("init_args", "dict_kwargs")  # levels that a name on the command line leaves out
STATES = {
    TrialState.RUNNING: "running",  # or stopped, or killed
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def metric_of(trial: FrozenTrial) -> float | None:
    """Return the metric after the last validation of a trial, or None before the first."""
    return None if trial.last_step is None else trial.intermediate_values[trial.last_step]


def best_of(study: optuna.Study) -> FrozenTrial | None:
    """Return the complete trial with the best metric, the first of equals; None if no trial is complete."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return study.best_trial if complete else None


def write_results(plan: Plan, study: optuna.Study) -> list[Path]:
    """Write `trials.csv`, and `history.png`, `values.png` and `best.yaml` once a trial is complete. Return their paths.

    Of all finished trials, only the best keeps its checkpoints.
    """
    trials, best = study.get_trials(deepcopy=False), best_of(study)
    names = list(plan.search.values)
    header = ("number", *names, plan.search.metric, "state", "epochs", "folder", "error")
    rows = [
        (
            *(trial.number, *(trial.params.get(name) for name in names), metric_of(trial), STATES[trial.state]),
            *(trial.user_attrs.get("epochs", 0), plan.folder_of(trial.number), trial.user_attrs.get("error", "")),
        )
        for trial in trials
    ]
    paths = [write_csv_whole(plan.folder / "trials.csv", header, rows)]
    if best is not None:
        finished = sum(trial.state.is_finished() for trial in trials)
        paths += _write_pictures(plan, study)
        paths.append(write_text_whole(plan.folder / "best.yaml", _recipe(plan, best, finished)))
    for trial in trials:
        if trial.state.is_finished() and (best is None or trial.number != best.number):
            for checkpoints in plan.folder_of(trial.number).glob("version_*/checkpoints"):
                shutil.rmtree(checkpoints)
    return paths


def _write_pictures(plan: Plan, study: optuna.Study) -> list[Path]:
    """Draw the metric by trial, and how it depends on each of the values."""
    from optuna.visualization.matplotlib import plot_optimization_history, plot_slice

    matplotlib.use("agg")  # no window
    paths = []
    with warnings.catch_warnings(), plt.rc_context():  # Optuna sets a style for all figures
        warnings.simplefilter("ignore")  # these pictures are experimental, and one trial spans no axis
        for name, plot in (("history.png", plot_optimization_history), ("values.png", plot_slice)):
            drawn: Any = plot(study, target_name=plan.search.metric)  # one axis, or an array of several
            axes = np.ravel(drawn)
            figure = axes[0].figure
            figure.set_size_inches(2 + 4 * len(axes), 5)
            figure.set_layout_engine("constrained")
            for axis in axes:
                axis.tick_params(axis="x", which="both", labelrotation=45)  # of names and of logarithms, which are long
            paths.append(write(figure, plan.folder / name))
            plt.close(figure)
    return paths


def _recipe(plan: Plan, best: FrozenTrial, finished: int) -> str:
    """Return a recipe that extends the one that was searched, with the overrides of the search and the best values."""
    recipe = plan.recipe
    extended = recipe.name
    if extended.endswith((".yaml", ".yml")):
        extended = Path(os.path.relpath(extended, plan.folder)).as_posix()
    values = {"extends": f"{extended} --small" if recipe.is_small else extended, **best.user_attrs["changes"]}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"# The best of {finished} trials: trial {best.number}, {plan.search.metric} {best.value:.6g}\n{text}"


def changes(overrides: Sequence[str], chosen: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return those values of a training that were overridden or chosen, nested as in a recipe.

    Args:
        overrides: the overrides of the search.
        chosen: the values of the trial.
        values: all values of its training.
    """
    names = [given.partition("=")[0].removeprefix("--").removesuffix("+") for given in overrides if given[:2] == "--"]
    changed: dict[str, Any] = {}
    for name in (*names, *chosen):
        _copy(name.split("."), values, changed)
    return changed


def _copy(names: list[str], values: Any, changed: dict[str, Any]) -> None:
    """Copy a value by its name on the command line into nested changes. Of a list, all is copied."""
    name, *rest = names
    if name not in values:
        level = next((level for level in ARGUMENTS if name in values.get(level, {})), None)
        if level is None:
            changed.update(values)
            return
        values, changed = values[level], changed.setdefault(level, {})
    part = values[name]
    if rest and isinstance(part, dict):
        _copy(rest, part, changed.setdefault(name, {}))
    else:
        changed[name] = part
