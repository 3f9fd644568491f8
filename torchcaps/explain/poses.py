"""How the pose vectors of class capsules move as toys turn: "reverse graphics" (Heinsen 2019, Figures 4, 6 and 7)."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.decomposition import PCA
from sklearn.manifold import MDS
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils.data import DataLoader, Subset

from torchcaps.capsules import Prediction
from torchcaps.explain.pictures import hide_ticks, write
from torchcaps.nn.modes import evaluating

if TYPE_CHECKING:
    from torchcaps.data import StereoData

Angle = Literal["elevation", "azimuth"]

# Of the number 0 in `Metadata`, and how many more of each next one.
DEGREES = {"elevation": (30, 5), "azimuth": (0, 10)}
ROUND = {"elevation": 10, "azimuth": 90}  # degrees from one tick to the next
# Of categories: for the colour-blind too, and none near the mean's.
COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MEAN = "darkblue"
NARROWEST = 6.0  # inches: titles need them
# A full turn ends where it began.
MAPS = {
    "elevation": colormaps["viridis"],
    "azimuth": LinearSegmentedColormap.from_list("turn", ["#1f4e9c", "#2a9d62", "#e0a100", "#c8326e", "#1f4e9c"]),
}


class PoseTrajectories(NamedTuple):
    """The class capsules of some toys, along images of which one angle varies; tensors are on the CPU.

    Fields:
        varying: "elevation" or "azimuth".
        fixed: what is the same in all images, in words.
        angles: in degrees, rising, `(steps,)`.
        poses: in float64, `(toys, steps, vectors, features)`.
        category, instance: of each toy, in this order, `(toys,)`.
        right: where the network is right, so that this capsule is the activated one, `(toys, steps)` bool.
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
def pose_trajectories(
    network: nn.Module,
    data: "StereoData",
    varying: Angle,
    elevation: int | None = None,
    azimuth: int | None = None,
    lighting: int | None = None,
) -> PoseTrajectories:
    """The pose vectors of every test toy's class capsule, in the images of which one angle varies and nothing else.

    The paper follows "the activated capsule". Here it is the capsule of the toy's own class from the first image to the
    last: the activated one wherever the network is right, which `right` says. Where the network errs the activated
    one is another capsule, with a space of its own, and to go on with that would show a change of class as one of pose.

    A matrix pose `(rows, features)`, the paper's d_cov x d_out, is `rows` pose vectors; a vector pose is one.

    Args:
        network: gives a `Prediction` with class capsules; it is run as in evaluation, and left as it was.
        data: is set up for the test if it is not. Images are taken at the centre, a batch at a time.
        varying: takes all values of the test set.
        elevation, azimuth, lighting: where those are held that do not vary, numbers as in `Metadata`; None is the first
            of the test set.

    Raises:
        TypeError: the network gives no class capsules.
        ValueError: there is nothing to vary, no such image or more than one of a toy, no capsule for a class; or poses
            are not finite.

    Reference:
        Heinsen 2019, section 3.4 and Figures 4, 6 and 7.
    """
    data.setup("test")
    grid = dict(zip(("elevation", "azimuth", "lighting"), data.grid(train=False), strict=True))
    if varying not in DEGREES:
        raise ValueError(f"varying must be elevation or azimuth, got {varying!r}")
    given = {"elevation": elevation, "azimuth": azimuth, "lighting": lighting}
    if (value := given.pop(varying)) is not None:
        raise ValueError(f"{varying} cannot both vary and be held at {value}: leave that out, or vary another angle")
    if len(grid[varying]) < 2:
        raise ValueError(f"the test set has a single {varying}, so that nothing varies: {_choose(varying)}")
    held = {name: grid[name][0] if value is None else value for name, value in given.items()}
    for name, value in held.items():
        if value not in grid[name]:
            there = ", ".join(map(str, grid[name]))
            raise ValueError(f"{name} must be one of the test set's, {there}, got {value}")
    toys, indices = _sequences(data, varying, grid[varying], held)

    poses, right = [], []
    images_and_classes = DataLoader(Subset(data.part("test"), indices), data.batch_size, collate_fn=lambda batch: batch)
    for images, classes in images_and_classes:
        prediction = _predict(network, data, images)
        of_classes = _class_poses(prediction)
        if of_classes is None:
            raise TypeError(f"figures of poses are of class capsules, and a {type(network).__name__} gives none")
        if of_classes.shape[1] < data.classes:
            raise ValueError(f"expected a class capsule for each of {data.classes} classes, got {of_classes.shape[1]}")
        poses.append(of_classes[torch.arange(len(classes)), classes])
        right.append(prediction.scores.argmax(1).cpu() == classes)
    shape = len(toys), len(grid[varying])
    found = torch.cat(poses).unflatten(0, shape)
    if not found.isfinite().all():
        raise ValueError("class capsules have poses that are not finite: look at the training's loss")
    first, each = DEGREES[varying]
    angles = first + each * torch.tensor(grid[varying])
    fixed = ", ".join(_spelled(name, value) for name, value in held.items())
    return PoseTrajectories(varying, fixed, angles, found, toys[:, 0], toys[:, 1], torch.cat(right).view(shape))


