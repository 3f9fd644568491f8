"""CIFAR's batches, pickled by Python 2 and Python 3. No code in a pickle is run."""

import os
import pickle
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchcaps.data import CIFAR10, CIFAR100, DataError
from torchcaps.data.cifar import read_batch

FOLDER = "cifar-10/cifar-10-batches-py"
NAMES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def pixels(count: int, first: int = 0) -> np.ndarray:
    return ((np.arange(count * 3072) + first) % 251).astype(np.uint8).reshape(count, 3072)


def python2(
    images: np.ndarray, labels: list[int], key: str = "labels", dtype: str = "u1", fortran: bool = False
) -> bytes:
    """A pickler with the opcodes of the published files, which Python 2 wrote: byte strings, numpy.core."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    def name(module: str, name: str) -> bytes:
        return f"c{module}\n{name}\n".encode()

    raw = images.tobytes("F" if fortran else "C")
    dtype_made = name("numpy", "dtype") + text(dtype) + b"K\0K\1\x87R"
    dtype_state = b"(K\3" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    shape = b"".join(b"M" + struct.pack("<H", size) for size in images.shape) + b"\x86"
    array = name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\0\x85" + text("b") + b"\x87R"
    array += b"(K\1" + shape + dtype_made + dtype_state + (b"\x88" if fortran else b"\x89")
    array += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    items = text("batch_label") + text("training batch 1 of 5") + text(key) + numbers
    return b"\x80\2}(" + items + text("data") + array + text("filenames") + b"]u."


def python3(images: Any, labels: Any, protocol: int = 2, key: str | bytes = b"labels") -> bytes:
    data = b"data" if isinstance(key, bytes) else "data"
    return pickle.dumps({b"batch_label": b"1 of 5", key: labels, data: images}, protocol=protocol)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root with six batches of two images."""
    (tmp_path / FOLDER).mkdir(parents=True)
    for i, name in enumerate(NAMES):
        (tmp_path / FOLDER / name).write_bytes(python2(pixels(2, first=i), [i, 9 - i]))
    return tmp_path


