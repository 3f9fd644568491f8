"""Which backend "auto" stands for, and why another cannot be used."""

import warnings

import pytest
import torch
from problems import BACKENDS

import torchcaps
from torchcaps import CapsuleConv2d, CapsuleLinear, DynamicRouting, use_backend
from torchcaps.ops import LinearVotes, backend
from torchcaps.ops.backend import choose_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = 10, 4, 4, 4


@pytest.fixture
def device(monkeypatch):
    """A CUDA device of compute capability 9.0 that can run the kernels, in a process that has not warned yet."""
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_context_sets_what_auto_means():
    x, w = torch.randn(1, 2, 1, 3), torch.randn(2, 4, 3, 3)
    best = BACKENDS[-1]
    assert LinearVotes(x, w, None, (3,)).backend == best
    with use_backend("reference"):
        assert LinearVotes(x, w, None, (3,)).backend == "reference"
        assert LinearVotes(x, w, None, (3,), backend="tiled").backend == "tiled"
        with use_backend("auto"):
            assert LinearVotes(x, w, None, (3,)).backend == best
    assert LinearVotes(x, w, None, (3,)).backend == best


def test_auto_is_the_fastest_that_has_been_checked(monkeypatch, device):
    for missing, expected in ((None, "native"), ("there is no compiler", "tiled")):
        monkeypatch.setattr(backend, "NATIVE_MISSING", missing)
        assert choose_backend("auto", CPU) == expected
    monkeypatch.setattr(backend, "CHECKED", {(9, 0)})
    assert choose_backend("auto", CUDA, SIZES) == "triton"
    assert choose_backend("auto", torch.device("meta")) == "tiled"

    def compiled(x):
        return x + (1 if choose_backend("auto", CUDA) == "triton" else 2)

    assert torch.compile(compiled, backend="eager", fullgraph=True)(torch.zeros(1)) == 1


def test_a_loop_of_contexts_compiles_once():
    programs = []
    layer = torch.compile(
        CapsuleLinear(4, 3, 2, 2, DynamicRouting()), backend=lambda program, _: programs.append(program) or program
    )
    for _ in range(3):
        with use_backend("tiled"):
            layer(torch.ones(1, 4, 2))
            with use_backend("tiled"):
                layer(torch.ones(1, 4, 2))
    assert len(programs) == 2  # within one context, and within two


def test_an_unchecked_device_is_tiled_and_says_once_how_to_ask(monkeypatch, device):
    monkeypatch.setattr(backend, "CHECKED", {(8, 0)})
    with pytest.warns(UserWarning, match=r"use_backend\('triton'\) asks .* capability 9\.0: .*'auto' uses 'tiled'$"):
        assert choose_backend("auto", CUDA, SIZES) == "tiled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", CUDA, (10, 1, 8, 16)) == "tiled"
    assert choose_backend("triton", CUDA, SIZES) == "triton"
    with use_backend("triton"):
        assert choose_backend("auto", CUDA, SIZES) == "triton"


@pytest.mark.parametrize(
    ("installed", "capability", "sizes", "reason"),
    [
        (False, (9, 0), SIZES, "triton is not installed"),
        (True, (7, 5), SIZES, r"capability 8\.0, this device has 7\.5"),
        (True, (9, 0), (10, 16, 2, 16), "at most 64 numbers of a vote, these are 256"),
        (True, (9, 0), (2000, 1, 8, 16), "at most 8192 numbers of a child's votes, these are 32000"),
        (True, (9, 0), (10, 1, 64, 64), "at most 512 weights .* 4096"),
    ],
)
def test_auto_says_once_why_it_is_tiled_on_a_gpu(monkeypatch, device, installed, capability, sizes, reason):
    monkeypatch.setattr(backend, "HAS_TRITON", installed)
    monkeypatch.setattr(backend, "CHECKED", {(9, 0)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_backend("auto", CUDA)  # operators without sizes have no Triton kernel
    with pytest.warns(UserWarning, match=f"{reason}.*'auto' uses 'tiled'$"):
        assert choose_backend("auto", CUDA, sizes) == "tiled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", CUDA, sizes) == "tiled"
    with pytest.raises(ValueError, match=f"'triton' cannot be used, .*{reason}.*'tiled'"):
        choose_backend("triton", CUDA, sizes)


def test_what_there_is_and_why_not(monkeypatch):
    monkeypatch.setattr(backend, "NATIVE_MISSING", "there is no compiler")
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    found = backend.backends()
    assert list(found) == ["reference", "tiled", "native", "triton"]
    assert found["reference"] is found["tiled"] is None
    assert "compiler" in found["native"]
    assert "not installed" in found["triton"]
    with pytest.raises(ValueError, match="there is no compiler.*'tiled'"):
        choose_backend("native", CPU)
    monkeypatch.setattr(backend, "NATIVE_MISSING", None)
    with pytest.raises(ValueError, match="CPU, got cuda.*'tiled'"):
        choose_backend("native", CUDA)
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    with pytest.raises(ValueError, match="CUDA device, got cpu.*'tiled'"):
        choose_backend("triton", CPU)


def test_unknown():
    with pytest.raises(ValueError, match=r"'auto', 'reference', 'tiled', 'native', 'triton', got 'cuda'"):
        CapsuleLinear(2, 2, 2, 2, torchcaps.DynamicRouting(), backend="cuda")
    with pytest.raises(ValueError, match="backend must be one of .* got 'fast'"), use_backend("fast"):
        pass
    with pytest.raises(ValueError, match="backend must be one of .* got 'fast'"):
        LinearVotes(torch.randn(1, 2, 1, 3), torch.randn(2, 4, 3, 3), None, (3,), backend="fast")


def test_layers_say_their_backend():
    routing = torchcaps.DynamicRouting()
    assert "backend='tiled'" in repr(CapsuleLinear(2, 2, 2, 2, routing, backend="tiled"))
    assert "backend='reference'" in repr(CapsuleConv2d(2, 2, 2, 2, 3, routing, backend="reference"))
    assert "backend" not in repr(CapsuleLinear(2, 2, 2, 2, routing))
