"""Checkpoints that a command is given: found, whole, safe to read, and of the same network."""

import argparse
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.checks import one_line
from torchcaps.cli.errors import BadInput
from torchcaps.cli.recipe_commands import load_requested, runs_of
from torchcaps.processes import rank

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.training.build import Training

EXACT = tuple(  # options of the trainer on which the weights depend
    f"trainer.{name}"
    for name in ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
)
IRRELEVANT = (".root", ".cache", ".num_workers")  # options of data that do not change the samples
KINDS: dict[str, type] = {  # parts of a checkpoint
    "state_dict": dict,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "pytorch-lightning_version": str,
}
EXPECTED = "expected one that `torchcaps train` wrote"
ENCODER = ("data.init_args.encoder", "data.init_args.revision")


def find_checkpoint(
    options: argparse.Namespace, training: "Training", given: str, part: str
) -> tuple[Path, dict[str, "Tensor"]]:
    """Find a checkpoint and check that it fits the model.

    Args:
        options: the command's arguments.
        training: training that was built of them.
        given: path of a checkpoint, or `last` for the newest whole one of the recipe.
        part: prefix of the model's values that must be the same as in the run: "network." to use the network, "" to go
            on with the training.

    Returns:
        Its path and the model's state in it.
    """
    path = _last(options) if given == "last" else _whole(Path(given))
    content = read_checkpoint(path, *(KINDS if not part else ("state_dict",)))
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


def _check_epoch(path: Path, content: dict[str, Any], training: "Training") -> None:
    """Check that the training does not end before the checkpoint."""
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


def read_checkpoint(path: Path, *keys: str) -> dict[str, Any]:
    """Read a checkpoint, which must have these parts; nothing in it is executed."""
    import torch

    from torchcaps.training.checkpoints import damage

    if problem := damage(path):
        raise BadInput(f"{path} is damaged, or not a checkpoint ({problem}): {EXPECTED}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError(f"it contains a {type(content).__name__}")
        found = [content[key] for key in keys]
    except Exception as error:  # bytes that anybody wrote make torch raise errors of many types
        raise BadInput(
            f"{path} is not a checkpoint that can be read safely ({type(error).__name__}): {EXPECTED}"
        ) from error
    for key, value in zip(keys, found, strict=True):
        tensors = value.items() if key == "state_dict" and isinstance(value, dict) else ()
        named = all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors)
        if not isinstance(value, KINDS[key]) or not named:
            raise BadInput(f"{path} is not a checkpoint of a training: its {key} is not what `torchcaps train` writes")
    return content


def _compare_values(path: Path, content: dict[str, Any], training: "Training", part: str) -> None:
    """Compare the recipe's values with those of the run; shapes do not show iterations, for example."""
    found = _values_of(path, content)
    if found is None:
        _warn(f"{path} does not say with which values it was trained: it is taken for one of {training.recipe.name}")
        return
    then, now = _by_name(found), _by_name(training.arguments())
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


def _values_of(path: Path, content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values with which a checkpoint was trained: they are in it, or beside those of earlier versions."""
    import yaml

    from torchcaps.recipes import Loader, check_size
    from torchcaps.training.checkpoints import VALUES

    text = content.get(VALUES)
    config = path.resolve().parent.parent / "config.yaml"
    try:
        if text is not None:
            found = json.loads(text)
        elif config.is_file():
            found = yaml.load(config.read_text(encoding="utf-8"), Loader)
            check_size(config, found, {})
        else:
            return None
        if not isinstance(found, dict):
            raise TypeError("no values")
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        where = config if text is None else path
        advice = "remove it" if text is None else EXPECTED
        raise BadInput(f"{where} does not hold the values of a recipe ({type(error).__name__}): {advice}") from error
    return found


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
