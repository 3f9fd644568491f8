"""Figures of the pose vectors of class capsules as toys turn (Heinsen 2019, Figures 4, 6 and 7)."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from torchcaps.arguments import checked
from torchcaps.explain.axes import hide_ticks
from torchcaps.explain.poses import PoseTrajectories, relative_changes
from torchcaps.explain.scaling import mds

ROUND = {"elevation": 10, "azimuth": 90}  # degrees from one tick to the next
# Colors of the categories: told apart by color-blind readers too, and unlike the mean's.
COLORS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MEAN = "darkblue"
NARROWEST = 6.0  # inches; narrower figures would cut their titles
# The colors of azimuth end where they begin, as a full turn does.
MAPS = {
    "elevation": colormaps["viridis"],
    "azimuth": LinearSegmentedColormap.from_list("turn", ["#1f4e9c", "#2a9d62", "#e0a100", "#c8326e", "#1f4e9c"]),
}


@checked
def relative_changes_figure(trajectories: PoseTrajectories, names: Sequence[str] = ()) -> Figure:
    """Draw distance, norm and cosine to the first of each pose vector over the angle, as in the paper's Figures 6, 7.

    There is a column for each pose vector, a thin line for each toy, and their mean in dark blue.

    Args:
        trajectories: result of :func:`pose_trajectories`.
        names: names of the categories.

    Reference:
        Heinsen 2019, Figures 6 and 7.
    """
    angles, category = trajectories.angles.numpy(), trajectories.category.tolist()
    vectors = trajectories.poses.shape[2]
    figure = Figure(figsize=(max(1.9 * vectors + 1.6, NARROWEST), 6.4), layout="constrained")
    grid = figure.subplots(3, vectors, sharex=True, sharey="row", squeeze=False)
    labels = (
        "distance to the first,\nrelative to its norm",
        "norm, relative to\nthat of the first",
        "cosine with the first",
    )
    for axes, changes, label in zip(grid, relative_changes(trajectories.poses), labels, strict=True):
        for vector, axis in enumerate(axes):
            for toy, values in zip(category, changes[..., vector], strict=True):
                axis.plot(angles, values.numpy(), color=_color(toy), linewidth=0.6, alpha=0.7)
            axis.plot(angles, changes[..., vector].nanmean(0).numpy(), color=MEAN, linewidth=2)
            axis.tick_params(labelsize=7)
            axis.grid(color="0.9", linewidth=0.5)
        axes[0].set_ylabel(label, fontsize=8)
    for vector, axis in enumerate(grid[0]):
        axis.set_title(f"pose vector {vector + 1}", fontsize=9)
    grid[0, 0].set_xticks(_ticks(trajectories))  # shared by all axes
    figure.supxlabel(f"{trajectories.varying}, degrees", fontsize=8)
    share = 100 * float(trajectories.right.double().mean())
    figure.suptitle(
        f"How the class capsules' pose vectors of {len(category)} toys change with the {trajectories.varying}\n"
        f"{trajectories.fixed}; the network is right about {share:.0f} % of the images",
        fontsize=10,
    )
    lines = [Line2D([], [], color=_color(k), linewidth=1.2, label=_name(k, names)) for k in sorted(set(category))]
    lines.append(Line2D([], [], color=MEAN, linewidth=2, label="mean"))
    figure.legend(handles=lines, loc="outside right center", fontsize=8, frameon=False)
    return figure


@checked
def pose_trajectories_figure(rows: Sequence[PoseTrajectories], names: Sequence[str] = ()) -> Figure:
    """Draw the pose vectors of one toy of each category in the plane, as in the paper's Figure 4.

    A panel is an :func:`mds` of the pose vectors of all images of a toy, the first of its category. The pose vectors of
    one image are connected to a polygon. Circles mark the first pose vector of the first and of the last image.

    Args:
        rows: results of :func:`pose_trajectories`, one for each row of panels.
        names: names of the categories.

    Raises:
        ValueError: there are no rows.

    Reference:
        Heinsen 2019, Figure 4.
    """
    if not rows:
        raise ValueError("expected PoseTrajectories, one for each row of panels, got none")
    columns = max(len(row.category.unique()) for row in rows)
    figure = Figure(figsize=(max(1.9 * columns + 1.4, NARROWEST), 2.2 * len(rows) + 0.8), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes, row in zip(grid, rows, strict=True):
        category = row.category.tolist()
        toys = [category.index(k) for k in sorted(set(category))]
        span = float(row.angles[0]), 360.0 if row.varying == "azimuth" else float(row.angles[-1])
        scale = ScalarMappable(Normalize(*span), MAPS[row.varying])
        for axis, toy in zip(axes, toys, strict=False):
            _draw(axis, row.poses[toy], scale.to_rgba(row.angles.numpy()))
            right = f"right about {int(row.right[toy].sum())} of {row.right.shape[1]} images"
            axis.set_title(f"{_name(category[toy], names)}, instance {row.instance[toy]}\n{right}", fontsize=8)
        for axis in axes[len(toys) :]:
            axis.set_axis_off()
        bar = figure.colorbar(scale, ax=axes, shrink=0.9, pad=0.01, ticks=_ticks(row))
        bar.set_label(f"{row.varying}, degrees\n({row.fixed})", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    figure.suptitle(
        "The pose vectors of a toy's class capsule, those of an image connected\n"
        "Circles: the first pose vector, in the first and in the last image",
        fontsize=10,
    )
    return figure


def _draw(axis: Axes, poses: Tensor, colors: np.ndarray) -> None:
    """Draw poses `(steps, vectors, features)` of a toy in the plane, each step in its color."""
    placed = mds(poses.flatten(0, 1)).view(*poses.shape[:2], 2).numpy()
    for vertices, color in zip(placed, colors, strict=True):
        axis.plot(*np.concatenate([vertices, vertices[:1]]).T, color=color, linewidth=0.8, marker=".", markersize=3)
    for end in (0, -1):
        axis.plot(*placed[end, 0], "o", markersize=8, markerfacecolor="none", markeredgecolor=colors[end])
    axis.set_aspect("equal", adjustable="datalim")
    hide_ticks(axis)


def _ticks(trajectories: PoseTrajectories) -> list[int]:
    """Round numbers among the angles, or the two ends where there are none."""
    first, last = int(trajectories.angles[0]), int(trajectories.angles[-1])
    ticks = [angle for angle in range(0, 360, ROUND[trajectories.varying]) if first <= angle <= last]
    return ticks if len(ticks) > 1 else [first, last]


def _color(category: int) -> str:
    return COLORS[category % len(COLORS)]


def _name(category: int, names: Sequence[str]) -> str:
    return names[category] if category < len(names) else f"category {category}"
