"""What a search does, and checks of all that can be checked before the first trial.

The head `search` of a recipe says which of its values are searched, and for the best value of which metric:

    search:
      metric: val/accuracy
      mode: max                # or min
      trials: 20
      prune: true              # whether bad trials end early; the default
      values:
        model.optimizer.lr: {low: 0.0001, high: 0.01, log: true}
        model.network.iterations: {choices: [1, 2, 3]}
        data.batch_size: {low: 16, high: 128, step: 16}

The names of the values are those of overrides on the command line.
"""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchcaps.recipes import Recipe
from torchcaps.recipes.values import plain
from torchcaps.training.build import Training
from torchcaps.training.monitors import logged_metrics, validates
from torchcaps.training.overrides import read_overrides
from torchcaps.utils.checks import nearest, one_line
from torchcaps.utils.extras import needs

with needs("search"):
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

KEYS = {"metric", "values", "mode", "trials", "prune"}
SPACE = "{low: NUMBER, high: NUMBER}, also with log: true or step: NUMBER, or {choices: [VALUE, VALUE]}"

Space = CategoricalDistribution | FloatDistribution | IntDistribution


@dataclass(frozen=True)
class Plan:
    """A search for good values of a recipe.

    Args:
        recipe: recipe with a head `search`.
        metric: metric of the validation, such as "val/accuracy".
        values: what each value is chosen from, by its name on the command line.
        mode: whether the highest ("max") or the lowest ("min") metric is the best.
        trials: number of trainings.
        prune: whether bad trials end early.
        overrides: command-line arguments that hold for all trials.
        allow_code: whether the recipe may name classes of any package.
        folder: folder of the search.
        seed: seed of the search, which is that of the recipe.
    """

    recipe: Recipe
    metric: str
    values: Mapping[str, Space]
    mode: str = "max"
    trials: int = 20
    prune: bool = True
    overrides: tuple[str, ...] = ()
    allow_code: bool = False
    folder: Path = Path()
    seed: int = 0

    def folder_of(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.folder / f"trial_{number}"

    def training(self, values: Mapping[str, Any], **options: Any) -> Training:
        """Return the training of a trial that has these values, with options of `Training`."""
        chosen = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        overrides = [*self.overrides, *(f"--{name}={value}" for name, value in chosen.items())]
        return Training(self.recipe, overrides, allow_code=self.allow_code, **options)


def read_plan(recipe: Recipe, **options: Any) -> Plan:
    """Return the plan of the head `search` of a recipe, with further options of `Plan`.

    Raises:
        ValueError: the head is not what it must be; the message is one line.
    """
    where = f"{recipe.name}: search"
    assert recipe.search is not None
    head = plain(recipe.search)
    if not isinstance(head, dict) or not {"metric", "values"} <= head.keys() <= KEYS:
        shown = ", ".join(map(str, head)) if isinstance(head, dict) else repr(head)
        raise ValueError(f"{where} must have metric and values, and may have mode, trials and prune, got {shown}")
    plan = Plan(recipe, **head)
    for name, good, expected in (
        ("mode", plan.mode in ("max", "min"), "max or min"),
        ("trials", type(plan.trials) is int and plan.trials > 0, "a number of trainings, at least 1"),
        ("prune", isinstance(plan.prune, bool), "true or false"),
        ("values", isinstance(plan.values, dict) and plan.values, f"a line for each value, NAME: {SPACE}"),
    ):
        if not good:
            raise ValueError(f"{where}.{name} must be {expected}, got {getattr(plan, name)!r}")
    spaces = {str(name): _space(f"{where}.values: {name}", space) for name, space in plan.values.items()}
    return replace(plan, values=spaces, **options)


def _space(where: str, space: Any) -> Space:
    """Read what a value is chosen from. A range has integers if all of its numbers are integers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the last step may end below `high`
            if space.keys() == {"choices"}:
                if not all(isinstance(choice, str | int | float | None) for choice in space["choices"]):
                    raise ValueError("choices are texts, numbers, true, false and null")
                return CategoricalDistribution(space["choices"])
            log = space.pop("log", False)
            if not isinstance(log, bool):
                raise ValueError("log is true or false")
            numbers = {name: _number(value) for name, value in space.items()}
            kind: Any = IntDistribution if {type(number) for number in numbers.values()} == {int} else FloatDistribution
            return kind(**numbers, log=log)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{where} must be {SPACE}: {one_line(error)}") from None


def _number(value: Any) -> float:
    """Read a number. YAML takes 1e-4, without a point, for a text, and `true` is none."""
    number = value if type(value) is int else float(str(value))
    if not math.isfinite(number):
        raise ValueError(f"{value} is not finite")
    return number


def check(plan: Plan) -> int:
    """Check that the values exist and can be built, that the metric is logged, and that there is a validation.

    Returns:
        The seed of the recipe.

    Raises:
        ValueError: something cannot work; the message is one line.
        DataError: the data is missing or damaged.
    """
    for override in read_overrides(list(plan.overrides)):
        if (name := ".".join(override.path)) in plan.values:
            raise ValueError(f"{name} is searched: leave out --{name}, or take it out of search.values")
    # The ends of each range, and all choices: each may be wrong in its own way.
    ends = {
        name: space.choices if isinstance(space, CategoricalDistribution) else (space.low, space.high)
        for name, space in plan.values.items()
    }
    for index in reversed(range(max(map(len, ends.values())))):  # the first of each last: it is looked at below
        training = plan.training({name: values[min(index, len(values) - 1)] for name, values in ends.items()})
    logged = [name for name in logged_metrics(training.model) if name.startswith("val/")]
    if plan.metric not in logged:
        raise ValueError(
            f"search.metric is {plan.metric!r}, which no validation logs{nearest(str(plan.metric), logged)}"
        )
    trainer: Any = training.trainer
    if trainer.world_size > 1:
        raise ValueError("a trial trains in one process: add --trainer.devices=1")
    training.datamodule.prepare_data()
    training.datamodule.setup("fit")
    if not validates(trainer, training.datamodule):
        raise ValueError(
            "a search needs a validation, and this recipe has none: set data.val_size (or --data.val_size N), and "
            "trainer.limit_val_batches to more than 0; the test set is not used by a search"
        )
    return int(training.values["seed_everything"])
