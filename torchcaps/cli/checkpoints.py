"""Runs that a command is given, by a recipe, a folder or a checkpoint: found, whole, safe to read, and built again."""

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchcaps.cli.errors import BadInput
from torchcaps.cli.recipe_commands import build_training, load_requested, runs_of
from torchcaps.utils.checks import counted, one_line
from torchcaps.utils.processes import rank

if TYPE_CHECKING:
    from torchcaps.recipes import Recipe
    from torchcaps.training.build import Training

EXACT = tuple(  # options of the trainer on which the weights depend
    f"trainer.{name}"
    for name in ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
)
IRRELEVANT = (".root", ".cache", ".num_workers")  # options of data that do not change the samples
A_RUN = "give the folder of a run, such as runs/quickstart/version_0"
ENCODER = ("data.init_args.encoder", "data.init_args.revision")


class Run(NamedTuple):
    """A run of a training, as a checkpoint of it tells.

    Args:
        checkpoint: the checkpoint.
        content: what is in it.
        recipe: the recipe, with the values of the run.
    """

    checkpoint: Path
    content: dict[str, Any]
    recipe: "Recipe"


def find_run(options: argparse.Namespace, overrides: list[str], given: str | None = None, resumed: bool = False) -> Run:
    """Find the checkpoint that a command is given, and read it.

    Args:
        options: the command's arguments.
        overrides: values that were given as options. A list of the trainer that they add to is that of the recipe, if
            the command names one: the same command can be given again.
        given: see `locate`.
        resumed: whether the training goes on from it.
    """
    from torchcaps.recipes import Recipe
    from torchcaps.recipes.values import with_source
    from torchcaps.training.checkpoint_files import KINDS, files_of, keep_split, values_of
    from torchcaps.training.overrides import read_overrides

    path = locate(options, given)
    content = read_or_refuse(path, *(KINDS if resumed else ("state_dict", "global_step", "epoch")))
    try:
        values = values_of(path, content)
        options_given = read_overrides(overrides)
        if not any(x.path[0] == "data" and x.path[-1] in ("data", "images", "split") for x in options_given):
            keep_split(values["data"], path)
        if is_run(options.recipe):
            return Run(path, content, Recipe(options.recipe, files_of(content), with_source(values, str(path))))
        recipe = load_requested(options)
        for name in [x.path[1] for x in options_given if x.adds and x.path[0] == "trainer" and len(x.path) == 2]:
            values["trainer"] = {**dict(values["trainer"]), name: recipe.config["trainer"].get(name)}
        return Run(path, content, replace(recipe, values=with_source(values, str(path))))
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"{path} does not hold the values of a recipe ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def build_run(options: argparse.Namespace, overrides: list[str], run: Run, part: str, **arguments: Any) -> "Training":
    """Build the training of a run, with its weights.

    Args:
        options: the command's arguments.
        overrides: values that were given as options.
        run: the run.
        part: prefix of the model's values that must be the same as in the run: "network." to use the network, "" to go
            on with the training.
        arguments: further arguments of `build_training`.
    """
    training = build_training(options, overrides, run.recipe, checkpoint=run.checkpoint, **arguments)
    try:
        load_weights(training, run)
        _compare_values(run, training, part, overrides)
        if not part:
            _check_epoch(run.checkpoint, run.content, training)
    except BadInput:
        training.give_back_folder()
        raise
    return training


def load_weights(training: "Training", run: Run) -> None:
    """Load the weights of a run into the model of a training."""
    from torchcaps.models.pretrained import load_state

    weighted = "loss.weight" in run.content["state_dict"]
    if weighted != ("loss.weight" in training.model.state_dict()):
        raise BadInput(
            f"{run.checkpoint} was trained with{'' if weighted else 'out'} class weights: leave out what changes "
            "model.class_weights"
        )
    try:
        load_state(training.model, run.content["state_dict"], run.checkpoint)
    except ValueError as error:
        raise BadInput(str(error)) from error


