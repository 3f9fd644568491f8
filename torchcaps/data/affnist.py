"""affNIST's test set, from its MATLAB file."""

import io
import zipfile
from pathlib import Path

import torch
from scipy.io import loadmat
from torch import Tensor

from torchcaps.data.expanded_mnist import SIZE, ExpandedMNIST
from torchcaps.data.files import DataError, check_regular, own_folder
from torchcaps.data.published import checked_images, checked_labels, unreadable

ADDRESS = "http://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/test.mat.zip"


class AffNIST(ExpandedMNIST):
    """Training and validation sets of `ExpandedMNIST`; the test set of affNIST: 320,000 images, 32 of each test digit.

    Source: T. Tieleman, affNIST, http://www.cs.toronto.edu/~tijmen/affNIST/; the transformed test set.

    It is read from the archive `<root>/affnist/test.mat.zip`, which is not unpacked. It is not downloaded, because it
    has no published hash; the archive's own checksum is checked.

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
        path = self._find()
        try:
            with zipfile.ZipFile(path) as archive:
                (name,) = (name for name in archive.namelist() if Path(name).name == "test.mat")
                content = loadmat(io.BytesIO(archive.read(name)))["affNISTdata"][0, 0]
            images = torch.from_numpy(content["image"]).T.reshape(-1, 1, SIZE, SIZE)  # from columns, row by row
            labels = checked_labels(content["label_int"].ravel(), len(images), self.classes)
            return checked_images(images, self.shape), labels
        except Exception as error:  # damaged bytes make zipfile and SciPy raise many kinds of errors
            raise unreadable(path, error, f"replace the file with the one from {ADDRESS}") from None

    def _find(self) -> Path:
        folder = own_folder(self.root, "affnist")
        path = folder / "test.mat.zip" if folder else None
        if path and path.exists():
            check_regular(path, f"replace it with {ADDRESS}")
            return path
        place = f"{folder}" if folder else "DIR/affnist and set TORCHCAPS_DATA=DIR"
        raise DataError(f"no test set of affNIST: put {ADDRESS} at {place}")
