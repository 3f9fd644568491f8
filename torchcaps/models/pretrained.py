"""Small trained weights that are part of the package: files `weights/<model>.<data>.safetensors`, each with a card.

Their recipes are `pretrained/<data>`; `docs/weights.py` of the repository makes a file and its card of a checkpoint.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.utils.arguments import as_python, shown
from torchcaps.utils.checks import nearest, one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import parse_json, write_whole

FOLDER = Path(__file__).parent / "weights"
SUFFIX = ".safetensors"
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # types that may stand for each other


class Weights(NamedTuple):
    """Trained weights of one of the package's files.

    Fields:
        path: the file.
        arguments: arguments with which the network was built.
        state: state dict of the network, in float32.
    """

    path: Path
    arguments: dict[str, Any]
    state: dict[str, Tensor]


def list_weights(name: str) -> list[str]:
    """Return the names of the data sets on which the package's weights of a model were trained, sorted."""
    files = FOLDER.glob(f"*{SUFFIX}")
    parts = (path.name.removesuffix(SUFFIX).partition(".") for path in files)
    return sorted(data for model, _, data in parts if model == name)


def find_weights(name: str, pretrained: str | bool) -> Weights:
    """Read the package's weights of a model.

    Args:
        name: name of the model.
        pretrained: name of the data set, or True for the only one.

    Raises:
        ValueError: there are no such weights, or `True` stands for several; the message lists them.
        ImportError: safetensors is not installed.
    """
    known = list_weights(name)
    if not known:
        raise ValueError(
            f"there are no trained weights of {name!r}: leave out pretrained, or choose one of "
            f"{', '.join(sorted({path.name.partition('.')[0] for path in FOLDER.glob(f'*{SUFFIX}')}))}"
        )
    if pretrained is True and len(known) > 1:
        raise ValueError(
            f"there are several trained weights of {name!r}: say pretrained={' or '.join(map(repr, known))}"
        )
    data = known[0] if pretrained is True else str(pretrained)
    if data not in known:
        raise ValueError(f"there are no weights of {name!r} for {data!r}{nearest(data, known)}")
    path = FOLDER / f"{name}.{data}{SUFFIX}"
    state, about = read_tensors(path)
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    return Weights(path, parse_json(about["arguments"], str(path), dict), state)


def fitting_arguments(weights: Weights, builder: Callable[..., nn.Module], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a builder makes the network of some weights.

    Args:
        weights: the weights.
        builder: function that builds the network.
        given: arguments that the user gave, which must be those of the weights.

    Raises:
        ValueError: an argument contradicts the weights.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(builder).parameters.items()}
    known = {**defaults, **weights.arguments}
    for name, value in given.items():
        if name in known and not _same(value, known[name]):  # the builder reports an argument that it does not have
            raise ValueError(
                f"the weights {weights.path.stem} were trained with {name}={shown(known[name])}, got {shown(value)}: "
                f"leave out {name}, or pretrained"
            )
    return {**weights.arguments, **given}


def _same(value: Any, other: Any) -> bool:
    plain = as_python(value)
    return bool(plain == other) if isinstance(plain, bool | int | float | str) else plain is other


def check_dense(state: Mapping[str, Tensor], source: object) -> None:
    """Check that each tensor of a file is dense and has its values: no sparse or nested one, and none of `meta`.

    Raises:
        ValueError: one does not.
    """
    for name, value in state.items():
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            raise ValueError(
                f"{source}: {name} is sparse, nested or without values there, expected a dense tensor: give the "
                "weights as they were trained"
            )


def load_state(network: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state dict whose names, shapes and types must be those of the network, and whose values must be finite.

    One floating type may stand for another. Values may be infinite where those of the network are, as in a mask.

    Args:
        network: the network. If the state does not fit, it stays as it was.
        state: the state dict.
        source: where the state comes from, for the message.

    Raises:
        ValueError: the state is that of another network, or is no state that a training has left.
    """
    check_dense(state, source)
    known = network.state_dict()
    for name in {**known, **state}:
        shape, expected_shape = (tuple(values[name].shape) if name in values else "none" for values in (state, known))
        if shape != expected_shape:
            raise ValueError(
                f"{source} has the weights of another network: {name} has shape {shape} there, expected "
                f"{expected_shape}: give those of this network"
            )
    for name, value in state.items():
        expected = known[name]
        if value.dtype != expected.dtype and not {value.dtype, expected.dtype} <= FLOATS:
            raise ValueError(
                f"{source}: {name} has numbers of type {value.dtype} there, expected {expected.dtype}: give the "
                "weights as they were trained, not quantized or converted"
            )
        loaded = value.to(expected.dtype)
        if not loaded.isfinite().all() and not (loaded.isfinite() | (loaded == expected.cpu())).all():
            raise ValueError(
                f"{source}: {name} has values that are NaN, or infinite as {expected.dtype}, as in a training that "
                "has diverged: take an earlier checkpoint, or train again with a lower learning rate"
            )
    network.load_state_dict(dict(state))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file in the safetensors format, which holds numbers and no code.

    Returns:
        Its tensors, and its metadata.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or has another format.
        ImportError: safetensors is not installed.
    """
    with needs("train"):
        from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or no safetensors file ({one_line(error)}): get the file again"
        ) from error


def write_tensors(path: Path, state: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> Path:
    """Write tensors and metadata to a file in the safetensors format, whole or not at all.

    Raises:
        ImportError: safetensors is not installed.
    """
    with needs("train"):
        from safetensors.torch import save

    # Copies: the format takes no tensors that share memory, and none whose numbers do not lie in a row.
    tensors = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    content = save(tensors, {"format": "pt", **(about or {})})
    return write_whole(path, lambda unfinished: unfinished.write_bytes(content))
