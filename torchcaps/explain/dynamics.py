"""Routing dynamics: how well votes and parents agree, to follow over training, and their figure (Li et al. 2018,
Figure 2)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.linalg import vector_norm

from torchcaps.capsules import Capsules
from torchcaps.explain.material import FigureKind, Material
from torchcaps.explain.recording import record
from torchcaps.explain.samples import STATISTICS
from torchcaps.measures.axes import BLUE, in_style
from torchcaps.measures.predicting import inputs_of
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.ops import Votes, at_least_float32
from torchcaps.utils.arguments import Count, checked

PER_LINE = 6  # panels of the figure; longer rows continue on the next line


class RoutingDynamics(NamedTuple):
    """Histogram of the cosines between a layer's votes and its parents, and the votes' lengths; float64 on the CPU.

    Fields:
        edges: bin edges from -1 to 1, `(bins + 1,)`.
        share: percentage of all votes whose cosine is in each bin, `(bins,)`.
        length: mean length of the votes in each bin, `(bins,)`; nan in an empty bin.
        zeros: percentage of votes without a cosine, because the vote or its parent is zero. It and `share` sum to 100.
    """

    edges: Tensor
    share: Tensor
    length: Tensor
    zeros: float


@checked
def capsule_layers(network: nn.Module) -> list[str]:
    """Return the names of the capsule layers of a network, as in `network.named_modules()`."""
    return [name for name, module in network.named_modules() if isinstance(module, CapsuleLayer)]


@torch.no_grad()
@checked
def routing_dynamics(network: nn.Module, layer: str, batches: Iterable[Any], bins: Count = 20) -> RoutingDynamics:
    r"""Compute how the votes of a capsule layer are distributed by their agreement with their parents.

    All votes of all samples are sorted into bins by the cosine between the vote for parent j and that parent, with
    poses flattened:

    .. math:: \cos(v_j, V_{ij}) = \frac{v_j \cdot V_{ij}}{|v_j| \, |V_{ij}|}

    Each bin gets its share of the votes and their mean length :math:`|V_{ij}|`. In a convolution every window is a
    sample. Children count alike whatever their scores, but those with a gate of 0 (padding) do not count. If the
    network runs the layer several times, or in a concurrent stack, its last iteration counts. Votes are computed a
    block at a time and never stored.

    Args:
        network: network that contains the layer; it is run in evaluation mode and left as it was.
        layer: name of a `CapsuleLayer` in `network.named_modules()`; see :func:`capsule_layers`.
        batches: batches of inputs, or tuples that begin with inputs, as from a `DataLoader`. Inputs are a tensor, or
            the arguments of the network in a tuple.
        bins: number of bins of equal width. A cosine on an edge belongs to the bin above it, and 1 to the last bin.

    Raises:
        TypeError: a batch is something else.
        ValueError: there is no such layer, it routes the poses of its children and no votes, the network does not run
            it, there is no vote, or votes are not finite.

    Reference:
        Li et al. 2018, section 2.2 and Figure 2.
    """
    name, routed = type(network).__name__, dict(network.named_modules(remove_duplicate=False)).get(layer)
    if not isinstance(routed, CapsuleLayer):
        there = ", ".join(capsule_layers(network)) or "none"
        raise ValueError(f"{name} has no capsule layer {layer!r}; there are {there}")
    if routed.routing.needs_poses:
        raise ValueError(f"layer {layer!r} routes poses, and its parents are no sums of votes: there is no agreement")
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)
    counts, lengths = torch.zeros(2, bins + 1, dtype=torch.float64)  # the last entries: votes without a cosine
    for batch in batches:
        _, runs = record(network, inputs_of(batch))
        last = next((run.last for run in runs if run.layer is routed), None)
        if last is None:
            raise ValueError(f"{name} did not run its layer {layer!r} on these inputs")
        parents = last.parents
        for places, vote_lengths in _places(last.votes.votes, parents, edges):
            counts += places.bincount(minlength=bins + 1).cpu()
            lengths += places.bincount(vote_lengths.double(), minlength=bins + 1).cpu()
        if not (lengths.isfinite().all() and parents.poses.isfinite().all()):
            raise ValueError(f"layer {layer!r} has votes or parents that are not finite: look at the training's loss")
    total = counts.sum()
    if total == 0:
        raise ValueError(f"layer {layer!r} has no vote in these batches: no image, or no child that is present")
    share = 100 * counts / total
    return RoutingDynamics(edges, share[:bins], (lengths / counts)[:bins], float(share[bins]))


def poses_as_votes(parents: Capsules, votes: Votes) -> Tensor:
    """Return the poses of parents `(batch, parents, features)`. Positions of a grid are samples, as in the votes."""
    return at_least_float32(parents.poses).flatten(-len(votes.pose)).movedim(1, -2).flatten(0, -3)


def _places(votes: Votes, parents: Capsules, edges: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Bin and length of each vote, a block at a time; votes without a cosine are in one more bin, behind the last."""
    poses = poses_as_votes(parents, votes)
    sizes = vector_norm(poses, dim=-1, keepdim=True)
    directions = poses / sizes
    inner = edges[1:-1].to(poses)  # without -1 and 1: rounding may lead beyond them
    for block, gates in votes.blocks():
        lengths = block.square().sum(-1).sqrt()  # vector_norm is slow over strided votes
        cosines = (block * directions.unsqueeze(1)).sum(-1) / lengths
        places = torch.bucketize(cosines, inner.to(cosines.dtype), right=True)
        places = torch.where((lengths == 0) | (sizes.mT == 0), len(edges) - 1, places)
        if gates is None:
            yield places.flatten(), lengths.flatten()
        else:
            yield places[gates > 0].flatten(), lengths[gates > 0].flatten()


