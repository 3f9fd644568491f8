"""SVHN, format 2, read from its published MATLAB files."""

from typing import Any

import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile, DataError
from torchcaps.data.images import ImageData
from torchcaps.data.matfile import check_images, check_labels, read_mat
from torchcaps.utils.arguments import checked

ADDRESS = "http://ufldl.stanford.edu/housenumbers/"


def _file(name: str, md5: str) -> CanonicalFile:
    return CanonicalFile("svhn", name, md5, (ADDRESS + name,))


class SVHN(ImageData):
    """SVHN: 73,257 training and 26,032 test photographs of digits in house numbers, 32 x 32, in color, 10 classes.

    Source: Y. Netzer, T. Wang, A. Coates, A. Bissacco, B. Wu and A. Y. Ng, Reading Digits in Natural Images with
    Unsupervised Feature Learning, NIPS Workshop on Deep Learning and Unsupervised Feature Learning, 2011; the
    cropped digits, "format 2". Class k is the digit k: the files' label 10 stands for 0.

    `train_32x32.mat`, `test_32x32.mat` and `extra_32x32.mat` are read from `<root>/svhn`. Missing files are downloaded
    once into pooch's cache and checked against their published md5. A well-formed local file with another md5 is used,
    with a warning. A corrupt one is an error and is never replaced.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        extra: also train on the 531,131 easier images of `extra_32x32.mat`. They take 1.6 GB of memory, and twice that
            while loading.
        options: see `ImageData`.

    Raises:
        DataError: a file is corrupt or cannot be downloaded. The one line says which file, what is wrong, the md5 it
            should have, and what to do.
    """

    classes = 10
    shape = (3, 32, 32)
    train_file = _file("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373")
    test_file = _file("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3")
    extra_file = _file("extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7")

    @checked
    def __init__(self, root: str | None = None, extra: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.root, self.extra = root, extra

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine: the others wait instead of downloading too.
        for file in (*self._files(train=True), *self._files(train=False)):
            file.find(self.root)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        images, labels = zip(*map(self._read, self._files(train)), strict=True)
        return torch.cat(images), torch.cat(labels)

    def _files(self, train: bool) -> tuple[CanonicalFile, ...]:
        if not train:
            return (self.test_file,)
        return (self.train_file, self.extra_file) if self.extra else (self.train_file,)

    def _read(self, file: CanonicalFile) -> tuple[Tensor, Tensor]:
        path = file.find(self.root)
        try:
            with path.open("rb") as opened:
                images, labels = read_mat(opened, "X", "y")
            check_images(images, "X", (32, 32, 3))  # row, column, color
            numbers = check_labels(labels, "y", images.shape[-1], range(1, 11))
        except (OSError, DataError) as error:
            problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise file.corrupt(path, problem) from None
        file.warn_of_other_hash(path)
        return torch.from_numpy(images.transpose(3, 2, 0, 1)), numbers % 10
