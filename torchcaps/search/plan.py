"""What a search does: its recipe, its values, its folder, and checks of all that can be checked before the first trial.

Nothing here starts a training.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchcaps.recipes import Recipe
from torchcaps.search.head import Search, ends
from torchcaps.training.build import Training
from torchcaps.training.monitors import logged_metrics, validates
from torchcaps.utils.checks import nearest


@dataclass(frozen=True)
class Plan:
    """A search that can begin or go on.

    Args:
        recipe: recipe with a head `search`.
        search: the head.
        overrides: command-line arguments that hold for all trials.
        trials: number of trials.
        folder: folder of the search.
        allow_code: whether the recipe may name classes of any package.
        seed: seed of the search, which is that of the recipe.
    """

    recipe: Recipe
    search: Search
    overrides: list[str]
    trials: int
    folder: Path
    allow_code: bool = False
    seed: int = 0

    def folder_of(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.folder / f"trial_{number}"

    def seed_of(self, number: int) -> int:
        """Return a seed for the choice of the values of a trial. It depends on the seed of the search alone, so that a
        search that was stopped goes on with the values that it would have had."""
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])

    def arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial that has these values."""
        chosen = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        return [*self.overrides, *(f"--{name}={value}" for name, value in chosen.items())]


def check(plan: Plan) -> int:
    """Check that the values exist and can be built, that the metric is logged, and that there is a validation.

    Returns:
        The seed of the recipe.

    Raises:
        ValueError: something cannot work; the message is one line.
        DataError: the data is missing or damaged.
    """
    search = plan.search
    for given in plan.overrides:
        name = given.partition("=")[0].removeprefix("--")
        if given.startswith("--") and name in search.values:
            raise ValueError(f"{name} is searched: leave out --{name}, or take it out of search.values")
    choices = {name: ends(space) for name, space in search.values.items()}
    for index in reversed(range(max(map(len, choices.values())))):  # the first of each last: it is looked at below
        chosen = {name: values[min(index, len(values) - 1)] for name, values in choices.items()}
        training = Training(plan.recipe, plan.arguments(chosen), allow_code=plan.allow_code)
    logged = [name for name in logged_metrics(training.model) if name.startswith("val/")]
    if search.metric not in logged:
        raise ValueError(
            f"search.metric is {search.metric!r}, which no validation logs{nearest(str(search.metric), logged)}"
        )
    trainer: Any = training.trainer
    if trainer.world_size > 1:
        raise ValueError("a trial trains in one process: add --trainer.devices=1")
    if trainer.limit_val_batches == 0:
        raise ValueError("a search needs a validation: set trainer.limit_val_batches to more than 0")
    training.datamodule.prepare_data()
    training.datamodule.setup("fit")
    if not validates(trainer, training.datamodule):
        raise ValueError(
            "a search needs a validation, and this recipe holds out no samples for it: set data.val_size in the recipe "
            "or as --data.val_size N; the test set is not used by a search"
        )
    return int(training.values["seed_everything"])
