"""Figures of what a training came to: its curves, which classes are confused, and samples that are taken for others."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from torchcaps.measures.axes import MARKERS, Row, color_bar, in_style, panels_figure
from torchcaps.utils.arguments import checked

MOST_NUMBERED = 25  # classes whose counts are written into the confusion matrix
MOST_PANELS = 12  # numbers that are drawn


@checked
@in_style
def curves_figure(
    curves: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], best: float | None = None
) -> Figure:
    """Draw a panel per quantity, with a line per part.

    Args:
        curves: by quantity, such as "loss", and part, such as "training": epochs and values.
        best: epoch of the weights that were kept, or None.
    """
    figure = Figure(figsize=(4.6 * len(curves), 3.4))
    for axis, (quantity, lines) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for (part, (epochs, values)), marker in zip(lines.items(), MARKERS, strict=False):
            axis.plot(epochs, values, marker=marker, markersize=3, label=part)
        if best is not None:
            axis.axvline(best, color="0.5", linewidth=1, linestyle=":", label="kept weights")
        axis.set(xlabel="epoch", ylabel=quantity)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend()
    figure.suptitle(f"How {' and '.join(curves)} changed during training")
    return figure


@checked
@in_style
def confusion_figure(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw a confusion matrix: shares of each true class as shades, and counts as numbers.

    Args:
        counts: number of samples of each class (row) that were taken for each class (column).
        names: names of the classes.
    """
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    side = min(max(3.5, 0.45 * len(names) + 1.8), 14)
    figure = Figure(figsize=(side + 0.9, side))
    axis = figure.subplots()
    image = axis.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    color_bar(figure, image, [axis], "% of the class", shrink=0.8)
    ticks = range(len(names))
    short = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
    size = 9 if len(names) <= MOST_NUMBERED else 5
    turned = max(map(len, short)) > 3
    axis.set_xticks(ticks, short, fontsize=size, rotation=45 * turned, ha="right" if turned else "center")
    axis.set_yticks(ticks, short, fontsize=size)
    axis.set(xlabel="predicted", ylabel="true")
    axis.spines[:].set_visible(True)
    axis.set_title("Which classes are taken for which", fontsize=11)
    if len(names) <= MOST_NUMBERED:
        for row, column in zip(*counts.nonzero(), strict=True):
            color = "white" if shares[row, column] > 0.5 else "black"
            axis.text(column, row, str(int(counts[row, column])), ha="center", va="center", color=color, fontsize=8)
    return figure


@checked
def mistakes_figure(images: Sequence[Tensor], titles: Sequence[str], title: str) -> Figure:
    """Draw images in a grid, each under its title.

    Args:
        images: each `(channels, height, width)` in [0, 1].
        titles: a title for each of them, perhaps of several lines.
        title: title of the figure.
    """
    rows = [Row(images, titles, [{"fontsize": 8}] * len(titles))]
    return panels_figure(rows, title, 1.7, 6)


@checked
@in_style
def numbers_figure(numbers: Tensor, predicted: Tensor, names: Sequence[str]) -> Figure:
    """Draw a panel per number: each sample at its true and its predicted value, and the line on which both are equal.

    Args:
        numbers, predicted: `(n, numbers)`.
        names: names of the numbers, of which the first 12 are drawn.
    """
    names = names[:MOST_PANELS]
    columns = min(len(names), 4)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.2 * lines + 0.4))
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for k, (name, axis) in enumerate(zip(names, axes, strict=False)):
        true, of_network = numbers[:, k].tolist(), predicted[:, k].tolist()
        axis.axline((numbers[0, k].item(),) * 2, slope=1, color="0.5", linewidth=1, linestyle=":")
        axis.scatter(true, of_network, s=8, alpha=0.5, linewidths=0)
        axis.set(title=name, xlabel="true", ylabel="predicted")
    for axis in list(axes):
        axis.set_axis_off()  # of a last line that is not full
    figure.suptitle("What was predicted of each test sample")
    return figure