def has_class_capsules(network: nn.Module, data: "StereoData") -> bool:
    """Whether there are :func:`pose_trajectories` of a network; it runs on one image."""
    data.setup("test")
    images, *_ = data.part("test")[0]
    with torch.no_grad():
        return _class_poses(_predict(network, data, images.unsqueeze(0))) is not None


def _sequences(data: "StereoData", varying: Angle, steps: list[int], held: dict[str, int]) -> tuple[Tensor, list[int]]:
    """Category and instance of each toy of the test set, `(toys, 2)`, and where their images are, toy by toy."""
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
            found = places.get((category, instance, step), [])
            if len(found) != 1:
                pose = ", ".join(f"{name} {value}" for name, value in {varying: step, **held}.items())
                raise ValueError(
                    f"expected one test image of category {category}, instance {instance} at {pose}, found {len(found)}"
                )
            indices += found
    return toys, indices


def _predict(network: nn.Module, data: "StereoData", images: Tensor) -> Any:
    like = next(network.parameters(), torch.empty(0))
    with evaluating(network):
        return network(data.centre(images).to(like))


def _class_poses(prediction: Any) -> Tensor | None:
    """`(batch, classes, vectors, features)` in float64 on the CPU, or None if there are no class capsules."""
    if not isinstance(prediction, Prediction) or prediction.capsules is None:
        return None
    poses = prediction.capsules.poses
    if poses.dim() not in (3, 4):
        return None  # capsules on a grid
    return (poses.unsqueeze(2) if poses.dim() == 3 else poses).cpu().double()


def _choose(*varying: Angle) -> str:
    return f"choose several with {' or '.join(f'data.test_{name}s' for name in varying)}"


def _spelled(name: str, value: int) -> str:
    if name not in DEGREES:
        return f"{name} {value}"
    first, each = DEGREES[name]
    return f"{name} {first + each * value}°"


def relative_changes(poses: Tensor) -> RelativeChanges:
    r"""How pose vectors change along a sequence, relative to the first.

    .. math::
        \frac{|v_t - v_0|}{|v_0|}, \qquad \frac{|v_t|}{|v_0|}, \qquad \frac{v_t \cdot v_0}{|v_t| \, |v_0|}

    Where v_0 is zero all three are nan, and where v_t is, the third: nothing can be relative to zero, nor has it a
    direction.

    Shape:
        - Input: `(..., steps, vectors, features)`.
        - Output: `(..., steps, vectors)` each.

    Reference:
        Heinsen 2019, Figures 6 and 7.
    """
    first = poses[..., :1, :, :]
    lengths, unit = vector_norm(poses, dim=-1), vector_norm(first, dim=-1)
    unit = torch.where(unit > 0, unit, torch.nan)
    cosine = (poses * first).sum(-1) / (torch.where(lengths > 0, lengths, torch.nan) * unit)
    # Rounding may lead beyond -1 and 1.
    return RelativeChanges(vector_norm(poses - first, dim=-1) / unit, lengths / unit, cosine.clamp(-1, 1))


def mds(points: Tensor) -> Tensor:
    r"""Points in the plane, the distances between them as near as possible to what they are: multidimensional scaling.

    What is smallest is the stress :math:`\sum_{i<j} (|x_i - x_j| - |p_i - p_j|)^2`, by scikit-learn, from the two
    principal components on: the same points always give the same picture, up to rounding.

    Shape:
        - Input: `(n, features)`.
        - Output: `(n, 2)`, around zero.
    """
    scale = (points - points.mean(0)).norm()
    if not scale:
        return points.new_zeros(len(points), 2)
    around_zero = F.pad((points - points.mean(0)) / scale, (0, max(0, 2 - points.shape[1]))).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of defaults that do not matter with a start of our own
        scaling = MDS(2, n_init=1, normalized_stress=False, eps=1e-9)
        placed = scaling.fit_transform(around_zero, init=PCA(2).fit_transform(around_zero))
    return scale * torch.from_numpy(placed).to(points)


