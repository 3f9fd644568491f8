"""Checks of the tensors that layers and networks are given."""

import math
from typing import TypeVar

import torch
from torch import Tensor

from torchcaps.capsules import IGNORED, Capsules, as_logits
from torchcaps.nn.pose import matrix_shape
from torchcaps.ops import ComputedVotes, gates_of
from torchcaps.utils.arguments import Count, CountOrZero, can_read, check_input, shown, shown_with_type
from torchcaps.utils.checks import counted

# What the sides of a map of 1, 2 or 3 dimensions are called.
SIDES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}

# An int for all sides, or one for each.
Size = Count | tuple[Count, ...]
Padding = CountOrZero | tuple[CountOrZero, ...]

V = TypeVar("V", bound=ComputedVotes)


def as_capsules(x: Capsules | Tensor, weight: Tensor | None, takes_half: bool = False) -> Capsules:
    """Return the children of a layer: Capsules, or a tensor of poses as Capsules without scores.

    Scores that are a bool mask become logits, inf for True and -inf for False.

    Raises:
        TypeError, ValueError: the poses or the scores do not fit the layer's weights, see `check_input`.
    """
    if not isinstance(x, (Capsules, Tensor)):
        raise TypeError(f"expected Capsules or a tensor of poses, got {shown_with_type(x, torch.is_tensor)}")
    capsules = x if isinstance(x, Capsules) else Capsules(x)
    sums_float32 = weight is not None and weight.dtype != torch.float64  # as votes of half precision are summed
    check_input("poses", capsules.poses, weight, takes_half and sums_float32)
    if capsules.scores is None:
        return capsules
    return capsules._replace(scores=as_logits(capsules.scores, capsules.poses))


def check_children(
    capsules: Capsules,
    pose: tuple[int, ...],
    count: int | None,
    share_positions: bool = False,
    coordinates: bool = False,
) -> None:
    """Check the shapes of the children of a layer.

    Args:
        pose: shape of a child's pose.
        count: number of children; None for any number.
        share_positions: the children have places, on a line, a grid or in a volume, and `count` is the number of types.
        coordinates: they are on a grid.
    """
    shape = tuple(capsules.poses.shape)
    without_pose = shape[: -len(pose)]
    capsule_dims = without_pose[1:]
    places = ", height, width" if share_positions else ""
    expected = f"(batch, {count or 'any number'}{places}, {', '.join(map(str, pose))})"
    if shape[-len(pose) :] != pose or len(capsule_dims) not in (1, 2, 3, 4):
        raise ValueError(f"expected poses of shape {expected}, got {shape}")
    if len(capsule_dims) == 4 and capsules.known_pose_dims() != len(pose):  # (rows, features) are not (width, features)
        raise ValueError(
            f"expected poses of {counted(len(pose), 'dimension')}, got {shape} with pose_dims={capsules.pose_dims}"
        )
    if share_positions and len(capsule_dims) not in ((3,) if coordinates else (2, 3, 4)):
        raise ValueError(f"share_positions=True takes children on a grid, {expected}, got {shape}")
    children = math.prod(capsule_dims)
    if children == 0:
        raise ValueError(f"expected at least one child (score -inf for padding), got poses of shape {shape}")
    name, given = ("types", capsule_dims[0]) if share_positions else ("in_capsules", children)
    if count is not None and given != count:
        advice = "" if share_positions else _each_alone(capsule_dims, count)
        raise ValueError(f"expected {name}={count}, got {given} (poses of shape {shape}){advice}")
    if capsules.scores is not None and tuple(capsules.scores.shape) != without_pose:
        raise ValueError(f"expected scores of shape {without_pose}, got {tuple(capsules.scores.shape)}")


def _each_alone(dims: tuple[int, ...], count: int) -> str:
    """Return how the capsules of each position, such as a token's heads of attention, are routed by themselves."""
    if len(dims) < 2 or dims[-1] != count:
        return ""
    others = len(dims) - 1
    return (
        f": to route the {count} of each position alone, flatten the batch and the positions by .flatten(0, {others}), "
        f"and give the parents their positions again by .poses.unflatten(0, (-1, {', '.join(map(str, dims[:-1]))}))"
    )


