"""Accuracy on affinely transformed images: does the network recognize what it knows from a new viewpoint?

Procedure: each test image is rotated, scaled, sheared and moved at once, by random amounts from affNIST's ranges:
rotation uniform over -20 to 20 degrees, shear over -0.2 to 0.2, scale over 0.8 to 1.2 across and down independently,
and a shift of up to an eighth of the side across and down; see :func:`torchcaps.measures.transforms.affine`. Then all
images are transformed in one way alone, in growing steps. What enters is black if images are gray on black, and else
repeats their edges. The accuracy on the images as they are stands beside, because networks are comparable only at
matched accuracy there. A network of MNIST on 40x40 pixels is tested on :class:`torchcaps.data.AffineMNIST` too, as in
the paper.

Source: Sabour et al. 2017, section 5.2; the ranges are those of T. Tieleman's affNIST.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchcaps.data import AffineMNIST, ExpandedMNIST
from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject
from torchcaps.measures.transforms import affine

ROTATIONS = (-30, -20, -10, 0, 10, 20, 30)  # degrees
SCALES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
SHEARS = (-0.4, -0.2, 0.0, 0.2, 0.4)
SHIFTS = (0.0, 5.0, 10.0, 15.0, 20.0)  # percent of the side


def random_affine(subject: Subject) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the images under random transformations of the ranges above, and what they are: rotation, shear
    `(n,)`, scale and shift `(n, 2)`."""
    draws = 2 * torch.rand(len(subject.images), 6, generator=subject.generator(), dtype=torch.float64) - 1
    factors = {
        "rotation": 20 * draws[:, 0],
        "shear": 0.2 * draws[:, 1],
        "scale": 1 + 0.2 * draws[:, 2:4],
        "shift": draws[:, 4:] / 8,
    }
    return affine(subject.images, **factors, padding=subject.padding), factors


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_classes()
    images = subject.images
    if math.prod(images.shape[2:]) < 64:
        raise DoesNotApply(f"images of {images.shape[2]}x{images.shape[3]} pixels are too small to transform")
    as_they_are = subject.accuracy(images)
    numbers = {
        "accuracy as they are (%)": as_they_are,
        "accuracy on affine images (%)": subject.accuracy(random_affine(subject)[0]),
    }
    if isinstance(subject.data, ExpandedMNIST):
        data = AffineMNIST(root=subject.data.root, check_hashes=subject.data.check_hashes)
        data.setup("test")
        test = data.test_set
        numbers["accuracy on AffineMNIST (%)"] = subject.accuracy(test.images.float() / 255, test.labels)  # type: ignore[union-attr]
    curves = {}
    for name, unit, values in (
        ("rotation", "degrees", ROTATIONS),
        ("scale", "factor", SCALES),
        ("shear", "part of the distance below the center", SHEARS),
        ("shift", "% of the side", SHIFTS),
    ):
        points = []
        subject.progress(f"affine: {name}")
        for value in values:
            amount: Any = (value / 100, value / 100) if name == "shift" else value
            if value == (1 if name == "scale" else 0):
                points.append((float(value), as_they_are))
            else:
                changed = affine(images, **{name: amount}, padding=subject.padding)
                points.append((float(value), subject.accuracy(changed)))
        curves[name] = Curve(f"{name} ({unit})", "accuracy (%)", points)
    return Outcome(numbers, curves)


PROTOCOL = Protocol(
    "Does it recognize images from new viewpoints?",
    ("CapsNet 79 % and a CNN 66 % on affNIST, both trained on MNIST on 40x40 pixels to 99.2 % (Sabour et al. 2017)",),
    run,
)