@contextmanager
def can_be_resumed(path: Path | None) -> Iterator[None]:
    """Within this context, errors in restoring the state of a training from a checkpoint are bad input."""
    from torchcaps.training.checkpoint_files import EXPECTED

    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        files = [Path(frame.f_code.co_filename).as_posix() for frame in frames]
        restoring = any(file.endswith("checkpoint_connector.py") for file in files)
        restoring |= "/torch/optim/" in files[-1] and not isinstance(error, ValueError)  # in the first step
        ours = isinstance(error, ValueError) and frames[-1].f_globals.get("__name__", "").startswith("torchcaps.")
        if path is None or not restoring or ours or type(error).__name__ == "OutOfMemoryError":
            raise
        raise BadInput(
            f"{path} has no state that this training can be resumed from ({type(error).__name__}: {one_line(error)}): "
            f"{EXPECTED} for the same recipe"
        ) from error


def read_or_refuse(path: Path, *keys: str) -> dict[str, Any]:
    """Read a checkpoint, which must have these parts; see `read_checkpoint`."""
    from torchcaps.training.checkpoint_files import read_checkpoint

    try:
        return read_checkpoint(path, *keys)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _check_epoch(path: Path, content: dict[str, Any], training: "Training") -> None:
    """Check that the training does not end before the checkpoint."""
    from torchcaps.training.checkpoint_files import EXPECTED

    step, trainer = content["global_step"], training.trainer
    most, steps = trainer.max_epochs, trainer.max_steps
    try:
        loop = content["loops"]["fit_loop"]
        finished = loop["epoch_progress"]["current"]["processed"]
        _check_alike(loop, trainer.fit_loop.state_dict())
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path} does not say how far its training was ({one_line(error)}): {EXPECTED}") from None
    if most is not None and 0 <= most < finished:
        raise BadInput(
            f"{path} has finished {counted(finished, 'epoch')}, and this training ends after {most}: give "
            f"--trainer.max_epochs {finished} or more"
        )
    if 0 <= steps < step:
        raise BadInput(
            f"{path} has taken {counted(step, 'step')}, and this training ends after {steps}: give "
            f"--trainer.max_steps {step} or more"
        )


def _check_alike(given: Any, fresh: Any, name: str = "fit_loop") -> None:
    """Raise a TypeError if the state of a loop, which anybody may have written, has no counts where that of a loop that
    has not begun has some. Names that only one of them has are those of another version."""
    from torchcaps.training.checkpoint_files import is_count
    from torchcaps.utils.arguments import shown_with_type

    if isinstance(fresh, dict) and isinstance(given, dict):
        for key in fresh.keys() & given.keys():
            _check_alike(given[key], fresh[key], key)
    elif type(given) is not type(fresh) or (
        isinstance(fresh, int) and not isinstance(fresh, bool) and not is_count(given)
    ):
        raise TypeError(f"{name} is {shown_with_type(given)}")


def _compare_values(run: Run, training: "Training", part: str, overrides: list[str]) -> None:
    """Say which values of the run an override has changed; shapes do not show iterations, for example."""
    then, now = _by_name(run.recipe.config), _by_name(training.values)
    given = {token.partition("=")[0].rpartition(".")[2] for token in overrides}
    for name in {**then, **now}:
        if then.get(name) == now.get(name) or (name not in then and name.rpartition(".")[2] not in given):
            continue  # a name that the run lacks and nobody gave is that of a newer argument, with its default
        changed = f"{run.checkpoint} was trained with {name} = {then.get(name)}, and now it is {now.get(name)}"
        if name.startswith((f"model.{part}", "model.class_weights")):
            raise BadInput(f"{changed}: leave out what changes it")
        if name in ENCODER:  # it may be the same one under two names
            _warn(f"{changed}: the network cannot read embeddings of another encoder")
        elif not part and name == "seed_everything":
            _warn(f"{changed}: the run keeps its seed")
        elif not part and (name in EXACT or (name.startswith("data.") and not name.endswith(IRRELEVANT))):
            _warn(f"{changed}: the run will not continue exactly")


def is_run(name: str) -> bool:
    """Return whether the first argument of a command is a folder or a checkpoint, and not the name of a recipe."""
    from torchcaps.recipes import is_recipe

    return not is_recipe(name) and (os.path.exists(name) or name.endswith(".ckpt"))


def runs_of_run(options: argparse.Namespace, run: Run) -> Path:
    """Return the folder in which a run that goes on gets a new folder: beside the run, or that of the recipe."""
    if not is_run(options.recipe):
        return runs_of(options, run.recipe)
    folder = run.checkpoint.parent
    return folder.parent.parent if folder.name == "checkpoints" else Path(options.runs) / run.checkpoint.stem


