"""Arrays of numbers in MATLAB files, read without SciPy, which a corrupt file can crash and Python with it."""

import math
import struct
import zlib
from typing import IO

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import DataError

# Numbers of the format: kinds of elements, of which these hold numbers; classes of arrays.
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
STRUCT, NUMERIC = 2, range(6, 16)
COMPLEX = 0x800


def read_mat(file: IO[bytes], *names: str) -> list[np.ndarray]:
    """Read arrays of real numbers from a MATLAB file of version 5 to 7.2.

    The format: MathWorks, MAT-File Format, "Level 5".

    Args:
        file: open for reading bytes.
        names: each of a variable, or "variable.field" where that is one struct. Nothing else is looked into.

    Returns:
        The arrays in MATLAB's shapes, of two dimensions or more, and in the type in which they are stored: the
        smallest that holds the values if they have MATLAB's usual type.

    Raises:
        DataError: the file is not a whole one, or has no such arrays. The message names no file.
    """
    header = file.read(128)
    order = {b"IM": "<", b"MI": ">"}.get(header[126:], "")
    version = struct.unpack(f"{order}H", header[124:126])[0] if order else 0
    if version == 0x200:
        raise DataError("is a MATLAB file of version 7.3, expected 5 to 7.2")
    if version != 0x100:
        raise DataError("is not a MATLAB file of version 5 to 7.2")
    found: dict[str, memoryview] = {}
    try:
        while tag := file.read(8):
            kind, size = struct.unpack(f"{order}II", tag)
            inflate = zlib.decompressobj() if kind == COMPRESSED else None
            raw = bytearray()
            while size and (chunk := file.read(min(size, 2**20))):
                raw += inflate.decompress(chunk) if inflate else chunk
                size -= len(chunk)
            if size or (inflate and not inflate.eof):  # its end is where zlib has a checksum
                raise DataError("truncated")
            matrix = memoryview(raw)
            if inflate:
                kind, matrix, _ = _element(matrix, order)
            if kind == MATRIX:
                found |= _arrays(matrix, order)
        return [_numbers(found[name], order, name) for name in names]
    except KeyError as error:
        raise DataError(f'has no array of numbers "{error.args[0]}"') from None
    except (struct.error, zlib.error) as error:
        raise DataError(f"truncated or corrupt: {error}") from None


def _element(raw: memoryview, order: str) -> tuple[int, memoryview, memoryview]:
    """The kind and the contents of the first element, and what comes after it."""
    kind, size = struct.unpack_from(f"{order}II", raw)
    start, end = 8, 8 + size + -size % 8
    if kind >> 16:  # a small element: size and kind in two bytes each, up to four bytes of contents
        kind, size, start, end = kind & 0xFFFF, kind >> 16, 4, 8
    if start + size > min(end, len(raw)):
        raise DataError("truncated or corrupt: an element is larger than what it is in")
    return kind, raw[start : start + size], raw[end:]


def _head(matrix: memoryview, order: str) -> tuple[int, tuple[int, ...], str, memoryview]:
    """Of a matrix its flags, its shape, its name, and what comes then."""
    _, flags, rest = _element(matrix, order)
    _, shape, rest = _element(rest, order)
    _, name, rest = _element(rest, order)
    sizes = struct.unpack(f"{order}{len(shape) // 4}i", shape)
    return struct.unpack_from(f"{order}I", flags)[0], sizes, bytes(name).decode("latin-1"), rest


def _arrays(matrix: memoryview, order: str) -> dict[str, memoryview]:
    """Of a variable that can be, or hold, arrays of numbers: itself by its name, or the fields of one struct."""
    _, flags, _ = _element(matrix, order)
    kind = struct.unpack_from(f"{order}I", flags)[0] & 0xFF
    if kind != STRUCT and kind not in NUMERIC:
        return {}  # not all of these have a head
    _, shape, variable, rest = _head(matrix, order)
    if kind in NUMERIC:
        return {variable: matrix}
    if math.prod(shape) != 1:
        return {}
    _, width, rest = _element(rest, order)
    _, fields, rest = _element(rest, order)
    arrays = {}
    step = max(struct.unpack(f"{order}i", width)[0], 1)
    for start in range(0, len(fields), step):
        name = bytes(fields[start : start + step]).partition(b"\0")[0].decode("latin-1")
        _, arrays[f"{variable}.{name}"], rest = _element(rest, order)
    return arrays


def _numbers(matrix: memoryview, order: str, name: str) -> np.ndarray:
    flags, shape, _, rest = _head(matrix, order)
    if flags & 0xFF not in NUMERIC or flags & COMPLEX:
        raise DataError(f'"{name}" is not an array of real numbers')
    kind, raw, _ = _element(rest, order)
    if kind not in NUMBERS:
        raise DataError(f'"{name}" is corrupt: its numbers are of an unknown kind, {kind}')
    stored = np.dtype(order + NUMBERS[kind])
    if len(shape) > 32 or min(shape, default=0) < 1 or len(raw) != math.prod(shape) * stored.itemsize:
        raise DataError(f'"{name}" is corrupt: {len(raw)} bytes for shape {shape} of {stored}')
    return np.ndarray(shape, stored, raw, order="F")


def check_images(images: np.ndarray, name: str, shape: tuple[int, ...]) -> None:
    """Raises DataError unless it is unsigned bytes of that shape and one dimension more, the images."""
    if images.dtype != np.uint8:
        raise DataError(f'"{name}" is of type {images.dtype}, expected uint8')
    if images.shape[:-1] != shape:
        raise DataError(f'"{name}" has shape {images.shape}, expected ({", ".join(map(str, shape))}, n)')


def check_labels(labels: np.ndarray, name: str, count: int, expected: range) -> Tensor:
    """The labels (count,) int64, if there are so many in a row or a column, all in the range."""
    if labels.shape not in ((1, count), (count, 1)):
        raise DataError(f'"{name}" has shape {labels.shape}, expected a label for each of {count} images')
    for wrong in labels[~np.isin(labels, expected)]:
        raise DataError(f"holds label {wrong}, expected {expected[0]} to {expected[-1]}")
    return torch.from_numpy(labels.ravel().astype(np.int64))
