"""What a search leaves in its folder after every trial: the table of the trials, their pictures, the best recipe."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization.matplotlib import plot_optimization_history, plot_slice

from torchcaps.explain.axes import write
from torchcaps.search.plan import Plan
from torchcaps.training.build import Training
from torchcaps.training.names import Names
from torchcaps.training.overrides import read_overrides, with_override
from torchcaps.utils.files import write_csv_whole, write_text_whole


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
    names = list(plan.values)
    header = ("number", *names, plan.metric, "state", "epochs", "folder", "error")
    rows = [
        (
            *(trial.number, *(trial.params.get(name) for name in names), metric_of(trial), trial.state.name.lower()),
            *(trial.user_attrs.get("epochs", 0), plan.folder_of(trial.number), trial.user_attrs.get("error", "")),
        )
        for trial in trials
    ]
    paths = [write_csv_whole(plan.folder / "trials.csv", header, rows)]
    finished = [trial for trial in trials if trial.state.is_finished()]
    if best is not None:
        paths += _write_pictures(plan, study)
        paths.append(write_text_whole(plan.folder / "best.yaml", _recipe(plan, best, len(finished))))
    for trial in finished:
        if best is None or trial.number != best.number:
            for checkpoints in plan.folder_of(trial.number).glob("version_*/checkpoints"):
                shutil.rmtree(checkpoints)
    return paths


def _write_pictures(plan: Plan, study: optuna.Study) -> list[Path]:
    """Draw the metric by trial, and how it depends on each of the values."""
    matplotlib.use("agg")  # no window
    paths = []
    with warnings.catch_warnings(), plt.rc_context():  # Optuna sets a style for all figures
        warnings.simplefilter("ignore")  # these pictures are experimental, and one trial spans no axis
        for name, plot in (("history.png", plot_optimization_history), ("values.png", plot_slice)):
            axes = np.ravel(np.asarray(plot(study, target_name=plan.metric)))  # one axis, or several
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
    return f"# The best of {finished} trials: trial {best.number}, {plan.metric} {best.value:.6g}\n{text}"


def changes(training: Training) -> dict[str, Any]:
    """Return those values of a training that its overrides have changed, nested as in a recipe."""
    before = after = training.recipe.config
    for override in read_overrides(training.overrides):
        after = with_override(after, override, Names(training.allow_code))
    return _changed(before, after, training.values)


def _changed(before: Any, after: Any, read: Any) -> Any:
    """Return what is in `after` and not in `before`, as the parser has read it. Lists, and classes with their
    arguments, are changed as a whole."""
    before = before if isinstance(before, dict) else {}
    if not isinstance(after, dict) or before.get("class_path") != after.get("class_path"):
        return read
    return {
        name: _changed(before.get(name), value, read.get(name, value))
        for name, value in after.items()
        if name not in before or before[name] != value
    }
