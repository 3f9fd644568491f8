"""Overlapping digits of MNIST among fragments of others, with a class of each pixel."""

from typing import Annotated, Any

import numpy as np

from torchcaps.data.masks import MaskSet, Scenes
from torchcaps.data.mnist import MNIST
from torchcaps.utils.arguments import Count, CountOrZero, Range, checked

FRAGMENT = 8  # side of a fragment in pixels, as Mnih et al. (2014) have it
INK = 96  # of 255: a pixel of a digit is at least so bright in MNIST
HELD_OUT = 6  # one training digit in so many is for the validation


class SegmentedDigits(Scenes, MNIST):
    """Segmented digits: digits of MNIST at random places, over each other and over fragments of other digits, with a
    class of each pixel: 0 for the background, 1 more than the digit otherwise.

    Modelled after MultiMNIST (S. Sabour, N. Frosst and G. E. Hinton, Dynamic Routing Between Capsules, NeurIPS 2017)
    and cluttered MNIST (V. Mnih, N. Heess, A. Graves and K. Kavukcuoglu, Recurrent Models of Visual Attention, NeurIPS
    2014). The paper of neither has masks: do not compare numbers with theirs.

    A digit may be cut off by the edge, by 7 pixels at most. Digits and fragments have brightnesses of their own. Where
    digits overlap the upper one counts. Fragments are windows of 8 x 8 out of other digits, lie below the digits, and
    are background. Validation images are made of the last sixth of the training digits, training images of the others.

    Args:
        root: see `Published`. The files are MNIST's.
        size: height and width of an image.
        digits: digits in an image.
        fragments: fragments in an image.
        options: options of `Published` and `Scenes`.

    Raises:
        ValueError: an argument is out of range.
        DataError: see `MNIST`.
    """

    classes = 11

    @checked
    def __init__(
        self,
        root: str | None = None,
        size: Annotated[int, Range(28)] = 64,
        digits: Count = 4,
        fragments: CountOrZero = 12,
        **options: Any,
    ) -> None:
        self.shape = (1, size, size)
        super().__init__(root=root, **options)
        if self.distort:
            raise ValueError("distort changes images and not their masks: leave it out")
        self.digits, self.fragments = digits, fragments
        self._drawn: tuple[np.ndarray, np.ndarray]  # digits that images are made of, and their labels

    @property
    def names(self) -> list[str]:
        return ["background", *map(str, range(10))]

    def _set(self, stage: str) -> MaskSet:
        images, labels = (x.numpy() for x in self.load(train=stage != "test"))
        last = len(labels) - len(labels) // HELD_OUT
        part = {"fit": slice(None, last), "validate": slice(last, None), "test": slice(None)}[stage]
        self._drawn = images[part, 0], labels[part]
        return super()._set(stage)

    def _scene(self, stage: str, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self._drawn
        size, margin = self.shape[1], 28
        # Drawn on a larger canvas, from which the middle is cut.
        canvas = np.zeros((size + 2 * margin,) * 2)
        mask = np.zeros(canvas.shape, np.uint8)
        for kind in [*["fragment"] * self.fragments, *["digit"] * self.digits]:
            which = random.integers(len(labels))
            digit = images[which]
            if kind == "fragment":
                top, left = random.integers(4, 28 - 4 - FRAGMENT, 2)  # where digits have ink
                digit = digit[top : top + FRAGMENT, left : left + FRAGMENT]
            side = len(digit)
            row, column = margin + random.integers(-side // 4, size - side + side // 4 + 1, 2)
            place = slice(row, row + side), slice(column, column + side)
            canvas[place] += digit / 255 * (255 * random.uniform(0.5, 1) - canvas[place])
            if kind == "digit":
                mask[place][digit >= INK] = 1 + labels[which]
        middle = slice(margin, margin + size), slice(margin, margin + size)
        return canvas[middle].round().astype(np.uint8), mask[middle]
