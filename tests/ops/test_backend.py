"""On a CUDA device "auto" is the Triton kernels only where they have passed their check on a device."""

import warnings

import pytest
import torch

from torchcaps import use_backend
from torchcaps.ops import backend
from torchcaps.ops.backend import choose_backend

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def a_device(monkeypatch):
    """A CUDA device of compute capability 9.0 that can run the kernels, in a process that has not warned yet."""
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_an_unchecked_device_is_tiled_and_says_once_how_to_ask(monkeypatch):
    monkeypatch.setattr(backend, "CHECKED", {(8, 0)})
    with pytest.warns(UserWarning, match=r"capability 9\.0: .*'auto' uses 'tiled', and use_backend\('triton'\) asks"):
        assert choose_backend("auto", CUDA, (10, 4, 4, 4)) == "tiled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", CUDA, (10, 1, 8, 16)) == "tiled"


def test_a_request_needs_no_check(monkeypatch):
    monkeypatch.setattr(backend, "CHECKED", frozenset())
    assert choose_backend("triton", CUDA, (10, 4, 4, 4)) == "triton"
    with use_backend("triton"):
        assert choose_backend("auto", CUDA, (10, 4, 4, 4)) == "triton"


def test_a_checked_device(monkeypatch):
    monkeypatch.setattr(backend, "CHECKED", {(9, 0)})
    assert choose_backend("auto", CUDA, (10, 4, 4, 4)) == "triton"
    with pytest.warns(UserWarning, match="at most 64 numbers.*'auto' uses 'tiled'$"):
        assert choose_backend("auto", CUDA, (10, 16, 2, 16)) == "tiled"


def test_what_cannot_run_says_why_and_not_how_to_ask(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.warns(UserWarning, match=r"this device has 7\.5: backend='auto' uses 'tiled'$"):
        assert choose_backend("auto", CUDA) == "tiled"


def test_a_compiler_takes_the_answer_as_it_is(monkeypatch):
    monkeypatch.setattr(backend, "CHECKED", {(9, 0)})

    def f(x):
        return x + (1 if choose_backend("auto", CUDA) == "triton" else 2)

    assert torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(1)) == 1


def test_checked_capabilities_are_pairs():
    assert all(len(pair) == 2 and pair >= backend.OLDEST for pair in backend.CHECKED)
