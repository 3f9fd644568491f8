"""Two images at once: does the network find both?

Procedure: each test image is laid over the next one of another class. Both are moved by up to a ninth of the side, each
way by random whole pixels; gray levels are added and clipped at 1, see :func:`torchcaps.explain.overlaps.overlaid`. The
network is right if no other class has as high a score as the two. A network that was trained on pairs (labels `(n,
classes)`) is tested on its own test set instead, by the same rule.

Source: Sabour et al. 2017, section 6: MultiMNIST. There digits of 28x28 pixels lie on 36x36, each shifted by up to 4.
"""

import torch
from torch import Tensor

from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject, percent
from torchcaps.explain.overlaps import overlaid
from torchcaps.measures.accuracy import is_right
from torchcaps.measures.transforms import on_black


def pairs(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return each image laid over the next one of another class, and both classes `(n, 2)`."""
    most = images.shape[-1] // 9
    shifts = torch.randint(-most, most + 1, (2, len(images), 2), generator=generator).tolist()
    both, partners = [], []
    for index, label in enumerate(labels.tolist()):
        others = (labels.roll(-index - 1) != label).nonzero()
        if not len(others):
            raise DoesNotApply("all images are of one class")
        partners.append((index + 1 + int(others[0])) % len(labels))
        moved = overlaid(torch.zeros_like(images[0]), images[index], tuple(shifts[0][index]))
        both.append(overlaid(moved, images[partners[-1]], tuple(shifts[1][index])))
    return torch.stack(both), torch.stack([labels, labels[partners]], 1)


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_classes()
    images, labels = subject.images, subject.labels
    if labels.dim() == 2:
        what = "its labels are predicted" if subject.target == "labels" else "all classes have the highest scores"
        name, accuracy = f"its own test: {what}", subject.accuracy(images)
        return Outcome({f"{name} (%)": accuracy}, {"": Curve("", "share of images (%)", [(name, accuracy)])})
    if not on_black(images):
        raise DoesNotApply("the images are not gray on black, so that two cannot be added")
    both, classes = pairs(images, labels, subject.generator())
    scores = subject.scores(both)
    if scores.shape[1] < 3:
        raise DoesNotApply("two classes: the two highest scores are always right")
    present = torch.zeros_like(scores).scatter(1, classes, 1.0)
    one_of_them = present.gather(1, scores.argmax(1, keepdim=True)) > 0
    points: list[tuple[float | str, float]] = [
        ("one image: it has the highest score", subject.accuracy(images)),
        ("two: one of them has the highest score", percent(one_of_them)),
        ("two: both have the highest scores", percent(is_right(scores, present))),
    ]
    return Outcome({f"{name} (%)": value for name, value in points}, {"": Curve("", "share of images (%)", points)})


PROTOCOL = Protocol(
    "Does it find two overlapping objects?",
    ("CapsNet 94.8 % and a CNN 91.9 % on MultiMNIST, both trained on it (Sabour et al. 2017)",),
    run,
)
