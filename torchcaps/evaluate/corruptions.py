"""Accuracy on corrupted images: the fifteen corruptions of MNIST-C, and rotation by up to 180 degrees.

Procedure: each test image is corrupted in each way, with the strengths of the published data set. Lines and shifts are
those of 28x28 pixels and grow with the side. All channels of a pixel are corrupted alike, but noise is drawn for each.
The images are not those of the published files: random numbers are our own, edges are kornia's, and a motion blur reads
the nearest pixels along its direction. Then all images are rotated by 0 to 180 degrees.

Source: N. Mu and J. Gilmer, MNIST-C, 2019; the strengths are those of its code.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from kornia.filters import canny, gaussian_blur2d
from torch import Tensor

from torchcaps.capsules import IGNORED
from torchcaps.evaluate.subject import BATCH, Curve, DoesNotApply, Outcome, Protocol, Subject
from torchcaps.measures.transforms import affine

ROTATIONS = range(15, 181, 15)  # degrees
Corruption = Callable[[Tensor, torch.Generator], Tensor]


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return 2.0 * torch.randint(0, 2, (count,), generator=generator) - 1


def _blurred(images: Tensor, sigma: float) -> Tensor:
    size = 2 * math.ceil(4 * sigma) + 1
    size = min(size, 2 * (min(images.shape[2:]) // 2) - 1)
    return gaussian_blur2d(images, (size, size), (sigma, sigma), border_type="replicate")


def shot_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Poisson noise of three photons at full brightness."""
    return torch.poisson(3 * x, generator=generator) / 3


def impulse_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Black and white in 17 % of the numbers."""
    drawn = torch.rand(x.shape, generator=generator)
    return torch.where(drawn < 0.085, 0.0, torch.where(drawn < 0.17, 1.0, x))


def glass_blur(x: Tensor, generator: torch.Generator) -> Tensor:
    """Blur, exchange neighboring pixels at random, blur."""
    x = _blurred(x, 0.7)
    height, width = x.shape[2:]
    every = torch.arange(len(x))
    for _ in range(2):
        for row in range(height - 1, 1, -1):
            for column in range(width - 1, 1, -1):
                swapped = torch.rand(len(x), generator=generator) < 0.5
                down, right = torch.randint(-1, 1, (2, len(x)), generator=generator) * swapped
                here, there = x[:, :, row, column].clone(), x[every, :, row + down, column + right]
                x[:, :, row, column] = there
                x[every, :, row + down, column + right] = here
    return _blurred(x, 0.7)


def motion_blur(x: Tensor, generator: torch.Generator) -> Tensor:
    """The right half of a Gaussian of 3 pixels along a direction of -45 to 45 degrees."""
    side = x.shape[3] / 28
    angles = torch.deg2rad(90 * torch.rand(len(x), generator=generator) - 45)
    weights = torch.exp(-0.5 * (torch.arange(21) / 3.0) ** 2)
    rows, columns = (torch.arange(size) for size in x.shape[2:])
    every, total = torch.arange(len(x))[:, None, None], torch.zeros_like(x)
    for step, weight in enumerate((weights / weights.sum()).tolist()):
        down = (rows + (side * step * angles.sin()).round().long()[:, None]).clamp(0, x.shape[2] - 1)
        right = (columns + (side * step * angles.cos()).round().long()[:, None]).clamp(0, x.shape[3] - 1)
        total += weight * x[every, :, down[:, :, None], right[:, None]].movedim(-1, 1)
    return total


def shear(x: Tensor, generator: torch.Generator) -> Tensor:
    """Vertical lines lean to the left or right by the arc tangent of sin 0.4, 0.37 radians."""
    angles = 0.4 * _signs(len(x), generator).double()
    return affine(x, scale=torch.stack([torch.ones_like(angles), 1 / angles.cos()], 1), shear=angles.sin())


def scale(x: Tensor, generator: torch.Generator) -> Tensor:
    """To 0.7 of the size."""
    return affine(x, scale=0.7)


def rotate(x: Tensor, generator: torch.Generator) -> Tensor:
    """By 0.4 radians either way."""
    return affine(x, rotation=math.degrees(0.4) * _signs(len(x), generator))


def brightness(x: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the full brightness more."""
    value = x.amax(1, keepdim=True)
    brighter = (value + 0.5).clamp(max=1)
    return torch.where(value > 0, x / value.clamp(min=1e-8) * brighter, brighter)