def flat_poses(capsules: Capsules, pose: tuple[int, ...]) -> Tensor:
    """Return the poses of all children as matrices, `(batch, children, rows, features)`."""
    batch, *capsule_dims = capsules.poses.shape[: -len(pose)]
    return capsules.poses.reshape(batch, math.prod(capsule_dims), *matrix_shape(pose))


def with_children(votes: V, capsules: Capsules, pose: tuple[int, ...]) -> V:
    """Return the votes of these children with their layout and their gates."""
    votes.layout = tuple(capsules.poses.shape[1 : -len(pose)])
    return votes if capsules.scores is None else votes.gated(gates_of(capsules.scores.flatten(1)))


def check_mask(mask: Tensor) -> None:
    """Check that a mask is bool, True for what is present.

    Raises:
        TypeError: it is not; which of its numbers stand for True, only integers of a tokenizer tell.
    """
    if mask.dtype != torch.bool:
        integers = not mask.is_floating_point() and not mask.is_complex()
        advice = "use mask.bool() if 1 is a token and 0 is padding" if integers else "give True and False themselves"
        raise TypeError(f"a mask must be bool, True for a token and False for padding, got {mask.dtype}: {advice}")


def check_map(x: Tensor, channels: int, weight: Tensor, dims: int = 2) -> None:
    """Check a feature map with this number of dimensions, `(batch, channels, *sides)`, see also `check_input`."""
    check_input("features", x, weight)
    if x.dim() != 2 + dims or x.shape[1] != channels or 0 in x.shape[2:]:
        sides = ", ".join(SIDES[dims])
        raise ValueError(f"expected a map of shape (batch, {channels}, {sides}), got {tuple(x.shape)}")


def size_of_sides(name: str, size: Padding, dims: int) -> tuple[int, ...]:
    """Return the size of a window, or of its stride or padding, as one number for each side."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,) * dims
    if len(sizes) != dims:
        others = {1: "", 2: " or a pair", 3: " or three numbers"}[dims]
        raise ValueError(f"{name} must be an int{others}, got {size!r}")
    return sizes


def check_masks(masks: Tensor, scores: Tensor) -> None:
    """Check masks `(batch, *sides)` for scores `(batch, classes, *sides)`: classes from 0 to classes - 1, or IGNORED.
    Values are read on the CPU alone.

    Raises:
        TypeError: the masks are no integers.
        ValueError: they have another shape or device, or are out of range.
    """
    classes, shape = scores.shape[1], (scores.shape[0], *scores.shape[2:])
    if tuple(masks.shape) != shape:
        raise ValueError(f"expected masks of shape {shape}, got {tuple(masks.shape)}")
    if masks.device != scores.device:
        raise ValueError(f"the masks are on {masks.device} and the scores on {scores.device}: move them to one device")
    if masks.is_floating_point() or masks.is_complex() or masks.dtype == torch.bool:
        raise TypeError(f"masks must be class indices, integers, got {masks.dtype}: convert them by .long()")
    if can_read(masks) and masks.numel():
        counted = masks[masks != IGNORED]
        least, most = counted.aminmax() if len(counted) else (0, 0)
        if least < 0 or most >= classes:
            wrong = int(least if least < 0 else most)
            raise ValueError(
                f"masks must be from 0 to {classes - 1}, as there are {classes} classes, or {IGNORED} where a position "
                f"does not count, got {wrong}"
            )


def check_labels(labels: Tensor, classes: int, device: torch.device) -> None:
    """Check class indices `(batch,)`: integers from 0 to classes - 1. Values are read on the CPU alone.

    Raises:
        TypeError: the labels are no tensor of integers.
        ValueError: they have another shape or device, or are out of range.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor of class indices, got {shown_with_type(labels, torch.is_tensor)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        advice = "convert whole numbers by .long()"
        raise TypeError(f"labels must be class indices, integers, got {labels.dtype}: {advice}")
    if labels.dim() != 1:
        raise ValueError(f"expected class indices of shape (batch,), got {shown(labels)}")
    if labels.device != device:
        raise ValueError(f"the labels are on {labels.device} and the scores on {device}: move them to one device")
    if can_read(labels) and len(labels):
        least, most = labels.aminmax()
        if least < 0 or most >= classes:
            wrong = int(least if least < 0 else most)
            raise ValueError(f"labels must be from 0 to {classes - 1}, as there are {classes} classes, got {wrong}")
