"""The idx reader, the paths of MNIST's files, and errors of one line for damaged files."""

import gzip
import hashlib
import os
import struct
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from torchcaps.data import MNIST, DataError, FashionMNIST, read_idx

PUBLISHED = dict(MNIST.md5)
REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"

needs_mnist = pytest.mark.skipif(
    not all((REAL / "mnist" / name).is_file() for name in PUBLISHED),
    reason=f"no MNIST at {REAL}/mnist (set TORCHCAPS_DATA to a folder that has mnist/)",
)


def write_idx(path: Path, sizes: tuple[int, ...], data: bytes, magic: bytes | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = (magic or bytes([0, 0, 8, len(sizes)])) + struct.pack(f">{len(sizes)}I", *sizes)
    path.write_bytes(gzip.compress(header + data, mtime=0))


def write_mnist(folder: Path) -> dict[str, str]:
    """Write seven training and three test images in the published format. Return the files' md5s."""
    for part, count in (("train", 7), ("t10k", 3)):
        pixels = bytes((i + 50 * (part == "t10k")) % 256 for i in range(count * 784))
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", (count, 28, 28), pixels)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", (count,), bytes(9 - i for i in range(count)))
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]) -> Path:
    """A data root with a tiny MNIST whose md5s count as the published ones."""
    for name, md5 in write_mnist(tmp_path / "root" / "mnist").items():
        monkeypatch.setitem(MNIST.md5, name, md5)
    return tmp_path / "root"


def error_of(root: Path | None, train: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        MNIST(root=str(root) if root else None).load(train)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The reader


@pytest.mark.parametrize(("sizes", "count"), [((5,), 5), ((2, 3, 4), 24), ((0, 28, 28), 0)])
def test_read_idx(tmp_path: Path, sizes: tuple[int, ...], count: int) -> None:
    write_idx(tmp_path / "a.gz", sizes, bytes(range(count)))
    found = read_idx(tmp_path / "a.gz")
    assert found.dtype == torch.uint8
    assert torch.equal(found, torch.arange(count, dtype=torch.uint8).reshape(sizes))
    assert torch.equal(found, read_idx(str(tmp_path / "a.gz")))


def test_sizes_are_big_endian(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"\0\0\x08\x02" + b"\0\0\x01\x02" + b"\0\0\0\x01" + bytes(258)))
    assert read_idx(tmp_path / "a.gz").shape == (258, 1)


GOOD = gzip.compress(b"\0\0\x08\x01\0\0\0\x05hello", mtime=0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (GOOD[:-12], "truncated gzip"),
        (b"plainly no gzip", "cannot be read: Not a gzipped file"),
        (GOOD[:-8] + bytes(8), "cannot be read: CRC check failed"),
        (GOOD[:12] + b"\xff" * 6 + GOOD[18:], "cannot be read: Error -3 while decompressing"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x05hello"), "wrong magic 0x00000d01"),
        (gzip.compress(b"\x01\0\x08\x01\0\0\0\x05hello"), "wrong magic 0x01000801"),
        (gzip.compress(b""), "wrong magic 0x"),
        (gzip.compress(b"\0\0\x08\x03\0\0\0\x05hi"), "the header needs 16 bytes, the file has 10"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05hell"), "shape (5,), 5 bytes, but 4 follow"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05hello!"), "shape (5,), 5 bytes, but 6 follow"),
    ],
    ids=[
        "truncated",
        "no_gzip",
        "checksum",
        "deflate",
        "floats",
        "magic",
        "empty",
        "short_header",
        "short_data",
        "long_data",
    ],
)
def test_read_idx_refuses(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.gz"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_idx_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.gz: cannot be read: .*No such file"):
        read_idx(tmp_path / "none.gz")


# Paths of the files


