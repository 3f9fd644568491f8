"""MNIST and Fashion-MNIST, read from their four published files."""

import gzip
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchcaps.data.distortions import distort
from torchcaps.data.files import CanonicalFile
from torchcaps.data.images import ImageData
from torchcaps.data.published import Published, checked_images, checked_labels
from torchcaps.utils.arguments import checked


def read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of bytes.

    The format: two zero bytes, 0x08 for unsigned bytes, and the number of dimensions, a byte; the size of each
    dimension, a big-endian 32-bit integer; then the bytes themselves, last dimension fastest.

    Returns:
        A uint8 tensor of the shape in the header.
    """
    with gzip.open(path) as file:
        raw = bytearray(file.read())
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"wrong magic 0x{raw[:4].hex()}, expected 0x000008.. of an idx file of bytes")
    start = 4 + 4 * raw[3]
    return torch.frombuffer(raw, dtype=torch.uint8)[start:].reshape(struct.unpack(f">{raw[3]}I", raw[4:start]))


class MNIST(Published, ImageData):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 x 28, 10 classes.

    Source: Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits, 1998. Training and test images
    have different writers.

    The four idx.gz files are read from `<root>/mnist`.

    Args:
        root: see `Published`.
        distort: whether training images are rotated, shifted, squeezed and erased, see `distort`. This comes before the
            augmentation of `ImageData`.
        options: see `Published` and `ImageData`.

    Raises:
        DataError: see `Published`.
    """

    classes = 10
    shape = (1, 28, 28)
    folder = "mnist"
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    }
    mirrors: tuple[str, ...] = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )

    @checked
    def __init__(self, root: str | None = None, distort: bool = False, **options: Any) -> None:
        super().__init__(root, **options)
        self.distort = distort

    def files(self) -> Iterable[CanonicalFile]:
        return map(self._file, self.md5)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        part = "train" if train else "t10k"
        images = self.read_file(
            self._file(f"{part}-images-idx3-ubyte.gz"),
            lambda path: checked_images(read_idx(path).unsqueeze(1), MNIST.shape),
        )
        labels = self.read_file(
            self._file(f"{part}-labels-idx1-ubyte.gz"),
            lambda path: checked_labels(read_idx(path), len(images), self.classes),
        )
        return images, labels

    @checked
    def augment(self, images: Tensor) -> Tensor:
        return super().augment(distort(self._enlarged(images)) if self.distort else images)

    def _file(self, name: str) -> CanonicalFile:
        return CanonicalFile(self.folder, name, self.md5[name], tuple(mirror + name for mirror in self.mirrors))


class FashionMNIST(MNIST):
    """Fashion-MNIST: 60,000 training and 10,000 test images of articles of clothing, 28 x 28, 10 classes.

    Source: H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
    Learning Algorithms, 2017.

    Everything else is as in `MNIST`. The files have the same names, in `<root>/fashion-mnist`.
    """

    folder = "fashion-mnist"
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    }
    mirrors = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    )

    @property
    def names(self) -> list[str]:
        """Names of the classes, as in the data set's description."""
        return ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
