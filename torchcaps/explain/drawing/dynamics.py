"""Figure of routing dynamics: a panel for each checkpoint, a row for each layer (Li et al. 2018, Figure 2)."""

from collections.abc import Sequence
from typing import cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.explain.axes import BLUE, in_style
from torchcaps.explain.dynamics import RoutingDynamics
from torchcaps.utils.arguments import checked

PER_LINE = 6  # panels; longer rows continue on the next line

Panel = tuple[str, RoutingDynamics]


@checked
@in_style
def routing_dynamics_figure(panels: Sequence[Panel] | Sequence[Sequence[Panel]], names: Sequence[str] = ()) -> Figure:
    """Draw shares as gray bars and mean lengths as a blue line with dots over the cosine, as in the paper's Figure 2.

    Args:
        panels: pairs of a title, such as "after epoch 20", and the result of :func:`routing_dynamics`; or rows of such
            pairs, such as one row per layer. The panels of a row have the same axes.
        names: names of the rows.

    Raises:
        ValueError: there are no panels.

    Reference:
        Li et al. 2018, Figure 2.
    """
    if not panels or not all(panels):
        raise ValueError("expected pairs of a title and its RoutingDynamics, or rows of these, got none")
    rows = cast(Sequence[Sequence[Panel]], [panels] if isinstance(panels[0][0], str) else panels)
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
