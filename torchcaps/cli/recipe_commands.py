"""What the commands that take a recipe share: its arguments, the training that is built of them, and its test."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.errors import BadInput
from torchcaps.cli.table import print_table
from torchcaps.utils.checks import nearest
from torchcaps.utils.files import user_path

if TYPE_CHECKING:
    from torchcaps.recipes import Recipe
    from torchcaps.training.build import Training


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


def add_recipe_name(
    parser: argparse.ArgumentParser, run: bool = True, folders: bool = False, several: bool = False
) -> None:
    """Add RECIPE or RUN, --small, --allow_code and --runs.

    Args:
        parser: parser of the command.
        run: whether the command needs a run: a recipe then means its newest one.
        folders: whether it also takes folders of `save_pretrained`.
        several: whether it takes several.
    """
    recipe = parser.add_argument(
        "recipe",
        nargs="+" if several else None,
        metavar="RUN" if run else "RECIPE",
        help="folder of a run, such as runs/quickstart/version_0, or a checkpoint"
        + ", or a folder of `save_pretrained`" * folders
        + "; or a recipe, which means its newest run"
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


def network_overrides(model: str | None, recipe: "Recipe") -> list[str]:
    """Return the overrides that choose a network by its name."""
    if model is None:
        return []
    if "/" in model:
        library, _, name = model.partition("/")
        if library == "transformers" and os.path.isdir(user_path(name)):
            model = f"{library}/{user_path(name).resolve()}"  # wherever the run is used
        found = ["--model.network=torchcaps.models.library_network", f"--model.network.name={model}"]
        if recipe.name == "own/images":
            found.append("--model.optimizer.lr=0.001")  # the recipe's own is for a small ResNet
        return found
    from torchcaps.models import list_models
    from torchcaps.models.registry import import_path

    path = import_path(model)
    if path is None:
        raise BadInput(f"--model: there is no network {model!r}{nearest(model, list_models())}")
    return [f"--model.network={path}"]


def load_requested(options: argparse.Namespace) -> "Recipe":
    """Load the recipe that was asked for."""
    from torchcaps.recipes import load_recipe

    try:
        return load_recipe(options.recipe, options.small)
    except ValueError as error:
        raise BadInput(str(error)) from error


def build_training(
    options: argparse.Namespace,
    overrides: list[str],
    recipe: "Recipe",
    folder: Path | None = None,
    smoke: bool = False,
    checkpoint: Path | None = None,
) -> "Training":
    """Build the trainer, the model and the data of a recipe.

    Args:
        options: the command's arguments.
        overrides: values of the recipe that were given as options.
        recipe: the recipe, or one with the values of a run.
        folder, smoke, checkpoint: see `Training`.
    """
    from torchcaps.training.build import Training

    try:
        overrides = [*network_overrides(options.model, recipe), *overrides]
        training = Training(recipe, overrides, folder, smoke, options.signals, options.allow_code, checkpoint)
        _check_data(recipe, overrides, training)
        return training
    except ValueError as error:
        raise BadInput(str(error)) from error


def _check_data(recipe: "Recipe", overrides: list[str], training: "Training") -> None:
    """Check that no share of the samples is asked for where a split, such as that of a run, has decided all parts. Say
    if own data are split or read otherwise than in the run that a checkpoint is of."""
    from torchcaps.data.notes import say
    from torchcaps.training.checkpoint_files import own_arguments
    from torchcaps.training.overrides import read_overrides

    given = [override.path for override in read_overrides(overrides) if override.path[0] == "data"]
    then, now = (own_arguments(values["data"]) for values in (recipe.config, training.values))
    if training.checkpoint is not None and "split" in now and any(path[-1] == "split" for path in given):
        say(f"the split is not that of {training.checkpoint}: its network may have been trained on what is now tested")
    if training.checkpoint is not None and then.get("window") != now.get("window"):
        say(f"data.window is {now['window']}, and the network was trained with {then['window']}")
    for path in given:
        name = path[-1]
        if name in ("val_share", "test_share") and now.get("split") is not None and now.get(name) != then.get(name):
            training.give_back_folder()
            raise BadInput(f"--{'.'.join(path)} has no effect on the split of {now['split']}: leave it out")


def check_test(training: "Training") -> None:
    """Check that there are batches to test on, before any training."""
    if training.trainer.limit_test_batches == 0:
        raise BadInput("no batch to test on: set trainer.limit_test_batches to more than 0")


def run_test(training: "Training") -> None:
    """Test the model and print the metrics; of several processes only the first one prints."""
    tested = training.trainer.test(training.model, training.datamodule, verbose=False)
    (metrics,) = tested
    if training.trainer.is_global_zero:
        for name, value in metrics.items():
            print(f"{name}: {value:.4f}")
        if report := training.report():
            print_table(report.HEADER, report.rows)
            if report.calibration:
                print(report.calibration)


def runs_of(options: argparse.Namespace, recipe: "Recipe") -> Path:
    """Return the folder of the runs of a recipe."""
    return Path(options.runs) / recipe.folder
