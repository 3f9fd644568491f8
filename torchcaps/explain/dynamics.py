"""How votes and parents come to agree in training (Li et al. 2018, Figure 2)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.linalg import vector_norm

from torchcaps.capsules import Capsules
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.modes import evaluating
from torchcaps.ops import Votes, at_least_float32
from torchcaps.routing import Iteration

PER_LINE = 6  # panels, before a row of a figure is broken
BLUE = "tab:blue"


class RoutingDynamics(NamedTuple):
    """How well the votes of a layer agree with its parents, and how long they are; in float64, on the CPU.

    Fields:
        edges: of the bins, from -1 to 1, `(bins + 1,)`.
        share: of all votes, those whose cosine is in each bin, in percent, `(bins,)`.
        length: their mean length, `(bins,)`; nan where there are none.
        zeros: of all votes, those without a cosine, in percent: the vote or the parent is zero. With `share` it sums
            to 100.
    """

    edges: Tensor
    share: Tensor
    length: Tensor
    zeros: float


Panel = tuple[str, RoutingDynamics]


def capsule_layers(network: nn.Module) -> list[str]:
    """The names of the layers that route, as in `network.named_modules()`.

    Raises:
        ValueError: there are none.
    """
    names = [name for name, module in network.named_modules() if isinstance(module, CapsuleLayer)]
    if not names:
        raise ValueError(f"{type(network).__name__} has no capsule layer: nothing in it routes votes")
    return names


@torch.no_grad()
def routing_dynamics(
    network: nn.Module, layer: str, batches: Iterable[Tensor | Sequence[Tensor]], bins: int = 20
) -> RoutingDynamics:
    r"""How the votes of a capsule layer are distributed by their agreement with the parents that they lead to.

    Of all samples, children i and parents j, with poses flattened, the share and the mean :math:`|V_{ij}|` of those
    whose

    .. math:: \cos(v_j, V_{ij}) = \frac{v_j \cdot V_{ij}}{|v_j| \, |V_{ij}|}

    is in each bin. In a convolution every window is a sample. All children count alike, whatever their scores, but
    those with a gate of 0 (padding) not at all. A layer whose network runs it several times, or in a concurrent stack,
    is seen as it is in the last of its iterations that ran. Votes are taken a block at a time, and never stored.

    Args:
        network: it is run as in evaluation, and left as it was.
        layer: the name of a `CapsuleLayer` in `network.named_modules()`; see :func:`capsule_layers`.
        batches: images as the network takes them, or tuples of images and whatever else, as from a `DataLoader`.
        bins: of equal width; a cosine on an edge belongs to the bin above it, and 1 to the last.

    Raises:
        ValueError: there is no such layer, the network runs without it, there is no vote, or some are not finite.

    Reference:
        Li et al. 2018, section 2.2 and Figure 2.
    """
    routed = _find(network, layer)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)
    counts, lengths = torch.zeros(2, bins + 1, dtype=torch.float64)  # the last of each: of what has no cosine
    for batch in batches:
        votes, parents = _routed(network, routed, layer, batch if isinstance(batch, Tensor) else batch[0])
        for places, of_votes in _places(votes, parents, edges):
            counts += places.bincount(minlength=bins + 1).cpu()
            lengths += places.bincount(of_votes.double(), minlength=bins + 1).cpu()
        if not (lengths.isfinite().all() and parents.poses.isfinite().all()):
            raise ValueError(f"layer {layer!r} has votes or parents that are not finite: look at the training's loss")
    total = counts.sum()
    if total == 0:
        raise ValueError(f"layer {layer!r} has no vote in these batches: no image, or no child that is present")
    share = 100 * counts / total
    return RoutingDynamics(edges, share[:bins], (lengths / counts)[:bins], float(share[bins]))


def _find(network: nn.Module, name: str) -> CapsuleLayer:
    names = capsule_layers(network)
    found = dict(network.named_modules(remove_duplicate=False)).get(name)
    if not isinstance(found, CapsuleLayer):
        raise ValueError(f"{type(network).__name__} has no capsule layer {name!r}; there are {', '.join(names)}")
    return found


def _routed(network: nn.Module, layer: CapsuleLayer, name: str, images: Tensor) -> tuple[Votes, Capsules]:
    """The votes and the parents of a layer when the network sees these images, in the last iteration that runs."""
    last: list[Iteration] = []

    def watch(iteration: Iteration) -> None:
        last[:] = [iteration]

    # Nothing is to be compiled again for the sake of the watcher.
    with evaluating(network), torch.compiler.set_stance("force_eager"), layer.routing.watched(watch):
        network(images)
    if not last:
        raise ValueError(f"{type(network).__name__} did not run its layer {name!r} on these images")
    return last[0].votes, last[0].parents


def _places(votes: Votes, parents: Capsules, edges: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The bin of each vote, from 0, and the length of each, a block at a time. What has no cosine comes after all."""
    # Off the grid, if there is one: a sample's parents, as its votes have them.
    poses = at_least_float32(parents.poses).flatten(-len(votes.pose)).movedim(1, -2).flatten(0, -3)
    sizes = vector_norm(poses, dim=-1, keepdim=True)
    directions = poses / sizes
    inner = edges[1:-1].to(poses)  # rounding may lead beyond -1 and 1
    for samples, block, gates in votes.blocks():
        lengths = block.square().sum(-1).sqrt()  # along strides, where vector_norm is slow
        cosines = (block * directions[samples].unsqueeze(1)).sum(-1) / lengths
        places = torch.bucketize(cosines, inner.to(cosines.dtype), right=True)
        places = torch.where((lengths == 0) | (sizes[samples].mT == 0), len(edges) - 1, places)
        if gates is None:
            yield places.flatten(), lengths.flatten()
        else:
            yield places[gates > 0].flatten(), lengths[gates > 0].flatten()


