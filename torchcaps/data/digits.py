"""Handwritten digits from scikit-learn: a small real data set that needs no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.images import ImageData
from torchcaps.data.stratified import stratified_split

STORED = "datasets/data/digits.csv.gz"  # in the package scikit-learn


class Digits(ImageData):
    """UCI handwritten digits, from scikit-learn: 1,797 images of 8 x 8, gray, 10 classes.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998;
    `sklearn.datasets.load_digits` has its test part. The 17 gray levels 0..16 are scaled to 0..255.

    1,437 images are for training and 360 for the test, a fixed stratified split of 80 % and 20 %. scikit-learn does not
    say who wrote which digit, so both parts have the same writers. The accuracy does not hold for unseen writers.

    Args:
        options: see `ImageData`.
    """

    classes = 10
    shape = (1, 8, 8)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        rows = _rows()
        labels = rows[:, -1].astype(np.int64)
        parts = stratified_split(labels, held_out=360, seed=0)
        part = parts[0] if train else parts[1]
        images = np.round(rows[part, :-1] * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
        return torch.from_numpy(images), torch.from_numpy(labels[part])


def _rows() -> np.ndarray:
    """Return the digits as scikit-learn stores them: 64 gray levels and a label in each row."""
    spec = find_spec("sklearn")
    path = Path(str(spec and spec.origin)).parent / STORED
    if path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # takes longer to import than the rest of this package

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])
