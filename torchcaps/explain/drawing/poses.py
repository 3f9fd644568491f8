"""Figures of the pose vectors of class capsules as toys turn (Heinsen 2019, Figures 4, 6 and 7)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from torchcaps.explain.axes import COLORS, DASHES, ORDERED, color_bar, hide_ticks, in_style
from torchcaps.explain.poses import PoseTrajectories, relative_changes
from torchcaps.explain.scaling import mds
from torchcaps.utils.arguments import checked

ROUND = {"elevation": 10, "azimuth": 90}  # degrees from one tick to the next
MEAN: dict[str, Any] = {"color": "black", "linestyle": "-", "linewidth": 2}
NARROWEST = 6.0  # inches; narrower figures would cut their titles
# Without the palest tenth, which would be lost on white.
ANGLES = LinearSegmentedColormap.from_list("angles", colormaps[ORDERED](np.linspace(0, 0.9, 256)))


@checked
@in_style
def relative_changes_figure(trajectories: PoseTrajectories, names: Sequence[str] = ()) -> Figure:
    """Draw distance, norm and cosine to the first of each pose vector over the angle, as in the paper's Figures 6, 7.

    There is a column for each pose vector, with a thin gray line for each toy, a line in color for the mean of each
    category and a thick black one for the mean of all toys.

    Args:
        trajectories: result of :func:`pose_trajectories`.
        names: names of the categories.

    Reference:
        Heinsen 2019, Figures 6 and 7.
    """
    angles, category = trajectories.angles.numpy(), trajectories.category.tolist()
    vectors = trajectories.poses.shape[2]
    styles = {kind: _style(kind) for kind in sorted(set(category))}
    figure = Figure(figsize=(max(1.9 * vectors + 1.6, NARROWEST), 6.4))
    grid = figure.subplots(3, vectors, sharex=True, sharey="row", squeeze=False)
    labels = (
        "distance to the first,\nrelative to its norm",
        "norm, relative to\nthat of the first",
        "cosine with the first",
    )
    for axes, changes, label in zip(grid, relative_changes(trajectories.poses), labels, strict=True):
        for vector, axis in enumerate(axes):
            for values in changes[..., vector]:
                axis.plot(angles, values.numpy(), "-", color="0.8", linewidth=0.5)
            for kind, style in styles.items():
                axis.plot(angles, changes[trajectories.category == kind][..., vector].nanmean(0).numpy(), **style)
            axis.plot(angles, changes[..., vector].nanmean(0).numpy(), **MEAN)
            axis.grid()
        axes[0].set_ylabel(label)
    for vector, axis in enumerate(grid[0]):
        axis.set_title(f"pose vector {vector + 1}")
    grid[0, 0].set_xticks(_ticks(trajectories))  # shared by all axes
    figure.supxlabel(f"{trajectories.varying}, degrees")
    share = 100 * float(trajectories.right.double().mean())
    figure.suptitle(
        f"How the class capsules' pose vectors of {len(category)} toys change with the {trajectories.varying}\n"
        f"{trajectories.fixed}; the network is right about {share:.0f} % of the images"
    )
    lines = [Line2D([], [], label=_name(kind, names), **style) for kind, style in styles.items()]
    lines += [Line2D([], [], label="mean", **MEAN), Line2D([], [], label="each toy", color="0.8", linewidth=0.5)]
    figure.legend(handles=lines, loc="outside right center")
    return figure


@checked
@in_style
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
    figure = Figure(figsize=(max(1.9 * columns + 1.4, NARROWEST), 2.2 * len(rows) + 0.8))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes, row in zip(grid, rows, strict=True):
        category = row.category.tolist()
        toys = [category.index(k) for k in sorted(set(category))]
        span = float(row.angles[0]), 360.0 if row.varying == "azimuth" else float(row.angles[-1])
        scale = ScalarMappable(Normalize(*span), ANGLES)
        for axis, toy in zip(axes, toys, strict=False):
            _draw(axis, row.poses[toy], scale.to_rgba(row.angles.numpy()))
            right = f"right about {int(row.right[toy].sum())} of {row.right.shape[1]} images"
            axis.set_title(f"{_name(category[toy], names)}, instance {row.instance[toy]}\n{right}")
        for axis in axes[len(toys) :]:
            axis.set_axis_off()
        color_bar(figure, scale, axes, f"{row.varying}, degrees\n({row.fixed})", ticks=_ticks(row))
    figure.suptitle(
        "The pose vectors of a toy's class capsule, those of an image connected\n"
        "Circles: the first pose vector, in the first and in the last image"
    )
    return figure


def _draw(axis: Axes, poses: Tensor, colors: np.ndarray) -> None:
    """Draw poses `(steps, vectors, features)` of a toy in the plane, each step in its color."""
    placed = mds(poses.flatten(0, 1)).view(*poses.shape[:2], 2).numpy()
    for vertices, color in zip(placed, colors, strict=True):
        axis.plot(*np.concatenate([vertices, vertices[:1]]).T, ".-", color=color, linewidth=0.7, markersize=4)
    for end in (0, -1):
        axis.plot(*placed[end, 0], "o", markersize=8, markerfacecolor="none", markeredgecolor=colors[end])
    axis.set_aspect("equal", adjustable="datalim")
    hide_ticks(axis)


def _ticks(trajectories: PoseTrajectories) -> list[int]:
    """Round numbers among the angles, or the two ends where there are none."""
    first, last = int(trajectories.angles[0]), int(trajectories.angles[-1])
    ticks = [angle for angle in range(0, 360, ROUND[trajectories.varying]) if first <= angle <= last]
    return ticks if len(ticks) > 1 else [first, last]


def _style(category: int) -> dict[str, Any]:
    return {"color": COLORS[category % len(COLORS)], "linestyle": DASHES[category % len(DASHES)], "linewidth": 1.2}


def _name(category: int, names: Sequence[str]) -> str:
    return names[category] if category < len(names) else f"category {category}"
