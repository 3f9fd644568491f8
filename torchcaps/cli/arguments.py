"""Arguments that several commands take, and the plain values that they mean."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from torchcaps.utils.checks import nearest, whole_number
from torchcaps.utils.files import user_path

if TYPE_CHECKING:
    from torchcaps.runs import Run
    from torchcaps.training.overrides import Override


def add_recipe(parser: argparse.ArgumentParser, run: bool = False, several: bool = False) -> None:
    """Add RECIPE or RUN and its options, and take values of the recipe as options. See `add_recipe_name`."""
    add_recipe_name(parser, run, several=several)
    model = parser.add_argument(
        "--model",
        metavar="NAME",
        help="another network: a name from `torchcaps models`, or torchvision/NAME, timm/NAME or transformers/FOLDER "
        "where these are installed",
    )
    model.completer = complete_model  # type: ignore[attr-defined]
    parser.set_defaults(takes_overrides=True)
    parser.epilog = "Any value of the recipe can be overridden: --trainer.max_epochs 5 --model.optimizer.lr 0.01"


def add_recipe_name(parser: argparse.ArgumentParser, run: bool = True, several: bool = False) -> None:
    """Add RECIPE or RUN, --small, --allow_code and --runs.

    Args:
        parser: parser of the command.
        run: whether the command needs a run: a recipe then means its newest one.
        several: whether it takes several.
    """
    recipe = parser.add_argument(
        "recipe",
        nargs="+" if several else None,
        metavar="RUN" if run else "RECIPE",
        help="folder of a run, such as runs/quickstart/version_0, a checkpoint, or a folder of `save_pretrained`, also "
        "on the Hugging Face Hub (hub:user/name); or a recipe, which means its newest run"
        if run
        else "name from `torchcaps recipes`, or path of a YAML file",
    )
    recipe.completer = complete_recipe  # type: ignore[attr-defined]
    parser.add_argument("--small", action="store_true", help="the version of the recipe for two CPU cores")
    parser.add_argument(
        "--allow_code",
        action="store_true",
        help="let the recipe and the overrides name classes of any package and of modules beside the recipe: this runs "
        "their code",
    )
    add_runs(parser)


def add_checkpoint(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add --ckpt_path for commands that use a trained network."""
    parser.add_argument(
        "--ckpt_path",
        help="`best`, `last`, or the path of a checkpoint (default: the best one of the run if it has one, else the "
        "last)",
        **options,
    )


def positive_int(text: str) -> int:
    """Return the number of an option that takes 1 or more, a `type` of argparse."""
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return number


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


def complete_model(prefix: str, **_: object) -> list[str]:
    """Names of models, for the completion of a shell."""
    from torchcaps.models import list_models

    return list_models(f"{prefix}*")


def changes_in(options: argparse.Namespace) -> "list[Override]":
    """Return the values of a recipe that a command line changes: by `--model`, and by options with their names.

    Raises:
        ValueError: an argument is no such option, or there is no such network.
    """
    if not options.takes_overrides:
        return []
    from torchcaps.training.overrides import overrides_of, read_overrides

    return [*overrides_of(_of_network(options.model, options.recipe)), *read_overrides(options.tokens)]


def _of_network(model: str | None, recipe: str | list[str]) -> dict[str, str]:
    """Return the values that choose a network by its name."""
    if model is None:
        return {}
    if "/" in model:
        library, _, name = model.partition("/")
        if library == "transformers" and os.path.isdir(user_path(name)):
            model = f"{library}/{user_path(name).resolve()}"  # wherever the run is used
        values = {"model.network": "torchcaps.models.library_network", "model.network.name": model}
        # The recipe's own learning rate is for a small ResNet.
        return values | {"model.optimizer.lr": "0.001"} if recipe in ("own/images", ["own/images"]) else values
    from torchcaps.models import list_models
    from torchcaps.models.registry import import_path

    path = import_path(model)
    if path is None:
        raise ValueError(f"--model: there is no network {model!r}{nearest(model, list_models())}")
    return {"model.network": path}


def find_run(options: argparse.Namespace, source: str | None = None, which: str | None = None) -> "Run":
    """Find the run that a command is given.

    Args:
        options: the command's arguments.
        source: the run, of a command that takes several.
        which: the checkpoint, in place of `--ckpt_path`.
    """
    from torchcaps.runs import Run

    which = options.ckpt_path if which is None else which
    return Run.find(source or options.recipe, which, options.small, options.runs, options.allow_code)
