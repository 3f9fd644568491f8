"""What all figures draw with."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.files import write_whole


def show(axis: Axes, image: Tensor) -> None:
    """An image `(channels, height, width)` in [0, 1], of one channel or three; of a stereo pair the left one."""
    image = image[:1] if len(image) == 2 else image
    pixels = image.movedim(0, -1).squeeze(-1).clamp(0, 1).cpu().numpy()
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=1)
    hide_ticks(axis)


def hide_ticks(axis: Axes) -> None:
    axis.set(xticks=[], yticks=[])


def write(figure: Figure, path: Path) -> Path:
    """Whole or not at all."""
    return write_whole(path, lambda unfinished: figure.savefig(unfinished, dpi=130))
