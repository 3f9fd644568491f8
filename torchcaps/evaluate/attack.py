"""Adversarial images: do small changes of the pixels change the prediction, and does a reconstruction give them away?

Procedure: on 1,000 test images at most, by the largest change e of a pixel (0.03, 0.1 and 0.3), three white-box
attacks that follow the sign of the gradient of d, the highest score of another class minus that of the true one:

- FGSM: one step of e (Goodfellow et al. 2015);
- BIM: ten steps of e/5, each time brought back to within e of the image and to [0, 1] (Kurakin et al. 2017);
- PGD: ten steps of e/4 from a random start within e, likewise (Madry et al. 2018).

The difference of scores has a gradient where a margin loss or a saturated softmax has none. The share of images whose
gradient is zero all the same is listed: on these an attack of this kind says nothing.

With a decoder, an image is suspected if the distance |x - r| to its reconstruction r from the winning capsule is above
the 95th percentile of the held-out images. Listed are the share of test images that is suspected as they are, and, of
the images that the network has right, the share of attacks that succeed (it is wrong now) and are not suspected.

Source: Frosst, Sabour and Hinton, DARCCC: Detecting Adversaries by Reconstruction from Class Conditional Capsules
(2018).
"""

import torch
from torch import Tensor, nn

from torchcaps.evaluate.subject import BATCH, Curve, Outcome, Protocol, Subject, percent, scores_of
from torchcaps.measures.accuracy import is_right
from torchcaps.measures.predicting import has_decoder, predict, reconstructed
from torchcaps.nn.modes import evaluating

STRENGTHS = (0.03, 0.1, 0.3)
ATTACKS = {"FGSM": (1, 1.0, False), "BIM": (10, 0.2, False), "PGD": (10, 0.25, True)}  # steps, length, random start
QUANTILE = 0.95


def gradient(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the highest score of another class minus that of the true one."""
    images = images.detach().requires_grad_()
    with torch.enable_grad(), evaluating(network):
        scores = scores_of(network, images)
        own = torch.zeros_like(scores, dtype=torch.bool).scatter(1, labels.to(scores.device).unsqueeze(1), True)
        leads = scores.masked_fill(own, -torch.inf).amax(1) - scores[own]
        return torch.autograd.grad(leads.sum(), images)[0]


def attack(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    strength: float,
    steps: int,
    length: float,
    start: torch.Generator | None = None,
) -> Tensor:
    """Return images that are changed by at most `strength` per pixel, to raise the score of another class.

    Args:
        network: see `Subject`.
        images, labels: images in [0, 1] and their classes.
        strength: largest change of a pixel.
        steps: number of steps.
        length: length of a step, as a part of the strength.
        start: random numbers of the start, or None to start from the images.
    """
    changed = images
    if start is not None:
        noise = 2 * torch.rand(images.shape, generator=start).to(images) - 1
        changed = (images + strength * noise).clamp(0, 1)
    for _ in range(steps):
        changed = changed + length * strength * gradient(network, changed, labels).sign()
        changed = torch.minimum(torch.maximum(changed, images - strength), images + strength).clamp(0, 1)
    return changed.detach()


def distances(network: nn.Module, images: Tensor) -> Tensor:
    """Return the distance of each image to its reconstruction from the capsule of the highest score."""
    lengths = []
    for batch in images.split(BATCH):
        prediction = predict(network, batch)
        assert prediction.capsules is not None
        drawn = reconstructed(network, prediction.capsules, prediction.evidence.argmax(1))
        lengths.append((drawn.cpu() - batch).flatten(1).norm(dim=1))
    return torch.cat(lengths)


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_one_label()
    network, images, labels = subject.network, subject.images, subject.labels
    right = is_right(subject.scores(images), labels)
    numbers = {"accuracy as they are (%)": percent(right)}
    batches = list(subject.batches())
    zero = [(gradient(network, *batch).flatten(1) == 0).all(1).cpu() for batch in batches]
    numbers["gradient is zero (%)"] = percent(torch.cat(zero))
    threshold, notes = None, []
    if not has_decoder(network):
        notes.append("without a decoder there is no reconstruction to suspect an image by")
    elif subject.held_out is None:
        notes.append("there are no held-out images for the threshold of the reconstruction: train with some")
    else:
        threshold = distances(network, subject.held_out[0]).quantile(QUANTILE)
        numbers["suspected as they are (%)"] = percent(distances(network, images) > threshold)
    curves: dict[str, Curve] = {}
    missed_curves: dict[str, Curve] = {}
    for name, (steps, length, random) in ATTACKS.items():
        accuracies, undetected = [(0.0, numbers["accuracy as they are (%)"])], [(0.0, 0.0)]
        for strength in STRENGTHS:
            subject.progress(f"attack: {name}, strength {strength}")
            start = subject.generator() if random else None
            changed = torch.cat([attack(network, *batch, strength, steps, length, start).cpu() for batch in batches])
            still = is_right(subject.scores(changed), labels)
            accuracies.append((strength, percent(still)))
            numbers[f"{name} {strength}: accuracy (%)"] = accuracies[-1][1]
            if threshold is not None and right.any():
                missed = right & ~still & (distances(network, changed) <= threshold)
                undetected.append((strength, percent(missed[right])))
                numbers[f"{name} {strength}: successful and not suspected (%)"] = undetected[-1][1]
        curves[name] = Curve("largest change of a pixel", "accuracy (%)", accuracies)
        if threshold is not None:
            missed_curves[f"{name}, despite the reconstruction"] = Curve(
                "largest change of a pixel", "successful and not suspected (%)", undetected
            )
    return Outcome(numbers, curves | missed_curves, notes)


PROTOCOL = Protocol(
    "Does it resist attacks, and does its reconstruction give them away?",
    (
        "a CapsNet, on MNIST or CIFAR-10: at 5 % false alarms about 70 % of attacks are detected (github.com/"
        "KellerJordan/CapsNet-Adversarial, which does not say on which; gradient ascent until the class changes)",
    ),
    run,
    max_images=1000,
)
