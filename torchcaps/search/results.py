"""What a search leaves in its folder after every trial: the table of the trials, their pictures, the best recipe."""

import os
import shutil
import warnings
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import optuna
import yaml
from optuna.trial import FrozenTrial
from optuna.visualization.matplotlib import plot_optimization_history, plot_slice

from torchcaps.measures.axes import write
from torchcaps.search.plan import Plan
from torchcaps.utils.files import write_csv_whole, write_text_whole


def best_of(study: optuna.Study) -> FrozenTrial | None:
    """Return the complete trial with the best metric, the first of equals; None if no trial is complete."""
    return min(study.best_trials, key=lambda trial: trial.number, default=None)


def write_results(plan: Plan, study: optuna.Study) -> list[Path]:
    """Write `trials.csv`, and `history.png`, `values.png` and `best.yaml` once a trial is complete. Return their paths.

    Of all finished trials, only the best keeps its checkpoints.
    """
    trials, best = study.get_trials(deepcopy=False), best_of(study)
    header = ("number", *plan.values, plan.metric, "state", "epochs", "folder", "error")
    rows = [
        (
            *(trial.number, *(trial.params.get(name) for name in plan.values), trial.value, trial.state.name.lower()),
            *(trial.user_attrs.get("epochs", 0), plan.folder_of(trial.number), trial.user_attrs.get("error", "")),
        )
        for trial in trials
    ]
    paths = [write_csv_whole(plan.folder / "trials.csv", header, rows)]
    if best is not None:
        paths += [*_write_pictures(plan, study), _write_recipe(plan, best)]
    for trial in trials:
        if trial.state.is_finished() and (best is None or trial.number != best.number):
            for checkpoints in plan.folder_of(trial.number).glob("version_*/checkpoints"):
                shutil.rmtree(checkpoints, ignore_errors=True)  # another process may remove them, too
    return paths


def _write_pictures(plan: Plan, study: optuna.Study) -> list[Path]:
    """Let Optuna draw the metric by trial, and by each of the values."""
    matplotlib.use("agg")  # no window
    paths = []
    # Optuna sets a style for all figures, until the context ends.
    with warnings.catch_warnings(), plt.rc_context({"figure.constrained_layout.use": True}):
        warnings.simplefilter("ignore")  # these pictures are experimental, and one trial spans no axis
        for name, plot in (("history.png", plot_optimization_history), ("values.png", plot_slice)):
            plot(study, target_name=plan.metric)
            for axis in plt.gcf().axes:
                axis.tick_params(axis="x", which="both", labelrotation=45)  # numbers on a logarithmic axis are long
            paths.append(write(plt.gcf(), plan.folder / name))
            plt.close()
    return paths


def _write_recipe(plan: Plan, best: FrozenTrial) -> Path:
    """Write a recipe with all values of the best trial. It extends the one that was searched: modules of the user's own
    are looked for beside that one."""
    name = plan.recipe.name
    if name.endswith((".yaml", ".yml")):
        name = os.path.relpath(os.path.realpath(name), os.path.realpath(plan.folder))
    recipe = {"extends": name, **best.user_attrs["recipe"]}
    about = f"# The best of the trials: trial {best.number}, {plan.metric} {best.value:.6g}\n"
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    return write_text_whole(plan.folder / "best.yaml", about + text)
