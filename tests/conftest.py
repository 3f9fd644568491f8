"""Data for tests."""

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers that share their cores are many times slower than one by one

import torch

if not torch.cuda.is_available():
    # Before Triton is imported, which Lightning does too: kernels then run in Python, on any device.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from noise import write_all, write_idx_files


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test draws the same numbers whichever tests came before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def mnist_of_noise(tmp_path_factory) -> Path:
    """A data root with sixteen images of noise in the format of MNIST."""
    root = tmp_path_factory.mktemp("data")
    write_idx_files(root / "mnist")
    return root


@pytest.fixture(scope="session")
def images_of_noise(mnist_of_noise: Path) -> Path:
    """A data root with a few samples of noise in the format of every data set that comes in files."""
    write_all(mnist_of_noise)
    return mnist_of_noise
