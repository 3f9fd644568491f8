"""Accuracy on affinely transformed images: does the network recognize what it knows from a new viewpoint?

Procedure: each test image is rotated, scaled, sheared and moved at once, by random amounts from affNIST's ranges:
rotation uniform over -20 to 20 degrees, shear over -0.2 to 0.2, scale over 0.8 to 1.2 across and down independently,
and a shift of up to an eighth of the side across and down. Then all images are transformed in one way alone, in growing
steps. Interpolation is bilinear; what enters an image has its data set's darkest value. The accuracy on the images as
they are stands beside, because networks are comparable only at matched accuracy there. A network of MNIST on 40x40
pixels is tested on :class:`torchcaps.data.AffineMNIST` too, as in the paper.

Source: Sabour et al. 2017, section 5.2; the ranges are those of T. Tieleman's affNIST.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data import AffineMNIST, ExpandedMNIST
from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject

ROTATIONS = (-30, -20, -10, 0, 10, 20, 30)  # degrees
SCALES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
SHEARS = (-0.4, -0.2, 0.0, 0.2, 0.4)
SHIFTS = (0.0, 5.0, 10.0, 15.0, 20.0)  # percent of the side


def affine(
    images: Tensor,
    rotation: Tensor | float = 0.0,
    scale: Tensor | float = 1.0,
    shear: Tensor | float = 0.0,
    shift: Tensor | tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Scale, shear, rotate and move images about their centers, in this order.

    Args:
        images: `(n, channels, height, width)`.
        rotation: degrees, counterclockwise; one for all, or `(n,)`.
        scale: factor; one for all, or across and down for each, `(n, 2)`.
        shear: a point moves to the right by this part of how far it lies below the center; one for all, or `(n,)`.
        shift: right and down, as parts of the width and the height; one for all, or `(n, 2)`.
    """
    count = len(images)
    angle = torch.as_tensor(rotation, dtype=torch.float64).deg2rad().expand(count)
    factors = torch.as_tensor(scale, dtype=torch.float64).expand(count, 2)
    slants = torch.as_tensor(shear, dtype=torch.float64).expand(count)
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros(count), torch.ones(count)
    turn = torch.stack([cos, sin, -sin, cos], 1).view(-1, 2, 2)  # y points down
    slant = torch.stack([one, slants, zero, one], 1).view(-1, 2, 2)
    return warp(images, torch.linalg.inv(turn @ slant @ torch.diag_embed(factors)), shift)


def warp(images: Tensor, back: Tensor, shift: Tensor | tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Return images whose pixel at p from the center has the value of the image at `back (p - shift)`.

    Args:
        images: `(n, channels, height, width)`.
        back: matrices of (x, y) in pixels, `(n, 2, 2)` float64.
        shift: right and down, as parts of the width and the height; one for all, or `(n, 2)`.
    """
    size = torch.tensor([images.shape[3], images.shape[2]], dtype=torch.float64) / 2
    moved = 2 * size * torch.as_tensor(shift, dtype=torch.float64).expand(len(images), 2)
    # From pixels to coordinates that are -1 and 1 at the edges.
    theta = torch.cat([back * (size / size[:, None]), -(back @ moved.unsqueeze(2)) / size[:, None]], 2)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False).to(images)
    background = images.amin()
    return F.grid_sample(images - background, grid, align_corners=False) + background


def random_affine(subject: Subject, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the first images under random transformations of the ranges above, and what they are: rotation, shear
    `(n,)`, scale and shift `(n, 2)`."""
    images = subject.images[:count]
    draws = 2 * torch.rand(len(images), 6, generator=subject.generator(), dtype=torch.float64) - 1
    factors = {
        "rotation": 20 * draws[:, 0],
        "shear": 0.2 * draws[:, 1],
        "scale": 1 + 0.2 * draws[:, 2:4],
        "shift": draws[:, 4:] / 8,
    }
    return affine(images, **factors), factors


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_one_label()
    images = subject.images
    if math.prod(images.shape[2:]) < 64:
        raise DoesNotApply(f"images of {images.shape[2]}x{images.shape[3]} pixels are too small to transform")
    numbers = {
        "as they are (%)": subject.accuracy(images),
        "affine (%)": subject.accuracy(random_affine(subject, len(images))[0]),
    }
    if isinstance(subject.data, ExpandedMNIST):
        data = AffineMNIST(root=subject.data.root)
        data.setup("test")
        test = data.test_set
        numbers["AffineMNIST (%)"] = subject.accuracy(test.images.float() / 255, test.labels)  # type: ignore[union-attr]
    curves = {}
    for name, unit, values in (
        ("rotation", "degrees", ROTATIONS),
        ("scale", "factor", SCALES),
        ("shear", "", SHEARS),
        ("shift", "% of the side", SHIFTS),
    ):
        points = []
        for value in values:
            subject.progress(f"affine: {name} {value:g}")
            amount: Any = (value / 100, value / 100) if name == "shift" else value
            points.append((float(value), subject.accuracy(affine(images, **{name: amount}))))
        curves[name] = Curve(f"{name}{f' ({unit})' if unit else ''}", "accuracy (%)", points)
    return Outcome(numbers, curves)


PROTOCOL = Protocol(
    "Does it recognize images from new viewpoints?",
    "Sabour et al. 2017, section 5.2",
    ("CapsNet 79 % and a CNN 66 % on affNIST, both trained on MNIST on 40x40 pixels to 99.2 % (Sabour et al. 2017)",),
    run,
)
