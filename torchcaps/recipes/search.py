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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

KEYS = ("metric", "mode", "trials", "prune", "values")
MODES = ("max", "min")
RANGE = ("low", "high", "log", "step")
HOW = "{low: NUMBER, high: NUMBER} or {choices: [VALUE, VALUE]}"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included. They are integers if both are.

    Args:
        low, high: the ends.
        log: whether the logarithm of the number is searched evenly, not the number.
        step: distance between two of the numbers, from `low` on; None for 1 between integers, and for any number else.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the numbers are integers."""
        return isinstance(self.low, int)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends."""
        return self.low, self.high


@dataclass(frozen=True)
class Choices:
    """One of several values.

    Args:
        values: texts, numbers, True, False or None.
    """

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """All of them: each may be wrong in its own way."""
        return self.values


@dataclass(frozen=True)
class Search:
    """A search for good values of a recipe.

    Args:
        metric: metric of the validation, such as "val/accuracy".
        mode: whether the highest ("max") or the lowest ("min") metric is the best.
        trials: number of trainings.
        values: what each value is chosen from, by its name on the command line.
        prune: whether bad trials end early.
        written: the head as it stands in the file.
        source: name of the file.
    """

    metric: str
    mode: str
    trials: int
    values: Mapping[str, Range | Choices]
    prune: bool
    written: dict[str, Any]
    source: str


def read_search(path: Path, head: Any, tops: tuple[str, ...]) -> Search:
    """Read the head `search` of a recipe.

    Args:
        path: file of the recipe, for messages.
        head: content of the head.
        tops: names of a recipe's values at its top level.

    Raises:
        ValueError: the head is not what it must be; the message is one line.
    """
    where = f"{path}: search"
    if not isinstance(head, dict):
        raise ValueError(f"{where} must have {', '.join(KEYS)}, got {head!r}")
    _check_keys(where, head, KEYS, needed=("metric", "values"))
    metric, mode, trials, prune = head["metric"], head.get("mode", "max"), head.get("trials", 20), head.get("prune")
    if not (isinstance(metric, str) and metric.startswith("val/")):
        raise ValueError(f"{where}.metric must be a metric of the validation, such as val/accuracy, got {metric!r}")
    if mode not in MODES:
        raise ValueError(f"{where}.mode must be max or min, got {mode!r}")
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise ValueError(f"{where}.trials must be a number of trainings, at least 1, got {trials!r}")
    if not isinstance(prune, bool | None):
        raise ValueError(f"{where}.prune must be true or false, got {prune!r}")
    spaces = head["values"]
    if not isinstance(spaces, dict) or not spaces:
        raise ValueError(f"{where}.values must have a line for each value, NAME: {HOW}, got {spaces!r}")
    for name in spaces:
        top, dot, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
        if top not in tops or (name != "seed_everything" and not all([dot, *rest.split(".")])):
            raise ValueError(
                f"{where}.values: {name!r} must be a name of a value as on the command line, such as model.optimizer.lr"
            )
    values = {name: _space(f"{where}.values: {name}", space) for name, space in spaces.items()}
    return Search(metric, mode, trials, values, prune is not False, head, path.name)


def _space(where: str, space: Any) -> Range | Choices:
    """Read what a value is chosen from."""
    if not isinstance(space, dict) or ("choices" in space) == ("low" in space or "high" in space):
        raise ValueError(f"{where} must be {HOW}, got {space!r}")
    if "choices" in space:
        _check_keys(where, space, ("choices",), needed=())
        return _choices(f"{where}: choices", space["choices"])
    _check_keys(where, space, RANGE, needed=("low", "high"))
    low, high = (_number(f"{where}: {end}", space[end]) for end in ("low", "high"))
    if not (isinstance(low, int) and isinstance(high, int)):
        low, high = float(low), float(high)
    log, step = space.get("log", False), space.get("step")
    if not low < high:
        raise ValueError(f"{where}: low must be less than high, got {low} and {high}")
    if not isinstance(log, bool):
        raise ValueError(f"{where}: log must be true or false, got {log!r}")
    if log and not low > 0:
        raise ValueError(f"{where}: low must be above 0 on a logarithmic scale, got {low}")
    if step is None:
        return Range(low, high, log)
    step = _number(f"{where}: step", step)
    if log:
        raise ValueError(f"{where} has a step or a logarithmic scale, not both: leave out one of them")
    if not step > 0 or (isinstance(low, int) and not isinstance(step, int)):
        kind = "an integer" if isinstance(low, int) else "a number"
        raise ValueError(f"{where}: step must be {kind} above 0, got {step}")
    rest = (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step))
    if rest:
        last = Decimal(str(high)) - rest
        raise ValueError(f"{where}: steps of {step} from {low} must end at high={high}, and the last one is at {last}")
    return Range(low, high, log, step if isinstance(low, int) else float(step))


def _choices(where: str, values: Any) -> Choices:
    if not isinstance(values, list) or len(values) < 2:
        raise ValueError(f"{where} must be a list of two or more values, got {values!r}")
    for value in values:
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"{where} must be texts, numbers, true, false or null, got {value!r}")
    if len({json.dumps(value) for value in values}) < len(values):
        raise ValueError(f"{where} must be different values, got {values!r}")
    return Choices(tuple(values))


def _number(where: str, value: Any) -> float:
    """Read a number. YAML takes 1e-4, without a point, for a text."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where} must be a number, got {value!r}")
    return value


def _check_keys(where: str, found: dict[Any, Any], known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    for key in found:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}, expected {', '.join(known)}")
    for key in needed:
        if key not in found:
            raise ValueError(f"{where} has no {key}: expected {', '.join(known)}")
