"""CIFAR-10 and CIFAR-100, read from their published pickles without running any code in them."""

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
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line

# The globals in the pickle of an array, in NumPy 1 and 2.
ARRAY_NAMES = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
}


class _Record:
    """Stand-in for every object that a pickle names or constructs. It records the arguments and runs nothing."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def __call__(self, *arguments: Any) -> "_Record":
        return _Record(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Unpickles a batch without running anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            # Python 3 pickles bytes for Python 2 as a call of this function.
            return lambda text, encoding: text.encode("latin-1")
        if f"{module}.{name}" not in ARRAY_NAMES:
            raise DataError(f"is not a CIFAR batch: it wants to run {f'{module}.{name}'[:80]!r}")
        return _Record(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Never:
        raise DataError("is not a CIFAR batch: it refers to an object outside of it")


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
        DataError: the content does not have this format. The message does not name the file.
    """
    try:
        batch = _Reader(io.BytesIO(raw), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # damaged bytes make pickle raise many kinds of errors
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
    """Return the array of bytes (n, 3072) that a record describes."""
    try:
        # The arguments of ndarray.__setstate__ and of dtype; see numpy.ndarray.__reduce__.
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
    """Base of the CIFAR sets. Batches come from a folder beside the archive, or from the archive itself."""

    shape = (3, 32, 32)
    archive: CanonicalFile
    train_batches: tuple[CanonicalFile, ...]
    test_batches: tuple[CanonicalFile, ...]
    label_key: str

    @checked
    def __init__(self, root: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.root = root

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine: the others wait instead of downloading too.
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
                while file.read(2**20):  # to the end: gzip's checksum is there
                    pass
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise self.archive.corrupt(path, f"cannot be read: {one_line(error)}") from None
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
    """CIFAR-10: 50,000 training and 10,000 test photographs, 32 x 32, in color, 10 classes.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; the "python version".
    `shift=4, flip=True` is the usual augmentation.

    The batches are read from the folder `<root>/cifar-10/cifar-10-batches-py`, or else from the archive
    `<root>/cifar-10/cifar-10-python.tar.gz`, which is not unpacked. If neither exists, the archive is downloaded once
    into pooch's cache and checked against its published md5. A well-formed local file with another md5 is used, with a
    warning. A corrupt one is an error and is never replaced. The batches are pickles; no code in them is run.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        options: see `ImageData`.

    Raises:
        DataError: a file is corrupt or cannot be downloaded. The one line says which file, what is wrong, the md5 it
            should have, and what to do.
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
