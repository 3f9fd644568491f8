"""CIFAR-10 and CIFAR-100, read from their published pickles without running any code in them."""

import io
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile
from torchcaps.data.images import ImageData
from torchcaps.data.published import Published, checked_images, checked_labels

# The globals in the pickle of an array, in NumPy 1 and 2.
ARRAY_NAMES = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
}


class _Array:
    """Stands for an array and its type in a pickle. It keeps the state, which has the shape and the bytes."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Unpickles a batch without running anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            # Python 3 pickles bytes for Python 2 as a call of this function.
            return lambda text, encoding: text.encode("latin-1")
        if f"{module}.{name}" not in ARRAY_NAMES:
            raise ValueError(f"it is no CIFAR batch and wants to run {f'{module}.{name}'[:80]!r}")
        return _Array

    def persistent_load(self, pid: Any) -> Never:
        raise ValueError("it is no CIFAR batch and refers to an object outside of it")


def read_batch(raw: bytes, label_key: str, classes: int) -> tuple[Tensor, Tensor]:
    """Read a CIFAR batch: a pickled dict with "data", an array (n, 3072) of unsigned bytes, and a list of n labels.

    A row of the array holds the image's red plane, then the green one, then the blue one. The pickle may come from
    Python 2 or Python 3.

    Args:
        raw: content of the file.
        label_key: key of the labels: "labels" or "fine_labels".
        classes: number of classes.

    Returns:
        Images (n, 3, 32, 32) uint8 and labels (n,) int64.

    Raises:
        Exception: the content does not have this format; which exception depends on what is wrong.
    """
    batch = {
        key.decode("latin-1") if isinstance(key, bytes) else key: value
        for key, value in _Reader(io.BytesIO(raw), encoding="bytes").load().items()
    }
    _, shape, _, by_columns, pixels = batch["data"].state  # the arguments of ndarray.__setstate__
    array = np.frombuffer(bytearray(pixels), np.uint8).reshape(shape, order="F" if by_columns else "C")
    images = checked_images(torch.from_numpy(array.reshape(shape[0], 3, 32, 32)), (3, 32, 32))
    return images, checked_labels(batch[label_key], len(images), classes)


class _CIFAR(Published, ImageData):
    """Base of the CIFAR sets. Batches come from a folder beside the archive, or from the archive itself."""

    shape = (3, 32, 32)
    archive: CanonicalFile
    train_batches: tuple[CanonicalFile, ...]
    test_batches: tuple[CanonicalFile, ...]
    label_key: str

    def files(self) -> Iterable[CanonicalFile]:
        return (self.archive,) if self._folder() is None else (*self.train_batches, *self.test_batches)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        batches = self.train_batches if train else self.test_batches
        if self._folder() is None:
            parts = self.read_file(self.archive, lambda path: self._from_archive(path, batches))
        else:
            parts = [self.read_file(batch, lambda path: self._batch(path.read_bytes())) for batch in batches]
        images, labels = zip(*parts, strict=True)
        return torch.cat(images), torch.cat(labels)

    def _folder(self) -> Path | None:
        place = self.train_batches[0].place(self.root)
        return place.parent if place is not None and place.parent.is_dir() else None

    def _from_archive(self, path: Path, batches: tuple[CanonicalFile, ...]) -> list[tuple[Tensor, Tensor]]:
        names = [f"{Path(batch.folder).name}/{batch.name}" for batch in batches]
        with tarfile.open(path) as archive:  # in its own order, because going back is slow
            members = ((member.name, archive.extractfile(member)) for member in archive if member.name in names)
            content = {name: file.read() for name, file in members if file is not None}
        return [self._batch(content[name]) for name in names]

    def _batch(self, raw: bytes) -> tuple[Tensor, Tensor]:
        return read_batch(raw, self.label_key, self.classes)


class CIFAR10(_CIFAR):
    """CIFAR-10: 50,000 training and 10,000 test photographs, 32 x 32, in color, 10 classes.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; the "python version".
    `shift=4, flip=True` is the usual augmentation.

    The batches are read from the folder `<root>/cifar-10/cifar-10-batches-py`, or else from the archive
    `<root>/cifar-10/cifar-10-python.tar.gz`, which is not unpacked. The batches are pickles; no code in them is run.

    Args:
        root, check_hashes: see `Published`.
        options: see `ImageData`.

    Raises:
        DataError: see `Published`.
    """

    classes = 10
    archive = CanonicalFile(
        "cifar-10",
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    )
    train_batches = (
        CanonicalFile("cifar-10/cifar-10-batches-py", "data_batch_1", "c99cafc152244af753f735de768cd75f"),
        CanonicalFile("cifar-10/cifar-10-batches-py", "data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
        CanonicalFile("cifar-10/cifar-10-batches-py", "data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
        CanonicalFile("cifar-10/cifar-10-batches-py", "data_batch_4", "634d18415352ddfa80567beed471001a"),
        CanonicalFile("cifar-10/cifar-10-batches-py", "data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
    )
    test_batches = (CanonicalFile("cifar-10/cifar-10-batches-py", "test_batch", "40351d587109b95175f43aff81a1287e"),)
    label_key = "labels"

    @property
    def names(self) -> list[str]:
        """Names of the classes, as in the data set's `batches.meta`."""
        return ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class CIFAR100(_CIFAR):
    """CIFAR-100: 50,000 training and 10,000 test photographs, 32 x 32, in color, 100 classes (the fine labels).

    Everything else is as in `CIFAR10`. The files are `<root>/cifar-100/cifar-100-python/train` and `test`, or
    `<root>/cifar-100/cifar-100-python.tar.gz`.
    """

    classes = 100
    archive = CanonicalFile(
        "cifar-100",
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
    )
    train_batches = (CanonicalFile("cifar-100/cifar-100-python", "train", "16019d7e3df5f24257cddd939b257f8d"),)
    test_batches = (CanonicalFile("cifar-100/cifar-100-python", "test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),)
    label_key = "fine_labels"
