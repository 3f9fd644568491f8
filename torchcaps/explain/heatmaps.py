"""Where a routing pool looks: its coefficients over the image (Zhao & Huang 2019, Table 3)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from torchcaps.explain.pictures import hide_ticks, show, write
from torchcaps.nn import RoutingPool2d
from torchcaps.nn.modes import evaluating

PER_LINE = 10  # pictures, before a line of a figure is broken


def heatmaps(model: nn.Module, images: Tensor, name: str | None = None) -> Tensor:
    """How much each place of each image counts in a network's routing pool, relative to average pooling.

    The coefficients of each group of channels, divided by those of average pooling (with windows, both summed over the
    windows that a position is in), enlarged to the images' size (bilinear): 1 is what an average would take, 0 nothing.

    Args:
        model: any network with a `RoutingPool2d`; it is run as in evaluation, and left as it was.
        images: as the network takes them, `(batch, channels, height, width)`.
        name: of the pool, as in `model.named_modules()`; by default the last one.

    Returns:
        `(batch, groups, height, width)`.

    Raises:
        ValueError: the network has no such pool, or runs without it.

    Reference:
        Zhao & Huang 2019, section 4.2 and Table 3.
    """
    pool, coefficients, size = _coefficients(model, images, name)
    shares = _over_map(pool, coefficients, size)
    return F.interpolate(shares, size=images.shape[-2:], mode="bilinear", align_corners=False)


def entropies(model: nn.Module, images: Tensor, name: str | None = None) -> Tensor:
    r"""How evenly a network's routing pool takes its positions: :math:`-\sum_i c_i \log c_i`, in nats.

    From 0, one position, to the logarithm of their number, the average. Arguments are those of :func:`heatmaps`.

    Returns:
        `(batch, groups)`, or `(batch, groups, rows, columns)` of windows.
    """
    pool, coefficients, _ = _coefficients(model, images, name)
    window = (2, 3) if pool.kernel_size is None else (4, 5)
    return torch.special.entr(coefficients).sum(window)


@torch.no_grad()
def _coefficients(model: nn.Module, images: Tensor, name: str | None) -> tuple[RoutingPool2d, Tensor, tuple[int, int]]:
    """A pool, its coefficients on these images, and the size of the map that it pools."""
    pools = {key: module for key, module in model.named_modules() if isinstance(module, RoutingPool2d)}
    if not pools:
        raise ValueError(f"{type(model).__name__} has no RoutingPool2d: put one there with replace_pooling")
    if name is not None and name not in pools:
        raise ValueError(f"{type(model).__name__} has no RoutingPool2d named {name!r}; there are {', '.join(pools)}")
    pool = list(pools.values())[-1] if name is None else pools[name]
    seen: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(inputs[0] if inputs else named["x"])

    handle = pool.register_forward_pre_hook(see, with_kwargs=True)
    with evaluating(model):
        try:
            with torch.compiler.set_stance("force_eager"):  # compiled code that ran before knows of no new hook
                model(images)
        finally:
            handle.remove()
        if not seen:
            raise ValueError(f"{type(model).__name__} did not run its RoutingPool2d on these images")
        _, coefficients = pool(seen[-1], return_coefficients=True)
    return pool, coefficients, (seen[-1].shape[2], seen[-1].shape[3])


def _over_map(pool: RoutingPool2d, coefficients: Tensor, size: tuple[int, int]) -> Tensor:
    """Coefficients at each position of the map, relative to average pooling's: `(batch, groups, height, width)`."""
    if pool.kernel_size is None:
        return coefficients * math.prod(size)
    batch, groups, rows, columns = coefficients.shape[:4]

    def summed(windows: Tensor) -> Tensor:
        """`(n, rows, columns, kernel, kernel)` at the positions that they stand for, `(n, height, width)`."""
        assert pool.kernel_size is not None
        columns_first = windows.flatten(3).flatten(1, 2).transpose(1, 2)
        return F.fold(columns_first, size, pool.kernel_size, padding=pool.padding, stride=pool.stride).squeeze(1)

    # Where a window hangs over the edge it has fewer positions to average over.
    inside = F.unfold(coefficients.new_ones(1, 1, *size), pool.kernel_size, padding=pool.padding, stride=pool.stride)
    uniform = (inside / inside.sum(1, keepdim=True)).transpose(1, 2).reshape(1, rows, columns, *coefficients.shape[4:])
    found = summed(coefficients.flatten(0, 1)).unflatten(0, (batch, groups))
    return found / summed(uniform).clamp_min(1e-12)


def heatmaps_figure(model: nn.Module, images: Tensor, titles: Sequence[str] = (), name: str | None = None) -> Figure:
    """Images above their heatmaps, as in the paper's Table 3; of a single image, that of each group of channels too.

    Args:
        model, images, name: as for :func:`heatmaps`; images in [0, 1].
        titles: of the images.
    """
    maps = heatmaps(model, images, name)
    rows = [("mean of all groups", maps.mean(1))]
    if len(images) == 1 and maps.shape[1] > 1:
        rows += [(f"group {group}", maps[:, group]) for group in range(maps.shape[1])]
    # One image has its maps beside it, many have theirs below; lines are broken.
    lines, panels = (1, 1 + len(rows)) if len(images) == 1 else (2, len(images))
    shape = lines * math.ceil(panels / PER_LINE), min(panels, PER_LINE)
    figure = Figure(figsize=(1.3 * shape[1] + 1.2, 1.3 * shape[0] + 0.4), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)

    def place(line: int, panel: int) -> Axes:
        return grid[lines * (panel // PER_LINE) + line, panel % PER_LINE]

    shown = [values.cpu() for _, values in rows]
    range_ = min(float(values.min()) for values in shown), max(float(values.max()) for values in shown)
    for index, image in enumerate(images):
        show(place(0, index), image)
        if index < len(titles):
            place(0, index).set_title(titles[index], fontsize=8)
        for k, values in enumerate(shown):
            axis = place(0, 1 + k) if lines == 1 else place(1, index)
            heat = axis.imshow(values[index].numpy(), cmap="inferno", vmin=range_[0], vmax=range_[1])
            hide_ticks(axis)
            if lines == 1:
                axis.set_title(rows[k][0], fontsize=8)
    for axis in grid.flat:
        if not axis.images:
            axis.set_axis_off()
    bar = figure.colorbar(heat, ax=grid, shrink=0.9)
    bar.set_label("share, average = 1", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def write_heatmaps(model: nn.Module, files: Sequence[Path], shape: tuple[int, int, int], folder: Path) -> Path:
    """`heatmaps-of-pictures.png` in the folder: :func:`heatmaps_figure` of :func:`read_image` of each file."""
    images = torch.stack([read_image(path, shape) for path in files])
    figure = heatmaps_figure(model, images, [path.name for path in files])
    return write(figure, folder / "heatmaps-of-pictures.png")


def read_image(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """A picture from a file as an image `(channels, height, width)` in [0, 1], upright and resized to that shape.

    What is transparent becomes white.

    Raises:
        ValueError: the file cannot be read, or is no picture.
    """
    channels, height, width = shape
    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I;16"):  # which Pillow would cut off at 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            if upright.has_transparency_data:
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
            small = upright.convert("L" if channels == 1 else "RGB").resize((width, height))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise ValueError(f"{path} is not a picture that can be read{reason}: give a PNG or JPEG file") from None
    pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).movedim(-1, 0) / 255
