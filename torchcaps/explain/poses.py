"""How the pose vectors of class capsules move as toys turn: "reverse graphics" (Heinsen 2019, Figures 4, 6 and 7).

:mod:`torchcaps.explain.drawing.poses` draws the figures.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils.data import DataLoader, Subset

from torchcaps.capsules import Prediction
from torchcaps.data import StereoData
from torchcaps.nn.modes import evaluating
from torchcaps.utils.arguments import FloatTensor, checked, shown

Angle = Literal["elevation", "azimuth"]

DEGREES = {"elevation": (30, 5), "azimuth": (0, 10)}  # (degrees at index 0, degrees per index), see `Metadata`


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
def pose_trajectories(
    network: nn.Module,
    data: StereoData,
    varying: Angle,
    elevation: int | None = None,
    azimuth: int | None = None,
    lighting: int | None = None,
) -> PoseTrajectories:
    """Follow the pose vectors of every test toy's class capsule through images in which only one angle varies.

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
        elevation, azimuth, lighting: index, as in `Metadata`, at which to hold what does not vary; None is the first of
            the test set.

    Raises:
        TypeError: the network gives no class capsules.
        ValueError: nothing varies, a toy has no image or several at one angle, a class has no capsule, or poses are not
            finite.

    Reference:
        Heinsen 2019, section 3.4 and Figures 4, 6 and 7.
    """
    data.setup("test")
    grid = dict(zip(("elevation", "azimuth", "lighting"), data.grid(train=False), strict=True))
    given = {"elevation": elevation, "azimuth": azimuth, "lighting": lighting}
    if (value := given.pop(varying)) is not None:
        raise ValueError(
            f"{varying} cannot both vary and be held at {value}: leave {varying} out, or vary another angle"
        )
    if len(grid[varying]) < 2:
        raise ValueError(f"the test set has a single {varying}, so that nothing varies: {how_to_vary(varying)}")
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
        class_poses = _class_poses(prediction)
        if class_poses is None:
            raise TypeError(f"figures of poses need class capsules, and a {type(network).__name__} gives none")
        if class_poses.shape[1] < data.classes:
            raise ValueError(f"expected a class capsule for each of {data.classes} classes, got {class_poses.shape[1]}")
        poses.append(class_poses[torch.arange(len(classes)), classes])
        right.append(prediction.evidence.argmax(1).cpu() == classes)
    shape = len(toys), len(grid[varying])
    found = torch.cat(poses).unflatten(0, shape)
    if not found.isfinite().all():
        raise ValueError("class capsules have poses that are not finite: look at the training's loss")
    first, each = DEGREES[varying]
    angles = first + each * torch.tensor(grid[varying])
    fixed = ", ".join(_spelled(name, value) for name, value in held.items())
    return PoseTrajectories(varying, fixed, angles, found, toys[:, 0], toys[:, 1], torch.cat(right).view(shape))


@checked
def has_class_capsules(network: nn.Module, data: StereoData) -> bool:
    """Return whether :func:`pose_trajectories` can follow a network's class capsules; run it on one image."""
    data.setup("test")
    images, *_ = data.part("test")[0]
    with torch.no_grad():
        return _class_poses(_predict(network, data, images.unsqueeze(0))) is not None


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


def how_to_vary(*varying: Angle) -> str:
    """Advice for a test set in which an angle has a single value: which option to set."""
    return f"choose several with {' or '.join(f'data.test_{name}s' for name in varying)}"


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
            found = places.get((category, instance, step), [])
            if len(found) != 1:
                pose = ", ".join(f"{name} {value}" for name, value in {varying: step, **held}.items())
                raise ValueError(
                    f"expected one test image of category {category}, instance {instance} at {pose}, found {len(found)}"
                )
            indices += found
    return toys, indices


def _predict(network: nn.Module, data: StereoData, images: Tensor) -> Any:
    like = next(network.parameters(), torch.empty(0))
    with evaluating(network):
        return network(data.center(images).to(like))


def _class_poses(prediction: Any) -> Tensor | None:
    """`(batch, classes, vectors, features)` in float64 on the CPU, or None if there are no class capsules."""
    if not isinstance(prediction, Prediction) or prediction.capsules is None:
        return None
    poses = prediction.capsules.poses
    if poses.dim() not in (3, 4):
        return None  # capsules on a grid
    return (poses.unsqueeze(2) if poses.dim() == 3 else poses).cpu().double()


def _spelled(name: str, value: int) -> str:
    if name not in DEGREES:
        return f"{name} {value}"
    first, each = DEGREES[name]
    return f"{name} {first + each * value}°"
