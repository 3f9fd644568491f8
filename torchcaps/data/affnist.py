"""affNIST's test set, from its MATLAB files."""

import io
import zipfile
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from torchcaps.data.expanded_mnist import SIZE, ExpandedMNIST
from torchcaps.data.files import DataError, own_folder
from torchcaps.data.matfile import check_images, check_labels, read_mat

# The test set, as one file or as 32 batches. Each can be in a zip archive of that name and ".zip".
ADDRESS = "http://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/"
TEST_FILES = {"test.mat": ["test.mat"], "test_batches": [f"{k}.mat" for k in range(1, 33)]}


class AffNIST(ExpandedMNIST):
    """Training and validation sets of `ExpandedMNIST`; the test set of affNIST: 320,000 images, 32 of each test digit.

    Source: T. Tieleman, affNIST, http://www.cs.toronto.edu/~tijmen/affNIST/; the transformed test set.

    It is read from `<root>/affnist`: from `test.mat`, `test.mat.zip`, the folder `test_batches` with `1.mat` to
    `32.mat`, or `test_batches.zip`, whichever exists first in this order. It is not downloaded, because it has no
    published hash.

    Args:
        root, options: see `ExpandedMNIST`.

    Raises:
        DataError: see `MNIST`; or the test set is missing or corrupt.
    """

    def prepare_data(self) -> None:
        super().prepare_data()
        self._find()  # fail now, not after the training

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        if train:
            return super().load(train)
        place, names = self._find()
        images, labels = zip(*(_read(place, name) for name in names), strict=True)
        return torch.cat(images), torch.cat(labels)

    def _find(self) -> tuple[Path, list[str]]:
        """Return the path of the test set, a file, a folder or an archive, and the names of its .mat files."""
        folder = own_folder(self.root, "affnist")
        if folder:
            for name, names in TEST_FILES.items():
                for place in (folder / name, folder / f"{name}.zip"):
                    if place.exists():
                        return place, names
        here = f"{folder}" if folder else "DIR/affnist and set TORCHCAPS_DATA=DIR"
        raise DataError(f"no test set of affNIST: put {ADDRESS}test.mat.zip or {ADDRESS}test_batches.zip at {here}")


def _read(place: Path, name: str) -> tuple[Tensor, Tensor]:
    """Return the images (n, 1, SIZE, SIZE) uint8 and the labels (n,) of one file of the test set."""
    try:
        with _open(place, name) as file:
            images, labels = read_mat(file, "affNISTdata.image", "affNISTdata.label_int")
        check_images(images, "image", (SIZE * SIZE,))  # an image is a column, row by row
        classes = check_labels(labels, "label_int", images.shape[1], range(10))
    except (OSError, DataError) as error:
        problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        where = place if place.suffix == ".mat" else place / name
        raise DataError(f"{where}: {problem}: replace the file with the one from {ADDRESS}") from None
    return torch.from_numpy(images.T.reshape(-1, 1, SIZE, SIZE)), classes


def _open(place: Path, name: str) -> IO[bytes]:
    if place.suffix != ".zip":
        return open(place / name if place.is_dir() else place, "rb")
    try:
        with zipfile.ZipFile(place) as archive:
            for member in archive.namelist():
                if member.rpartition("/")[2] == name:
                    return io.BytesIO(archive.read(member))
    except Exception as error:  # damaged bytes make zipfile raise many kinds of errors
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"truncated, or not a zip file ({reason})") from None
    raise DataError("is not in the archive")
