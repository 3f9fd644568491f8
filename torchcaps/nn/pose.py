"""Shapes of poses, and the capsules that layers take."""

from torch import Tensor

from torchcaps.capsules import Capsules

Pose = int | tuple[int, ...]


def pose_shape(pose: Pose) -> tuple[int, ...]:
    """A pose as it appears in shapes: `(features,)` or `(rows, features)`."""
    shape = (pose,) if isinstance(pose, int) else tuple(pose)
    if len(shape) not in (1, 2) or any(size < 1 for size in shape):
        raise ValueError(f"a pose is an int (a vector) or (rows, features) (a matrix), got {pose!r}")
    return shape


def matrix_shape(pose: Pose) -> tuple[int, int]:
    """A pose as (rows, features): a vector has one row."""
    shape = pose_shape(pose)
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def show_pose(pose: tuple[int, ...]) -> int | tuple[int, ...]:
    """A pose as a user writes it."""
    return pose[0] if len(pose) == 1 else pose


def check_rows(in_pose: Pose, out_pose: Pose) -> None:
    rows_in, rows_out = matrix_shape(in_pose)[0], matrix_shape(out_pose)[0]
    if rows_in != rows_out:
        raise ValueError(
            f"votes keep the rows of a pose: in_pose={in_pose!r} has {rows_in} and out_pose={out_pose!r} has "
            f"{rows_out}; they must be equal (a vector has one)"
        )


def as_capsules(x: Capsules | Tensor) -> Capsules:
    return x if isinstance(x, Capsules) else Capsules(x)
