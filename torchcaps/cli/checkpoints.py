"""Checkpoints that a command is given: found, whole, safe to read, and of the same network."""

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.errors import BadInput
from torchcaps.cli.recipe_commands import load_requested, runs_of
from torchcaps.utils.checks import one_line
from torchcaps.utils.processes import rank

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.training.build import Training

EXACT = tuple(  # options of the trainer on which the weights depend
    f"trainer.{name}"
    for name in ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
)
IRRELEVANT = (".root", ".cache", ".num_workers")  # options of data that do not change the samples
ENCODER = ("data.init_args.encoder", "data.init_args.revision")


def find_checkpoint(
    options: argparse.Namespace, training: "Training", given: str | None, part: str
) -> tuple[Path, dict[str, "Tensor"]]:
    """Find a checkpoint and check that it fits the model.

    Args:
        options: the command's arguments.
        training: training that was built of them.
        given: see `locate`.
        part: prefix of the model's values that must be the same as in the run: "network." to use the network, "" to go
            on with the training.

    Returns:
        Its path and the model's state in it.
    """
    from torchcaps.training.checkpoint_files import KINDS

    path = locate(options, given)
    content = read_or_refuse(path, *(KINDS if not part else ("state_dict",)))
    state = content["state_dict"]
    expected = {name: tuple(value.shape) for name, value in training.model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            raise BadInput(
                f"{path} is a checkpoint of another architecture than {options.recipe}: {name} has shape "
                f"{found.get(name, 'none')} there, expected {expected.get(name, 'none')}"
            )
    _compare_values(path, content, training, part)
    if not part:
        _check_epoch(path, content, training)
    return path, state


@contextmanager
def can_be_resumed(path: Path | None) -> Iterator[None]:
    """Within this context, errors in restoring the state of a training from a checkpoint are bad input."""
    from torchcaps.training.checkpoint_files import EXPECTED

    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        restoring = any(frame.f_code.co_filename.endswith("checkpoint_connector.py") for frame in frames)
        ours = isinstance(error, ValueError) and frames[-1].f_globals.get("__name__", "").startswith("torchcaps.")
        if path is None or not restoring or ours:
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

    loops, step = content["loops"], content["global_step"]
    most, steps = training.trainer.max_epochs, training.trainer.max_steps
    try:
        finished = int(loops["fit_loop"]["epoch_progress"]["current"]["processed"])
    except (KeyError, TypeError, ValueError):
        raise BadInput(f"{path} does not say how far its training was: {EXPECTED}") from None
    if most is not None and 0 <= most < finished:
        raise BadInput(
            f"{path} has finished {finished} epochs, and this training ends after {most}: give --trainer.max_epochs "
            f"{finished} or more"
        )
    if 0 <= steps < step:
        raise BadInput(
            f"{path} has taken {step} steps, and this training ends after {steps}: give --trainer.max_steps {step} or "
            "more"
        )


def _compare_values(path: Path, content: dict[str, Any], training: "Training", part: str) -> None:
    """Compare the recipe's values with those of the run; shapes do not show iterations, for example."""
    from torchcaps.training.checkpoint_files import values_of

    try:
        found = values_of(path, content)
    except ValueError as error:
        raise BadInput(str(error)) from error
    then, now = _by_name(found), _by_name(training.values)
    for name in {**then, **now}:
        if then.get(name) == now.get(name):
            continue
        said = f"{path} was trained with {name} = {then.get(name)}, and now it is {now.get(name)}"
        if name.startswith(f"model.{part}"):
            raise BadInput(f"{said}: give the same recipe and overrides as then")
        if name in ENCODER:  # it may be the same one under two names
            _warn(f"{said}: the network cannot read embeddings of another encoder")
        elif not part and name == "seed_everything":
            _warn(f"{said}: the run keeps its seed")
        elif not part and (name in EXACT or (name.startswith("data.") and not name.endswith(IRRELEVANT))):
            _warn(f"{said}: the run will not continue exactly")


def locate(options: argparse.Namespace, given: str | None) -> Path:
    """Return the path of the checkpoint that was asked for.

    Args:
        options: the command's arguments.
        given: path of a checkpoint; `last` for the newest whole one of the recipe; `best` for the best one of its
            newest run that has one; None for `best` if the newest run has one, else `last`.
    """
    if given not in (None, "last", "best"):
        return _whole(Path(given))
    newest = _last(options)
    best = newest.with_name("best.ckpt")
    if given == "last" or (given is None and not best.is_file()):
        return newest
    if not best.is_file():
        raise BadInput(f"{newest.parent} has no best.ckpt: its recipe keeps none; give --ckpt_path last")
    return _whole(best)


def _whole(path: Path) -> Path:
    """Return the checkpoint that was asked for, or `previous.ckpt` if it is a damaged `last.ckpt`."""
    from torchcaps.training.checkpoints import damage

    if not path.is_file():
        raise BadInput(f"no checkpoint {path}: give the path of a .ckpt file, or `last`")
    previous = path.with_name("previous.ckpt")
    if path.name == "last.ckpt" and previous.is_file() and (problem := damage(path)) and not damage(previous):
        _warn(f"{path} is damaged ({problem}): taking {previous}, the one before")
        return previous
    return path


def _last(options: argparse.Namespace) -> Path:
    """Return the newest whole checkpoint of a recipe."""
    from torchcaps.training.checkpoints import newest_whole

    runs = runs_of(options, load_requested(options))
    path, problem = newest_whole(runs.glob("version_*/checkpoints"))
    if path is None and problem:
        raise BadInput(f"{problem}, and there is no whole checkpoint under {runs}: train again")
    if path is None:
        small = " --small" if options.small else ""
        raise BadInput(f"no checkpoint under {runs}: run `torchcaps train {options.recipe}{small}` first")
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
