"""Helpers of all figures: show an image, hide ticks, write a file."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.files import write_whole


def show(axis: Axes, image: Tensor) -> None:
    """Draw an image `(channels, height, width)` in [0, 1], gray or color; two channels are a stereo pair, whose left
    image is drawn."""
    image = image[:1] if len(image) == 2 else image
    pixels = image.movedim(0, -1).squeeze(-1).clamp(0, 1).cpu().numpy()
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=1)
    hide_ticks(axis)


def hide_ticks(axis: Axes) -> None:
    """Draw neither ticks nor their labels."""
    axis.set(xticks=[], yticks=[])


def write(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG; the file appears only when it is complete. Return its path."""
    return write_whole(path, lambda unfinished: figure.savefig(unfinished, dpi=130))
