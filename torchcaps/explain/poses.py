"""How the pose vectors of class capsules move as toys turn: "reverse graphics" (Heinsen 2019, Figures 4, 6 and 7)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.decomposition import PCA
from sklearn.manifold import smacof
from sklearn.metrics import pairwise_distances
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils.data import DataLoader, Subset

from torchcaps.data import StereoData
from torchcaps.explain.material import FigureKind, Material
from torchcaps.measures.axes import COLORS, DASHES, MARKERS, ORDERED, color_bar, hide_ticks, in_style
from torchcaps.measures.predicting import NoClassCapsules, class_poses, predict
from torchcaps.utils.arguments import FloatTensor, checked, shown
from torchcaps.utils.checks import percent

Angle = Literal["elevation", "azimuth"]

DEGREES = {"elevation": (30, 5), "azimuth": (0, 10)}  # (degrees at index 0, degrees per index), see `Metadata`
ROUND = {"elevation": 10, "azimuth": 90}  # degrees from one tick to the next
MEAN: dict[str, Any] = {"color": "black", "linestyle": "-", "linewidth": 2}
NARROWEST = 6.0  # inches; narrower figures would cut their titles
# Without the palest tenth, which would be lost on white.
ANGLES = LinearSegmentedColormap.from_list("angles", colormaps[ORDERED](np.linspace(0, 0.9, 256)))


class PoseTrajectories(NamedTuple):
    """Class capsules of toys along images in which one angle varies; tensors are on the CPU.

    Fields:
        varying: the angle that varies, "elevation" or "azimuth".
        fixed: the values held in all images, in words.
        angles: angles in degrees, rising, `(steps,)`.
        poses: poses in float64, `(toys, steps, vectors, features)`.
        category, instance: label and number of each toy, sorted by them, `(toys,)` each.
        right: where the network predicts the toy's category, so that this capsule is the activated one, `(toys, steps)`
            bool.
    """

    varying: Angle
    fixed: str
    angles: Tensor
    poses: Tensor
    category: Tensor
    instance: Tensor
    right: Tensor


class RelativeChanges(NamedTuple):
    """How pose vectors differ from what they were in the first image, `(..., steps, vectors)` each."""

    distance: Tensor
    norm: Tensor
    cosine: Tensor


@torch.no_grad()
@checked
def pose_trajectories(network: nn.Module, data: StereoData, varying: Angle) -> PoseTrajectories:
    """Follow the pose vectors of every test toy's class capsule through images in which only one angle varies.

    All else is held at the first value of the test set: `StereoToys(test_elevations=[8])` holds the elevation at 8.

    The paper follows "the activated capsule". Here it is the capsule of the toy's own class in all images. Where the
    network is right (see `right`), that is the activated capsule. Where it errs, the activated capsule is that of
    another class with a pose space of its own, and following it would show a change of class as a change of pose.

    A matrix pose `(rows, features)`, the paper's d_cov x d_out, is `rows` pose vectors; a vector pose is one.

    Args:
        network: network that returns a `Prediction` with class capsules; it is run in evaluation mode and left as it
            was.
        data: stereo pairs; they are set up for the test if necessary. Images are cropped at the center and run a batch
            at a time.
        varying: angle that takes all values of the test set.

    Raises:
        TypeError: the network gives no class capsules.
        ValueError: nothing varies, a toy has no image or several at one angle, a class has no capsule, or poses are not
            finite.

    Reference:
        Heinsen 2019, section 3.4 and Figures 4, 6 and 7.
    """
    data.setup("test")
    grid = dict(zip(("elevation", "azimuth", "lighting"), data.grid(train=False), strict=True))
    if len(grid[varying]) < 2:
        raise ValueError(
            f"the test set has a single {varying}, so that nothing varies: choose several with data.test_{varying}s"
        )
    held = {name: values[0] for name, values in grid.items() if name != varying}
    toys, indices = _sequences(data, varying, grid[varying], held)

    poses, right = [], []
    images_and_classes = DataLoader(Subset(data.part("test"), indices), data.batch_size, collate_fn=lambda batch: batch)
    for images, classes in images_and_classes:
        prediction = predict(network, data.center(images))
        flat = class_poses(network, prediction)
        if flat.shape[1] < data.classes:
            raise ValueError(f"expected a class capsule for each of {data.classes} classes, got {flat.shape[1]}")
        assert prediction.capsules is not None
        vectors = flat.unflatten(2, (-1, prediction.capsules.poses.shape[-1])).cpu().double()
        poses.append(vectors[torch.arange(len(classes)), classes])
        right.append(prediction.evidence.argmax(1).cpu() == classes)
    shape = len(toys), len(grid[varying])
    followed = torch.cat(poses).unflatten(0, shape)
    if not followed.isfinite().all():
        raise ValueError("class capsules have poses that are not finite: look at the training's loss")
    first, each = DEGREES[varying]
    angles = first + each * torch.tensor(grid[varying])
    fixed = ", ".join(_spelled(name, value) for name, value in held.items())
    return PoseTrajectories(varying, fixed, angles, followed, toys[:, 0], toys[:, 1], torch.cat(right).view(shape))


@checked
def relative_changes(poses: FloatTensor) -> RelativeChanges:
    r"""Compute how pose vectors change along a sequence, relative to the first.

    .. math::
        \frac{|v_t - v_0|}{|v_0|}, \qquad \frac{|v_t|}{|v_0|}, \qquad \frac{v_t \cdot v_0}{|v_t| \, |v_0|}

    Where v_0 is zero all three are nan, because nothing can be relative to zero. Where v_t is zero the third is nan,
    because a zero vector has no direction.

    Shape:
        - Input: `(..., steps, vectors, features)`.
        - Output: `(..., steps, vectors)` each.

    Reference:
        Heinsen 2019, Figures 6 and 7.
    """
    if poses.dim() < 3:
        raise ValueError(f"expected poses of shape (..., steps, vectors, features), got {shown(poses)}")
    first = poses[..., :1, :, :]
    lengths, unit = vector_norm(poses, dim=-1), vector_norm(first, dim=-1)
    unit = torch.where(unit > 0, unit, torch.nan)
    cosine = (poses * first).sum(-1) / (torch.where(lengths > 0, lengths, torch.nan) * unit)
    # Rounding may lead beyond -1 and 1.
    return RelativeChanges(vector_norm(poses - first, dim=-1) / unit, lengths / unit, cosine.clamp(-1, 1))


def _sequences(data: StereoData, varying: Angle, steps: list[int], held: dict[str, int]) -> tuple[Tensor, list[int]]:
    """Category and instance of each toy of the test set, `(toys, 2)`, and the indices of its images, toy by toy."""
    metadata = data.metadata("test")
    columns = metadata._asdict()
    chosen = torch.ones(len(metadata.category), dtype=torch.bool)
    for name, value in held.items():
        chosen &= columns[name] == value
    places: dict[tuple[int, ...], list[int]] = {}
    keys = torch.stack([metadata.category, metadata.instance, columns[varying]], 1)
    for index in chosen.nonzero().flatten().tolist():
        places.setdefault(tuple(keys[index].tolist()), []).append(index)
    toys = keys[:, :2].unique(dim=0)
    if not len(toys):
        raise ValueError("the test set is empty")
    indices = []
    for category, instance in toys.tolist():
        for step in steps:
            hits = places.get((category, instance, step), [])
            if len(hits) != 1:
                pose = ", ".join(f"{name} {value}" for name, value in {varying: step, **held}.items())
                raise ValueError(
                    f"expected one test image of category {category}, instance {instance} at {pose}, found {len(hits)}"
                )
            indices += hits
    return toys, indices


def _spelled(name: str, value: int) -> str:
    if name not in DEGREES:
        return f"{name} {value}"
    first, each = DEGREES[name]
    return f"{name} {first + each * value}°"


@checked
@in_style
def relative_changes_figure(trajectories: PoseTrajectories, names: Sequence[str] = ()) -> Figure:
    """Draw distance, norm and cosine to the first of each pose vector over the angle, as in Heinsen 2019, Figures 6, 7.

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
    share = percent(float(trajectories.right.double().mean()), 0)
    figure.suptitle(
        f"How the class capsules' pose vectors of {len(category)} toys change with the {trajectories.varying}\n"
        f"{trajectories.fixed}; the network is right about {share} of the images"
    )
    lines = [Line2D([], [], label=_name(kind, names), **style) for kind, style in styles.items()]
    lines += [Line2D([], [], label="mean", **MEAN), Line2D([], [], label="each toy", color="0.8", linewidth=0.5)]
    figure.legend(handles=lines, loc="outside right center")
    return figure


