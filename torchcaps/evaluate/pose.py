"""Do the poses of class capsules know how an object was transformed?

Procedure: 4,000 test images at most, each under a random rotation, shear, scale and shift as in the protocol `affine`.
A ridge regression predicts each of the six factors from the pose of the winning capsule, that of the highest score;
each class has a regression of its own. It is fitted on three quarters of the images and its R2 is that on the others;
its penalty is chosen among seven by leave-one-out on the fitted ones. Beside it the same from the penultimate layer,
the inputs of the last module that has weights, projected to as many principal components as a pose has features, or to
16 without class capsules. Where a linear layer reads the class capsules, these inputs are the poses of all classes. R2
is 1 if a factor is predicted exactly, and 0 if no better than by its mean.

Source: Konstantinou et al., EquiCaps, 2025, section 4: frozen features and a regression of pose. There the images are
renderings of 3D objects.
"""

from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.evaluate.affine import random_affine
from torchcaps.evaluate.subject import BATCH, Curve, DoesNotApply, Outcome, Protocol, Subject
from torchcaps.measures.predicting import as_prediction, run_network
from torchcaps.nn.modes import evaluating

WIDTH = 16  # features of the penultimate layer of a network without class capsules
FACTORS = ("rotation", "shear", "scale across", "scale down", "shift across", "shift down")
PENALTIES = np.logspace(-3, 3, 7)


def r2(features: Tensor, winners: Tensor, factors: Tensor) -> list[float]:
    """Return the R2 of a ridge regression from features `(n, d)` to each factor `(n, factors)`, on the last quarter.

    The regression is one for each winning class `(n,)`, because each class has a pose space of its own.
    """
    fitted = 3 * len(features) // 4
    scaled = StandardScaler().fit(features[:fitted].double()).transform(features.double())
    classes = np.eye(int(winners.max()) + 1)[winners]
    inputs = np.concatenate([(classes[:, :, None] * scaled[:, None]).reshape(len(scaled), -1), classes], 1)
    model = RidgeCV(PENALTIES, alpha_per_target=True).fit(inputs[:fitted], factors[:fitted].numpy())
    return r2_score(factors[fitted:].numpy(), model.predict(inputs[fitted:]), multioutput="raw_values").tolist()


def features_of(network: nn.Module, images: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the poses of the winning capsules `(n, features)`, or None without class capsules; the inputs of the last
    module with weights, flattened `(n, features)`; and the winning classes `(n,)`."""
    poses: list[Tensor] = []
    winners: list[Tensor] = []
    penultimate: list[Tensor] = []
    latest: list[Tensor] = []

    def keep(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        given = next(iter((*args, *named.values())), None)
        inputs = given.poses if isinstance(given, Capsules) else given
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            latest[:] = [inputs]

    # The decoder, if there is one, is no part of the classification, and forward does not call it.
    with_weights = [x for x in network.modules() if next(x.parameters(recurse=False), None) is not None]
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in with_weights]
    try:
        with torch.no_grad(), evaluating(network), torch.compiler.set_stance("force_eager"):
            for batch in images.split(BATCH):
                prediction = as_prediction(network, run_network(network, batch))
                penultimate.append(latest[0].flatten(1).cpu())
                capsules, scores = prediction.capsules, prediction.evidence
                winners.append(scores.argmax(1).cpu())
                if capsules is not None and capsules.poses.dim() < 5 and capsules.poses.shape[1] == scores.shape[1]:
                    poses.append(capsules.poses[torch.arange(len(batch)), winners[-1]].flatten(1).cpu())
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(poses) if poses else None, torch.cat(penultimate), torch.cat(winners)


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_classes()
    if len(subject.images) < 200:
        raise DoesNotApply(f"a regression needs at least 200 images, and there are {len(subject.images)}")
    images, drawn = random_affine(subject)
    factors = torch.cat([drawn["rotation"][:, None], drawn["shear"][:, None], drawn["scale"], drawn["shift"]], 1)
    subject.progress("pose: features of transformed images")
    poses, penultimate, winners = features_of(subject.network, images)
    fitted = 3 * len(images) // 4
    width = min(WIDTH if poses is None else poses.shape[1], penultimate.shape[1], fitted)
    projection = PCA(width, random_state=subject.seed).fit(penultimate[:fitted].double().numpy())
    below = torch.from_numpy(projection.transform(penultimate.double().numpy()))
    numbers: dict[str, float] = {}
    curves = {}
    for what, features in (("pose", poses), ("penultimate layer", below)):
        if features is not None:
            points = list(zip(FACTORS, r2(features, winners, factors), strict=True))
            numbers |= {f"R2 of {name}, from the {what}": value for name, value in points}
            points.append(("mean", sum(value for _, value in points) / len(points)))
            numbers[f"mean R2, from the {what}"] = points[-1][1]
            curves[what] = Curve("", "R2 on held-out images", points)
    notes = [f"the penultimate layer's {penultimate.shape[1]} features are projected to {width} principal components"]
    if poses is None:
        notes.append("there is no capsule for each class, so no pose")
    return Outcome(numbers, curves, notes)


PROTOCOL = Protocol(
    "Do its poses say how an object was transformed?",
    ("R2 of 0.78 for the rotation of rendered 3D objects, from capsules trained without labels (EquiCaps 2025)",),
    run,
    max_images=4000,
)
