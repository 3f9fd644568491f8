"""Files that are no state dicts, for the readers of published weights."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import torch


class Opened(Exception):
    """Raised where a reader runs code from a file."""


class Trap:
    def __reduce__(self):
        return Opened, ()


def write_no_state_dicts(path: Path) -> Iterator[str]:
    """Write one file after the other, and yield what the error about each must say."""
    for content in (b"", b"hello", bytes(range(256)), pickle.dumps(Trap())):
        path.write_bytes(content)
        yield "cannot be read safely as a state dict"
    for value in ([torch.ones(1)], torch.ones(1), {"routings.1.W": 1}, {1: torch.ones(1)}):
        torch.save(value, path)
        yield "is not a state dict of names and tensors"
    torch.save(Trap(), path)
    yield "cannot be read safely as a state dict (UnpicklingError)"
