"""Where in an image the capsules of a grid look, maps of their shares over its pixels, and their figure."""

import itertools
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.explain.credits import Credit, LayerCredit, children_of, connected, credit
from torchcaps.explain.material import FigureKind, Material
from torchcaps.explain.recording import Recording, record
from torchcaps.explain.shares import Shares
from torchcaps.measures.axes import VERMILLION, Row, panels_figure
from torchcaps.measures.predicting import kind_of_scores
from torchcaps.utils.arguments import FloatTensor, checked

NOISE = 4  # images of noise by which a network is probed
CLASSES = 10  # in the figure of a single image
WIDTH = 15  # characters that are as wide as a panel


class Places(NamedTuple):
    """Which pixels the capsules of a grid see.

    The capsule at row r and column c sees a window of pixels around (offset + step * (r, c)).

    Fields:
        offset, step: in pixels, down and across; offset is the center of the first capsule's window.
        window: height and width of a window in pixels, as far as it lies in the image.
    """

    offset: tuple[float, float]
    step: tuple[float, float]
    window: tuple[float, float]

    def box(self, row: int, column: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of a capsule's window in an image of this size, from 0 to 1."""
        sides = zip(self.offset, self.step, self.window, (row, column), size, strict=True)
        (top, bottom), (left, right) = (
            (max(0.0, (o + s * i - w / 2 + 0.5) / n), min(1.0, (o + s * i + w / 2 + 0.5) / n))
            for o, s, w, i, n in sides
        )
        return left, top, right, bottom


@checked
def places(network: nn.Module, image_shape: tuple[int, int, int]) -> dict[str, Places]:
    """Find out which pixels the children of each capsule layer see, where they lie on a grid.

    For the layer next to the image, a pixel is seen if its gradient is not zero. Windows of equal size are where the
    gradients say. If they differ, because they reach beyond the image, the grid is laid evenly over it. For the layers
    above, the windows of the layers below are put together. Behind a layer whose parents see all children, a position
    has no place in the image.

    Args:
        network: network of images; it is run in evaluation mode and left as it was.
        image_shape: `(channels, height, width)`.

    Returns:
        Places by the layers' names; none if the network ran no capsule layer.
    """
    generator = torch.Generator().manual_seed(0)
    like = next(network.parameters(), torch.empty(0))
    noise = torch.rand(NOISE, *image_shape, generator=generator).to(like).requires_grad_()
    with torch.enable_grad():
        _, runs = record(network, noise)
        if not runs:
            return {}
        chain = connected(runs)
        grid = _on_grid(*chain[0])
        if grid is None:
            return {}
        sides = [_side(grid, noise, axis) for axis in (0, 1)]
    offset, step, window = zip(*sides, strict=True)
    by_layer = {chain[0][0].name: Places(offset, step, window)}
    for (run, own), (above, _) in itertools.pairwise(chain):
        if own.windows is None:
            break
        by_layer[above.name] = _composed(by_layer[run.name], own.windows)
    return by_layer


def _composed(seen: Places, windows: tuple[tuple[int, int], ...]) -> Places:
    """Return the places of parents whose children have the places `seen`."""
    sides = []
    for offset, step, size, kernel, dilation, padding, stride in zip(*seen, *windows, strict=True):
        reach = dilation * (kernel - 1)
        sides.append((offset + step * (reach / 2 - padding), step * stride, size + step * reach))
    return Places(*zip(*sides, strict=True))


def _on_grid(run: Recording, own: Shares) -> Tensor | None:
    """Return the children's poses as `(batch, height, width, numbers)`, or None if they are not on a grid."""
    if len(own.children) != 3:
        return None
    types, height, width = own.children
    poses = children_of(run, own)
    if own.groups:
        return poses.movedim(1, -1)
    return poses.reshape(len(poses), types, height, width, -1).movedim(1, 3).flatten(3)


def _side(grid: Tensor, noise: Tensor, axis: int) -> tuple[float, float, float]:
    """Return offset, step and window along one side."""
    count, size = grid.shape[1 + axis], noise.shape[2 + axis]
    weights = torch.rand(grid.shape[-1], generator=torch.Generator().manual_seed(0)).to(grid)
    spans: list[tuple[int, int]] = []
    for index in range(count):
        line = (grid.select(1 + axis, index) * weights).sum()
        (gradient,) = torch.autograd.grad(line, noise, retain_graph=True)
        seen = gradient.abs().sum((0, 1, 3 - axis)).nonzero().flatten()
        if len(seen):
            spans.append((int(seen[0]), int(seen[-1])))
    widths = {last - first + 1 for first, last in spans}
    if len(spans) == count and len(widths) == 1 and widths != {size}:
        centers = [(first + last) / 2 for first, last in spans]
        step = (centers[-1] - centers[0]) / (count - 1) if count > 1 else float(size)
        return centers[0], step, float(widths.pop())
    step = size / count
    return (step - 1) / 2, step, float(max(widths, default=size))


@checked
def heat(network: nn.Module, images: FloatTensor) -> dict[str, Tensor]:
    """Compute where in images each class takes its input from, for every capsule layer whose children are on a grid.

    A map is the :func:`torchcaps.explain.credit` of the layer's children, summed over their types, as a multiple of the
    share that the position would have if all children contributed alike, and interpolated between the centers of
    windows. Without this division, maps of convolutions show how many windows a position lies in. Pixels beyond the
    outermost centers have the value of the nearest one.

    Args:
        network: classifier of images; it is run in evaluation mode and left as it was.
        images: `(batch, channels, height, width)`, as the network takes them.

    Returns:
        Maps `(batch, classes, height, width)` by the layers' names, from the layer next to the image on.

    Raises:
        ValueError: the network runs no capsule layer.
    """
    credits = credit(network, images)
    channels, height, width = images.shape[1:]
    return heat_of(credits, places(network, (channels, height, width)), (height, width))


@checked
def heat_of(credits: Credit, seen: dict[str, Places], size: tuple[int, int]) -> dict[str, Tensor]:
    """Return the maps of :func:`heat` for a credit that is there already, over images of this size."""
    return {layer.name: _over_pixels(layer, seen[layer.name], size) for layer in credits.layers if layer.name in seen}


def _over_pixels(layer: LayerCredit, seen: Places, size: tuple[int, int]) -> Tensor:
    shares, even = layer.shares.sum(2).float(), layer.even.sum(2).float()
    grid = shares.shape[2], shares.shape[3]
    shares = torch.where(even > 0, shares / even.clamp_min(1e-30), 0)
    lines = []
    for offset, step, count, pixels in zip(seen.offset, seen.step, grid, size, strict=True):
        position = (torch.arange(pixels, device=shares.device) - offset) / step
        lines.append(2 * position / max(1, count - 1) - 1 if count > 1 else torch.zeros_like(position))
    rows, columns = torch.meshgrid(*lines, indexing="ij")
    at = torch.stack([columns, rows], -1).expand(len(shares), -1, -1, -1)
    return F.grid_sample(shares, at, mode="bilinear", padding_mode="border", align_corners=True)


@checked
def credit_figure(network: nn.Module, images: FloatTensor, labels: Tensor, names: Sequence[str] = ()) -> Figure:
    """Draw where in images the predicted class takes its input from, a row of maps for each capsule layer.

    A single image is drawn once, with a map for each class, or for the ten classes with the highest scores.
    :func:`heat` says what a map's values are.

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
    credits = credit(network, images)
    size = images.shape[2], images.shape[3]
    maps = heat_of(credits, places(network, (images.shape[1], *size)), size)
    if not maps:
        raise ValueError(f"{type(network).__name__} has no capsule layer whose children lie on a grid: nothing to draw")
    scores = credits.prediction.evidence
    called = [textwrap.fill(names[k] if k < len(names) else f"class {k}", WIDTH) for k in range(scores.shape[1])]
    layers = {name.replace(".", ".\n"): x.cpu() for name, x in maps.items()}
    if len(images) == 1:
        classes = scores[0].topk(min(CLASSES, len(called))).indices.sort().values.tolist()
        word = "score" if kind_of_scores(credits.prediction) == "logits" else "activation"
        titles = [f"input:\n{called[int(labels[0])]}", *(f"{called[k]}\n{scores[0, k]:.2f}" for k in classes)]
        bold = [{"fontweight": "bold" if k == scores[0].argmax() else "normal"} for k in classes]
        shown = {name: list(x[0, classes]) for name, x in layers.items()}
        rows = [Row([None, *panels], label=name) for name, panels in shown.items()]
        rows[0] = Row([images[0], *rows[0].panels[1:]], titles, [{}, *bold], rows[0].label)
        title = f"Where each class takes its input from: the brighter, the more\nBelow each name: its {word}"
    else:
        predicted = scores.argmax(1).cpu()
        pairs = list(zip(labels.tolist(), predicted.tolist(), strict=True))
        titles = [called[a] if a == b else textwrap.fill(f"{called[a]}, seen as {called[b]}", WIDTH) for a, b in pairs]
        wrong = [{} if a == b else {"color": VERMILLION} for a, b in pairs]
        shown = {name: list(x[torch.arange(len(x)), predicted]) for name, x in layers.items()}
        rows = [Row(list(images), titles, wrong), *(Row(panels, label=name) for name, panels in shown.items())]
        title = "Where the predicted class takes its input from: the brighter, the more"
    # The brightest one of a hundred pixels is beyond the scale, so that the others are not black.
    pixels = torch.cat([panel.flatten() for panels in shown.values() for panel in panels])
    most = float(np.quantile(pixels.numpy(), 0.99))
    return panels_figure(
        rows,
        title,
        per_line=1 + CLASSES if len(images) == 1 else 10,
        limits=(0.0, most),
        bar="share of a place,\n1 if all had the same",
        extend="max",
    )


def _fits(material: Material) -> bool:
    samples = material.samples
    return samples.are_images_of_one_class and bool(places(material.network, samples.image_shape))


def _draw(material: Material) -> Figure:
    return credit_figure(material.network, *material.samples.images_of_each(), material.samples.names)


CREDIT = FigureKind("credit", "where each class takes its input from", _fits, _draw)
