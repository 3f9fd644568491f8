"""What a network that segments makes of images: masks, and which class the capsules at each position vote for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image
from torch import Tensor, nn

from torchcaps.capsules import IGNORED
from torchcaps.explain.material import FigureKind, Material
from torchcaps.explain.recording import record
from torchcaps.measures.axes import COLORS, Row, in_style, panels_figure
from torchcaps.measures.masks import dice_of, overlaps
from torchcaps.nn import CapsuleMap
from torchcaps.utils.arguments import FloatTensor, checked

MOST_IMAGES, MOST_CLASSES = 6, 6  # that are drawn
SHADE = 0.6  # of a class over its image


@torch.no_grad()
@checked
def segmented(network: nn.Module, images: FloatTensor) -> tuple[Tensor, Tensor | None]:
    """Segment images, and look at the last layer that routes.

    Args:
        network: network that returns a Segmentation; it is run in evaluation mode and left as it was.
        images: `(batch, channels, height, width)`.

    Returns:
        Probabilities of the classes, `(batch, classes, height, width)`, and, at each position, the coefficients between
        the child types and each class, the mean over the child types, in the same shape. These are None if no
        :class:`torchcaps.CapsuleMap` gives the classes.
    """
    parts = [_segmented(network, image) for image in images.split(1)]  # one by one: all votes are in memory
    probabilities, coefficients = zip(*parts, strict=True)
    known = [x for x in coefficients if x is not None]
    return torch.cat(probabilities), torch.cat(known) if known else None


def _segmented(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    output, layers = record(network, images)
    probabilities = output.probabilities.detach().float().cpu()
    last = layers[-1] if layers else None
    if last is None or not isinstance(last.layer, CapsuleMap) or last.layer.out_capsules != probabilities.shape[1]:
        return probabilities, None
    votes: Any = last.last.votes  # type: ignore[union-attr]  # a CapsuleMap routes
    coefficients = votes.coefficients().mean(1).unflatten(0, votes.votes.positions).movedim(-1, 1)
    height, width = images.shape[2:]
    return probabilities, coefficients[..., :height, :width].detach().float().cpu()


@checked
@in_style
def masks_figure(
    network: nn.Module,
    images: FloatTensor,
    masks: Tensor | None,
    names: Sequence[str],
    maps: bool = False,
    edges: Tensor | None = None,
) -> Figure:
    """Draw images, their masks and what a network predicts, in columns of one image each.

    Args:
        network: network that returns a Segmentation.
        images: `(n, channels, height, width)` in [0, 1], of which the first 6 are drawn.
        masks: class of each pixel, `(n, height, width)`, or None.
        names: names of the classes. The first one is not colored.
        maps: also draw a map of each class, 6 at most: the coefficients of `segmented`, or the probabilities.
        edges: which pixels are an added edge, `(n, height, width)` bool, or None.
    """
    images = images[:MOST_IMAGES]
    probabilities, coefficients = segmented(network, images)
    names = [*names, *(f"class {k}" for k in range(len(names), probabilities.shape[1]))]
    predicted = probabilities.argmax(1)
    if edges is not None:
        predicted = predicted.masked_fill(edges[:MOST_IMAGES], IGNORED)
    rows = [Row(list(images), label="image")]
    titles: list[str] = []
    drawn = [predicted]
    if masks is not None:
        masks = masks[:MOST_IMAGES].cpu()
        rows.append(Row(over(images, masks), label="mask"))
        dice = dice_of(overlaps(predicted, masks, len(names))).nanmean(1).tolist()
        titles = [f"Dice {value:.2f}" for value in dice]
        predicted = predicted.masked_fill(masks == IGNORED, IGNORED)
        drawn = [predicted, masks]
    rows.append(Row(over(images, predicted), titles, label="prediction"))
    counts = count_classes(drawn, len(names))
    bar = ""
    if maps:
        what, values = ("probability", probabilities) if coefficients is None else ("coefficients", coefficients)
        rows += [Row(list(values[:, k]), label=f"{what}:\n{names[k]}") for k in classes_with_maps(counts)]
        bar = what
    figure = panels_figure(rows, "What the network predicts of each pixel", 1.5, MOST_IMAGES, bar=bar)
    patches = [Patch(color=color_of(k), label=name) for k, name in enumerate(names) if k and counts[k]]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 6))
    return figure


@checked
def overlay(picture: Image.Image, mask: np.ndarray) -> Image.Image:
    """Return a picture with the color of each pixel's class laid over.

    Args:
        picture: gray or in color.
        mask: class of each pixel, `(height, width)`.
    """
    image = torch.from_numpy(np.array(picture.convert("RGB"))).movedim(-1, 0) / 255
    (drawn,) = over(image[None], torch.from_numpy(mask)[None].long())
    return Image.fromarray((255 * drawn).round().byte().movedim(0, -1).numpy())


def count_classes(masks: Sequence[Tensor], classes: int) -> Tensor:
    """Return how many pixels of the masks are of each class, without those that do not count."""
    return torch.cat([mask[mask != IGNORED] for mask in masks]).bincount(minlength=classes)


def classes_with_maps(counts: Tensor) -> list[int]:
    """Return the classes with the most pixels, 6 at most, in the order of the classes."""
    chosen: list[int] = counts.argsort(descending=True, stable=True)[:MOST_CLASSES].sort().values.tolist()
    return chosen


def color_of(label: int) -> str:
    """Return the color of a class in pictures."""
    return COLORS[(label - 1) % len(COLORS)]


def over(images: Tensor, masks: Tensor) -> list[Tensor]:
    """Return images, gray, with the color of each pixel's class laid over; pixels that do not count are white."""
    drawn = []
    for image, mask in zip(images.float().cpu(), masks, strict=True):
        picture = image.mean(0, keepdim=True).clamp(0, 1).repeat(3, 1, 1)
        for label in mask[mask > 0].unique().tolist():
            color = torch.tensor([int(color_of(label)[i : i + 2], 16) / 255 for i in (1, 3, 5)])
            inside = mask == label
            picture[:, inside] = (1 - SHADE) * picture[:, inside] + SHADE * color[:, None]
        picture[:, mask == IGNORED] = 1.0
        drawn.append(picture)
    return drawn


def _gives_masks(material: Material) -> bool:
    return material.samples.target == "masks"


def _draw(material: Material) -> Figure:
    samples = material.samples
    some = list(range(min(len(samples), MOST_IMAGES)))
    masks = None if samples.labels is None else samples.labels[some]
    return masks_figure(material.network, samples.images(some), masks, samples.names, True, samples.edges)


MASKS = FigureKind(
    "masks",
    "Images, their masks, and the class that the network predicts of each pixel. The maps show, for each class, the "
    "coefficients between the capsules at a position and the class, or its probability where the network does not "
    "route to the classes.",
    _gives_masks,
    _draw,
)
