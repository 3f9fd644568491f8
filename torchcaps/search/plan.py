"""What is searched: the head `search` of a recipe, and checks before the first trial.

docs/hyperparameters.md shows a head, and says what each of its lines means.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import PositiveInt

from torchcaps.recipes import Recipe
from torchcaps.recipes.values import own_arguments, plain
from torchcaps.training.build import Training
from torchcaps.training.errors import innermost, misfit, where
from torchcaps.training.monitors import how_to_validate, logged_metrics, mode_of, validates
from torchcaps.training.names import Names
from torchcaps.training.overrides import Override, overrides_of
from torchcaps.training.values import Values
from torchcaps.utils.checks import nearest, one_line
from torchcaps.utils.extras import needs

with needs("search"):
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

# Ranges and choices by the names of their values, as they stand in a head.
Ranges = dict[str, dict[str, int | float | bool | list[int | float | bool | str | None]]]


@dataclass(frozen=True)
class Plan:
    """A search for good values of a recipe.

    Args:
        recipe: recipe with a head `search`.
        metric: metric of the validation, such as "val/accuracy".
        values: what each value is chosen from, by its name on the command line.
        mode: whether the highest ("max") or the lowest ("min") metric is the best; None for the highest accuracy, and
            the lowest of all else.
        trials: number of trainings.
        prune: whether bad trials end early.
        overrides: values that are the same in all trials.
        allow_code: whether the recipe may name classes of any package.
        folder: folder of the search.
        seed: seed of the search, which is that of the recipe.
    """

    recipe: Recipe
    metric: str
    values: Mapping[str, BaseDistribution]
    mode: Literal["max", "min"] | None = None
    trials: PositiveInt = 20
    prune: bool = True
    overrides: tuple[Override, ...] = ()
    allow_code: bool = False
    folder: Path = Path()
    seed: int = 0

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """What the search does with the metric, in Optuna's words."""
        return "maximize" if (self.mode or mode_of(self.metric)) == "max" else "minimize"

    def folder_of(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.folder / f"trial_{number}"

    def training(self, values: Mapping[str, Any], **options: Any) -> Training:
        """Return the training of a trial that has these values, with options of `Training`. All trials on data of one's
        own have the split of the first."""
        overrides = [*self.overrides, *overrides_of(values)]
        splits = sorted(self.folder.glob("trial_*/version_*/split.csv"))
        data = self.recipe.config.get("data") or {}
        name = "data.images.split" if isinstance((data.get("init_args") or {}).get("images"), dict) else "data.split"
        has_split = own_arguments(data).get("split") is not None or any(
            ".".join(x.path).startswith(name) for x in overrides
        )
        if splits and not has_split:
            overrides += overrides_of({name: str(splits[0])})
        return Training(Values.of(self.recipe, overrides, self.allow_code), **options)


def read_plan(recipe: Recipe, **options: Any) -> Plan:
    """Return the plan of the head `search` of a recipe, with further options of `Plan`. A ValueError says in one line
    what is wrong with the head."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Plan, "search", skip={"recipe", "values", "overrides", "allow_code", "folder", "seed"})
    parser.add_argument("--search.values", type=Ranges, required=True)
    written = plain(recipe.search or {})
    try:
        head = parser.parse_object({"search": written}).search.as_dict()
    except ArgumentError as error:
        kinds = {name: x.annotation for name, x in inspect.signature(Plan, eval_str=True).parameters.items()}
        kinds["values"] = Ranges
        for name, value in written.items() if isinstance(written, dict) else ():
            if refused := misfit(value, kinds.get(name, Any), ("search", name), Names(allow_code=False)):
                path, reason = refused
                raise ValueError(f"{where(path, recipe.name, [])}: {reason}") from None
        raise ValueError(f"{recipe.name}: {innermost(error)}") from None
    place = f"{recipe.name}: search.values"
    if not head["values"]:
        raise ValueError(f"{place} is empty: give at least one value to search")
    values = {str(name): _space(f"{place}: {name}", choice) for name, choice in head["values"].items()}
    return Plan(recipe, **{**head, "values": values, **options})


def _space(place: str, choice: dict[str, Any]) -> BaseDistribution:
    """Return what a value is chosen from. A range has integers if all of its numbers are integers."""
    try:
        if "choices" in choice:
            return CategoricalDistribution(**choice)
        if not all(map(math.isfinite, choice.values())):
            raise ValueError("a number is not finite")
        integers = all(isinstance(number, int) for number in choice.values())
        return IntDistribution(**choice) if integers else FloatDistribution(**choice)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place} must be {{low: NUMBER, high: NUMBER}}, also with log: true or step: NUMBER, or "
            f"{{choices: [VALUE, VALUE]}}: {one_line(error)}"
        ) from None


def check(plan: Plan) -> int:
    """Check that a training with the first of the values can be built, logs the metric, and has a validation.

    Return the seed of the recipe. Raise a ValueError, in one line, or a DataError if something cannot work.
    """
    for override in plan.overrides:
        if (name := ".".join(override.path)) in plan.values:
            raise ValueError(f"{name} is searched: leave out --{name}, or take it out of search.values")
    for name in plan.values:
        if name.startswith("data.") and name.endswith(("_share", ".split")):
            raise ValueError(f"search.values has {name}, and all trials have the split of the first: take it out")
    spaces: Any = plan.values.items()
    first = {name: x.choices[0] if isinstance(x, CategoricalDistribution) else x.low for name, x in spaces}
    training = plan.training(first)
    logged = [name for name in logged_metrics(training.model) if name.startswith("val/")]
    if plan.metric not in logged:
        raise ValueError(f"search.metric is {plan.metric!r}, which no validation logs{nearest(plan.metric, logged)}")
    trainer: Any = training.trainer
    if trainer.world_size > 1:
        raise ValueError("a trial trains in one process: set trainer.devices and trainer.num_nodes to 1")
    training.datamodule.prepare_data()
    training.datamodule.setup("fit")
    if not validates(trainer, training.datamodule):
        raise ValueError(
            f"a search needs a validation, and this recipe has none: {how_to_validate(trainer, training.datamodule)}; "
            "the test set is not used by a search"
        )
    return int(training.values["seed_everything"])
