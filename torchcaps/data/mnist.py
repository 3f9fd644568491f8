"""MNIST and Fashion-MNIST, read from their four published files."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchcaps.data.distortions import distort
from torchcaps.data.files import CanonicalFile, DataError
from torchcaps.data.images import ImageData
from torchcaps.utils.arguments import checked


@checked
def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """Read a gzipped idx file of bytes.

    The format: two zero bytes, 0x08 for unsigned bytes, and the number of dimensions, a byte; the size of each
    dimension, a big-endian 32-bit integer; then the bytes themselves, last dimension fastest.

    Returns:
        A uint8 tensor of the shape in the header.

    Raises:
        DataError: the file cannot be read or does not have this format.
    """
    try:
        with gzip.open(path) as file:
            raw = file.read()
    except EOFError:
        raise DataError(f"{path}: truncated gzip, the file ends too early") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"{path}: wrong magic 0x{raw[:4].hex()}, expected 0x000008.. (an idx file of bytes)")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise DataError(f"{path}: the header needs {start} bytes, the file has {len(raw)}")
    sizes = struct.unpack(f">{raw[3]}I", raw[4:start])
    if len(raw) - start != math.prod(sizes):
        raise DataError(
            f"{path}: the header says shape {sizes}, {math.prod(sizes)} bytes, but {len(raw) - start} follow"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)[start:].reshape(sizes)


class MNIST(ImageData):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 x 28, 10 classes.

    Source: Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits, 1998. Training and test images
    have different writers.

    The four idx.gz files are read from `<root>/mnist`. Missing files are downloaded once into pooch's cache and checked
    against their published md5. A well-formed local file with another md5 is used, with a warning. A corrupt one is an
    error and is never replaced.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        distort: whether training images are rotated, shifted, squeezed and erased, see `distort`. This comes before the
            augmentation of `ImageData`.
        options: see `ImageData`.

    Raises:
        DataError: a file is corrupt or cannot be downloaded. The one line says which file, what is wrong, the md5 it
            should have, and what to do.
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
        super().__init__(**options)
        self.root, self.distort = root, distort

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine: the others wait instead of downloading too.
        for name in self.md5:
            self._file(name).find(self.root)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        part = "train" if train else "t10k"
        images_file, labels_file = (self._file(f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        images_path, labels_path = images_file.find(self.root), labels_file.find(self.root)
        images, labels = _read(images_file, images_path), _read(labels_file, labels_path)
        if images.ndim != 3 or images.shape[1:] != (28, 28):
            raise images_file.corrupt(images_path, f"holds shape {tuple(images.shape)}, expected (n, 28, 28)")
        if labels.ndim != 1:
            raise labels_file.corrupt(labels_path, f"holds shape {tuple(labels.shape)}, expected (n,)")
        if len(labels) != len(images):
            problem = f"{len(labels)} labels, but {len(images)} images in {images_path}"
            raise labels_file.corrupt(labels_path, problem)
        if (labels >= self.classes).any():
            problem = f"holds label {int(labels.max())}, expected 0 to {self.classes - 1}"
            raise labels_file.corrupt(labels_path, problem)
        images_file.warn_of_other_hash(images_path)
        labels_file.warn_of_other_hash(labels_path)
        return images.unsqueeze(1), labels.long()

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


def _read(file: CanonicalFile, path: Path) -> Tensor:
    try:
        return read_idx(path)
    except DataError as error:
        raise file.corrupt(path, str(error).removeprefix(f"{path}: ")) from None
