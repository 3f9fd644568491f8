"""Do capsules form a tree of parts that differs from image to image?

Procedure: for each layer that routes, in the order of depth, on 1,000 test images at most:

- dead: share of parents that are dead, see :func:`torchcaps.explain.dead_capsules`;
- change: standard deviation of each coefficient over the images, mean over children and parents, in percent of a
  uniform coefficient. Children that are absent in all images, as at the edge of a padded convolution, do not count. A
  layer whose coefficients do not change is a fixed weighting, no tree of an image;
- gradient: norm of the loss's gradient for the layer's weights, divided by their norm, mean over batches.

Source: Mitterreiter et al., Why Capsule Neural Networks Do Not Scale, AAAI 2023, sections 4 and 5.
"""

import torch
from torch import Tensor, nn

from torchcaps.evaluate.subject import BATCH, Curve, DoesNotApply, Outcome, Protocol, Subject, scores_of
from torchcaps.explain.dead import dead_capsules
from torchcaps.explain.recording import record, routing_layers
from torchcaps.nn.modes import evaluating

DEAD, CHANGE, GRADIENT = "dead capsules (%)", "change of coefficients (% of uniform)", "gradient norm / weight norm"


def change_of_coefficients(network: nn.Module, images: Tensor) -> dict[str, float]:
    """Return for each layer that routes how much its coefficients change from image to image, in percent of a uniform
    one."""
    sums: dict[str, list[Tensor]] = {}
    present: dict[str, Tensor] = {}
    for batch in images.split(BATCH // 4):
        for routed in record(network, batch)[1]:
            if routed.last is None:
                continue
            coefficients = routed.last.votes.coefficients().detach().double()
            coefficients = coefficients.unflatten(0, (len(batch), -1)).cpu()  # windows are samples of their own
            total, squares = sums.setdefault(routed.name, [torch.zeros_like(coefficients[0]) for _ in range(2)])
            total += coefficients.sum(0)
            squares += coefficients.square().sum(0)
            if (gates := routed.last.votes.gates) is not None:
                seen = (gates.detach().unflatten(0, (len(batch), -1)) > 0).any(0).cpu()
                present[routed.name] = present.get(routed.name, seen) | seen
    changes = {}
    for name, (total, squares) in sums.items():
        mean = total / len(images)
        spread = (squares / len(images) - mean.square()).clamp_min(0).sqrt()
        counted = present.get(name, ...)
        changes[name] = 100 * float(spread[counted].mean() / mean[counted].mean())
    return changes


def gradient_norms(subject: Subject, layers: dict[str, nn.Module]) -> dict[str, float]:
    """Return the norm of the loss's gradient for each layer's weights, relative to the norm of the weights. Layers
    without weights are left out."""
    weights = {name: list(layer.parameters()) for name, layer in layers.items()}
    weights = {name: own for name, own in weights.items() if own}
    learned = [w for own in weights.values() for w in own if w.requires_grad]
    norms = dict.fromkeys(weights, 0.0)
    batches = list(subject.batches()) if learned else []
    for images, labels in batches:
        with evaluating(subject.network), torch.enable_grad():
            scores = scores_of(subject.network, images)
            gradients = torch.autograd.grad(subject.loss(scores, labels.to(scores.device)), learned, allow_unused=True)
        slopes = {id(w): 0.0 if g is None else float(g.square().sum()) for w, g in zip(learned, gradients, strict=True)}
        for name, own in weights.items():
            size, slope = sum(float(w.detach().square().sum()) for w in own), sum(slopes.get(id(w), 0.0) for w in own)
            norms[name] += (slope / size) ** 0.5 / len(batches) if size else 0.0
    return norms


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    if subject.target == "masks":
        raise DoesNotApply("the network predicts masks, and this measures predictions of whole images")
    layers = routing_layers(subject.network)
    if not layers:
        raise DoesNotApply("the network has no layer that routes")
    if len(subject.images) < 2:
        raise DoesNotApply("one image changes nothing: at least two are needed")
    subject.progress("parts: dead capsules")
    dead = dead_capsules(subject.network, subject.batches())
    subject.progress("parts: coefficients")
    changes = change_of_coefficients(subject.network, subject.images)
    subject.progress("parts: gradients")
    norms = gradient_norms(subject, layers)
    depths = {name: depth for depth, name in enumerate((name for name in dead if name in layers), 1)}
    measures: dict[str, dict[str, float]] = {
        DEAD: {name: 100 * share for name in depths if (share := dead[name].parents) is not None},
        CHANGE: {name: changes[name] for name in depths if name in changes},
        GRADIENT: {name: norms[name] for name in depths if name in norms},
    }
    numbers = {
        f"{name}: {what}": values[name] for name in depths for what, values in measures.items() if name in values
    }
    curves = {
        what.partition(" (")[0]: Curve("layer, by depth", what, [(float(depths[n]), v) for n, v in values.items()])
        for what, values in measures.items()
        if values
    }
    return Outcome(numbers, curves)


PROTOCOL = Protocol(
    "Do its capsules form a tree of parts that depends on the image?",
    ("In deep CapsNets most capsules are dead, and coefficients hardly depend on the image (Mitterreiter et al.)",),
    run,
    max_images=1000,
)
