"""Two images at once: does the network find both?

Procedure: each test image is laid over the next one of another class. Both are moved by up to a ninth of the side, each
way by random whole pixels; gray levels are added and clipped at 1. The network is right if its two highest scores are
those of both classes. A network that was trained on pairs (labels `(n, classes)`) is tested on its own test set
instead: it is right if no other class has as high a score as any of the labels.

Source: Sabour et al. 2017, section 6: MultiMNIST. There digits of 28x28 pixels lie on 36x36, each shifted by up to 4.
"""

import torch
from torch import Tensor

from torchcaps.evaluate.subject import DoesNotApply, Outcome, Protocol, Subject, percent

DARK = 0.1  # mean of the pixels at the edge up to which a background is dark


def pairs(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return each image laid over the next one of another class, and both classes `(n, 2)`."""
    partners = []
    for index, label in enumerate(labels.tolist()):
        others = (labels.roll(-index - 1) != label).nonzero()
        if not len(others):
            raise DoesNotApply("all images are of one class")
        partners.append((index + 1 + int(others[0])) % len(labels))
    return _moved(images, generator).add(_moved(images[partners], generator)).clamp(max=1), torch.stack(
        [labels, labels[partners]], 1
    )


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by random whole pixels; what enters is black."""
    most = images.shape[-1] // 9
    steps = torch.randint(-most, most + 1, (len(images), 2), generator=generator)
    for axis in (2, 3):
        size = images.shape[axis]
        places = torch.arange(size) - steps[:, axis - 2, None]
        inside = ((places >= 0) & (places < size)).unflatten(1, (size, 1) if axis == 2 else (1, size)).unsqueeze(1)
        index = places.clamp(0, size - 1).unflatten(1, (size, 1) if axis == 2 else (1, size)).unsqueeze(1)
        images = images.gather(axis, index.expand_as(images)) * inside
    return images


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    images, labels = subject.images, subject.labels
    if labels.dim() == 2:
        scores, present = subject.scores(images), labels > 0
        lowest = scores.masked_fill(~present, torch.inf).amin(1)
        return Outcome({"own test, both right (%)": percent(lowest > scores.masked_fill(present, -torch.inf).amax(1))})
    edge = torch.cat([images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]], -1).mean()
    if edge > DARK:
        raise DoesNotApply("images have no dark background, so that two cannot be added")
    both, classes = pairs(images, labels, subject.generator())
    scores = subject.scores(both)
    if scores.shape[1] < 3:
        raise DoesNotApply("two classes: the two highest scores are always right")
    highest = scores.topk(2, dim=1).indices
    hits = (highest.sort(1).values == classes.sort(1).values).all(1)
    first = (highest[:, :1] == classes).any(1)
    return Outcome({"both right (%)": percent(hits), "highest score right (%)": percent(first)})


PROTOCOL = Protocol(
    "Does it find two overlapping objects?",
    "Sabour et al. 2017, section 6",
    ("CapsNet 94.8 % and a CNN 91.9 % on MultiMNIST, both trained on it (Sabour et al. 2017)",),
    run,
)
