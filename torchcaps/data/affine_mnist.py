"""MNIST's test digits under random affine transformations, as in affNIST."""

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from torchcaps.data.expanded_mnist import SIZE, ExpandedMNIST, windows
from torchcaps.data.streams import AFFINE_TEST, draws, stream

CANVAS = 56  # no transformation below moves a point of 28 x 28 pixels further than 25.6 from the center


def _drawn(count: int) -> Tensor:
    """Return the random numbers of the images 0 to count - 1, (count, DRAWS)."""
    return draws(stream(0, AFFINE_TEST), torch.arange(count))


def affine_maps(count: int) -> Tensor:
    """Return the linear maps of the images 0 to count - 1, (count, 2, 2) float64, see `AffineMNIST`."""
    rotation, shear, vertical, horizontal = (_drawn(count)[:, :4].double() / 2**52 - 1).unbind(1)  # -1 to 1
    rotation, shear = torch.deg2rad(20 * rotation), 0.2 * shear
    vertical, horizontal = 1 + 0.2 * vertical, 1 + 0.2 * horizontal
    cos, sin, zero, one = rotation.cos(), rotation.sin(), torch.zeros(count), torch.ones(count)
    turn = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    slant = torch.stack([one, shear, zero, one], 1).view(-1, 2, 2)
    return turn @ slant @ torch.diag_embed(torch.stack([horizontal, vertical], 1))


def transform(digits: Tensor, maps: Tensor) -> Tensor:
    """Transform digits (n, 1, 28, 28) uint8 about their centers, onto canvases (n, 1, CANVAS, CANVAS) uint8.

    The canvas is large enough for every result of `affine_maps`. Interpolation is bilinear. It is done in float64:
    rounding, which differs between machines, then changes no gray level.
    """
    # Each pixel takes its value from the point that the map moves there. Both images reach from -1 to 1.
    back = pad(torch.linalg.inv(maps) * (CANVAS / digits.shape[2]), (0, 1))
    grid = affine_grid(back, [len(digits), 1, CANVAS, CANVAS], align_corners=False)
    return grid_sample(digits.double(), grid, align_corners=False).round().byte()


def _scattered(canvases: Tensor) -> Tensor:
    """Return a random window of each image (n, 1, CANVAS, CANVAS) that contains all of its ink: (n, 1, SIZE, SIZE)."""
    starts = []
    for axis, draw in zip((3, 2), _drawn(len(canvases))[:, 4:6].unbind(1), strict=True):
        inked = canvases.any(axis).squeeze(1).byte()
        first, last = inked.argmax(1), CANVAS - 1 - inked.flip(1).argmax(1)
        free = SIZE - (last - first + 1)
        starts.append(first - torch.where(free < 0, free // 2, draw % (free.clamp(min=0) + 1)))
    return windows(canvases, starts[0], starts[1])


class AffineMNIST(ExpandedMNIST):
    """Training and validation sets of `ExpandedMNIST`; a test set of affinely transformed MNIST test digits.

    This is not affNIST. It has that set's ranges, but its own random numbers, its own interpolation, and one image of
    each test digit where affNIST has 32. Do not compare an accuracy on one with an accuracy on the other.
    Source of the ranges: T. Tieleman, affNIST, http://www.cs.toronto.edu/~tijmen/affNIST/.

    A point of the digit, x to the right of the image's center and y below it, is mapped to

        rotation @ [[1, shear], [0, 1]] @ [[horizontal, 0], [0, vertical]] @ (x, y)

    The digit is scaled, then sheared, then rotated, with

        horizontal, vertical: independent and uniform over 0.8..1.2
        shear: uniform over -0.2..0.2; a positive shear moves the foot of the digit right and its head left
        rotation: [[cos, -sin], [sin, cos]] of an angle that is uniform over -20..20 degrees; positive is clockwise

    The result is moved by whole pixels, to a place that is uniform over all those where every pixel that is not black
    lies within 40 x 40. A larger result would be centered and cut; MNIST has no such digit. Test image k depends on the
    digit and on k alone.

    Args:
        root, options: see `ExpandedMNIST`.
    """

    def _for_test(self, digits: Tensor) -> Tensor:
        maps = affine_maps(len(digits))
        canvases = digits.new_empty(len(digits), 1, CANVAS, CANVAS)
        for start in range(0, len(digits), 1000):  # in parts: an intermediate result takes 100 KB per image
            part = slice(start, start + 1000)
            canvases[part] = transform(digits[part], maps[part])
        return _scattered(canvases)
