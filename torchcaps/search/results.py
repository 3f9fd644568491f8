"""What a search leaves in its folder after every trial: the table of all trials, their picture, and the best recipe."""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from torchcaps.explain.axes import write
from torchcaps.search.picture import search_figure
from torchcaps.search.plan import Plan
from torchcaps.search.trial import Trial, best_of, read_trials
from torchcaps.utils.files import write_csv_whole, write_text_whole

ARGUMENTS = ("init_args", "dict_kwargs")  # levels that a name on the command line leaves out


def write_results(plan: Plan) -> list[Path]:
    """Write `trials.csv`, `search.png` and `best.yaml`, and return their paths. Without a complete trial there is no
    `best.yaml`. Of all finished trials, only the best keeps its checkpoints."""
    trials = read_trials(plan)
    best = best_of(plan, trials)
    paths = [
        _write_table(plan, trials),
        write(search_figure(plan.search, trials, best), plan.folder / "search.png"),
    ]
    if best is not None:
        paths.append(write_text_whole(plan.folder / "best.yaml", _recipe(plan, best)))
    for trial in trials:
        if trial.is_finished and trial != best:
            for checkpoints in plan.folder_of(trial.number).glob("version_*/checkpoints"):
                shutil.rmtree(checkpoints)
    return paths


def _write_table(plan: Plan, trials: list[Trial]) -> Path:
    names = list(plan.search.values)
    header = ("number", *names, plan.search.metric, "state", "epochs", "folder", "error")
    rows = [
        (
            trial.number,
            *(trial.values.get(name) for name in names),
            *(trial.metric, trial.state, trial.epochs, plan.folder_of(trial.number), trial.error),
        )
        for trial in trials
    ]
    return write_csv_whole(plan.folder / "trials.csv", header, rows)


def _recipe(plan: Plan, best: Trial) -> str:
    """Return a recipe that extends the one that was searched, with the overrides of the search and the best values."""
    recipe = plan.recipe
    extended = recipe.name
    if extended.endswith((".yaml", ".yml")):
        extended = Path(os.path.relpath(extended, plan.folder)).as_posix()
    configs = sorted(plan.folder_of(best.number).glob("version_*/config.yaml"), key=lambda path: path.stat().st_mtime)
    everything = yaml.safe_load(configs[-1].read_text(encoding="utf-8"))
    changes: dict[str, Any] = {}
    for name in (*_names(plan.overrides), *best.values):
        _copy(name.split("."), everything, changes)
    text = yaml.safe_dump(
        {"extends": f"{extended} --small" if recipe.is_small else extended, **changes},
        sort_keys=False,
        allow_unicode=True,
    )
    count = sum(trial.is_finished for trial in read_trials(plan))
    return f"# The best of {count} trials: trial {best.number}, {plan.search.metric} {best.metric:.6g}\n{text}"


def _names(overrides: list[str]) -> list[str]:
    """Return the names of the values that are overridden."""
    return [
        given.partition("=")[0].removeprefix("--").removesuffix("+") for given in overrides if given.startswith("--")
    ]


def _copy(names: list[str], values: Any, changes: dict[str, Any]) -> None:
    """Copy a value by its name on the command line into nested changes. Of a list, all is copied."""
    name, *rest = names
    if name not in values:
        level = next((level for level in ARGUMENTS if name in values.get(level, {})), None)
        if level is None:
            changes.update(values)
            return
        values, changes = values[level], changes.setdefault(level, {})
    part = values[name]
    if rest and isinstance(part, dict):
        _copy(rest, part, changes.setdefault(name, {}))
    else:
        changes[name] = part
