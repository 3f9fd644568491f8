"""The head `search` of a recipe: which of its values are searched, and for the best value of which metric.

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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchcaps.recipes import Recipe
from torchcaps.recipes.values import plain
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs

with needs("search"):
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

KEYS = ("metric", "mode", "trials", "prune", "values")
SPACE = "{low: NUMBER, high: NUMBER}, also with log: true or step: NUMBER, or {choices: [VALUE, VALUE]}"

Space = CategoricalDistribution | FloatDistribution | IntDistribution


@dataclass(frozen=True)
class Search:
    """A search for good values of a recipe.

    Args:
        metric: metric of the validation, such as "val/accuracy".
        mode: whether the highest ("max") or the lowest ("min") metric is the best.
        trials: number of trainings.
        prune: whether bad trials end early.
        values: what each value is chosen from, by its name on the command line.
    """

    metric: str
    mode: str
    trials: int
    prune: bool
    values: Mapping[str, Space]


def read_search(recipe: Recipe) -> Search:
    """Read the head `search` of a recipe.

    Raises:
        ValueError: the head is not what it must be; the message is one line.
    """
    where = f"{recipe.name}: search"
    assert recipe.search is not None
    head = plain(recipe.search)
    if not isinstance(head, dict) or not {"metric", "values"} <= head.keys() <= set(KEYS):
        shown = ", ".join(map(str, head)) if isinstance(head, dict) else repr(head)
        raise ValueError(f"{where} must have metric and values, and may have mode, trials and prune, got {shown}")
    mode, trials, prune = head.get("mode", "max"), head.get("trials", 20), head.get("prune", True)
    if mode not in ("max", "min"):
        raise ValueError(f"{where}.mode must be max or min, got {mode!r}")
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise ValueError(f"{where}.trials must be a number of trainings, at least 1, got {trials!r}")
    if not isinstance(prune, bool):
        raise ValueError(f"{where}.prune must be true or false, got {prune!r}")
    spaces = head["values"]
    if not isinstance(spaces, dict) or not spaces:
        raise ValueError(f"{where}.values must have a line for each value, NAME: {SPACE}, got {spaces!r}")
    values = {str(name): _space(f"{where}.values: {name}", space) for name, space in spaces.items()}
    return Search(head["metric"], mode, trials, prune, values)


def ends(space: Space) -> tuple[Any, ...]:
    """Return the ends of a range, or all choices: each may be wrong in its own way."""
    return tuple(space.choices) if isinstance(space, CategoricalDistribution) else (space.low, space.high)


def _space(where: str, space: Any) -> Space:
    """Read what a value is chosen from. A range has integers if all of its numbers are integers."""
    keys = space.keys() if isinstance(space, dict) else set()
    if keys == {"choices"}:
        return CategoricalDistribution(_choices(f"{where}: choices", space["choices"]))
    if not {"low", "high"} <= keys <= {"low", "high", "log", "step"} or not isinstance(space.get("log", False), bool):
        raise ValueError(f"{where} must be {SPACE}, got {space!r}")
    numbers = {key: _number(f"{where}: {key}", space[key]) for key in ("low", "high", "step") if key in space}
    kind = IntDistribution if all(isinstance(number, int) for number in numbers.values()) else FloatDistribution
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the last step may end below `high`
            return kind(**numbers, log=space.get("log", False))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{where}: {one_line(error)}") from None


def _choices(where: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(value, str | int | float | bool | None) for value in values):
        raise ValueError(f"{where} must be a list of texts, numbers, true, false or null, got {values!r}")
    if len(values) < 2 or len({json.dumps(value) for value in values}) < len(values):
        raise ValueError(f"{where} must be two or more different values, got {values!r}")
    return values


def _number(where: str, value: Any) -> float:
    """Read a number. YAML takes 1e-4, without a point, for a text."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where} must be a number, got {value!r}")
    return value
