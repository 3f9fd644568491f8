"""Weights from files that anybody wrote: their names, shapes, types and values are checked before they are loaded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchcaps.models.libraries import load_file
from torchcaps.models.pretrained import load_state
from torchcaps.models.state_dicts import read_state_dict

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of rare kinds of tensors


class Network(nn.Module):
    """A network with weights, a counter, and a mask of attention, which is infinite."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, dtype=dtype)
        self.norm = nn.BatchNorm1d(2, dtype=dtype)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf, dtype=dtype).triu(1))


WEIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
BAD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "int8": (lambda x: x.to(torch.int8), "linear.weight has numbers of type torch.int8 there, expected torch.float32"),
    "bool": (lambda x: x > 1, "of type torch.bool there"),
    "complex": (lambda x: x.to(torch.complex64), "of type torch.complex64 there"),
    "8 bits": (lambda x: x.to(torch.float8_e4m3fn), "of type torch.float8_e4m3fn there"),
    "sparse": (lambda x: x.to_sparse(), "linear.weight is sparse, nested or without values there"),
    "sparse rows": (lambda x: x.to_sparse_csr(), "is sparse, nested or without values there"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "is sparse, nested or without values there"),
    "meta": (lambda x: x.to("meta"), "is sparse, nested or without values there"),
    "NaN": (lambda x: x * torch.nan, "linear.weight has values that are NaN, or infinite as torch.float32"),
    "inf": (lambda x: x / 0, "NaN, or infinite as torch.float32"),
    "too large": (lambda x: x.double() * 1e300, "NaN, or infinite as torch.float32"),
}


@pytest.mark.parametrize("kind", BAD)
def test_tensors_that_are_no_weights(kind, tmp_path):
    change, said = BAD[kind]
    network, path = Network(), tmp_path / "file.pt"
    before = {name: x.clone() for name, x in network.state_dict().items()}
    torch.save(before | {"linear.weight": change(WEIGHT)}, path)
    with pytest.raises(ValueError, match=said) as error:
        load_file(network, str(path), "network")
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())


@pytest.mark.parametrize("there", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("here", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_floating_type_stands_for_another(there, here):
    network, other = Network(here), Network(there)
    load_state(network, other.state_dict(), "a file")
    assert network.linear.weight.dtype == here
    assert torch.equal(network.linear.weight, other.linear.weight.to(here))
    assert torch.equal(network.mask, other.mask.to(here))


def test_counters_and_masks():
    """A counter has its type, and a value is infinite only where that of the network is: a mask, not a weight."""
    state = Network().state_dict()
    load_state(Network(), state | {"mask": torch.zeros(2, 2)}, "a file")
    for name, value, said in (
        ("norm.num_batches_tracked", torch.tensor(3.0), "type torch.float32 there, expected torch.int64"),
        ("mask", state["mask"].T, "mask has values that are NaN, or infinite"),
        ("mask", -state["mask"], "mask has values that are NaN, or infinite"),
        ("norm.running_var", torch.tensor([1.0, torch.inf]), "norm.running_var has values"),
    ):
        with pytest.raises(ValueError, match=said):
            load_state(Network(), state | {name: value}, "a file")


@pytest.mark.parametrize("value", [torch.zeros(1).expand(10**6, 10**6), torch.zeros(0, 10**12)])
def test_shapes_without_numbers_build_no_network(value, tmp_path):
    """The author's networks are built with the sizes in the file, which could ask for any memory."""
    torch.save({"W": value}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match="has no numbers of its own for each place of W: give another"):
        read_state_dict(tmp_path / "file.pt", "nowhere", "give another")
