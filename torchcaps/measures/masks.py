"""How well a class of each pixel is predicted."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.capsules import IGNORED
from torchcaps.utils.arguments import Count, checked


class OfClass(NamedTuple):
    r"""How well the pixels of one class are predicted.

    With P the pixels that are predicted to be of the class, and T those that are,

    .. math:: \text{Dice} = \frac{2 |P \cap T|}{|P| + |T|}, \quad \text{IoU} = \frac{|P \cap T|}{|P \cup T|}

    Fields:
        dice, iou: of all pixels together; NaN if none is of the class and none is predicted to be.
        of_images: the mean of the Dice coefficients of the images in which the class is or is predicted.
        share: the share of all pixels that are of the class.
        images: number of images with such pixels.
    """

    dice: float
    iou: float
    of_images: float
    share: float
    images: int


@checked
def overlaps(predicted: Tensor, masks: Tensor, classes: Count) -> Tensor:
    """Count pixels of each class: `(batch, 3, classes)` int64, those in the masks, those predicted, and those in both.

    Args:
        predicted, masks: class of each pixel, `(batch, *sides)` int64; -100 in a mask for a pixel that does not count.
        classes: number of classes.
    """
    masks, predicted = masks.flatten(1), predicted.flatten(1)
    counts, true = (masks != IGNORED).long(), masks.clamp_min(0)
    empty = counts.new_zeros(len(masks), classes)
    pairs = (true, counts), (predicted, counts), (true, counts * (predicted == true))
    return torch.stack([empty.scatter_add(1, of, ones) for of, ones in pairs], 1)


@checked
def dice_of(counts: Tensor) -> Tensor:
    """Return the Dice coefficient of each class, `(..., classes)`, from numbers of pixels `(..., 3, classes)`, see
    `overlaps`; NaN for a class without pixels."""
    true, predicted, both = counts.double().unbind(-2)
    return 2 * both / (true + predicted)


@checked
def of_each_class(counts: Tensor) -> list[OfClass]:
    """Return how well each class is predicted.

    Args:
        counts: numbers of pixels of each image, `(n, 3, classes)`, see `overlaps`.
    """
    together, of_images = counts.sum(0), dice_of(counts)
    true, predicted, both = together.double()
    columns = (
        dice_of(together),
        both / (true + predicted - both),
        of_images.nanmean(0),
        true / true.sum(),
        (counts[:, 0] > 0).sum(0),
    )
    return [OfClass(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if all are."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
