"""Pairs of views of one object, whose relative rotation is known: data to learn from without labels."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.stereo import Metadata
from torchcaps.utils.arguments import FloatTensor, NotNegative, checked


class ViewPairs(NamedTuple):
    """Two views of each of n objects. Pairs of your own are one of these too.

    Fields:
        first, second: the views, `(n, channels, height, width)` each.
        transforms: matrices that turn the first view into the second, `(n, rows, rows)`: where a row vector v describes
            a direction of the object in the first view, `v @ transform` does so in the second.
    """

    first: Tensor
    second: Tensor
    transforms: Tensor


@checked
def turned_pairs(images: FloatTensor, degrees: NotNegative, generator: torch.Generator | None = None) -> ViewPairs:
    """Turn each image twice, by angles drawn evenly from -degrees to degrees, with black outside.

    Args:
        images: `(n, channels, height, width)`.
        degrees: the largest angle.
        generator: random numbers of the angles, on the CPU; None for PyTorch's own.

    Returns:
        The views, and the rotations from the first to the second, `(n, 2, 2)`: x is to the right, and y up.
    """
    if images.dim() != 4:
        raise ValueError(f"expected images of shape (n, channels, height, width), got {tuple(images.shape)}")
    angles = torch.deg2rad(degrees * (2 * torch.rand(2, len(images), generator=generator) - 1)).to(images)
    first, second = (_turned(images, angle) for angle in angles)
    return ViewPairs(first, second, about_z(angles[1] - angles[0]).mT[:, :2, :2])


@checked
def stereo_pairs(
    images: Tensor, metadata: Metadata, first: Tensor, generator: torch.Generator | None = None
) -> ViewPairs:
    """Pair images of toys with images of the same toy under the same lighting, from any elevation and azimuth.

    Args:
        images: stereo images, `(m, 2, height, width)` uint8.
        metadata: metadata of the images, such as `StereoData.metadata("fit")`.
        first: indices of the first views, `(n,)` int64. The second view of each is drawn, and may be the same image.
        generator: random numbers, on the CPU; None for PyTorch's own.

    Returns:
        The views in [0, 1], and the rotations from the first to the second, `(n, 3, 3)`, in the axes of the cameras,
        see :func:`viewpoints`.
    """
    same = (metadata.category * 10 + metadata.instance) * 6 + metadata.lighting
    order = same.argsort(stable=True)
    counts = same.bincount()
    starts, own = counts.cumsum(0) - counts, same[first]
    drawn = (torch.rand(len(first), generator=generator, dtype=torch.float64) * counts[own]).long()
    second = order[starts[own] + drawn]
    views = viewpoints(metadata)
    return ViewPairs(images[first] / 255, images[second] / 255, views[first] @ views[second].mT)


@checked
def viewpoints(metadata: Metadata) -> Tensor:
    """Return the rotations that lead from the axes of a toy to those of the cameras, `(n, 3, 3)`, for column vectors.

    A camera's x is to the right, y up and z towards it. A toy looks along its x, and its z is up.
    """
    turn = torch.deg2rad(10.0 * metadata.azimuth)
    up = torch.deg2rad(30 + 5.0 * metadata.elevation)
    cos, sin, zero, one = up.cos(), up.sin(), torch.zeros_like(up), torch.ones_like(up)
    cameras = torch.stack([one, zero, zero, zero, sin, cos, zero, -cos, sin], 1).view(-1, 3, 3)
    return cameras @ about_z(turn)


def about_z(angles: Tensor) -> Tensor:
    """Return rotations about the z axis by angles in radians, `(n, 3, 3)`, for column vectors."""
    cos, sin, zero, one = angles.cos(), angles.sin(), torch.zeros_like(angles), torch.ones_like(angles)
    return torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], 1).view(-1, 3, 3)


def _turned(images: Tensor, angles: Tensor) -> Tensor:
    """Turn images counterclockwise by angles in radians, `(n,)`."""
    # The y of a grid points down: its rotation by the angle, which shows where a pixel comes from, turns the other way.
    grid = F.affine_grid(about_z(angles)[:, :2], list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
