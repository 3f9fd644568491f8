"""Base of the data sets that are published as files with known hashes, and checks of what the files hold."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile, DataError
from torchcaps.data.labeled import LabeledData
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line

Content = TypeVar("Content")


class Published(LabeledData):
    """Base of the published data sets, beside `ImageData` or `TextData`. A subclass implements `files`.

    Files are read from `<root>/<folder of the data set>`. Missing ones are downloaded once into pooch's cache. A file
    with another hash than the published one is an error, and is never replaced.

    Args:
        root: folder of all data sets; by default the environment variable TORCHCAPS_DATA.
        check_hashes: whether files must have their published hashes. With False they are read as they are, which the
            values of a run record. No code in a file is run in either case.
        options: see the other base class.

    Raises:
        DataError: a file is wrong or cannot be downloaded. The one line says which file, what is wrong, the hash that
            it should have, and what to do.
    """

    @checked
    def __init__(self, root: str | None = None, check_hashes: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.root, self.check_hashes = root, check_hashes

    def files(self) -> Iterable[CanonicalFile]:
        """Return the files that the training and the test read."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine: the others wait instead of downloading too.
        for file in self.files():
            file.find(self.root)

    def read_file(self, file: CanonicalFile, reader: Callable[[Path], Content]) -> Content:
        """Find a published file, check its hash, and return what `reader` returns for its path."""
        path = file.find(self.root)
        try:
            if self.check_hashes:
                file.check(path)
            return reader(path)
        except DataError:
            raise
        except Exception as error:  # damaged bytes make readers raise many kinds of errors
            raise unreadable(path, error, f"the {file.algorithm} should be {file.digest}: {file.advice}") from None


def unreadable(path: Path, error: Exception, advice: str) -> DataError:
    """Return the one line for a file that a reader refuses with an error."""
    if isinstance(error, PermissionError | FileNotFoundError | MemoryError):  # another file would not help
        return DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'the memory is full'})")
    return DataError(f"{path}: cannot be read ({type(error).__name__}: {one_line(error)[:160]}); {advice}")


def checked_images(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the images. Raise a ValueError if they are not one or more of this shape, of bytes."""
    if images.dtype != torch.uint8 or images.shape[1:] != shape or not len(images):
        raise ValueError(
            f"it holds {tuple(images.shape)} of {images.dtype}, expected one or more images {shape} of torch.uint8"
        )
    return images


def checked_labels(labels: Any, count: int, classes: int) -> Tensor:
    """Return labels as int64 (count,). Raise a ValueError if they are not so many, or beyond the classes."""
    labels = torch.as_tensor(labels)
    if labels.shape != (count,) or not torch.isin(labels, torch.arange(classes)).all():
        raise ValueError(f"it holds labels {tuple(labels.shape)}, expected {count} from 0 to {classes - 1}")
    return labels.long()