def refused(raw: bytes) -> str:
    """Read a batch that cannot be read, as a file of CIFAR-10, and return the one line."""
    path = Path(FOLDER, "test_batch")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        CIFAR10(".", check_hashes=False).load(train=False)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: cannot be read (")
    return str(caught.value)


# The reader


@pytest.mark.parametrize(
    "raw",
    [
        python2(pixels(3), [0, 9, 4]),
        *(python3(pixels(3), [0, 9, 4], protocol) for protocol in (2, 3, 4)),
        python3(pixels(3), [0, 9, 4], key="labels"),
        python3(np.asfortranarray(pixels(3)), [0, 9, 4]),
        python2(pixels(3), [0, 9, 4], fortran=True),
    ],
    ids=["python2", "protocol2", "protocol3", "protocol4", "text_keys", "columns", "python2_columns"],
)
def test_read_batch(raw: bytes) -> None:
    images, labels = read_batch(raw, "labels", 10)
    assert images.shape == (3, 3, 32, 32)
    assert images.dtype == torch.uint8
    # Planes of red, green and blue, each row by row: pixel (1, 2) of the green plane of image 2.
    assert images[2, 1, 1, 2] == (2 * 3072 + 1024 + 32 + 2) % 251
    assert np.array_equal(images.reshape(3, 3072).numpy(), pixels(3))
    assert labels.tolist() == [0, 9, 4]
    assert labels.dtype == torch.int64


class Calls:
    """Object that is pickled as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch owned",), "system"),
        (subprocess.check_call, (["touch", "owned"],), "check_call"),
        (eval, ("open('owned', 'w')",), "eval"),
        (np.fromfile, ("owned",), "fromfile"),
        (getattr, (dict, "clear"), "getattr"),
    ],
    ids=["system", "subprocess", "eval", "numpy", "getattr"],
)
def test_nothing_is_run(function: Callable[..., Any], arguments: tuple[Any, ...], name: str, protocol: int) -> None:
    call = Calls(function, *arguments)
    for raw in (
        pickle.dumps(call, protocol),
        pickle.dumps({b"data": call, b"labels": [1]}, protocol),
        pickle.dumps({b"data": pixels(1), b"labels": [call]}, min(protocol, 4)),
        pickle.dumps({call: 1}, protocol),
    ):
        message = refused(raw)
        assert "it is no CIFAR batch and wants to run " in message
        assert name in message
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\2cnumpy.core.multiarray\n_reconstruct.__globals__\n.",
        b"\x80\4\x8c\x05numpy\x8c\x0cndarray.data\x93.",
        b"(S'touch owned'\nios\nsystem\n.",
        b"cnumpy\n" + b"x" * 1000 + b"\n.",
    ],
    ids=["attribute", "attribute_protocol4", "inst", "long"],
)
def test_other_names_are_refused(raw: bytes) -> None:
    assert "it is no CIFAR batch and wants to run '" in refused(raw)
    assert len(refused(raw)) < 400


def test_outside_objects_are_refused() -> None:
    assert "it is no CIFAR batch and refers to an object outside of it" in refused(b"Pname\n.")


def test_every_truncation_is_refused() -> None:
    raw = python2(pixels(1), [3])
    assert len(read_batch(raw, "labels", 10)[0]) == 1
    for length in [*range(0, 300, 4), *range(300, len(raw), 200), len(raw) - 1]:
        refused(raw[:length])


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"plainly no pickle", "UnpicklingError"),
        (pickle.dumps({b"labels": [1]}), "KeyError: 'data'"),
        (python3(pixels(1)[:, 1:], [1]), "cannot reshape array of size 3071"),
        (python2(pixels(1), [1]).replace(b"M\1\0", b"M\2\0"), "cannot reshape array of size 3072 into shape (2,"),
        (python3(pixels(2), [1]), "holds labels (1,), expected 2 from 0 to 9"),
        (python3(pixels(2), [1, 10]), "expected 2 from 0 to 9"),
    ],
)
def test_read_batch_refuses(raw: bytes, problem: str) -> None:
    assert problem in refused(raw)


# Paths of the batches


def test_batches_in_their_order(root: Path) -> None:
    data = CIFAR10(str(root), check_hashes=False)
    images, labels = data.load(train=True)
    assert np.array_equal(images.reshape(10, 3072).numpy(), np.concatenate([pixels(2, first=i) for i in range(5)]))
    assert labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.load(train=False)[1].tolist() == [5, 4]


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100" / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, labels in (("train", [99, 0, 50]), ("test", [100, 1, 2])):
        raw = python2(pixels(3), labels, key="fine_labels")
        coarse = b"U\x0dcoarse_labels](K\1K\2K\3e"
        (folder / name).write_bytes(raw.replace(b"U\4data", coarse + b"U\4data"))
    data = CIFAR100(str(tmp_path), check_hashes=False)
    assert data.load(train=True)[1].tolist() == [99, 0, 50]
    with pytest.raises(DataError, match=r"test: cannot be read .*from 0 to 99\); .*f0ef6b0ae62326f3e7ffdfab6717acfc"):
        data.load(train=False)


@pytest.mark.parametrize("real", [FOLDER], indirect=True)
def test_real_cifar10(real: str) -> None:
    data = CIFAR10(real, check_hashes=False)  # a copy in which some images are others is fine too
    (train, train_labels), (test, test_labels) = data.load(train=True), data.load(train=False)
    assert train.shape == (50000, 3, 32, 32)
    assert test.shape == (10000, 3, 32, 32)
    assert train_labels.bincount().tolist() == [5000] * 10
    assert test_labels.bincount().tolist() == [1000] * 10
    assert train_labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert test_labels[:5].tolist() == [3, 8, 8, 0, 6]
    # The well-known means of red, green and blue.
    means = [train[:, channel].float().mean().item() / 255 for channel in range(3)]
    assert [round(mean, 3) for mean in means] == [0.491, 0.482, 0.447]
