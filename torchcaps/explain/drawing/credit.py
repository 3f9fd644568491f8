"""Figure of credit: images, and where in them the classes take their input from, for each capsule layer."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.explain.axes import VERMILLION, color_bar, in_style, show, show_map
from torchcaps.explain.credit import credit
from torchcaps.explain.pixels import heat_of, places
from torchcaps.utils.arguments import FloatTensor, checked

PER_LINE = 10  # images; more continue below
CLASSES = 10  # of a single image


@checked
@in_style
def credit_figure(network: nn.Module, images: FloatTensor, labels: Tensor, names: Sequence[str] = ()) -> Figure:
    """Draw where in images the predicted class takes its input from, a row of maps for each capsule layer.

    A single image is drawn once, with a map for each class, or for the ten classes with the highest scores.
    :func:`torchcaps.explain.heat` says what a map's values are.

    Args:
        network: classifier of images; it is run in evaluation mode and left as it was.
        images: images as the network takes them, in [0, 1], `(batch, channels, height, width)`.
        labels: their labels, `(batch,)`.
        names: names of the classes.

    Raises:
        ValueError: there is no image, the network runs no capsule layer, or the children of none lie on a grid.
    """
    if not len(images):
        raise ValueError("expected one image or more, got none")
    found = credit(network, images)
    size = images.shape[2], images.shape[3]
    maps = heat_of(found, places(network, (images.shape[1], *size)), size)
    if not maps:
        raise ValueError(f"{type(network).__name__} has no capsule layer whose children lie on a grid: nothing to draw")
    scores = found.prediction.evidence
    if len(images) == 1:
        return _of_classes(images[0], int(labels[0]), scores[0], {name: x[0] for name, x in maps.items()}, names)
    predicted = scores.argmax(1)
    chosen = {name: x[torch.arange(len(x)), predicted] for name, x in maps.items()}
    return _of_images(images, labels.tolist(), predicted.tolist(), chosen, names)


def _of_images(
    images: Tensor, labels: list[int], predicted: list[int], maps: dict[str, Tensor], names: Sequence[str]
) -> Figure:
    """Draw each image above the maps of its predicted class, `(batch, height, width)` by layer."""
    columns, lines = min(PER_LINE, len(images)), 1 + len(maps)
    blocks = -(-len(images) // PER_LINE)
    figure = Figure(figsize=(max(1.2 * columns + 1.8, 6.5), 1.2 * blocks * lines + 0.3 * blocks + 0.6))
    grid = figure.subplots(blocks * lines, columns, squeeze=False)
    limits = _limits(list(maps.values()))
    for index, (image, label, guess) in enumerate(zip(images, labels, predicted, strict=True)):
        block, column = divmod(index, PER_LINE)
        axes = grid[lines * block : lines * (block + 1), column]
        show(axes[0], image)
        if label == guess:
            axes[0].set_title(_wrapped(_name(label, names)))
        else:
            axes[0].set_title(_wrapped(f"{_name(label, names)}, seen as {_name(guess, names)}"), color=VERMILLION)
        shown = [show_map(axis, x[index], limits) for axis, x in zip(axes[1:], maps.values(), strict=True)]
        if column == 0:
            _label(axes[1:], maps)
    _finish(figure, grid, shown[0], "Where the predicted class takes its input from: the brighter, the more")
    return figure


def _of_classes(image: Tensor, label: int, scores: Tensor, maps: dict[str, Tensor], names: Sequence[str]) -> Figure:
    """Draw an image beside the maps of the classes, `(classes, height, width)` by layer."""
    classes = scores.topk(min(CLASSES, len(scores))).indices.sort().values.tolist()
    figure = Figure(figsize=(max(1.2 * (1 + len(classes)) + 1.8, 7.5), 1.3 * len(maps) + 0.9))
    grid = figure.subplots(len(maps), 1 + len(classes), squeeze=False)
    limits = _limits([x[classes] for x in maps.values()])
    show(grid[0, 0], image)
    grid[0, 0].set_title(f"input:\n{_wrapped(_name(label, names))}")
    for axes, x in zip(grid, maps.values(), strict=True):
        shown = [show_map(axis, x[k], limits) for axis, k in zip(axes[1:], classes, strict=True)]
    for axis, k in zip(grid[0, 1:], classes, strict=True):
        bold = "bold" if k == scores.argmax() else "normal"
        axis.set_title(f"{_wrapped(_name(k, names))}\nscore {scores[k]:.2f}", fontweight=bold)
    _label(grid[:, 1], maps)
    title = "Where each class (bold: the predicted one) takes its input from: the brighter, the more"
    _finish(figure, grid, shown[0], title)
    return figure


def _limits(maps: Sequence[Tensor]) -> tuple[float, float]:
    """Ends of the scale; the brightest one of a hundred pixels is beyond it, so that the others are not black."""
    return 0.0, float(np.quantile(np.concatenate([x.cpu().numpy().ravel() for x in maps]), 0.99))


def _label(axes: Iterable[Axes], maps: dict[str, Tensor]) -> None:
    for axis, name in zip(axes, maps, strict=True):
        axis.set_ylabel(name.replace(".", ".\n"), fontsize=8)


def _finish(figure: Figure, grid: np.ndarray, shown: Any, title: str) -> None:
    for axis in grid.flat:
        if not axis.images:
            axis.set_axis_off()
    color_bar(
        figure, shown, grid, "share of a place,\n1 if all had the same", shrink=min(0.9, 3 / len(grid)), extend="max"
    )
    figure.suptitle(title)


def _wrapped(title: str) -> str:
    return textwrap.fill(title, 15)  # as wide as a panel


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else f"class {label}"
