"""Reading arrays in files: layouts, sizes, standardization, and files that hold no array."""

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib import format as npy

from torchcaps.data import DataError
from torchcaps.data.arrays import LAYOUTS, mean_and_deviation, moments_of, read_array, read_shape, standardized


def saved(folder: Path, array: object, name: str = "a.npy") -> Path:
    np.save(folder / name, np.asarray(array))
    return folder / name


def error_of(path: Path, layout: str = "L", key: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_array(path, layout, key)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path} is not an array that can be read (")
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_come_first(tmp_path, layout):
    sizes = {"C": 2, "L": 3, "D": 4, "H": 5, "W": 6}
    array = np.random.default_rng(0).normal(size=[sizes[letter] for letter in layout])
    read = read_array(saved(tmp_path, array), layout)
    others = [letter for letter in layout if letter != "C"]
    assert read.shape == (2 if "C" in layout else 1, *(sizes[letter] for letter in others))
    back = read[0] if "C" not in layout else np.moveaxis(read, 0, layout.index("C"))
    assert np.array_equal(back, array)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", ">i4", "float16", "float32", ">f8"])
def test_numbers_of_any_type_keep_their_values(tmp_path, dtype):
    array = np.array([0, 1, 1], dtype)
    assert read_array(saved(tmp_path, array), "L").tolist() == [[0, 1, 1]]
    assert read_array(saved(tmp_path, np.asfortranarray(array[None].repeat(2, 0))), "CL").tolist() == [[0, 1, 1]] * 2


def test_long_arrays_are_cut_to_their_middle(tmp_path):
    path = saved(tmp_path, np.arange(40).reshape(5, 8))
    assert read_array(path, "HW", size=[3, 4])[0].tolist() == np.arange(40).reshape(5, 8)[1:4, 2:6].tolist()
    assert read_array(path, "HW", size=[9, 8]).shape == (1, 5, 8)


def test_standardized_values_and_padding():
    array = np.array([[1, 2, 3], [10, 10, 40]])
    result = standardized(array, [6], [2.0, 20.0], [0.5, 10.0])
    assert result.dtype == torch.float32
    assert result.tolist() == [[0, -2, 0, 2, 0, 0], [0, -1, -1, 2, 0, 0]]
    large = standardized(np.array([[2**40, 2**40 + 1]]), [2], [2.0**40], [1.0])  # float32 would round both to one
    assert large.tolist() == [[0, 1]]


def test_means_and_deviations_are_those_of_all_values():
    random = np.random.default_rng(0)
    arrays = [random.normal(random.uniform(-3, 3), 2, (2, 50)) for _ in range(3)]
    means, deviations = mean_and_deviation([moments_of(array) for array in arrays])
    together = np.concatenate(arrays, 1)
    np.testing.assert_allclose(means, together.mean(1))
    np.testing.assert_allclose(deviations, together.std(1))
    assert mean_and_deviation([moments_of(np.full((1, 3), 0.1, np.float32))])[1] == [0]  # no rounding error


def test_arrays_of_archives(tmp_path):
    np.savez_compressed(tmp_path / "one.npz", np.arange(3))
    np.savez(tmp_path / "two.npz", x=np.arange(3), y=np.zeros((4, 5)))
    assert read_array(tmp_path / "one.npz", "L").tolist() == [[0, 1, 2]]
    assert read_array(tmp_path / "two.npz", "L", "x").tolist() == [[0, 1, 2]]
    assert read_shape(tmp_path / "two.npz", None, "y") == (4, 5)
    assert "it has 2 arrays: x, y): set data.key to one" in error_of(tmp_path / "two.npz")
    assert "no array 'z'; there are x, y" in error_of(tmp_path / "two.npz", key="z")
    np.savez(tmp_path / "none.npz")
    assert "it has 0 arrays" in error_of(tmp_path / "none.npz")


class Explosive:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


def test_nothing_is_unpickled(tmp_path):
    np.save(tmp_path / "a.npy", np.array([Explosive()]), allow_pickle=True)
    assert "its values are of type object" in error_of(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", x=np.array([Explosive()]))
    assert "its values are of type object" in error_of(tmp_path / "a.npz")
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Explosive()))
    assert "numpy.save" in error_of(tmp_path / "b.npy")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        ([1, np.nan], "NaN, infinite or beyond 1e\\+30"),
        ([np.inf, 1], "NaN, infinite or beyond"),
        ([1e300], "NaN, infinite or beyond"),
        ([1j], "of type complex128"),
        (["a"], "of type str"),
        (np.zeros(2, np.longdouble), "of at most 64 bits"),
        (np.zeros(2, [("a", "f4")]), "of type void"),
        (np.zeros((0, 3)), "its shape is 0x3: it is empty"),
        (3.0, "its shape is \\(\\), and data.layout L has 1 letter\\)"),
        (np.zeros((2, 3)), "its shape is 2x3, and data.layout L has 1 letter\\)"),
    ],
)
def test_values_that_are_no_finite_numbers(tmp_path, array, said):
    with pytest.raises(DataError, match=said):
        read_array(saved(tmp_path, array), "L")


def test_damaged_files(tmp_path):
    good = saved(tmp_path, np.arange(50)).read_bytes()
    path = tmp_path / "bad.npy"
    for content in (b"", b"1,2,3\n", good[:30], good[:-9], good[:6] + b"\x09" + good[7:]):
        path.write_bytes(content)
        assert "write it again with numpy.save" in error_of(path)
    np.savez_compressed(tmp_path / "a.npz", np.arange(5000) % 7)
    archive = (tmp_path / "a.npz").read_bytes()
    for content in (archive[:-30], archive[:150] + bytes([archive[150] ^ 255]) + archive[151:]):
        path.write_bytes(content)
        assert "write it again with numpy.save" in error_of(path)
    assert "No such file" in error_of(tmp_path / "none.npy")
    path.write_bytes(good.replace(b"(50,)", b"(-1,)"))
    assert "its shape is -1: it is empty" in error_of(path)


def test_a_small_file_cannot_fill_the_memory(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as file:
        npy.write_array_header_1_0(file, {"descr": "|b1", "fortran_order": False, "shape": (2**14, 2**15)})
    assert "more than 268,435,456 values): cut it into smaller" in error_of(tmp_path / "a.npz", "HW")
