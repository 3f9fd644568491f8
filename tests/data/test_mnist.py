"""MNIST and Fashion-MNIST: the idx reader, downloads from a real server, and the real files."""

import gzip
import hashlib
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from torchcaps.data import MNIST, DataError, FashionMNIST
from torchcaps.data.mnist import read_idx

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def write_idx(path: Path, sizes: tuple[int, ...], data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)
    path.write_bytes(gzip.compress(header + data, mtime=0))


def write_mnist(folder: Path) -> dict[str, str]:
    """Write seven training and three test images in the published format. Return the files' md5s."""
    for part, count in (("train", 7), ("t10k", 3)):
        pixels = bytes((i + 50 * (part == "t10k")) % 256 for i in range(count * 784))
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", (count, 28, 28), pixels)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", (count,), bytes(9 - i for i in range(count)))
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def error_of(data: MNIST, train: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        data.load(train)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (MNIST, FashionMNIST):
        for name, md5 in write_mnist(tmp_path / kind.folder).items():
            monkeypatch.setitem(kind.md5, name, md5)
        images, labels = kind(str(tmp_path)).load(train=True)
        assert images.shape == (7, 1, 28, 28)
        assert images.dtype == torch.uint8
        assert images.flatten().tolist() == [i % 256 for i in range(7 * 784)]
        assert labels.tolist() == [9, 8, 7, 6, 5, 4, 3]
        assert labels.dtype == torch.int64
        images, labels = kind(str(tmp_path)).load(train=False)
        assert images[0, 0, 0, 0] == 50
        assert labels.tolist() == [9, 8, 7]


def test_sizes_are_big_endian(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"\0\0\x08\x02" + b"\0\0\x01\x02" + b"\0\0\0\x01" + bytes(258)))
    assert read_idx(tmp_path / "a.gz").shape == (258, 1)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (IMAGES, b"\0\0\x0d\x01\0\0\0\x05hello", "wrong magic 0x00000d01, expected 0x000008"),
        (IMAGES, b"\0\0\x08\x03\0\0\0\x05hi", "unpack requires a buffer of 12 bytes"),
        (IMAGES, b"\0\0\x08\x01\0\0\0\x05hell", r"shape '\[5\]' is invalid for input of size 4"),
        (LABELS, b"\0\0\x08\x01\0\0\0\x07\0\0\0\x0a\0\0\0", "holds labels .*, expected 7 from 0 to 9"),
        (LABELS, b"\0\0\x08\x01\0\0\0\x06\0\0\0\0\0\0", "holds labels .*, expected 7 from 0 to 9"),
    ],
)
def test_other_files(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    write_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / name
    path.write_bytes(gzip.compress(content))
    with pytest.raises(
        DataError, match=f"^{path}: cannot be read .*{problem}.*; the md5 should be {MNIST.md5[name]}: r"
    ):
        MNIST(str(tmp_path), check_hashes=False).load(train=True)


def test_without_test_images(tmp_path: Path, no_network: list[str]) -> None:
    write_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    write_idx(path, (0, 28, 28), b"")
    data = MNIST(str(tmp_path), check_hashes=False)
    data.setup("fit")
    with pytest.raises(DataError, match=f"^{path}: .* expected one or more images"):
        data.setup("test")
    path.unlink()
    assert f": put it at {path}; tried" in error_of(data, train=False)
    with pytest.raises(DataError, match=f": put it at {path}; tried"):  # before the training, not after it
        data.prepare_data()


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
    """A mirror with the wrong content and one without the file leave nothing behind. What was downloaded is kept."""
    for name, md5 in write_mnist(tmp_path / "served" / "good").items():
        monkeypatch.setitem(MNIST.md5, name, md5)
    write_idx(tmp_path / "served" / "wrong" / IMAGES, (7, 28, 28), bytes(7 * 784))
    cache = tmp_path / "cache" / "torchcaps" / "mnist"

    monkeypatch.setattr(MNIST, "mirrors", (server + "wrong/", server + "none/"))
    message = error_of(MNIST())
    assert "ValueError" in message
    assert "hash" in message
    assert "HTTPError: 404" in message
    assert list(cache.iterdir()) == []

    monkeypatch.setattr(MNIST, "mirrors", (server + "wrong/", server + "good/"))
    MNIST().prepare_data()
    assert sorted(path.name for path in cache.iterdir()) == sorted(MNIST.md5)
    monkeypatch.setattr(MNIST, "mirrors", ("http://127.0.0.1:9/",))  # nothing answers there
    assert len(MNIST(str(tmp_path / "nowhere")).load(train=True)[0]) == 7


@pytest.mark.parametrize(
    ("real", "kind", "first", "counts", "mean"),
    [  # label counts and means as in descriptions of the sets
        ("mnist", MNIST, [5, 7], [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], 0.1307),
        ("fashion-mnist", FashionMNIST, [9, 9], [6000] * 10, 0.286),
    ],
    indirect=["real"],
)
def test_real_files(real: str, kind: type[MNIST], first: list[int], counts: list[int], mean: float) -> None:
    data = kind(real, val_size=5000)
    (train, train_labels), (test, test_labels) = data.load(train=True), data.load(train=False)
    assert train.shape == (60000, 1, 28, 28)
    assert test.shape == (10000, 1, 28, 28)
    assert [train_labels[0], test_labels[0]] == first
    assert train_labels.bincount().tolist() == counts
    assert round(train.float().mean().item() / 255, 4) == mean
