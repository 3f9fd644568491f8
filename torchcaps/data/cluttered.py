"""Digits at random places among fragments of other digits: what belongs together must be found first."""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from torchcaps.data.digits import Digits
from torchcaps.data.expanded_mnist import windows
from torchcaps.data.images import ImageSet
from torchcaps.data.labeled import LabeledSet
from torchcaps.utils.arguments import CountOrZero, checked

SIZE = 16  # pixels
MARGIN = (SIZE - 8) // 2
FRAGMENT = 5  # side of a fragment in pixels


def with_fragments(images: Tensor, count: int, generator: Generator | None = None) -> Tensor:
    """Lay square windows out of random images of the batch (n, 1, h, w) over each image: the lighter pixel stays."""
    side, device = torch.arange(images.shape[-1], device=images.device), images.device
    cluttered = images
    for _ in range(count):
        others = images[torch.randperm(len(images), generator=generator, device=device)]
        places = (2, len(images), 1)
        first = torch.randint(0, len(side) - FRAGMENT + 1, places, generator=generator, device=device)
        rows, columns = (side >= first) & (side < first + FRAGMENT)
        inside = rows[:, None, :, None] & columns[:, None, None, :]
        cluttered = torch.where(inside, torch.maximum(cluttered, others), cluttered)
    return cluttered


class ClutteredDigits(Digits):
    """Cluttered digits: each digit of `Digits` at a random place of 16 x 16 pixels, among fragments of other digits.

    Source of the task: V. Mnih, N. Heess, A. Graves and K. Kavukcuoglu, Recurrent Models of Visual Attention, NeurIPS
    2014, which has digits of MNIST among windows of 8 x 8 pixels. Here the windows have 5 x 5 pixels, each at the same
    place as in the image that it is from.

    The place of the 8 x 8 digit is uniform over all places of the image. A training image gets a new place and other
    fragments every time, from other images of its batch. Each validation and test image is always the same.

    Args:
        fragments: number of fragments in an image.
        options: options of `ImageData` but `shift`.
    """

    shape = (1, SIZE, SIZE)

    @checked
    def __init__(self, fragments: CountOrZero = 4, **options: Any) -> None:
        super().__init__(shift=MARGIN, **options)
        self.fragments = fragments

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        digits, labels = super().load(train)
        centered = pad(digits, (MARGIN,) * 4)
        return centered if train else self._always_the_same(centered), labels

    @checked
    def augment(self, images: Tensor) -> Tensor:
        return with_fragments(super().augment(images), self.fragments)

    def _for_validation(self, images: LabeledSet) -> ImageSet:
        assert isinstance(images, ImageSet)
        return ImageSet(self._always_the_same(images.images), images.labels)

    def _always_the_same(self, centered: Tensor) -> Tensor:
        random = Generator().manual_seed(0)
        down, right = torch.randint(-MARGIN, MARGIN + 1, (2, len(centered)), generator=random)
        return with_fragments(windows(centered, -down, -right, SIZE), self.fragments, random)
