"""Expanded MNIST: digits that move over a larger background."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.data.images import ImageSet
from torchcaps.data.labeled import LabeledSet
from torchcaps.data.mnist import MNIST
from torchcaps.data.streams import EXPANDED_TEST, EXPANDED_VALIDATE, draws, stream
from torchcaps.utils.arguments import checked

SIZE = 40  # pixels
MARGIN = (SIZE - 28) // 2


def windows(images: Tensor, top: Tensor, left: Tensor, size: int = SIZE) -> Tensor:
    """Return a window of each image (n, 1, h, w): (n, 1, size, size).

    Window k begins at row `top[k]` and column `left[k]`. Images are periodic: beyond an edge follows the opposite one.
    """
    window = torch.arange(size)
    rows, columns = (top[:, None] + window) % images.shape[2], (left[:, None] + window) % images.shape[3]
    return images[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None]].unsqueeze(1)


def moved(images: Tensor, number: int) -> Tensor:
    """Move each digit at the center of (n, 1, SIZE, SIZE) to its own place, drawn from the stream with this number."""
    drawn = draws(stream(0, number), torch.arange(len(images)))
    down, right = (drawn[:, :2] % (2 * MARGIN + 1) - MARGIN).unbind(1)
    return windows(images, -down, -right)


class ExpandedMNIST(MNIST):
    """Expanded MNIST: each digit of MNIST at a random place on a black background of 40 x 40.

    Source: S. Sabour, N. Frosst and G. E. Hinton, Dynamic Routing Between Capsules, NeurIPS 2017, section 5.2. There it
    is the training set of networks that are tested on affNIST.

    The place of the 28 x 28 image is uniform over all places on the background. A training image gets a new place every
    time: the set has it at the center, and `augment` shifts it by up to 6 pixels each way. Each validation and test
    image has a fixed place.

    Args:
        root: see `Published`. The files are MNIST's.
        options: options of `Published` and `ImageData` but `shift`.

    Raises:
        DataError: see `MNIST`.
    """

    shape = (1, SIZE, SIZE)

    @checked
    def __init__(self, root: str | None = None, **options: Any) -> None:
        super().__init__(root, shift=MARGIN, **options)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        digits, labels = super().load(train)
        return self._centered(digits) if train else self._for_test(digits), labels

    def _for_validation(self, images: LabeledSet) -> ImageSet:
        assert isinstance(images, ImageSet)
        return ImageSet(moved(images.images, EXPANDED_VALIDATE), images.labels)

    def _for_test(self, digits: Tensor) -> Tensor:
        """Return the test images for the test digits (n, 1, 28, 28) uint8."""
        return moved(self._centered(digits), EXPANDED_TEST)

    def _centered(self, digits: Tensor) -> Tensor:
        return pad(digits, (MARGIN,) * 4)
