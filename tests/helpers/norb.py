"""Files of noise in the format of smallNORB."""

import gzip
import struct
from pathlib import Path

import numpy as np

from torchcaps.data.smallnorb import TEST, TRAIN

BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54


# Unsorted rows (instance, elevation, azimuth, lighting): two toys of each category in two poses. Each row is used for
# all five categories.
INFO = {
    TRAIN: [(4, 0, 0, 5), (9, 8, 34, 0), (9, 3, 2, 1), (4, 0, 20, 1)],
    TEST: [(0, 1, 4, 2), (5, 1, 4, 3), (5, 7, 6, 2), (0, 7, 6, 2)],
}


def matrix(values: np.ndarray, magic: int | None = None) -> bytes:
    """Encode an array in smallNORB's matrix format."""
    sizes = [*values.shape, *[1] * (3 - values.ndim)]
    if magic is None:
        magic = BYTES if values.dtype == np.uint8 else INTEGERS
    header = struct.pack(f"<{2 + len(sizes)}i", magic, values.ndim, *sizes)
    return header + values.astype("u1" if magic == BYTES else "<i4").tobytes()


def small_norb() -> dict[str, np.ndarray]:
    """Return twenty training and twenty test pairs of images, by file name. The category changes fastest, as in the
    original."""
    files = {}
    for part, info in INFO.items():
        pixels = np.random.default_rng(len(part)).integers(0, 256, (20, 2, 96, 96), np.uint8)
        files |= {f"{part}-dat": pixels, f"{part}-cat": np.arange(20) % 5, f"{part}-info": np.repeat(info, 5, 0)}
    return files


def write(folder: Path, zipped: bool, files: dict[str, np.ndarray]) -> None:
    """Write arrays as smallNORB's files, compressed or not."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in files.items():
        raw = matrix(values)
        if zipped:
            (folder / f"{name}.mat.gz").write_bytes(gzip.compress(raw, 1, mtime=0))
        else:
            (folder / f"{name}.mat").write_bytes(raw)
