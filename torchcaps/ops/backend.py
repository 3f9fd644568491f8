"""Which code computes the reductions over votes that are not stored."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from torchcaps.ops import native

Backend = Literal["auto", "reference", "tiled", "native", "triton"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs kernels on any device, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Asked once, and not while torch.compile looks.
NATIVE_MISSING = native.why_not()

_preferred: Backend = "auto"  # no ContextVar: torch.compile cannot read one


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Within this context, `backend="auto"` means another backend.

    - "reference" stores the votes and leaves the rest to PyTorch; it defines what the others must compute.
    - "tiled" computes the votes block by block, twice, and stores none. Any device.
    - "native" does so in C++ on the CPU, if it was built, see :func:`torchcaps.ops.backends`.
    - "triton" does so in kernels for CUDA devices.
    - "auto" is "triton" on a CUDA device, "native" on the CPU, and "tiled" where these are not to be had.

    A layer that was given a backend of its own keeps it.
    """
    global _preferred
    before, _preferred = _preferred, check_backend(backend)
    try:
        yield
    finally:
        _preferred = before


def backends() -> dict[str, str | None]:
    """Why each backend cannot be used on this machine; None where it can."""
    triton = None
    if not HAS_TRITON:
        triton = "the package triton is not installed"
    elif not torch.cuda.is_available() and not INTERPRETED:
        triton = "there is no CUDA device"
    return {"reference": None, "tiled": None, "native": NATIVE_MISSING, "triton": triton}


def check_backend(backend: Backend) -> Backend:
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
    return backend


def choose_backend(backend: Backend, device: torch.device) -> Literal["reference", "tiled", "native", "triton"]:
    """The backend that "auto" stands for, or the one that was asked for if it can run there."""
    if backend == "auto":
        backend = _preferred
    if backend == "auto":
        if device.type == "cpu" and NATIVE_MISSING is None:
            return "native"
        return "triton" if device.type == "cuda" and HAS_TRITON else "tiled"
    if backend == "triton":
        if not HAS_TRITON:
            raise ValueError("backend='triton' needs the package triton, which is not installed: use backend='tiled'")
        if device.type != "cuda" and not INTERPRETED:
            raise ValueError(f"backend='triton' needs tensors on a CUDA device, got {device.type}: use backend='tiled'")
    if backend == "native":
        if NATIVE_MISSING is not None:
            raise ValueError(f"backend='native' cannot be used, {NATIVE_MISSING}: use backend='tiled'")
        if device.type != "cpu":
            raise ValueError(f"backend='native' needs tensors on the CPU, got {device.type}: use backend='auto'")
    return backend
