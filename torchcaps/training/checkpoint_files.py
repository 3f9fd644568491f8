"""Reading checkpoints that may come from anywhere: whole, safe to read, with the values of their recipe."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchcaps.measures.calibration import HIGHEST, LOWEST
from torchcaps.training.checkpoints import FACTS, FILES, VALUES, damage
from torchcaps.utils.arguments import shown
from torchcaps.utils.files import parse_json

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
NETWORK = "network."  # prefix of the network in the state of a `Classifier`
EXPECTED = "expected one that `torchcaps train` wrote"


def read_checkpoint(path: Path, *keys: str) -> dict[str, Any]:
    """Read a checkpoint; nothing in it is executed.

    Args:
        path: the file.
        keys: names of the parts that it must have, see KINDS.

    Raises:
        ValueError: it is damaged, or is no such checkpoint.
    """
    if problem := damage(path):
        raise ValueError(f"{path} is damaged, or not a checkpoint ({problem}): {EXPECTED}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError(f"it contains a {type(content).__name__}")
        parts = {key: content[key] for key in keys}
    except Exception as error:  # bytes that anybody wrote make torch raise errors of many types
        raise ValueError(
            f"{path} is not a checkpoint that can be read safely ({type(error).__name__}): {EXPECTED}"
        ) from error
    for key, value in parts.items():
        tensors = value.items() if key == "state_dict" and isinstance(value, dict) else ()
        named = all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors)
        counted = KINDS[key] is not int or is_count(value)
        if not isinstance(value, KINDS[key]) or not named or not counted:
            raise ValueError(
                f"{path} is not a checkpoint of a training: its {key} is not what `torchcaps train` writes"
            )
    return content


def is_count(value: Any) -> bool:
    """Return whether a value is a number of epochs, steps or samples, as a training counts them."""
    return type(value) is int and 0 <= value < 2**63


def network_state(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the state of the network in a checkpoint, with the network's own names."""
    state = content["state_dict"]
    return {name.removeprefix(NETWORK): value for name, value in state.items() if name.startswith(NETWORK)}


def facts_of(content: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of the training of a checkpoint, see `torchcaps.training.Report`; {} if nothing is."""
    with suppress(ValueError):
        return parse_json(content.get(FACTS), FACTS, dict)
    return {}


def temperature_of(facts: dict[str, Any], source: Path) -> float | None:
    """Return the temperature among the facts of a training; None if it has none.

    Raises:
        ValueError: it is none that `best_temperature` returns; scores divided by it may not be finite.
    """
    value = facts.get("temperature")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST <= value <= HIGHEST:
        raise ValueError(
            f"{source}: temperature must be a number from {LOWEST:g} to {HIGHEST:g}, got {shown(value)}: {EXPECTED}"
        )
    return float(value)


def files_of(content: dict[str, Any]) -> tuple[Path, ...]:
    """Return the user's own files of the recipe of a checkpoint; modules beside them may run if code is allowed."""
    with suppress(ValueError):
        return tuple(Path(name) for name in parse_json(content.get(FILES), FILES, list) if isinstance(name, str))
    return ()


def own_arguments(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of data of one's own in the values of a recipe: those of the images that an encoder encodes,
    or of the data itself."""
    arguments = data.get("init_args") or {}
    images = arguments.get("images")
    return (images.get("init_args") or {}) if isinstance(images, dict) else arguments


def keep_split(data: dict[str, Any], checkpoint: Path) -> None:
    """Let the values of one's own data name the checkpoint as their split: if files were added or deleted since, a new
    one would test on samples that the network was trained on. Of a folder of `save_pretrained`, which has no split,
    that is an error once samples are read."""
    arguments = own_arguments(data)
    if {"split", "test_share"} <= arguments.keys():
        arguments["split"] = str(checkpoint.absolute())


def values_of(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the values with which a checkpoint was trained."""
    try:
        return parse_json(content.get(VALUES), f"its {VALUES}", dict)
    except ValueError as error:
        raise ValueError(f"{path} does not hold the values of a recipe ({error}): {EXPECTED}") from None
