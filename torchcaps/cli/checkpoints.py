"""Checkpoints that a command is given: found, whole, safe to read, and of the same network."""

import argparse
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.errors import BadInput
from torchcaps.cli.recipe_commands import load_requested, runs_of

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.training.build import Training

IRRELEVANT = (".root", ".cache", ".num_workers")  # options of data that do not change the samples
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
    (state,) = read_checkpoint(path, "state_dict")
    expected = {name: tuple(value.shape) for name, value in training.model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            raise BadInput(
                f"{path} is a checkpoint of another architecture than {options.recipe}: {name} has shape "
                f"{found.get(name, 'none')} there, expected {expected.get(name, 'none')}"
            )
    _compare_values(path, training, part)
    return path, state


def read_checkpoint(path: Path, *keys: str) -> list[Any]:
    """Read parts of a checkpoint; nothing in it is executed."""
    import torch

    from torchcaps.training.checkpoints import damage

    if problem := damage(path):
        raise BadInput(f"{path} is damaged, or not a checkpoint ({problem}): expected one that `torchcaps train` wrote")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return [content[key] for key in keys]
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is not a checkpoint that can be read safely ({type(error).__name__}): "
            "expected one that `torchcaps train` wrote"
        ) from error


def _compare_values(path: Path, training: "Training", part: str) -> None:
    """Compare the recipe's values with those of the run; shapes do not show iterations, for example."""
    import yaml

    config = path.parent.parent / "config.yaml"
    if not config.is_file():
        return
    then, now = _by_name(yaml.safe_load(config.read_text(encoding="utf-8"))), _by_name(training.arguments())
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
        elif not part and name.startswith("data.") and not name.endswith(IRRELEVANT):
            _warn(f"{said}: the run will not continue exactly")


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
    from torchcaps.recipes.values import leaves

    return {".".join(path): value for path, value in leaves(config)}


def _warn(text: str) -> None:
    print(f"torchcaps: {text}", file=sys.stderr)
