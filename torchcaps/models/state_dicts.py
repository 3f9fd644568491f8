"""Reading of state dicts that authors published, with their names."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchcaps.models.pretrained import check_dense, load_state
from torchcaps.utils.files import user_path

Network = TypeVar("Network", bound=nn.Module)


def read_state_dict(path: str | os.PathLike[str], home: str, advice: str) -> dict[str, Tensor]:
    """Read a state dict without running code from the file.

    Args:
        path: path of the file.
        home: repository that has the files, for the message.
        advice: what to give instead, for the messages.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read safely, or is not a state dict.
    """
    file = user_path(path)
    if not os.path.isfile(file):
        raise FileNotFoundError(f"no file {path}: the weights are at {home}")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for files that are not pickles
        raise ValueError(f"{path} cannot be read safely as a state dict ({type(error).__name__}): {advice}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(x, Tensor) for name, x in state.items()
    ):
        raise ValueError(f"{path} is not a state dict of names and tensors: {advice}")
    check_dense(state, path)
    for name, x in state.items():  # its shapes may say how large the network is: they must have as many numbers
        if not x.numel() or x.untyped_storage().nbytes() < x.numel() * x.element_size():
            raise ValueError(f"{path} has no numbers of its own for each place of {name}: {advice}")
    return state


def load_published(
    network: Network, published: dict[str, Tensor], authors_name: Callable[[str], str], path: str | os.PathLike[str]
) -> Network:
    """Load a published state dict into a network, and return it in evaluation mode.

    Args:
        network: the network. If the state does not fit, it stays as it was.
        published: the state dict.
        authors_name: returns the name in the author's code of a parameter or a buffer of ours.
        path: the file, for the message.
    """
    names = {authors_name(name): name for name in network.state_dict()}
    # Constants of the author's code, such as CONST_one, are numbers in ours.
    load_state(network, {names.get(name, name): x for name, x in published.items() if ".CONST_" not in name}, path)
    return network.eval()
