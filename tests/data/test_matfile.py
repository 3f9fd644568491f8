"""The MATLAB reader finds the same arrays as SciPy, in files of MATLAB and of SciPy, and reports damage in one line."""

import io
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io.matlab
import torch
from scipy.io import loadmat, savemat

from torchcaps.data import DataError
from torchcaps.data.matfile import check_images, check_labels, read_mat

# SciPy's own tests have files that MATLAB wrote: of several versions, in both byte orders.
MATLAB_FILES = Path(scipy.io.matlab.__path__[0]) / "tests" / "data"
needs_files = pytest.mark.skipif(not MATLAB_FILES.is_dir(), reason=f"this SciPy came without {MATLAB_FILES}")

NUMBERS = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def saved(variables: dict[str, Any], compressed: bool = False) -> bytes:
    file = io.BytesIO()
    savemat(file, variables, do_compression=compressed)
    return file.getvalue()


def read(raw: bytes, *names: str) -> list[np.ndarray]:
    return read_mat(io.BytesIO(raw), *names)


def refused(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(DataError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
def test_numbers_of_every_type(kind: str, compressed: bool) -> None:
    raw = saved(
        {"A": NUMBERS.astype(kind), "b": np.ones((1, 1)), "S": {"x": 1, "of": NUMBERS.astype(kind)}}, compressed
    )
    for found in read(raw, "S.of", "A"):
        assert found.dtype == kind
        assert np.array_equal(found, NUMBERS)
        assert found.flags.f_contiguous
        assert found.flags.writeable  # otherwise torch warns
    assert read(raw, "b")[0].shape == (1, 1)


@needs_files
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("testdouble", "f8"),
        ("testmatrix", "u1"),  # MATLAB's doubles, stored as bytes
        ("testminus", "i2"),
        ("test3dmatrix", "u1"),
        ("teststruct.doublefield", "f8"),
        ("teststructnest.one", "u1"),
    ],
)
@pytest.mark.parametrize("version", ["6.1_SOL2", "6.5.1_GLNX86", "7.1_GLNX86", "7.4_GLNX86"])
def test_files_of_matlab(name: str, kind: str, version: str) -> None:
    variable, _, field = name.partition(".")
    path = MATLAB_FILES / f"{variable}_{version}.mat"
    expected = loadmat(path)[variable]
    with path.open("rb") as file:
        (found,) = read_mat(file, name)
    assert np.array_equal(found, expected[0, 0][field] if field else expected)
    assert found.dtype == np.dtype((">" if version == "6.1_SOL2" else "<") + kind)


@needs_files
def test_functions_and_objects_are_not_looked_into() -> None:
    raw = (MATLAB_FILES / "some_functions.mat").read_bytes()
    expected = loadmat(io.BytesIO(raw))
    assert {type(value).__name__ for value in expected.values()} >= {"MatlabFunction"}
    for name in "abc":
        assert np.array_equal(read(raw, name)[0], expected[name])
    assert refused(read, raw, "parabola") == 'has no array of numbers "parabola"'
    raw = (MATLAB_FILES / "testobject_7.4_GLNX86.mat").read_bytes()
    assert refused(read, raw, "testobject.expr") == 'has no array of numbers "testobject.expr"'


def test_an_opaque_object_is_not_looked_into() -> None:
    # Opaque objects have their name where other classes have their shape.
    content = struct.pack("<4I", 6, 8, 17, 0) + struct.pack("<2I8s", 1, 3, b"abc") + b"MCOS"
    opaque = struct.pack("<2I", 14, len(content)) + content
    raw = saved({"A": NUMBERS})
    assert np.array_equal(read(raw[:128] + opaque + raw[128:], "A")[0], NUMBERS)


def test_a_large_variable_is_read_in_pieces() -> None:
    large = np.random.default_rng(0).integers(0, 256, (1000, 3000), dtype=np.uint8)  # 3 MB, also when compressed
    for compressed in (False, True):
        found, after = read(saved({"large": large, "after": NUMBERS}, compressed), "large", "after")
        assert np.array_equal(found, large)
        assert np.array_equal(after, NUMBERS)


# Errors