def routing_dynamics_figure(panels: Sequence[Panel] | Sequence[Sequence[Panel]], names: Sequence[str] = ()) -> Figure:
    """Shares as grey bars and mean lengths as a blue line, over the cosine, as in the paper's Figure 2.

    Args:
        panels: a title, e.g. "after epoch 20", and what :func:`routing_dynamics` found then; or rows of these, e.g. one
            per layer. The panels of a row have the same axes.
        names: of the rows.

    Raises:
        ValueError: there are no panels.

    Reference:
        Li et al. 2018, Figure 2.
    """
    if not panels or not all(panels):
        raise ValueError("expected a title and its RoutingDynamics, or rows of these, got none")
    rows = cast(Sequence[Sequence[Panel]], [panels] if isinstance(panels[0][0], str) else panels)
    lines = [(row, first) for row in range(len(rows)) for first in range(0, len(rows[row]), PER_LINE)]
    columns = min(PER_LINE, max(map(len, rows)))
    figure = Figure(figsize=(1.9 * columns + 1.6, 1.9 * len(lines) + 0.9), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False)
    for axes, (row, first) in zip(grid, lines, strict=True):
        limits = _limit([x.share for _, x in rows[row]]), _limit([x.length for _, x in rows[row]])
        shown = rows[row][first : first + PER_LINE]
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        for column, (axis, (title, dynamics)) in enumerate(zip(axes, shown, strict=False)):
            right = _draw(axis, title, dynamics, limits)
            if column == 0:
                name = f"{names[row]}\n" if row < len(names) else ""
                axis.set_ylabel(f"{name}share, %", fontsize=8)
            else:
                axis.tick_params(left=False, labelleft=False)
            if column == len(shown) - 1:
                right.set_ylabel("mean length", fontsize=8, color=BLUE)
                right.set_in_layout(column == columns - 1)  # beside a shorter row there is room
            else:
                right.tick_params(right=False, labelright=False)
    figure.supxlabel("cosine of a vote and its parent", fontsize=8)
    handles = [grid[0, 0].containers[0], right.lines[0]]
    labels = ["share of the votes", "their mean length"]
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    return figure


def _limit(values: Sequence[Tensor]) -> float:
    """From 0 to there an axis shows all of these; some may be nan."""
    return 1.05 * float(torch.cat(list(values)).nan_to_num().max()) or 1.0


def _draw(axis: Axes, title: str, dynamics: RoutingDynamics, limits: tuple[float, float]) -> Axes:
    """A panel; its right axis."""
    widths = dynamics.edges.diff()
    centres = dynamics.edges[:-1] + widths / 2
    axis.bar(centres.numpy(), dynamics.share.numpy(), widths.numpy(), color="0.7", edgecolor="white", linewidth=0.4)
    axis.set(xlim=(-1, 1), ylim=(0, limits[0]))
    axis.set_xticks([-1, 0, 1])
    right = axis.twinx()
    right.plot(centres.numpy(), dynamics.length.numpy(), color=BLUE, linewidth=1.2, marker=".", markersize=3)
    right.set_ylim(0, limits[1])
    axis.tick_params(labelsize=7)
    right.tick_params(labelsize=7, colors=BLUE)
    right.yaxis.get_offset_text().set_fontsize(7)
    left_out = f"\n{dynamics.zeros:.3g} % zero, left out" if dynamics.zeros else ""
    axis.set_title(title + left_out, fontsize=8)
    return right
