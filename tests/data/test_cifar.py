"""CIFAR's batches, pickled by Python 2 and Python 3, in a folder and in an archive. No code in a pickle is run."""

import hashlib
import io
import os
import pickle
import struct
import subprocess
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest
import torch

from torchcaps.data import CIFAR10, CIFAR100, DataError
from torchcaps.data.cifar import read_batch

pytestmark = pytest.mark.usefixtures("no_network")

REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")
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


def write_cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    for i, name in enumerate(NAMES):
        (folder / name).write_bytes(python2(pixels(2, first=i), [i, 9 - i]))


def write_archive(path: Path, folder: Path, names: list[str] = NAMES) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name, recursive=False)
        for name in reversed(names):  # the archive has another order than the batches
            archive.add(folder / name, f"{folder.name}/{name}")


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with six batches of two images, in a folder and an archive, with md5s that count as published."""
    root = tmp_path / "root"
    write_cifar10(root / FOLDER)
    write_archive(root / "cifar-10/cifar-10-python.tar.gz", root / FOLDER)
    for part in ("train_batches", "test_batches"):
        files = [replace(file, digest=md5(root / FOLDER / file.name)) for file in getattr(CIFAR10, part)]
        monkeypatch.setattr(CIFAR10, part, tuple(files))
    archive = replace(CIFAR10.archive, digest=md5(root / "cifar-10/cifar-10-python.tar.gz"))
    monkeypatch.setattr(CIFAR10, "archive", archive)
    return root


def without_folder(root: Path) -> Path:
    for name in NAMES:
        (root / FOLDER / name).unlink()
    (root / FOLDER).rmdir()
    return root


def error_of(root: Path, train: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        CIFAR10(root=str(root)).load(train)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(raw: bytes) -> str:
    with pytest.raises(DataError) as caught:
        read_batch(raw, "labels", 10)
    assert "\n" not in str(caught.value)
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


def test_what_tests_write_python_2_wrote() -> None:
    # NumPy's own unpickling, which runs code, gives the same result.
    if not hasattr(np, "core"):
        pytest.skip("this NumPy has no numpy.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core has moved, align=0 is now False
        batch = pickle.loads(python2(pixels(3), [1, 2, 3]), encoding="bytes")
    assert list(batch) == [b"batch_label", b"labels", b"data", b"filenames"]
    assert np.array_equal(batch[b"data"], pixels(3))


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
        assert message.startswith("is not a CIFAR batch: it wants to run ")
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
    assert "is not a CIFAR batch: it wants to run '" in refused(raw)
    assert len(refused(raw)) < 150


def test_outside_objects_are_refused() -> None:
    assert refused(b"Pname\n.") == "is not a CIFAR batch: it refers to an object outside of it"


def test_every_truncation_is_refused() -> None:
    raw = python2(pixels(1), [3])
    assert len(read_batch(raw, "labels", 10)[0]) == 1
    for length in range(len(raw)):
        assert "truncated" in refused(raw[:length])


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"plainly no pickle", "truncated, or not a pickle"),
        (pickle.dumps([1, 2]), "is not a CIFAR batch: it holds a list"),
        (pickle.dumps({b"labels": [1]}), 'it has no "data"'),
        (pickle.dumps({b"data": 1}), 'it has no "labels"'),
        (python2(pixels(1), [1], key="fine_labels"), 'it has no "labels"'),
        (python3([[0] * 3072], [1]), '"data" is not a pickled array of two dimensions'),
        (python3(pixels(1)[0], [1]), '"data" is not a pickled array of two dimensions'),
        (python3(pixels(1)[..., None], [1]), '"data" is not a pickled array of two dimensions'),
        (python3(np.dtype("u1"), [1]), '"data" is not a pickled array of two dimensions'),
        (python3(np.ndarray, [1]), '"data" is not a pickled array of two dimensions'),
        (python3(pixels(1).astype("i1"), [1]), "\"data\" is an array of type 'i1'"),
        (python2(pixels(1), [1], dtype="f4"), "\"data\" is an array of type b'f4'"),
        (python3(pixels(1)[:, 1:], [1]), '"data" has shape (1, 3071)'),
        (python2(pixels(1), [1]).replace(b"M\1\0", b"M\2\0"), "does not have the 6144 bytes of its shape (2, 3072)"),
        (python3(pixels(2), (1, 2)), '"labels" is not a list of integers'),
        (python3(pixels(2), [1, 2.0]), '"labels" is not a list of integers'),
        (python3(pixels(2), [1, True]), '"labels" is not a list of integers'),
        (python3(pixels(2), [1]), "1 labels, but 2 images"),
        (python3(pixels(2), [1, 2, 3]), "3 labels, but 2 images"),
        (python3(pixels(2), [1, 10]), "holds label 10"),
        (python3(pixels(2), [1, -1]), "holds label -1"),
    ],
)
def test_read_batch_refuses(raw: bytes, problem: str) -> None:
    assert problem in refused(raw)


# Paths of the batches


def test_folder_and_archive_hold_the_same(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = np.concatenate([pixels(2, first=i) for i in range(5)]).reshape(10, 3, 32, 32)
    for root in (tiny, without_folder(tiny)):
        data = CIFAR10(root=str(root))
        data.prepare_data()
        images, labels = data.load(train=True)
        assert np.array_equal(images.numpy(), expected)
        assert labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert data.load(train=False)[1].tolist() == [5, 4]
    assert [path.name for path in (tiny / "cifar-10").iterdir()] == ["cifar-10-python.tar.gz"]  # nothing unpacked
    monkeypatch.setenv("TORCHCAPS_DATA", str(tiny))
    assert len(CIFAR10().load(train=True)[1]) == 10


def test_downloaded_archive(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> str:
        asked.append((url, known_hash, fname, path))
        return str(tiny / "cifar-10" / fname)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert len(CIFAR10(root=str(tmp_path / "nowhere")).load(train=True)[1]) == 10
    url = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    cache = tmp_path / "cache" / "torchcaps" / "cifar-10"
    assert asked == [(url, f"md5:{CIFAR10.archive.digest}", "cifar-10-python.tar.gz", cache)]


def test_offline_message(tmp_path: Path) -> None:
    data = CIFAR100(root=str(tmp_path / "mine"))
    for act in (data.prepare_data, data.setup):
        with pytest.raises(DataError) as caught:
            act()
        assert str(caught.value) == (
            "cannot download cifar-100-python.tar.gz (md5 eb9058c3a382ffc7106e4002c42a8d85): "
            f"put it at {tmp_path}/mine/cifar-100/cifar-100-python.tar.gz; "
            "tried https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz "
            "(ConnectionError: Name or service not known and a second line)"
        )


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100" / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, labels in (("train", [99, 0, 50]), ("test", [100, 1, 2])):
        raw = python2(pixels(3), labels, key="fine_labels")
        coarse = b"U\x0dcoarse_labels](K\1K\2K\3e"
        (folder / name).write_bytes(raw.replace(b"U\4data", coarse + b"U\4data"))
    with pytest.warns(UserWarning, match="the published file has 16019d7e3df5f24257cddd939b257f8d"):
        assert CIFAR100(root=str(tmp_path)).load(train=True)[1].tolist() == [99, 0, 50]
    with pytest.raises(DataError, match=r"test: holds label 100, expected 0 to 99; .*f0ef6b0ae62326f3e7ffdfab6717acfc"):
        CIFAR100(root=str(tmp_path)).load(train=False)


def test_another_md5_warns_once_for_a_file(tiny: Path) -> None:
    path = tiny / FOLDER / "data_batch_2"
    path.write_bytes(python3(pixels(1), [7]))
    with pytest.warns(UserWarning, match="has md5") as caught:
        assert CIFAR10(root=str(tiny)).load(train=True)[1].tolist() == [0, 9, 7, 2, 7, 3, 6, 4, 5]
    (message,) = [str(warning.message) for warning in caught]
    published = CIFAR10.train_batches[1].digest
    assert message == f"{path} has md5 {md5(path)}, the published file has {published}: it is used anyway"

    archive = tiny / "cifar-10/cifar-10-python.tar.gz"
    write_archive(archive, tiny / FOLDER)
    with pytest.warns(UserWarning, match="has md5") as caught:
        CIFAR10(root=str(without_folder(tiny))).load(train=True)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"{archive} has md5 {md5(archive)}, the published file has {CIFAR10.archive.digest}")


# Damaged files


def test_a_corrupt_batch(tiny: Path) -> None:
    path = tiny / FOLDER / "data_batch_3"
    path.write_bytes(python2(pixels(2), [1, 10]))
    assert error_of(tiny) == (
        f"{path}: holds label 10, expected 0 to 9; the md5 should be {CIFAR10.train_batches[2].digest}: "
        f"replace the file, or remove {path.parent} to have cifar-10-python.tar.gz read"
    )
    path.unlink()
    assert error_of(tiny).startswith(f"{path}: cannot be read: No such file or directory; the md5 should be")
    path.mkdir()
    assert error_of(tiny).startswith(f"{path}: cannot be read: Is a directory; the md5 should be")


def test_an_archive_with_a_corrupt_batch(tiny: Path) -> None:
    archive = tiny / "cifar-10/cifar-10-python.tar.gz"
    (tiny / FOLDER / "data_batch_4").write_bytes(pickle.dumps(Calls(os.system, "touch owned")))
    write_archive(archive, tiny / FOLDER)
    name = f"{os.system.__module__}.system"
    assert error_of(without_folder(tiny)) == (
        f"{archive}: cifar-10-batches-py/data_batch_4: is not a CIFAR batch: it wants to run '{name}'; "
        f"the md5 should be {CIFAR10.archive.digest}: replace the file, or remove it to have it downloaded"
    )
    assert not Path("owned").exists()


def test_an_archive_without_a_batch(tiny: Path) -> None:
    archive = tiny / "cifar-10/cifar-10-python.tar.gz"
    write_archive(archive, tiny / FOLDER, NAMES[1:])
    message = error_of(without_folder(tiny))
    assert message.startswith(f"{archive}: cifar-10-batches-py/data_batch_1: not in the archive; the md5 should be")
    assert str(archive) in message


def test_a_corrupt_archive(tiny: Path) -> None:
    archive = without_folder(tiny) / "cifar-10/cifar-10-python.tar.gz"
    good = archive.read_bytes()
    middle = len(good) // 2
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w:gz") as made:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(member)
    for bad, problem in (
        (b"plainly no archive", "cannot be read: Not a gzipped file"),
        (good[:middle], "cannot be read: "),
        (good[:middle] + b"\xff" * 9 + good[middle + 9 :], "cannot be read: "),
        (good[:-8] + bytes(8), "cannot be read: "),
        (link.getvalue(), "cifar-10-batches-py/data_batch_1: not in the archive"),
    ):
        archive.write_bytes(bad)
        message = error_of(tiny)
        assert message.startswith(f"{archive}: {problem}")
        assert f"the md5 should be {CIFAR10.archive.digest}" in message


# As a data module


def test_arguments_reach_the_batches(tiny: Path) -> None:
    data = CIFAR10(root=str(tiny), batch_size=4, shift=4, flip=True)
    data.setup()
    assert [len(labels) for _, labels in data.train_dataloader()] == [4, 4, 2]
    images, labels = next(iter(data.test_dataloader()))
    assert images.shape == (2, *CIFAR10.shape)
    assert images.dtype == torch.float32
    assert labels.tolist() == [5, 4]
    assert data.augment(images).shape == images.shape
    assert (data.shift, data.flip) == (4, True)


@pytest.mark.skipif(
    not (REAL / FOLDER / "test_batch").is_file(),
    reason=f"no CIFAR-10 at {REAL}/{FOLDER} (set TORCHCAPS_DATA to a folder that has cifar-10/)",
)
def test_real_cifar10() -> None:
    data = CIFAR10(root=str(REAL), val_size=5000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*it is used anyway")  # a copy with another md5 is fine too
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