@checked
@in_style
def pose_trajectories_figure(rows: Sequence[PoseTrajectories], names: Sequence[str] = ()) -> Figure:
    """Draw the pose vectors of one toy of each category in the plane, as in Figure 4 of Heinsen 2019.

    A panel has the pose vectors of all images of a toy, the first of its category, so that the distances between them
    change as little as possible (multidimensional scaling). Each pose vector is a path from image to image with a
    marker of its own, and a ring around its first point. The paper joins the pose vectors of one image instead, and
    these polygons hide how each vector moves.

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
        "How the pose vectors of a toy's class capsule move from image to image\n"
        "A path for each vector, from its ring on; points close together are similar"
    )
    return figure


def _draw(axis: Axes, poses: Tensor, colors: np.ndarray) -> None:
    """Draw poses `(steps, vectors, features)` of a toy in the plane, a path for each vector, each step in its color."""
    placed = in_the_plane(poses.flatten(0, 1)).reshape(*poses.shape[:2], 2)
    for vector in range(placed.shape[1]):
        x, y = placed[:, vector].T
        marker = MARKERS[vector % len(MARKERS)]
        axis.plot(x, y, "-", color="0.8", linewidth=0.8, zorder=1)
        axis.scatter(x, y, s=14, c=colors, marker=marker, linewidths=0, zorder=2)
        axis.plot(x[:1], y[:1], "o", markersize=8, markerfacecolor="none", markeredgecolor="black", markeredgewidth=0.8)
    axis.set_aspect("equal", adjustable="datalim")
    hide_ticks(axis)


def in_the_plane(poses: Tensor) -> np.ndarray[Any, Any]:
    """Place poses `(n, features)` in the plane, so that the distances between them stay as near as possible to what
    they are. The start is the two principal components, so the same poses always give the same picture."""
    centered = (poses - poses.mean(0)).numpy()
    scale = float(np.linalg.norm(centered))
    if not scale:
        return np.zeros((len(poses), 2))
    centered = np.pad(centered / scale, ((0, 0), (0, max(0, 2 - poses.shape[1]))))
    placed, _ = smacof(
        pairwise_distances(centered),
        init=PCA(2).fit_transform(centered),
        n_init=1,
        max_iter=300,
        eps=1e-9,
        normalized_stress=False,
    )
    return scale * placed


def _ticks(trajectories: PoseTrajectories) -> list[int]:
    """Round numbers among the angles, or the two ends where there are none."""
    first, last = int(trajectories.angles[0]), int(trajectories.angles[-1])
    ticks = [angle for angle in range(0, 360, ROUND[trajectories.varying]) if first <= angle <= last]
    return ticks if len(ticks) > 1 else [first, last]


def _style(category: int) -> dict[str, Any]:
    return {"color": COLORS[category % len(COLORS)], "linestyle": DASHES[category % len(DASHES)], "linewidth": 1.2}


def _name(category: int, names: Sequence[str]) -> str:
    return names[category] if category < len(names) else f"category {category}"


def _varying(material: Material) -> list[Angle]:
    """Return the angles that vary in a test set of stereo pairs; none if the network has no class capsules."""
    network, samples, data = material.network, material.samples, material.data
    if not isinstance(data, StereoData) or samples.labels is None:
        return []
    try:
        class_poses(network, predict(network, samples.inputs[0]))
    except NoClassCapsules:
        return []
    elevations, azimuths, _ = data.grid(train=False)
    angles: dict[Angle, list[int]] = {"elevation": elevations, "azimuth": azimuths}
    return [angle for angle, values in angles.items() if len(values) > 1]


def _draw_trajectories(material: Material) -> Figure:
    rows = [pose_trajectories(material.network, material.data, angle) for angle in _varying(material)]
    return pose_trajectories_figure(rows, material.data.names)


def _varies(material: Material, angle: Angle) -> bool:
    return angle in _varying(material)


def _draw_changes(material: Material, angle: Angle) -> Figure:
    return relative_changes_figure(pose_trajectories(material.network, material.data, angle), material.data.names)


TRAJECTORIES = FigureKind(
    "trajectories", "the poses of toys that turn", lambda material: bool(_varying(material)), _draw_trajectories
)
BY_ELEVATION, BY_AZIMUTH = (
    FigureKind(
        f"poses-by-{angle}",
        "how poses change as toys turn",
        partial(_varies, angle=angle),
        partial(_draw_changes, angle=angle),
    )
    for angle in get_args(Angle)
)
