"""Reading of state dicts that authors published."""

import os
from pathlib import Path

import torch
from torch import Tensor


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
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}: the weights are at {home}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for files that are not pickles
        raise ValueError(f"{path} cannot be read safely as a state dict ({type(error).__name__}): {advice}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(x, Tensor) for name, x in state.items()
    ):
        raise ValueError(f"{path} is not a state dict of names and tensors: {advice}")
    return state