def test_root_and_environment(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = MNIST(root=str(tiny)).load(train=True)
    assert images.shape == (7, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert images.flatten().tolist() == [i % 256 for i in range(7 * 784)]
    assert labels.tolist() == [9, 8, 7, 6, 5, 4, 3]
    assert labels.dtype == torch.int64

    monkeypatch.setenv("TORCHCAPS_DATA", str(tiny))
    images, labels = MNIST().load(train=False)
    assert images.shape == (3, 1, 28, 28)
    assert images[0, 0, 0, 0] == 50
    assert labels.tolist() == [9, 8, 7]

    # The argument wins over the variable.
    write_idx(tmp_path / "other" / "mnist" / IMAGES, (2, 28, 28), bytes(2 * 784))
    write_idx(tmp_path / "other" / "mnist" / LABELS, (2,), b"\1\2")
    with pytest.warns(UserWarning, match="has md5"):
        assert MNIST(root=str(tmp_path / "other")).load(train=True)[1].tolist() == [1, 2]


def test_published_md5_is_no_warning_and_another_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MNIST(root=str(tiny)).load(train=True)

    found = MNIST.md5[IMAGES]
    monkeypatch.setitem(MNIST.md5, IMAGES, PUBLISHED[IMAGES])
    with pytest.warns(UserWarning, match="it is used anyway") as caught:
        images, _ = MNIST(root=str(tiny)).load(train=True)
    assert len(images) == 7
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(str(tiny / "mnist" / IMAGES))
    assert found in message
    assert PUBLISHED[IMAGES] in message
    assert "\n" not in message


def test_a_cached_file_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, md5 in write_mnist(tmp_path / "cache" / "torchcaps" / "mnist").items():
        monkeypatch.setitem(MNIST.md5, name, md5)
    monkeypatch.setattr(MNIST, "mirrors", ())  # no download is possible
    with pytest.raises(DataError):
        MNIST().load(train=True)
    monkeypatch.setattr(MNIST, "mirrors", ("http://127.0.0.1:9/",))  # nothing answers there
    assert len(MNIST().load(train=True)[0]) == 7
    # Without the file in the root, the cache is used. An empty variable counts as no root.
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "nowhere"))
    assert len(MNIST().load(train=True)[0]) == 7
    monkeypatch.setenv("TORCHCAPS_DATA", "")
    assert len(MNIST().load(train=True)[0]) == 7


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "served").mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=partial(http.serve_forever, poll_interval=0.01))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/"
    http.shutdown()
    http.server_close()
    thread.join()


