"""Which code computes the reductions over votes that are not stored."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

Backend = Literal["auto", "reference", "tiled", "triton"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs kernels on any device, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_preferred: Backend = "auto"  # no ContextVar: torch.compile cannot read one


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Within this context, `backend="auto"` means another backend.

    - "reference" stores the votes and leaves the rest to PyTorch; it defines what the others must compute.
    - "tiled" computes the votes block by block, twice, and stores none. Any device.
    - "triton" does so in kernels for CUDA devices.
    - "auto" is "triton" for tensors on a CUDA device if Triton is installed, and else "tiled".

    A layer that was given a backend of its own keeps it.
    """
    global _preferred
    before, _preferred = _preferred, check_backend(backend)
    try:
        yield
    finally:
        _preferred = before


def check_backend(backend: Backend) -> Backend:
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
    return backend


def choose_backend(backend: Backend, device: torch.device) -> Literal["reference", "tiled", "triton"]:
    """The backend that "auto" stands for, or the one that was asked for if it can run there."""
    if backend == "auto":
        backend = _preferred
    if backend == "auto":
        return "triton" if device.type == "cuda" and HAS_TRITON else "tiled"
    if backend == "triton":
        if not HAS_TRITON:
            raise ValueError("backend='triton' needs the package triton, which is not installed: use backend='tiled'")
        if device.type != "cuda" and not INTERPRETED:
            raise ValueError(f"backend='triton' needs tensors on a CUDA device, got {device.type}: use backend='tiled'")
    return backend