def translate(x: Tensor, generator: torch.Generator) -> Tensor:
    """By three pixels either way, across and down."""
    return affine(x, shift=3 / 28 * torch.stack([_signs(len(x), generator) for _ in range(2)], 1))


def stripe(x: Tensor, generator: torch.Generator) -> Tensor:
    """The left and the right quarter are inverted."""
    x, quarter = x.clone(), x.shape[3] // 4
    x[..., :quarter] = 1 - x[..., :quarter]
    x[..., -quarter:] = 1 - x[..., -quarter:]
    return x


def fog(x: Tensor, generator: torch.Generator) -> Tensor:
    """A plasma of three times the full brightness is added."""
    most = x.amax((1, 2, 3), keepdim=True)
    haze = plasma(len(x), generator)[:, None, : x.shape[2], : x.shape[3]]
    return (x + 3 * haze) * most / (most + 3)


def plasma(count: int, generator: torch.Generator) -> Tensor:
    """Return maps in [0, 1] by the diamond-square algorithm on a torus, `(count, 256, 256)`."""
    maps = torch.zeros(count, 256, 256)
    step, wobble = 256, 100.0

    def around(total: Tensor) -> Tensor:
        return total / 4 + wobble**2 * (2 * torch.rand(total.shape, generator=generator) - 1)

    while step >= 2:
        half = step // 2
        corners = maps[:, ::step, ::step]
        squares = corners + corners.roll(-1, 1)
        maps[:, half::step, half::step] = around(squares + squares.roll(-1, 2))
        centers = maps[:, half::step, half::step]
        maps[:, ::step, half::step] = around(centers + centers.roll(1, 1) + corners + corners.roll(-1, 2))
        maps[:, half::step, ::step] = around(centers + centers.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wobble = half, wobble / 1.4
    maps -= maps.amin((1, 2), keepdim=True)
    return maps / maps.amax((1, 2), keepdim=True)


def spatter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Drops of mud."""
    drops = _blurred(0.65 + 0.3 * torch.randn(len(x), 1, *x.shape[2:], generator=generator), 1)
    mask = _blurred((drops > 0.65).float(), 1.5)
    mask = mask * (mask >= 0.8)
    return x * (1 - mask) + 63 / 255 * mask


def _line(x: Tensor, ends: Tensor) -> Tensor:
    """Return lines between points (column, row) of a 28x28 grid, `ends` (n, 4), as gray levels `(n, 1, h, w)`."""
    height, width = x.shape[2:]
    rows = torch.arange(height)[:, None] * 27 / (height - 1)
    columns = torch.arange(width) * 27 / (width - 1)
    c0, r0, c1, r1 = (end[:, None, None] for end in ends.unbind(1))
    distance = (rows - r0 - (r1 - r0) / (c1 - c0) * (columns - c0)).abs().clamp(max=2.3 - 1e-6)
    gray = ((1 - distance / 2.3).log() + 1).clamp(0, 1)
    return (gray * (columns >= c0.floor()) * (columns < c1.ceil())).unsqueeze(1)


def dotted_line(x: Tensor, generator: torch.Generator) -> Tensor:
    """A dotted line from the left to the right edge."""
    heights = torch.randint(0, 27, (2, len(x)), generator=generator).float()
    ends = torch.stack([torch.zeros(len(x)), heights[0], torch.full((len(x),), 27.0), heights[1]], 1)
    columns = torch.arange(x.shape[3]) * 27 / (x.shape[3] - 1)
    return x + _line(x, ends) * (columns % 4 >= 2)


def zigzag(x: Tensor, generator: torch.Generator) -> Tensor:
    """A zigzag of teeth of two pixels from left to right, which rises or falls by up to five pixels."""
    start = torch.randint(0, 27, (len(x),), generator=generator).float()
    rise = torch.randint(-5, 5, (len(x),), generator=generator).float()
    angle = torch.atan(rise / 23)
    teeth = [(0.0, 0.0), *((2.0 * (2 * tooth + 1), 2.0 * (-1) ** tooth) for tooth in range(6)), (23.0, 0.0)]
    points = [
        (2 + along * angle.cos() - up * angle.sin(), start + along * angle.sin() + up * angle.cos())
        for along, up in teeth
    ]
    for (c0, r0), (c1, r1) in pairwise(points):
        x = (x + _line(x, torch.stack([c0, r0, c1, r1], 1))).clamp(0, 1)
    return x


def canny_edges(x: Tensor, generator: torch.Generator) -> Tensor:
    """Edges alone."""
    return canny(x.mean(1, keepdim=True))[1].expand_as(x)


CORRUPTIONS: dict[str, Corruption] = {
    corruption.__name__: corruption
    for corruption in (
        shot_noise,
        impulse_noise,
        glass_blur,
        motion_blur,
        shear,
        scale,
        rotate,
        brightness,
        translate,
        stripe,
        fog,
        spatter,
        dotted_line,
        zigzag,
        canny_edges,
    )
}


MOVING = ("shear", "scale", "rotate", "translate")  # which a mask would have to follow


def turned_masks(masks: Tensor, angle: float) -> Tensor:
    """Return masks `(n, height, width)` that are turned by an angle in degrees, counterclockwise; what enters them does
    not count."""
    classes = max(1, int(masks.max()) + 1)  # all pixels may be such that do not count
    present = torch.stack([(masks == label).float() for label in range(classes)], 1)
    shares, labels = affine(present, rotation=angle).max(1)
    return labels.where(shares > 0, IGNORED)


def corrupted(images: Tensor, name: str, generator: torch.Generator) -> Tensor:
    """Return images in [0, 1] with one of the corruptions."""
    parts = [CORRUPTIONS[name](batch.clone(), generator).clamp(0, 1) for batch in images.split(BATCH)]
    return torch.cat(parts)


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    images = subject.images
    if not 16 <= min(images.shape[2:]) <= max(images.shape[2:]) <= 256:
        raise DoesNotApply(f"images have {images.shape[2]}x{images.shape[3]} pixels, and 16 to 256 are needed")
    points: list[tuple[float | str, float]] = [("as they are", subject.accuracy(images))]
    names = [name for name in CORRUPTIONS if subject.target != "masks" or name not in MOVING]
    for name in names:
        subject.progress(f"corruptions: {name}")
        points.append((name.replace("_", " "), subject.accuracy(corrupted(images, name, subject.generator()))))
    points.append(("mean of the corruptions", sum(value for _, value in points[1:]) / len(names)))
    subject.progress("corruptions: rotation")
    rotated: list[tuple[float | str, float]] = [(0.0, points[0][1])]
    for angle in ROTATIONS:
        turned = affine(images, rotation=float(angle), padding=subject.padding)
        labels = turned_masks(subject.labels, float(angle)) if subject.target == "masks" else None
        rotated.append((float(angle), subject.accuracy(turned, labels)))
    curves = {
        "corruptions": Curve("", subject.measure, points),
        "rotation": Curve("rotation (degrees)", subject.measure, rotated),
    }
    return Outcome({f"{name}: {subject.measure}": value for name, value in points}, curves)


PROTOCOL = Protocol(
    "Does it recognize corrupted images?",
    (),
    run,
)
