"""Which backend "auto" stands for, and why another cannot be used."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from problems import BACKENDS

import torchcaps
from torchcaps import CapsuleConv2d, CapsuleLinear, DynamicRouting, use_backend
from torchcaps.ops import LinearVotes, backend, computed
from torchcaps.ops.backend import choose_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = 10, 4, 4, 4


@pytest.fixture
def device(monkeypatch):
    """A CUDA device of 16 GB whose kernels have passed their check, in a process that has not warned yet."""
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(backend, "why_not_trusted", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * 10**9))


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
    assert choose_backend("auto", CUDA, SIZES, 10**12) == "triton"
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


def test_a_device_that_fails_its_check_stores_few_votes_and_says_so_once(monkeypatch, device):
    monkeypatch.setattr(backend, "why_not_trusted", lambda device: "the check failed on this")
    with pytest.warns(
        UserWarning, match=r"^the check failed on this: .*'reference' for few votes, and 'tiled' for many$"
    ):
        assert choose_backend("auto", CUDA, SIZES, 160_000_000) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", CUDA, SIZES, 160_000_001) == "tiled"
        assert choose_backend("auto", CUDA) == "tiled"
        for asked in ("triton", "tiled", "reference"):
            assert choose_backend(asked, CUDA, SIZES, 160_000_001) == asked
            with use_backend(asked):
                assert choose_backend("auto", CUDA, SIZES, 160_000_001) == asked


def test_votes_are_counted_in_bytes(monkeypatch):
    sizes = []
    monkeypatch.setattr(computed, "choose_backend", lambda backend, device, *size: sizes.append(size) or "tiled")
    for dtype in (torch.float16, torch.float32, torch.float64):
        x, w = torch.randn(2, 6, 4, 3, dtype=dtype), torch.randn(3, 5, 3, 7, dtype=dtype)
        votes = LinearVotes(x, w, None, (4, 7))
        assert sizes.pop() == ((5, 4, 3, 7), votes.stored(slice(None)).nbytes)
    maps, w = torch.randn(2, 3, 6, 5, 1, 4), torch.randn(3, 3, 3, 5, 4, 4)
    votes = LinearVotes(maps, w, None, (4,), stride=(1, 2))
    assert sizes.pop()[1] == votes.stored(slice(None)).nbytes


def test_compiled_code_stores_no_votes_and_takes_any_batch(monkeypatch, device):
    monkeypatch.setattr(backend, "why_not_trusted", lambda device: "the check failed")
    monkeypatch.setattr(backend, "_warn_once", lambda message: None)

    class Chosen(torch.nn.Module):
        def forward(self, x):
            return x.sum() * 0 + (1 if choose_backend("auto", CUDA, SIZES, x.shape[0]) == "tiled" else 2)

    assert Chosen()(torch.zeros(2)) == 2
    torch.compiler.reset()
    batch = {0: torch.export.Dim("batch")}
    for strict in (True, False):
        exported = torch.export.export(Chosen(), (torch.zeros(2),), dynamic_shapes=(batch,), strict=strict).module()
        assert [exported(torch.zeros(batch)) for batch in (2, 9)] == [1, 1]
    assert torch.compile(Chosen(), backend="eager", fullgraph=True)(torch.zeros(2)) == 1


@pytest.mark.parametrize(
    ("installed", "capability", "sizes", "reason"),
    [
        (False, (8, 0), SIZES, "triton is not installed"),
        (True, (7, 5), SIZES, r"capability 8\.0, this device has 7\.5"),
        (True, (8, 0), (10, 16, 2, 16), "at most 64 numbers of a vote, these are 256"),
        (True, (8, 0), (2000, 1, 8, 16), "at most 8192 numbers of a child's votes, these are 32000"),
        (True, (8, 0), (10, 1, 64, 64), "at most 512 weights .* 4096"),
    ],
)
def test_auto_says_once_why_it_is_not_triton_on_a_gpu(monkeypatch, device, installed, capability, sizes, reason):
    monkeypatch.setattr(backend, "HAS_TRITON", installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_backend("auto", CUDA)  # operators without sizes have no Triton kernel
    with pytest.warns(UserWarning, match=f"{reason}.*'auto' is 'reference' for few"):
        assert choose_backend("auto", CUDA, sizes, 1) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", CUDA, sizes, 10**9) == "tiled"
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


def test_what_there_is_on_a_gpu_is_what_passed_its_check(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend.backends()["triton"] is None
    monkeypatch.setattr(backend, "why_not_trusted", lambda device: f"the check failed on {device.type}")
    assert backend.backends()["triton"] == "the check failed on cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability 8.0" in backend.backends()["triton"]


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
