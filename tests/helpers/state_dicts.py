"""What the readers of published weights must load and must refuse.

`load` is such a reader: a function of a path and, if given, of the network to load into.
"""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

Load = Callable[..., nn.Module]


class Opened(Exception):
    """Raised where a reader runs code from a file."""


class Trap:
    def __reduce__(self):
        return Opened, ()


def edited(path: Path, changes: dict[str, Tensor | None]) -> Path:
    """Change some entries of a file; None takes one away."""
    state = torch.load(path, weights_only=True) | changes
    torch.save({name: x for name, x in state.items() if x is not None}, path)
    return path


def error_of(load: Load, path: Path, *network: nn.Module) -> str:
    """Return the message of the error that a reader must raise, which is one line and names the file."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(path, *network)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def assert_holds(network: nn.Module, path: Path) -> None:
    """The network holds exactly the tensors of the file but its constants, in any order."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    expected = [x for name, x in state.items() if "CONST" not in name]
    found, expected = (
        sorted((x.shape, x.double().sum().item()) for x in tensors)
        for tensors in (network.state_dict().values(), expected)
    )
    assert found == expected
    assert not network.training


def assert_stays_as_it_was(load: Load, path: Path, network: nn.Module, message: str) -> None:
    """A network that the file does not fit is not changed."""
    before = {name: x.clone() for name, x in network.state_dict().items()}
    assert message in error_of(load, path, network)
    assert network.training
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())


def assert_refuses_other_files(load: Load, folder: Path, message: str) -> None:
    """Files that are no state dicts, or that are of another network, which gives `message`; none runs code."""
    assert "no file" in error_of(load, folder / "absent")
    assert "no file" in error_of(load, folder)
    path = folder / "file"
    for content in (b"", b"hello", bytes(range(256)), pickle.dumps(Trap())):
        path.write_bytes(content)
        assert "cannot be read safely as a state dict" in error_of(load, path)
    for value in ([torch.ones(1)], torch.ones(1), {"routings.1.W": 1}, {1: torch.ones(1)}):
        torch.save(value, path)
        assert "is not a state dict of names and tensors" in error_of(load, path)
    torch.save(Trap(), path)
    assert "cannot be read safely as a state dict (UnpicklingError)" in error_of(load, path)
    torch.save(nn.Linear(1, 1).state_dict(), path)
    assert message in error_of(load, path)
