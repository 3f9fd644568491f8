"""SVHN, format 2, read from its published MATLAB files."""

from collections.abc import Iterable
from pathlib import Path

import torch
from scipy.io import loadmat
from torch import Tensor

from torchcaps.data.files import CanonicalFile
from torchcaps.data.images import ImageData
from torchcaps.data.published import Published, checked_images, checked_labels

ADDRESS = "http://ufldl.stanford.edu/housenumbers/"


def _file(name: str, md5: str) -> CanonicalFile:
    return CanonicalFile("svhn", name, md5, (ADDRESS + name,))


class SVHN(Published, ImageData):
    """SVHN: 73,257 training and 26,032 test photographs of digits in house numbers, 32 x 32, in color, 10 classes.

    Source: Y. Netzer, T. Wang, A. Coates, A. Bissacco, B. Wu and A. Y. Ng, Reading Digits in Natural Images with
    Unsupervised Feature Learning, NIPS Workshop on Deep Learning and Unsupervised Feature Learning, 2011; the
    cropped digits, "format 2". Class k is the digit k: the files' label 10 stands for 0.

    `train_32x32.mat` and `test_32x32.mat` are read from `<root>/svhn`; the extra images are not.

    Args:
        root: see `Published`.
        options: see `Published` and `ImageData`.

    Raises:
        DataError: see `Published`.
    """

    classes = 10
    shape = (3, 32, 32)
    train_file = _file("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373")
    test_file = _file("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3")

    def files(self) -> Iterable[CanonicalFile]:
        return self.train_file, self.test_file

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        return self.read_file(self.train_file if train else self.test_file, self._read)

    def _read(self, path: Path) -> tuple[Tensor, Tensor]:
        content = loadmat(path, variable_names=("X", "y"))
        images = torch.from_numpy(content["X"].transpose(3, 2, 0, 1)).contiguous()  # from row, column, color, image
        digits = torch.from_numpy(content["y"].ravel())
        labels = checked_labels(torch.where(digits == 10, 0, digits), len(images), self.classes)
        return checked_images(images, self.shape), labels
