"""Do capsules form a tree of parts that differs from image to image?

Procedure: for each layer that routes, in the order of depth, on 1,000 test images:

- dead: share of parents that are dead, see :func:`torchcaps.explain.dead_capsules`;
- change: standard deviation of each coefficient over the images, mean over children and parents, in percent of a
  uniform coefficient. A layer whose coefficients do not change is a fixed weighting, no tree of an image;
- gradient: norm of the loss's gradient for the layer's weights, divided by their norm, mean over batches.

Source: Mitterreiter et al., Why Capsule Neural Networks Do Not Scale, AAAI 2023, sections 4 and 5.
"""

import torch
from torch import Tensor, nn

from torchcaps.evaluate.subject import BATCH, Curve, DoesNotApply, Outcome, Protocol, Subject, scores_of
from torchcaps.explain.dead import dead_capsules
from torchcaps.explain.recording import record
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.modes import evaluating

MOST = 1000  # images


def change_of_coefficients(network: nn.Module, images: Tensor) -> dict[str, float]:
    """Return for each layer how much its coefficients change from image to image, in percent of a uniform one."""
    sums: dict[str, list[Tensor]] = {}
    counts: dict[str, int] = {}
    for batch in images.split(BATCH // 4):
        for run_ in record(network, batch)[1]:
            if run_.last is None or not isinstance(run_.layer, CapsuleLayer):
                continue
            found = run_.last.votes.coefficients().detach().double()
            found = found.unflatten(0, (len(batch), -1)).cpu()  # windows are samples of their own
            total, squares = sums.setdefault(run_.name, [torch.zeros_like(found[0]) for _ in range(2)])
            total += found.sum(0)
            squares += found.square().sum(0)
            counts[run_.name] = counts.get(run_.name, 0) + len(batch)
    changes = {}
    for name, (total, squares) in sums.items():
        mean = total / counts[name]
        spread = (squares / counts[name] - mean.square()).clamp_min(0).sqrt().mean()
        changes[name] = 100 * float(spread / mean.mean())
    return changes


def gradient_norms(subject: Subject, layers: dict[str, CapsuleLayer], count: int) -> dict[str, float]:
    """Return the norm of the loss's gradient for each layer's weights, relative to the norm of the weights."""
    norms = dict.fromkeys(layers, 0.0)
    batches = list(subject.batches(count))
    with evaluating(subject.network), torch.enable_grad():
        for images, labels in batches:
            subject.network.zero_grad()
            subject.loss(scores_of(subject.network, images), labels).backward()
            for name, layer in layers.items():
                pairs = [(p.detach(), p.grad) for p in layer.parameters() if p.grad is not None]
                size = sum(float(weight.square().sum()) for weight, _ in pairs)
                slope = sum(float(grad.square().sum()) for _, grad in pairs)
                norms[name] += (slope / size) ** 0.5 / len(batches) if size else 0.0
    subject.network.zero_grad()
    return norms


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    layers = {name: x for name, x in subject.network.named_modules() if isinstance(x, CapsuleLayer)}
    if not layers:
        raise DoesNotApply("the network has no layer that routes")
    subject.progress("parts: dead capsules")
    dead = dead_capsules(subject.network, subject.batches(MOST))
    subject.progress("parts: coefficients")
    changes = change_of_coefficients(subject.network, subject.images[:MOST])
    subject.progress("parts: gradients")
    norms = gradient_norms(subject, layers, MOST)
    numbers, depths = {}, [name for name in dead if name in layers]
    for name in depths:
        share = dead[name].parents
        if share is not None:
            numbers[f"{name}: dead (%)"] = 100 * share
        numbers[f"{name}: change (%)"] = changes.get(name, 0.0)
        numbers[f"{name}: gradient"] = norms[name]
    curves = {}
    if len(depths) > 1:
        for what, unit in (("dead", " (%)"), ("change", " (%)"), ("gradient", "")):
            points = [
                (float(depth), numbers[f"{name}: {what}{unit}"])
                for depth, name in enumerate(depths, 1)
                if f"{name}: {what}{unit}" in numbers
            ]
            curves[what] = Curve("layer", f"{what}{unit}", points)
    return Outcome(numbers, curves)


PROTOCOL = Protocol(
    "Do its capsules form a tree of parts that depends on the image?",
    "Mitterreiter et al. 2023, sections 4 and 5",
    ("In deep CapsNets most capsules are dead, and coefficients hardly depend on the image (Mitterreiter et al.)",),
    run,
)