@pytest.mark.parametrize(
    ("variables", "name", "problem"),
    [
        ({"A": NUMBERS}, "B", 'has no array of numbers "B"'),
        ({"A": NUMBERS}, "A.x", 'has no array of numbers "A.x"'),
        ({"A": {"x": NUMBERS}}, "A", 'has no array of numbers "A"'),
        ({"A": {"x": NUMBERS}}, "A.y", 'has no array of numbers "A.y"'),
        ({"A": {"x": {"y": NUMBERS}}}, "A.x", '"A.x" is not an array of real numbers'),
        ({"A": {"x": "text"}}, "A.x", '"A.x" is not an array of real numbers'),
        ({"A": np.array([{"x": 1}, {"x": 2}])}, "A.x", 'has no array of numbers "A.x"'),  # a cell array
        ({"A": np.zeros((1, 2), dtype=[("x", "u1")])}, "A.x", 'has no array of numbers "A.x"'),
        ({"A": "text"}, "A", 'has no array of numbers "A"'),
        ({"A": scipy.sparse.eye_array(3).tocsc()}, "A", 'has no array of numbers "A"'),
        ({"A": NUMBERS * 1j}, "A", '"A" is not an array of real numbers'),
        ({"A": np.zeros((0, 3))}, "A", '"A" is corrupt: 0 bytes for shape (0, 3) of float64'),
    ],
)
def test_variables_that_are_not_numbers(variables: dict[str, Any], name: str, problem: str) -> None:
    for compressed in (False, True):
        assert refused(read, saved(variables, compressed), name) == problem


GOOD = saved({"A": NUMBERS, "S": {"x": NUMBERS, "y": np.ones((2, 3))}})
PACKED = saved({"A": NUMBERS, "S": {"x": NUMBERS, "y": np.ones((2, 3))}}, compressed=True)
NAMES = ("A", "S.x", "S.y")


def changed(position: int, *values: int) -> bytes:
    """Return GOOD with 32-bit integers `values` written from byte `position`; variable A begins at byte 128."""
    raw = bytearray(GOOD)
    struct.pack_into(f"<{len(values)}I", raw, position, *values)
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is not a MATLAB file of version 5 to 7.2"),
        (b"plainly no MATLAB file" * 10, "is not a MATLAB file of version 5 to 7.2"),
        (GOOD[:124] + b"\0\2IM" + GOOD[128:], "is a MATLAB file of version 7.3"),
        (GOOD[:124] + b"\2\0MI" + GOOD[128:], "is a MATLAB file of version 7.3"),
        (GOOD[:124] + b"\0\1MI" + GOOD[128:], "is not a MATLAB file of version 5 to 7.2"),
        (GOOD[:128], 'has no array of numbers "A"'),
        (changed(128, 15), "truncated or corrupt: Error -3 while decompressing data: "),
        (changed(128, 9), 'has no array of numbers "A"'),
        (changed(132, 2**32 - 1), "truncated"),
        (changed(136, 6, 2**31), "truncated or corrupt: an element is larger than the one that contains it"),
        (changed(136, 6, 0), "truncated or corrupt: unpack_from requires a buffer of at least 4 bytes"),
        (changed(144, 1), 'has no array of numbers "A"'),
        (changed(144, 9 + 0x800), '"A" is not an array of real numbers'),
        (changed(152, 5, 11), "truncated or corrupt: unpack requires a buffer of 8 bytes"),
        (changed(152, 5, 0), 'has no array of numbers "A"'),
        (changed(160, 2, 3, 3), '"A" is corrupt: 24 bytes for shape (2, 3, 3) of uint8'),
        (changed(160, 2, 3, 5), '"A" is corrupt: 24 bytes for shape (2, 3, 5) of uint8'),
        (changed(160, 2**32 - 2, 2**32 - 3, 4), '"A" is corrupt: 24 bytes for shape (-2, -3, 4) of uint8'),
        (changed(160, 2**31 - 1, 2**31 - 1, 0), '"A" is corrupt: 24 bytes for shape (2147483647, 2147483647, 0)'),
        (changed(176, 0x00050001), "truncated or corrupt: an element is larger than the one that contains it"),
        (changed(184, 8), '"A" is corrupt: its numbers are of an unknown kind, 8'),
        (changed(184, 9), '"A" is corrupt: 24 bytes for shape (2, 3, 4) of float64'),
        (PACKED[:128] + struct.pack("<2I", 15, 16) + zlib.compress(b"few")[:16].ljust(16), "truncated or corrupt: "),
        (PACKED[:160] + bytes([PACKED[160] ^ 1]) + PACKED[161:], "truncated or corrupt: Error -3 while decompressing"),
    ],
)
def test_corrupt_files(raw: bytes, problem: str) -> None:
    assert refused(read, raw, *NAMES).startswith(problem)


