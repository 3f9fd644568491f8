"""Arguments of the commands that take a recipe, and what is built of them."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.errors import BadInput
from torchcaps.extras import needs

if TYPE_CHECKING:
    from torchcaps.recipes import Recipe
    from torchcaps.training.cli import RecipeCLI


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add RECIPE, --small and --runs, and take values of the recipe as options."""
    recipe = parser.add_argument(
        "recipe", metavar="RECIPE", help="name from `torchcaps recipes`, or path of a YAML file"
    )
    recipe.completer = complete_recipe  # type: ignore[attr-defined]
    parser.add_argument("--small", action="store_true", help="the version of the recipe for two CPU cores")
    add_runs(parser)
    parser.set_defaults(takes_overrides=True)
    parser.epilog = "Any value of the recipe can be overridden: --trainer.max_epochs 5 --model.optimizer.lr 0.01"


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add --runs."""
    default = os.environ.get("TORCHCAPS_RUNS", "runs")
    parser.add_argument(
        "--runs", default=default, help="folder of all runs (default: $TORCHCAPS_RUNS, or runs; now %(default)s)"
    )


def complete_recipe(prefix: str, **_: object) -> list[str]:
    """Names of recipes, for the completion of a shell."""
    from torchcaps.recipes import list_recipes

    return [name for name in list_recipes() if name.startswith(prefix)]


def load(options: argparse.Namespace) -> "Recipe":
    """The recipe that was asked for."""
    from torchcaps.recipes import load_recipe

    try:
        return load_recipe(options.recipe, options.small)
    except ValueError as error:
        raise BadInput(str(error)) from error


def build(options: argparse.Namespace, overrides: list[str], logs: bool = False, smoke: bool = False) -> "RecipeCLI":
    """Trainer, model and data of the recipe that was asked for.

    Args:
        options: the command's arguments.
        overrides: values of the recipe that were given as options.
        logs: whether the trainer writes logs and checkpoints to a new folder of runs.
        smoke: see `RecipeCLI`.
    """
    with needs("train"):
        from torchcaps.training.cli import RecipeCLI

    recipe = load(options)
    try:
        return RecipeCLI(recipe, overrides, runs_of(options, recipe) if logs else None, smoke, options.signals)
    except ValueError as error:
        raise BadInput(str(error)) from error


def runs_of(options: argparse.Namespace, recipe: "Recipe") -> Path:
    """Folder of the runs of a recipe."""
    return Path(options.runs) / recipe.runs
