"""Arrays in files, such as signals and volumes: read without pickles, in one layout and size, and standardized."""

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal, get_args

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import counted, nearest, one_line, printable

Layout = Literal["L", "CL", "LC", "HW", "CHW", "HWC", "DHW", "CDHW", "DHWC"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LETTERS = "C: channels; L: moments; D, H, W: depth, height, width"
SUFFIXES = (".npy", ".npz")
MOST_VALUES = 2**28  # of an array, a GiB as float32: a small compressed file may say that it holds far more
LARGEST = 1e30  # of a value: its square is finite
STEADY = 1e-9  # deviation, as a part of the mean, below which a channel is taken for constant


@checked
def read_array(path: Path, layout: Layout, key: str | None = None, size: Sequence[int] | None = None) -> np.ndarray:
    """Read an array of numbers from a `.npy` or `.npz` file: `(channels, *size)`, in the type of the file.

    Args:
        path: the file. Nothing in it is unpickled.
        layout: what the dimensions in the file are. C is the channels; without it there is one channel.
        key: name of the array in a `.npz` file of several; None for the only one.
        size: largest length of each dimension: of a longer one the middle is kept. None for all of it.

    Raises:
        DataError: the file cannot be read; or it does not hold real numbers in this layout, or too many of them.
    """
    with _opened(path, key) as (file, shape):
        _check_layout(path, shape, layout)
        array: np.ndarray = npy.read_array(file, allow_pickle=False)
    if not -LARGEST <= float(array.min()) <= float(array.max()) <= LARGEST:  # NaN is neither
        raise unreadable(path, f"it has values that are NaN, infinite or beyond {LARGEST:g}", "replace them")
    array = np.moveaxis(array, layout.index("C"), 0) if "C" in layout else array[None]
    for dim, length in enumerate(size or (), 1):
        start = max(0, array.shape[dim] - length) // 2
        array = array[(slice(None),) * dim + (slice(start, start + length),)]
    return array


@checked
def read_shape(path: Path, layout: Layout | None, key: str | None = None) -> tuple[int, ...]:
    """Return the channels and the size of an array in a file, of which only the beginning is read; without a layout the
    shape as it stands there. The errors are those of `read_array`."""
    with _opened(path, key) as (_, shape):
        if layout is None:
            return shape
        _check_layout(path, shape, layout)
    place = layout.find("C")
    return (1, *shape) if place < 0 else (shape[place], *shape[:place], *shape[place + 1 :])


def unreadable(path: Path, reason: str, advice: str) -> DataError:
    """Return the error about a file that is no array, or not one that is needed."""
    return DataError(f"{path} is not an array that can be read ({reason}): {advice}")


def _check_layout(path: Path, shape: Sequence[int], layout: Layout) -> None:
    """Raise DataError if an array of a shape has not as many dimensions as a layout."""
    if len(shape) != len(layout):
        reason = f"its shape is {by(shape)}, and data.layout {layout} has {counted(len(layout), 'letter')}"
        fitting = " or ".join(x for x in LAYOUTS if len(x) == len(shape))
        raise unreadable(
            path, reason, f"set data.layout to {fitting}, or leave this file out" if fitting else "remove it"
        )


def by(shape: Sequence[int]) -> str:
    """Return a shape as a text, such as 12x512."""
    return "x".join(map(str, shape)) or "()"


@checked
def standardized(array: np.ndarray, size: Sequence[int], means: Sequence[float], deviations: Sequence[float]) -> Tensor:
    """Return an array `(channels, ...)` less the mean of each channel, divided by its deviation: float32 `(channels,
    *size)`. Dimensions that are shorter are padded at both ends, with zeros, which are the means."""
    per_channel = (-1, *[1] * len(size))
    values = array - np.asarray(means, np.float64).reshape(per_channel)  # in float64: float32 rounds large integers
    values /= np.asarray(deviations, np.float64).reshape(per_channel)
    missing = [length - now for length, now in zip(size, values.shape[1:], strict=True)]
    return torch.from_numpy(np.pad(values, [(0, 0), *((n // 2, n - n // 2) for n in missing)]).astype(np.float32))


def moments_of(array: np.ndarray) -> np.ndarray:
    """Return the mean and the variance of each channel of an array `(channels, ...)`, float64 `(2, channels)`."""
    values = array.reshape(len(array), -1).astype(np.float64)
    return np.stack([values.mean(1), values.var(1)])


def mean_and_deviation(moments: Sequence[np.ndarray]) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel, given the `moments_of` arrays, which count alike. A
    channel that never changes has the deviation 0, without rounding errors."""
    means, variances = np.stack(moments, 1)
    mean, deviation = means.mean(0), np.sqrt(variances.mean(0) + means.var(0))
    return mean.tolist(), np.where(deviation > STEADY * np.abs(mean), deviation, 0.0).tolist()


@contextmanager
def _opened(path: Path, key: str | None) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """Within this context the array of a file is open at its beginning, which says that it has a shape of numbers. What
    goes wrong with it is a DataError."""
    try:
        with ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(path.open("rb"))
            if file.read(2) == b"PK":
                file = stack.enter_context(_member(path, stack.enter_context(zipfile.ZipFile(file)), key))
            else:
                file.seek(0)
            version = npy.read_magic(file)  # 3.0 is for names of columns alone
            shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
            if dtype.kind not in "biuf" or dtype.itemsize > 8:
                raise unreadable(
                    path, f"its values are of type {dtype.name}", "save bool, int or float numbers of at most 64 bits"
                )
            if min(shape, default=1) < 1:
                raise unreadable(path, f"its shape is {by(shape)}: it is empty", "remove it")
            if math.prod(shape) > MOST_VALUES:
                count = f"its shape is {by(shape)}: more than {MOST_VALUES:,} values"
                raise unreadable(path, count, "cut it into smaller arrays")
            file.seek(0)
            yield file, shape
    except Exception as error:  # damaged bytes make NumPy and zipfile raise errors of many types
        if isinstance(error, MemoryError | DataError):
            raise
        advice = (
            "make it readable"
            if isinstance(error, PermissionError)
            else "write it again with numpy.save or numpy.savez"
        )
        raise unreadable(path, one_line(error), advice) from None


def _member(path: Path, archive: zipfile.ZipFile, key: str | None) -> IO[bytes]:
    names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    if key is None and len(names) != 1:
        raise unreadable(
            path, f"it has {len(names)} arrays: {printable(', '.join(names))[:200]}", "set data.key to one of them"
        )
    if key is not None and key not in names:
        raise unreadable(
            path, f"it has no array {key!r}{nearest(key, names)}", "set data.key to one that each file has"
        )
    return archive.open(f"{key or names[0]}.npy")
