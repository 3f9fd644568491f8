"""Handwritten digits from scikit-learn: a small real data set that needs no download."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from torchcaps.data.images import ImageData


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
        digits = load_digits()
        parts = train_test_split(np.arange(len(digits.target)), test_size=0.2, stratify=digits.target, random_state=0)
        part = parts[0] if train else parts[1]
        images = np.round(digits.images[part] * 255 / 16).astype(np.uint8)
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(digits.target[part]).long()