def test_second_mirror_is_tried(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror with the wrong content and one without the file leave nothing behind."""
    for name, md5 in write_mnist(tmp_path / "served" / "good").items():
        monkeypatch.setitem(MNIST.md5, name, md5)
    write_idx(tmp_path / "served" / "wrong" / IMAGES, (7, 28, 28), bytes(7 * 784))
    cache = tmp_path / "cache" / "torchcaps" / "mnist"

    monkeypatch.setattr(MNIST, "mirrors", (server + "wrong/", server + "none/"))
    message = error_of(None)
    assert "ValueError" in message
    assert "hash" in message
    assert "HTTPError: 404" in message
    assert list(cache.iterdir()) == []

    monkeypatch.setattr(MNIST, "mirrors", (server + "wrong/", server + "good/"))
    data = MNIST()
    data.prepare_data()
    assert sorted(path.name for path in cache.iterdir()) == sorted(MNIST.md5)
    assert len(data.load(train=True)[0]) == 7
    assert len(data.load(train=False)[0]) == 3


def test_the_canonical_mirrors_are_asked_in_turn(no_network: list[str]) -> None:
    error_of(None)
    assert no_network == [
        f"https://ossci-datasets.s3.amazonaws.com/mnist/{IMAGES}",
        f"https://storage.googleapis.com/cvdf-datasets/mnist/{IMAGES}",
    ]


def test_offline_message(no_network: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(None)
    assert message == (
        f"cannot download {IMAGES} (md5 {PUBLISHED[IMAGES]}): "
        f"put it at DIR/mnist/{IMAGES} and set TORCHCAPS_DATA=DIR; "
        f"tried https://ossci-datasets.s3.amazonaws.com/mnist/{IMAGES} "
        "(ConnectionError: Name or service not known and a second line), "
        f"https://storage.googleapis.com/cvdf-datasets/mnist/{IMAGES} "
        "(ConnectionError: Name or service not known and a second line)"
    )

    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "mine"))
    assert f": put it at {tmp_path}/mine/mnist/{IMAGES}; tried" in error_of(None)
    assert f": put it at {tmp_path}/argument/mnist/{IMAGES}; tried" in error_of(tmp_path / "argument")


def test_one_missing_file_of_four(tiny: Path, no_network: list[str]) -> None:
    (tiny / "mnist" / LABELS).unlink()
    assert f": put it at {tiny}/mnist/{LABELS}; tried" in error_of(tiny)
    assert all(url.endswith(LABELS) for url in no_network)
    assert len(MNIST(root=str(tiny)).load(train=False)[0]) == 3


# Damaged files


def test_a_corrupt_file_is_an_error_and_never_downloaded(tiny: Path, no_network: list[str]) -> None:
    path = tiny / "mnist" / IMAGES
    path.write_bytes(path.read_bytes()[:-20])
    message = error_of(tiny)
    assert message == (
        f"{path}: truncated gzip, the file ends too early; the md5 should be {MNIST.md5[IMAGES]}: "
        "replace the file, or remove it to have it downloaded"
    )
    assert no_network == []


@pytest.mark.parametrize(
    ("name", "sizes", "data", "problem"),
    [
        (IMAGES, (7, 28, 27), bytes(7 * 28 * 27), "holds shape (7, 28, 27)"),
        (IMAGES, (7,), bytes(7), "holds shape (7,)"),
        (LABELS, (7, 1), bytes(7), "holds shape (7, 1)"),
        (LABELS, (6,), bytes(6), "6 labels, but 7 images in"),
        (LABELS, (8,), bytes(8), "8 labels, but 7 images in"),
        (LABELS, (7,), b"\0\0\0\x0a\0\0\0", "holds label 10"),
        (LABELS, (8,), bytes(7), "the header says shape (8,), 8 bytes, but 7 follow"),
    ],
    ids=["width", "images_1d", "labels_2d", "few_labels", "many_labels", "label_10", "short_data"],
)
def test_well_formed_but_not_mnist(tiny: Path, name: str, sizes: tuple[int, ...], data: bytes, problem: str) -> None:
    write_idx(tiny / "mnist" / name, sizes, data)
    message = error_of(tiny)
    assert message.startswith(f"{tiny}/mnist/{name}: {problem}")
    assert f"md5 should be {MNIST.md5[name]}" in message
    assert "replace the file" in message


# Fashion-MNIST


def test_fashion_mnist_is_read_from_files_of_its_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny / "fashion-mnist"
    write_mnist(other)
    write_idx(other / IMAGES, (2, 28, 28), bytes(i % 251 for i in range(2 * 784)))
    write_idx(other / LABELS, (2,), b"\x09\x04")
    for path in other.iterdir():
        monkeypatch.setitem(FashionMNIST.md5, path.name, hashlib.md5(path.read_bytes()).hexdigest())
    data = FashionMNIST(root=str(tiny), batch_size=1, shift=2)
    data.prepare_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images, labels = data.load(train=True)
    assert images.shape == (2, *FashionMNIST.shape)
    assert images.flatten().tolist() == [i % 251 for i in range(2 * 784)]
    assert labels.tolist() == [9, 4]
    assert len(MNIST(root=str(tiny)).load(train=True)[1]) == 7
    assert (data.batch_size, data.shift) == (1, 2)

    (other / LABELS).write_bytes((other / LABELS).read_bytes()[:-3])
    with pytest.raises(DataError) as caught:
        data.load(train=True)
    assert str(caught.value).startswith(f"{other / LABELS}: truncated gzip, the file ends too early; the md5 should be")


def test_published_fashion_mnist(no_network: list[str], tmp_path: Path) -> None:
    assert FashionMNIST.md5 == {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    }
    with pytest.raises(DataError) as caught:
        FashionMNIST(root=str(tmp_path)).prepare_data()
    assert f"(md5 8d4fb7e6c68d591d4c3dfef9ec88bf0d): put it at {tmp_path}/fashion-mnist/{IMAGES}" in str(caught.value)
    assert no_network == [
        f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{IMAGES}",
        f"https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/{IMAGES}",
    ]


# Real files


@needs_mnist
def test_real_mnist(no_network: list[str]) -> None:
    data = MNIST(root=str(REAL), val_size=5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another md5 would warn
        (train, train_labels), (test, test_labels) = data.load(train=True), data.load(train=False)
    assert train.shape == (60000, 1, 28, 28)
    assert test.shape == (10000, 1, 28, 28)
    assert train_labels[0] == 5
    assert test_labels[0] == 7
    # The label counts in descriptions of MNIST.
    assert train_labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert train.max() == 255
    assert train.min() == 0
    assert round(train.float().mean().item() / 255, 4) == 0.1307

    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (128, 1, 28, 28)
    assert labels.shape == (128,)
    assert data.train_set is not None
    assert len(data.train_set) == 55000
    assert data.val_set is not None
    assert len(data.val_set) == 5000


@pytest.mark.skipif(
    not all((REAL / "fashion-mnist" / name).is_file() for name in PUBLISHED),
    reason=f"no Fashion-MNIST at {REAL}/fashion-mnist (set TORCHCAPS_DATA to a folder that has fashion-mnist/)",
)
def test_real_fashion_mnist(no_network: list[str]) -> None:
    data = FashionMNIST(root=str(REAL))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another md5 would warn
        (train, train_labels), (test, test_labels) = data.load(train=True), data.load(train=False)
    assert train.shape == (60000, 1, 28, 28)
    assert test.shape == (10000, 1, 28, 28)
    assert train_labels.bincount().tolist() == [6000] * 10
    assert test_labels.bincount().tolist() == [1000] * 10
    assert train_labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert test_labels[:5].tolist() == [9, 2, 1, 1, 6]
    # The well-known mean and standard deviation.
    assert round(train.float().mean().item() / 255, 4) == 0.286
    assert round(train.float().std().item() / 255, 4) == 0.353
