"""Conversions between the forms in which poses are given."""

from typing import TypeVar

from torchcaps.utils.arguments import Count

T = TypeVar("T")

Pose = Count | tuple[Count, ...]


def pose_shape(pose: Pose) -> tuple[int, ...]:
    """Return a pose as it appears in shapes: `(features,)` or `(rows, features)`."""
    shape = tuple(pose) if isinstance(pose, (tuple, list)) else (pose,)
    if len(shape) not in (1, 2):
        raise ValueError(f"a pose is an int (a vector) or (rows, features) (a matrix), got {pose!r}")
    return shape


def matrix_shape(pose: Pose) -> tuple[int, int]:
    """Return a pose as (rows, features); a vector has one row."""
    shape = pose_shape(pose)
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def show_pose(pose: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return a pose as users write it, an int for a vector."""
    return pose[0] if len(pose) == 1 else pose


def show_size(size: T) -> T | int:
    """Return a size for all sides as users write it, an int if it is the same on all."""
    return size[0] if isinstance(size, tuple) and len(set(size)) == 1 else size


def check_rows(in_pose: Pose, out_pose: Pose) -> None:
    """Check that children and parents have the same number of rows."""
    rows_in, rows_out = matrix_shape(in_pose)[0], matrix_shape(out_pose)[0]
    if rows_in != rows_out:
        raise ValueError(
            f"votes keep the rows of a pose: in_pose={in_pose!r} has {rows_in} and out_pose={out_pose!r} has "
            f"{rows_out}; they must be equal (a vector has one)"
        )
