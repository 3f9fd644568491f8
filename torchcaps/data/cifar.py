"""CIFAR-10 and CIFAR-100 from their canonical Python batches, of which no code is run."""

import gzip
import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile, DataError
from torchcaps.data.images import ImageData

# What a pickled array names, in NumPy 1 and 2.
ARRAY_NAMES = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
}


class _Record:
    """Stands for whatever a pickle names or makes by a call: it only notes what it was given."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def __call__(self, *arguments: Any) -> "_Record":
        return _Record(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads a batch without running anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            # How Python 3 writes bytes for Python 2.
            return lambda text, encoding: text.encode("latin-1")
        if f"{module}.{name}" not in ARRAY_NAMES:
            raise DataError(f"is not a CIFAR batch: it wants to run {f'{module}.{name}'[:80]!r}")
        return _Record(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Never:
        raise DataError("is not a CIFAR batch: it refers to an object outside of it")


def read_batch(raw: bytes, label_key: str, classes: int) -> tuple[Tensor, Tensor]:
    """Read a CIFAR batch: a pickled dict with "data", an array (n, 3072) of unsigned bytes, and a list of n labels.

    A row of the array has the image's red plane, then the green one, then the blue one. Keys and values may
    have been pickled by Python 2 or by Python 3.

    Args:
        raw: the pickle.
        label_key: "labels" or "fine_labels".
        classes: labels must be below.

    Returns:
        Images (n, 3, 32, 32) uint8 and labels (n,) int64.

    Raises:
        DataError: it is not exactly this. The message names no file.
    """
    try:
        batch = _Reader(io.BytesIO(raw), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # pickle names no end of the exceptions that bad bytes can raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"truncated, or not a pickle ({reason})") from None
    if not isinstance(batch, dict):
        raise DataError(f"is not a CIFAR batch: it holds a {type(batch).__name__}, expected a dict")
    batch = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    for key in ("data", label_key):
        if key not in batch:
            raise DataError(f'is not a CIFAR batch: it has no "{key}"')
    images, labels = _array(batch["data"]), batch[label_key]
    if not isinstance(labels, list) or any(type(label) is not int for label in labels):
        raise DataError(f'"{label_key}" is not a list of integers')
    if len(labels) != len(images):
        raise DataError(f"{len(labels)} labels, but {len(images)} images")
    for label in labels:
        if not 0 <= label < classes:
            raise DataError(f"holds label {label}, expected 0 to {classes - 1}")
    return torch.from_numpy(images).reshape(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _array(record: Any) -> np.ndarray:
    """The array that NumPy would make of the record, if it is one of bytes (n, 3072)."""
    try:
        # What ndarray.__setstate__ and dtype are given: numpy.ndarray.__reduce__ in NumPy's reference.
        _, shape, dtype, fortran, raw = record.state
        (kind, *_), (count, width) = dtype.arguments, shape
    except (AttributeError, TypeError, ValueError):
        raise DataError('"data" is not a pickled array of two dimensions') from None
    if kind not in (b"u1", "u1"):
        raise DataError(f'"data" is an array of type {kind!r}, expected unsigned bytes')
    if type(count) is not int or width != 3072:
        raise DataError(f'"data" has shape {shape}, expected (n, 3072)')
    if not isinstance(raw, bytes) or len(raw) != count * 3072:
        raise DataError(f'"data" does not have the {count * 3072} bytes of its shape {shape}')
    return np.frombuffer(bytearray(raw), np.uint8).reshape((count, 3072), order="F" if fortran else "C")


class _CIFAR(ImageData):
    """Batches from a folder beside the archive, or from the archive itself."""

    shape = (3, 32, 32)
    archive: CanonicalFile
    train_batches: tuple[CanonicalFile, ...]
    test_batches: tuple[CanonicalFile, ...]
    label_key: str

    def __init__(self, root: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.root = root

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine, so that the others do not all download.
        if self._folder() is None:
            self.archive.find(self.root)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        batches = self.train_batches if train else self.test_batches
        folder = self._folder()
        parts = self._from_archive(batches) if folder is None else self._from_folder(folder, batches)
        images, labels = zip(*parts, strict=True)
        return torch.cat(images), torch.cat(labels)

    def _folder(self) -> Path | None:
        place = self.train_batches[0].place(self.root)
        return place.parent if place is not None and place.parent.is_dir() else None

    def _from_folder(self, folder: Path, batches: tuple[CanonicalFile, ...]) -> list[tuple[Tensor, Tensor]]:
        parts = []
        for batch in batches:
            path = folder / batch.name
            try:
                parts.append(read_batch(path.read_bytes(), self.label_key, self.classes))
            except (OSError, DataError) as error:
                problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
                advice = f"or remove {folder} to have {self.archive.name} read"
                raise DataError(f"{batch.corrupt(path, problem)}, {advice}") from None
            batch.warn_of_other_hash(path)
        return parts

    def _from_archive(self, batches: tuple[CanonicalFile, ...]) -> list[tuple[Tensor, Tensor]]:
        path = self.archive.find(self.root)
        names = [f"{Path(batch.folder).name}/{batch.name}" for batch in batches]
        found: dict[str, bytes] = {}
        try:
            with gzip.open(path) as file:
                with tarfile.open(fileobj=file, mode="r|") as archive:
                    for member in archive:
                        if member.name in names and member.isfile():
                            found[member.name] = archive.extractfile(member).read()  # type: ignore[union-attr]
                while file.read(2**20):  # to the end, where gzip has its checksum
                    pass
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise self.archive.corrupt(path, f"cannot be read: {' '.join(str(error).split())}") from None
        parts = []
        for name in names:
            try:
                if name not in found:
                    raise DataError("not in the archive")
                parts.append(read_batch(found.pop(name), self.label_key, self.classes))
            except DataError as error:
                raise self.archive.corrupt(path, f"{name}: {error}") from None
        self.archive.warn_of_other_hash(path)
        return parts


class CIFAR10(_CIFAR):
    """CIFAR-10: 50,000 training and 10,000 test photographs, 32 x 32 in colour, 10 classes.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; the "python version".
    `shift=4, flip=True` is the usual augmentation.

    The batches are read from `<root>/cifar-10/cifar-10-batches-py`; where that folder is not there, from
    `<root>/cifar-10/cifar-10-python.tar.gz`, which is not unpacked; where that is not there either, the
    archive is downloaded into pooch's cache and checked against its published md5. Files that are well-formed
    but have another md5 are used, with a warning; corrupt ones are an error, never silently replaced. A batch
    is a pickle: nothing that it names is run.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        options: see `ImageData`.

    Raises:
        DataError: a file is corrupt or cannot be had; one line that says which file, what is wrong, the md5
            it should have and what to do.
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


class CIFAR100(_CIFAR):
    """CIFAR-100: 50,000 training and 10,000 test photographs, 32 x 32 in colour, 100 classes (the fine labels).

    Like `CIFAR10` in everything else: its files are `<root>/cifar-100/cifar-100-python/train` and `test`, or
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
