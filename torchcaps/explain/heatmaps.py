"""Where a routing pool looks: its coefficients over the image, and how even they are (Zhao & Huang 2019, Table 3)."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.explain.axes import Row, panels_figure
from torchcaps.explain.recording import record
from torchcaps.nn import RoutingPool2d
from torchcaps.utils.arguments import FloatTensor, checked


@checked
def heatmaps(model: nn.Module, images: FloatTensor, name: str | None = None) -> Tensor:
    """Compute how much each place of each image counts in a network's routing pool, relative to average pooling.

    A heatmap is the coefficients of a group of channels divided by those of average pooling, enlarged to the size of
    the image (bilinear): 1 is the share that an average would take, 0 is none. In a pool with windows, both are summed
    over the windows that contain a position.

    Args:
        model: network with a `RoutingPool2d`; it is run in evaluation mode and left as it was.
        images: images as the network takes them, `(batch, channels, height, width)`.
        name: name of the pool in `model.named_modules()`; by default the last pool.

    Returns:
        `(batch, groups, height, width)`.

    Raises:
        ValueError: the network has no such pool, or does not run it.

    Reference:
        Zhao & Huang 2019, section 4.2 and Table 3.
    """
    pool, coefficients, size = _coefficients(model, images, name)
    shares = _over_map(pool, coefficients, size)
    return F.interpolate(shares, size=images.shape[-2:], mode="bilinear", align_corners=False)


@checked
def entropies(model: nn.Module, images: FloatTensor, name: str | None = None) -> Tensor:
    r"""Compute how evenly a network's routing pool takes its positions: :math:`-\sum_i c_i \log c_i`, in nats.

    The entropy is 0 if one position takes all, and the logarithm of their number for an average. Arguments are those
    of :func:`heatmaps`.

    Returns:
        `(batch, groups)`; for a pool with windows `(batch, groups, rows, columns)`.
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
    _, runs = record(model, images)
    pooled = next((run.children for run in runs if run.layer is pool), None)
    if pooled is None:
        raise ValueError(f"{type(model).__name__} did not run its RoutingPool2d on these images")
    _, coefficients = pool(pooled, return_coefficients=True)
    return pool, coefficients, (pooled.shape[2], pooled.shape[3])


def _over_map(pool: RoutingPool2d, coefficients: Tensor, size: tuple[int, int]) -> Tensor:
    """Coefficients at each position of the map, relative to average pooling's: `(batch, groups, height, width)`."""
    if pool.kernel_size is None:
        return coefficients * math.prod(size)
    batch, groups, rows, columns = coefficients.shape[:4]

    def summed(windows: Tensor) -> Tensor:
        """Sum windows `(n, rows, columns, kernel, kernel)` over the positions they cover: `(n, height, width)`."""
        assert pool.kernel_size is not None
        columns_first = windows.flatten(3).flatten(1, 2).transpose(1, 2)
        return F.fold(columns_first, size, pool.kernel_size, padding=pool.padding, stride=pool.stride).squeeze(1)

    # A window that hangs over the edge has fewer positions to average over.
    inside = F.unfold(coefficients.new_ones(1, 1, *size), pool.kernel_size, padding=pool.padding, stride=pool.stride)
    uniform = (inside / inside.sum(1, keepdim=True)).transpose(1, 2).reshape(1, rows, columns, *coefficients.shape[4:])
    found = summed(coefficients.flatten(0, 1)).unflatten(0, (batch, groups))
    return found / summed(uniform).clamp_min(1e-12)


@checked
def heatmaps_figure(
    model: nn.Module, images: FloatTensor, titles: Sequence[str] = (), name: str | None = None
) -> Figure:
    """Draw images above their heatmaps, the mean of all groups, as in the paper's Table 3.

    A single image has its heatmap beside it, and that of each group of channels too.

    Args:
        model, images, name: as for :func:`heatmaps`; images are in [0, 1].
        titles: titles of the images.
    """
    maps = heatmaps(model, images, name).cpu()
    means = maps.mean(1)
    rows = [Row(list(images), titles), Row(list(means))]
    limits = float(means.min()), float(means.max())
    if len(images) == 1:
        groups = maps[0] if maps.shape[1] > 1 else maps[0, :0]
        limits = min(limits[0], float(maps.min())), max(limits[1], float(maps.max()))
        names = [f"group {group}" for group in range(len(groups))]
        rows = [Row([images[0], means[0], *groups], [titles[0] if titles else "", "all groups", *names])]
    return panels_figure(
        rows,
        "What the pool takes from each place of an image: the brighter, the more",
        limits=limits,
        bar="share of a place,\n1 in an average",
    )
