"""The small real set that needs no download."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from torchcaps.data.images import ImageData


class Digits(ImageData):
    """UCI handwritten digits, as embedded in scikit-learn: 1,797 images of 8 x 8, 10 classes.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998; `sklearn.datasets.load_digits` carries the test part of it. The 17 grey levels 0..16
    become 0..255.

    1,437 images train and 360 test: a stratified split of 80 and 20 per cent that never changes. The embedded
    set does not say who wrote which digit, so the same writers are in both parts: the accuracy is not one on
    writers never seen.
    """

    classes = 10
    shape = (1, 8, 8)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        digits = load_digits()
        parts = train_test_split(np.arange(len(digits.target)), test_size=0.2, stratify=digits.target, random_state=0)
        part = parts[0] if train else parts[1]
        images = np.round(digits.images[part] * 255 / 16).astype(np.uint8)
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(digits.target[part]).long()
