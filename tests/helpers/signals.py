"""Signals and volumes in files, as a user may have them."""

from pathlib import Path

import numpy as np


def write_signals(folder: Path, count: int, shape: tuple[int, int] = (12, 128), seed: int = 0) -> Path:
    """Write noisy waves `(leads, moments)`, slow and fast, into a folder for each class."""
    random = np.random.default_rng(seed)
    for name, frequency in (("slow", 3), ("fast", 7)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            wave = np.sin(frequency * np.linspace(0, 2 * np.pi, shape[1]) + random.uniform(0, 6, (shape[0], 1)))
            np.save(folder / name / f"{i:02}.npy", (wave + random.normal(0, 0.5, shape)).astype(np.float32))
    return folder


def write_volumes(folder: Path, count: int, seed: int = 0) -> Path:
    """Write noisy volumes `(depth, height, width)` with a ball or a cube into a folder for each class."""
    random = np.random.default_rng(seed)
    grid = np.mgrid[:10, :12, :14]
    for name in ("ball", "cube"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            distance = np.abs(grid - random.uniform(4, 6, 3)[:, None, None, None])
            inside = (distance**2).sum(0) < 16 if name == "ball" else distance.max(0) < 3
            np.save(folder / name / f"{i:02}.npy", (inside + random.normal(0, 0.2, inside.shape)).astype(np.float32))
    return folder