def relative_changes_figure(trajectories: PoseTrajectories, names: Sequence[str] = ()) -> Figure:
    """Distance, norm and cosine to the first of each pose vector over the angle, as in the paper's Figures 6 and 7.

    A column for each pose vector, a thin line for each toy, and their mean in dark blue.

    Args:
        trajectories: from :func:`pose_trajectories`.
        names: of the categories.

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
                axis.plot(angles, values.numpy(), color=_colour(toy), linewidth=0.6, alpha=0.7)
            axis.plot(angles, changes[..., vector].nanmean(0).numpy(), color=MEAN, linewidth=2)
            axis.tick_params(labelsize=7)
            axis.grid(color="0.9", linewidth=0.5)
        axes[0].set_ylabel(label, fontsize=8)
    for vector, axis in enumerate(grid[0]):
        axis.set_title(f"pose vector {vector + 1}", fontsize=9)
    grid[0, 0].set_xticks(_ticks(trajectories))  # and so all
    figure.supxlabel(f"{trajectories.varying}, degrees", fontsize=8)
    share = 100 * float(trajectories.right.double().mean())
    figure.suptitle(
        f"How the class capsules' pose vectors of {len(category)} toys change with the {trajectories.varying}\n"
        f"{trajectories.fixed}; the network is right about {share:.0f} % of the images",
        fontsize=10,
    )
    lines = [Line2D([], [], color=_colour(k), linewidth=1.2, label=_name(k, names)) for k in sorted(set(category))]
    lines.append(Line2D([], [], color=MEAN, linewidth=2, label="mean"))
    figure.legend(handles=lines, loc="outside right center", fontsize=8, frameon=False)
    return figure


def pose_trajectories_figure(rows: Sequence[PoseTrajectories], names: Sequence[str] = ()) -> Figure:
    """The pose vectors of one toy of each category in the plane, as in the paper's Figure 4.

    A panel is an :func:`mds` of all pose vectors of all images of a toy, the first of its category; those of an image
    are the connected vertices of one polygon. Circles are around the first pose vector of the first and the last image.

    Args:
        rows: from :func:`pose_trajectories`, one for each row of panels.
        names: of the categories.

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


def _draw(axis: Axes, poses: Tensor, colours: np.ndarray) -> None:
    """Poses `(steps, vectors, features)` of a toy in the plane."""
    placed = mds(poses.flatten(0, 1)).view(*poses.shape[:2], 2).numpy()
    for vertices, colour in zip(placed, colours, strict=True):
        axis.plot(*np.concatenate([vertices, vertices[:1]]).T, color=colour, linewidth=0.8, marker=".", markersize=3)
    for end in (0, -1):
        axis.plot(*placed[end, 0], "o", markersize=8, markerfacecolor="none", markeredgecolor=colours[end])
    axis.set_aspect("equal", adjustable="datalim")
    hide_ticks(axis)


def _ticks(trajectories: PoseTrajectories) -> list[int]:
    """Round ones among the angles, or the ends."""
    first, last = int(trajectories.angles[0]), int(trajectories.angles[-1])
    ticks = [angle for angle in range(0, 360, ROUND[trajectories.varying]) if first <= angle <= last]
    return ticks if len(ticks) > 1 else [first, last]


def _colour(category: int) -> str:
    return COLOURS[category % len(COLOURS)]


def _name(category: int, names: Sequence[str]) -> str:
    return names[category] if category < len(names) else f"category {category}"


def write_pose_figures(network: nn.Module, data: "StereoData", folder: Path) -> Iterator[Path]:
    """Write the figures of each angle that varies in the test set, all else held at its first; give each path.

    `trajectories.png`, and for each angle `poses-by-azimuth.png`, `poses-by-elevation.png`.

    Raises:
        TypeError, ValueError: as :func:`pose_trajectories`; neither angle varies.
    """
    elevations, azimuths, _ = data.grid(train=False)
    angles: dict[Angle, list[int]] = {"elevation": elevations, "azimuth": azimuths}
    found = [pose_trajectories(network, data, angle) for angle, values in angles.items() if len(values) > 1]
    if not found:
        raise ValueError(
            "the test set has a single elevation and a single azimuth, so that nothing varies: "
            + _choose("elevation", "azimuth")
        )
    yield write(pose_trajectories_figure(found, data.names), folder / "trajectories.png")
    for trajectories in found:
        figure = relative_changes_figure(trajectories, data.names)
        yield write(figure, folder / f"poses-by-{trajectories.varying}.png")
