"""What a search does: its recipe, its values, its folder, and checks of all that can be checked before the first trial.

Nothing here starts a training.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from torchcaps.recipes import Recipe
from torchcaps.recipes.search import Search
from torchcaps.recipes.values import leaves, spelled
from torchcaps.training.build import Training
from torchcaps.training.monitors import logged_metrics, validates
from torchcaps.utils.checks import nearest
from torchcaps.utils.files import take_folder, write_text_whole

ENGINES = ("optuna", "ray")
BEGUN = "search.json"  # file in the folder of a search: what it began with


@dataclass(frozen=True)
class Plan:
    """A search that can begin or go on.

    Args:
        recipe: recipe with a head `search`.
        overrides: command-line arguments that hold for all trials.
        engine: what runs the trials, one of ENGINES.
        trials: number of trials.
        folder: folder of the search.
        allow_code: whether the recipe may name classes of any package.
        seed: seed of the search, which is that of the recipe.
    """

    recipe: Recipe
    overrides: list[str]
    engine: str
    trials: int
    folder: Path
    allow_code: bool = False
    seed: int = 0

    @property
    def search(self) -> Search:
        """The head of the recipe."""
        assert self.recipe.search is not None
        return self.recipe.search

    def folder_of(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.folder / f"trial_{number}"

    def seed_of(self, number: int) -> int:
        """Return a seed for the choice of the values of a trial. It depends on the seed of the search alone, so that a
        search that was stopped goes on with the values that it would have had."""
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])

    def arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial that has these values."""
        return [*self.overrides, *as_overrides(values)]


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return values by their names as command-line arguments."""
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]


class _Parsed(Training):
    """Checks the names and the types of all values, and builds nothing."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


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
    ends = [space.ends for space in search.values.values()]
    first = dict(zip(search.values, (values[0] for values in ends), strict=True))
    for row in zip_longest(*ends):
        chosen = {name: first[name] if value is None else value for name, value in zip(first, row, strict=True)}
        _Parsed(plan.recipe, plan.arguments(chosen), allow_code=plan.allow_code)
    training = Training(plan.recipe, plan.arguments(first), allow_code=plan.allow_code)
    logged = [name for name in logged_metrics(training.model) if name.startswith("val/")]
    if search.metric not in logged:
        raise ValueError(f"search.metric is {search.metric!r}, which is not logged{nearest(search.metric, logged)}")
    trainer: Any = training.trainer
    if trainer.world_size > 1:
        raise ValueError("a trial trains in one process: add --trainer.devices=1; `--with ray` runs trials in parallel")
    if trainer.limit_val_batches == 0:
        raise ValueError("a search needs a validation: set trainer.limit_val_batches to more than 0")
    training.datamodule.prepare_data()
    training.datamodule.setup("fit")
    if not validates(trainer, training.datamodule):
        raise ValueError(
            "a search needs a validation, and this recipe holds out no samples for it: set data.val_size in the recipe "
            "or as --data.val_size N; the test set is not used by a search"
        )
    return int(training.config.seed_everything)


def begin(plan: Plan, runs: Path) -> Plan:
    """Return the plan with a new folder `search_N` in the folder of the recipe's runs, and write what it began with."""
    folder = take_folder(runs, "search")
    write_text_whole(folder / BEGUN, json.dumps(_about(plan), indent=1))
    return replace(plan, folder=folder)


def newest(runs: Path) -> Path | None:
    """Return the folder of the newest search in the folder of a recipe's runs."""
    numbered = {path.parent.name.removeprefix("search_"): path.parent for path in runs.glob(f"search_*/{BEGUN}")}
    numbers = [int(number) for number in numbered if number.isdigit()]
    return numbered[str(max(numbers))] if numbers else None


def begun(folder: Path) -> dict[str, Any]:
    """Return what a search began with.

    Raises:
        ValueError: its file is damaged.
    """
    try:
        about = json.loads((folder / BEGUN).read_text(encoding="utf-8"))
        if not isinstance(about["overrides"], list) or about["with"] not in ENGINES:
            raise TypeError("it has other values")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{folder / BEGUN} is not what a search wrote ({error}): begin a new search") from None
    return about


def check_same(plan: Plan) -> None:
    """Check that a search goes on with what it began with. The number of trials may be another one.

    Raises:
        ValueError: it does not; the message names the first difference.
    """
    then, now = (_by_name(about) for about in (begun(plan.folder), json.loads(json.dumps(_about(plan)))))
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            raise ValueError(
                f"{plan.folder} began with {name} = {then.get(name)}, and now it is {now.get(name)}: give the same as "
                "then, or leave out --resume to begin a new search"
            )


@contextmanager
def alone(plan: Plan) -> Iterator[None]:
    """Within this context no other process works on the search.

    Raises:
        ValueError: another process does.
    """
    lock = FileLock(plan.folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another process works on {plan.folder}: wait for it, or begin a new search") from None
    try:
        yield
    finally:
        lock.release()


def give_back(plan: Plan) -> None:
    """Remove the folder of a search that has no trial."""
    if not any(plan.folder.glob("trial_*/trial.json")):
        shutil.rmtree(plan.folder, ignore_errors=True)


def _about(plan: Plan) -> dict[str, Any]:
    head = {key: value for key, value in plan.search.written.items() if key != "trials"}
    return {
        "recipe": plan.recipe.name,
        "small": plan.recipe.is_small,
        "with": plan.engine,
        "overrides": plan.overrides,
        "search": head,
        "values": plan.recipe.config,
    }


def _by_name(about: dict[str, Any]) -> dict[str, Any]:
    return {spelled(path): value for path, value in leaves(about)}
