"""Where a routing pool looks: its coefficients over the image (Zhao & Huang 2019, Table 3)."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.explain.material import FigureKind, Material
from torchcaps.explain.recording import record
from torchcaps.explain.shares import shares_of
from torchcaps.measures.axes import Row, panels_figure
from torchcaps.nn import RoutingPool2d
from torchcaps.utils.arguments import FloatTensor, checked


@torch.no_grad()
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
    pools = {key: module for key, module in model.named_modules() if isinstance(module, RoutingPool2d)}
    if not pools:
        raise ValueError(f"{type(model).__name__} has no RoutingPool2d: put one there with replace_pooling")
    if name is not None and name not in pools:
        raise ValueError(f"{type(model).__name__} has no RoutingPool2d named {name!r}; there are {', '.join(pools)}")
    pool = list(pools.values())[-1] if name is None else pools[name]
    _, runs = record(model, images)
    run = next((run for run in runs if run.layer is pool), None)
    if run is None or run.last is None:
        raise ValueError(f"{type(model).__name__} did not run its RoutingPool2d on these images")
    coefficients = run.last.votes.coefficients()
    shares = shares_of(run)
    own = shares._replace(table=coefficients.reshape(shares.table.shape))
    whole = coefficients.new_ones(len(images), 1, *own.parents)
    maps = own.down(whole) / own.evenly().down(whole).clamp_min(1e-12)
    return F.interpolate(maps.squeeze(1), size=images.shape[-2:], mode="bilinear", align_corners=False)


@checked
def heatmaps_figure(
    model: nn.Module, images: FloatTensor, titles: Sequence[str] = (), name: str | None = None
) -> Figure:
    """Draw images above their heatmaps, the mean of all groups, as in Table 3 of Zhao & Huang 2019.

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


def _has_pool(network: nn.Module) -> bool:
    return any(isinstance(module, RoutingPool2d) for module in network.modules())


def _fits(material: Material) -> bool:
    return material.samples.are_images_of_one_class and _has_pool(material.network)


def _fits_pictures(material: Material) -> bool:
    samples = material.samples
    return len(samples) > 0 and samples.are_images and samples.labels is None and _has_pool(material.network)


def _draw_pictures(material: Material) -> Figure:
    samples = material.samples
    return heatmaps_figure(material.network, samples.images(range(len(samples))), samples.titles)


def _draw(material: Material, max_images: int | None = None) -> Figure:
    images, labels = material.samples.images_of_each()
    names = [material.samples.names[label] for label in labels.tolist()]
    return heatmaps_figure(material.network, images[:max_images], names[:max_images])


CAPTION = "where the routing pool looks"
HEATMAPS_OF_PICTURES = FigureKind("heatmaps-of-pictures", CAPTION, _fits_pictures, _draw_pictures)
HEATMAPS = FigureKind("heatmaps", CAPTION, _fits, _draw)
HEATMAPS_OF_GROUPS = FigureKind("heatmaps-of-groups", CAPTION, _fits, partial(_draw, max_images=1))