Panel = tuple[str, RoutingDynamics]


@checked
@in_style
def routing_dynamics_figure(rows: Sequence[Sequence[Panel]], names: Sequence[str] = ()) -> Figure:
    """Draw shares as gray bars and mean lengths as a blue line over the cosine, as in Figure 2 of Li et al. 2018.

    Args:
        rows: rows of panels, such as a row for each layer. A panel is a title, such as "after epoch 20", and the result
            of :func:`routing_dynamics`. The panels of a row have the same axes.
        names: names of the rows.

    Raises:
        ValueError: there are no panels.

    Reference:
        Li et al. 2018, Figure 2.
    """
    if not rows or not all(rows):
        raise ValueError("expected rows of pairs of a title and its RoutingDynamics, got none")
    lines = [(row, first) for row in range(len(rows)) for first in range(0, len(rows[row]), PER_LINE)]
    columns = min(PER_LINE, max(map(len, rows)))
    figure = Figure(figsize=(1.9 * columns + 1.6, 1.9 * len(lines) + 0.9))
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
                axis.set_ylabel(f"{name}share, %")
            else:
                axis.tick_params(left=False, labelleft=False)
            if column == len(shown) - 1:
                right.set_ylabel("mean length", color=BLUE)
                right.set_in_layout(column == columns - 1)  # a shorter row has room beside it
            else:
                right.tick_params(right=False, labelright=False)
    figure.supxlabel("cosine of a vote and its parent")
    handles = [grid[0, 0].containers[0], right.lines[0]]
    labels = ["share of the votes", "their mean length"]
    title = "How well votes and their parents agree,\nand how long these votes are"
    figure.legend(handles, labels, title=title, loc="outside upper center", ncols=2)
    return figure


def _limit(values: Sequence[Tensor]) -> float:
    """Upper end of an axis from 0 that shows all of these values; some may be nan."""
    return 1.05 * float(torch.cat(list(values)).nan_to_num().max()) or 1.0


def _draw(axis: Axes, title: str, dynamics: RoutingDynamics, limits: tuple[float, float]) -> Axes:
    """Draw a panel and return its right axis."""
    widths = dynamics.edges.diff()
    centers = dynamics.edges[:-1] + widths / 2
    axis.bar(centers.numpy(), dynamics.share.numpy(), widths.numpy(), color="0.7", edgecolor="white", linewidth=0.4)
    axis.set(xlim=(-1, 1), ylim=(0, limits[0]))
    axis.set_xticks([-1, 0, 1])
    right = axis.twinx()
    right.plot(centers.numpy(), dynamics.length.numpy(), color=BLUE, marker=".", markersize=3)
    right.set_ylim(0, limits[1])
    right.tick_params(colors=BLUE)
    right.spines["right"].set(visible=True, color=BLUE)
    right.yaxis.get_offset_text().set_fontsize(8)
    left_out = f"\n{dynamics.zeros:.3g} % zero, left out" if dynamics.zeros else ""
    axis.set_title(title + left_out)
    return right


def _layers_with_votes(network: nn.Module) -> list[str]:
    """Return the names of the capsule layers whose parents are sums of votes."""
    layers: dict[str, Any] = dict(network.named_modules())
    return [name for name in capsule_layers(network) if not layers[name].routing.needs_poses]


def _fits(material: Material) -> bool:
    samples = material.samples
    if not material.states or samples.words or samples.labels is None or samples.target == "masks":
        return False
    return bool(_layers_with_votes(material.network))


def _draw_states(material: Material) -> Figure:
    """Draw a row of panels per capsule layer, a panel per state of the weights."""
    names, batches = _layers_with_votes(material.network), material.samples.batches(STATISTICS)
    rows: dict[str, list[Panel]] = {name: [] for name in names}
    for label, load in material.states:
        load()
        for name, row in rows.items():
            row.append((label, routing_dynamics(material.network, name, batches)))
    return routing_dynamics_figure(list(rows.values()), names)


DYNAMICS = FigureKind("dynamics", "how long votes are, and how well they agree with the parents", _fits, _draw_states)