def locate(options: argparse.Namespace, given: str | None, folders: bool = False) -> Path:
    """Return the path of the checkpoint that a command is given.

    Args:
        options: the command's arguments. Its `recipe` is a recipe, which means its newest run, the folder of a run, or
            a checkpoint.
        given: path of a checkpoint, or a folder, in place of these; `last` for the newest whole checkpoint of the
            recipe or the run; `best` for the best one of the newest run; None for `best` if the run has one, else
            `last`.
        folders: whether it may also be a folder of `save_pretrained`.
    """
    run = is_run(options.recipe)
    if run and options.small:
        raise BadInput(f"{options.recipe} is small or not, as it was trained: leave out --small")
    chosen = given if given in ("last", "best") else None
    place = given if given is not None and chosen is None else options.recipe if run else None
    folder = place is not None and os.path.isfile(os.path.join(place, "config.json"))
    alone = place is not None and (folder or not os.path.isdir(place))
    if alone and chosen is not None and chosen in (options.ckpt_path or ()):
        raise BadInput(f"{place} is no run with several checkpoints: leave out --ckpt_path {chosen}")
    if place is not None and not os.path.isdir(place):
        return _whole(Path(place))
    if place is not None and folder:
        if folders:
            return Path(place)
        raise BadInput(f"{place} is a folder of `save_pretrained`, without the training: give a run or a checkpoint")
    newest = _last(options, place)
    best = None if chosen == "last" else _best(newest)
    if best is None and chosen == "best":
        raise BadInput(f"{newest.parent} has no best checkpoint: its recipe keeps none; give --ckpt_path last")
    return newest if best is None else _whole(best)


def _whole(path: Path) -> Path:
    """Return the checkpoint that was asked for, or `previous.ckpt` if it is a damaged `last.ckpt`."""
    from torchcaps.training.checkpoints import damage

    if not path.is_file():
        raise BadInput(f"there is no checkpoint {path}: give the path of a .ckpt file, or the folder of a run")
    previous = path.with_name("previous.ckpt")
    if path.name == "last.ckpt" and previous.is_file() and (problem := damage(path)) and not damage(previous):
        _warn(f"{path} is damaged ({problem}): taking {previous}, the one before")
        return previous
    return path


def _best(newest: Path) -> Path | None:
    """Return the best checkpoint beside the newest one of a run, if its recipe keeps one: `best.ckpt`, or the one that
    a callback has named."""
    best = newest.with_name("best.ckpt")
    if best.is_file():
        return best
    from torchcaps.training.checkpoints import NEWEST

    states = read_or_refuse(newest).get("callbacks")
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and state.get("monitor") not in NEWEST:
            best = newest.parent / Path(str(state.get("best_model_path"))).name
            if best.suffix == ".ckpt" and best.is_file():
                return best
    return None


def _last(options: argparse.Namespace, folder: str | None) -> Path:
    """Return the newest whole checkpoint of a run, or of the runs in a folder; None for those of the recipe."""
    from torchcaps.training.checkpoints import NAMES, newest_whole

    runs = runs_of(options, load_requested(options)) if folder is None else Path(folder)
    for name in NAMES:
        if (newest := runs / "checkpoints" / name).is_file():
            return _whole(newest)
    path, problem = newest_whole(runs.glob("version_*/checkpoints"))
    if path is None and problem:
        raise BadInput(f"{problem}, and there is no whole checkpoint under {runs}: train again")
    if path is None:
        # A recipe may have runs elsewhere, so that no command to train it would be right.
        how = "train first, or give the --runs and --small of its training" if folder is None else A_RUN
        raise BadInput(f"{runs} has no checkpoint of a run: {how}")
    if problem:
        _warn(f"{problem}: taking {path}, the newest that is whole")
    return path


def _by_name(config: dict[str, Any]) -> dict[str, Any]:
    """Return nested values by their dotted names."""
    from torchcaps.recipes.values import leaves, spelled

    return {spelled(path): value for path, value in leaves(config)}


def _warn(text: str) -> None:
    if not rank():
        print(f"torchcaps: {text}", file=sys.stderr)