def test_a_missing_checksum_is_an_error() -> None:
    raw = saved({"A": NUMBERS}, compressed=True)
    kind, size = struct.unpack("<2I", raw[128:136])
    cut = raw[:128] + struct.pack("<2I", kind, size - 4) + raw[136:-4]
    assert refused(read, cut, "A") == "truncated"


def test_more_dimensions_than_numpy_has() -> None:
    for count in (3, 70):
        shape = struct.pack(f"<{2 + count}I", 5, 4 * count, *[1] * count) + bytes(4 * (count % 2))
        content = struct.pack("<4I", 6, 8, 9, 0) + shape + struct.pack("<I4s", 0x10001, b"A") + b"\2\0\1\0\7\0\0\0"
        raw = GOOD[:128] + struct.pack("<2I", 14, len(content)) + content
        if count == 3:
            assert read(raw, "A")[0].tolist() == [[[7]]]
        else:
            assert refused(read, raw, "A").startswith('"A" is corrupt: 1 bytes for shape (1, 1, 1, ')


def test_every_truncation_is_refused() -> None:
    for good in (GOOD, PACKED):
        assert len(read(good, *NAMES)) == 3
        for length in range(len(good)):
            refused(read, good[:length], *NAMES)


def test_no_change_of_bytes_does_harm() -> None:
    """For some of these, SciPy's reader ends in a segmentation fault: see `torchcaps.data.matfile`."""
    draw = random.Random(0)
    lines: list[str] = []
    for good in (GOOD, PACKED):
        for _ in range(3000):
            raw = bytearray(good)
            for _ in range(draw.choice([1, 1, 2, 5])):
                raw[draw.randrange(120, len(raw))] = draw.choice([0, 1, 2, 128, 255, draw.randrange(256)])
            try:
                arrays = read(bytes(raw), *NAMES)
            except DataError as error:
                lines.append(str(error))
            else:
                assert sum(array.nbytes for array in arrays) < 1000
    assert len(lines) > 3000
    assert not [line for line in lines if "\n" in line]


# Images and labels


def test_images() -> None:
    check_images(NUMBERS, "X", (2, 3))
    assert refused(check_images, NUMBERS, "X", (3, 2)) == '"X" has shape (2, 3, 4), expected (3, 2, n)'
    assert refused(check_images, NUMBERS, "X", (2,)) == '"X" has shape (2, 3, 4), expected (2, n)'
    assert refused(check_images, NUMBERS.astype("i1"), "X", (2, 3)) == '"X" is of type int8, expected uint8'


@pytest.mark.parametrize("kind", ["u1", ">i2", "f8"])
def test_labels(kind: str) -> None:
    row = np.array([[3, 1, 2]], kind)
    for labels in (row, row.T, np.asfortranarray(row)):
        found = check_labels(labels, "y", 3, range(1, 4))
        assert found.dtype == torch.int64
        assert found.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([[1, 2]], '"y" has shape (1, 2)'),
        ([1, 2, 3], '"y" has shape (3,)'),
        (np.ones((3, 3)), '"y" has shape (3, 3)'),
        ([[1, 0, 11]], "holds label 0"),
        ([[1, 2, 11]], "holds label 11"),
        ([[1, 2, -1]], "holds label -1"),
        ([[1, 2, 2.5]], "holds label 2.5"),
        ([[1, 2, np.nan]], "holds label nan"),
        ([[1, 2, np.inf]], "holds label inf"),
    ],
)
def test_bad_labels(labels: Any, problem: str) -> None:
    assert problem in refused(check_labels, np.array(labels), "y", 3, range(1, 11))
