"""What a CapsNet does with one image: where its class capsules take their input from, and what each pose entry means.

:mod:`torchcaps.explain.drawing.capsnet` draws both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.arguments import CountOrZero, FloatTensor, checked, shown
from torchcaps.models.reconstructing import ReconstructingCapsNet

# Sabour et al. 2017, Figure 4: [-0.25, 0.25] in steps of 0.05.
TWEAKS = torch.linspace(-0.25, 0.25, 11)


class CoefficientMaps(NamedTuple):
    """Coefficients of each class capsule over the positions of one image.

    If parents compete for children, a map's value is the mean of the coefficients c[i,j] of the primary capsules at a
    position, weighted by their lengths; routing starts from 1 / classes. If children compete for parents, it is the
    sum of those coefficients relative to the mean over all positions; routing starts from 1.

    Fields:
        maps: values, `(classes, rows, columns)`.
        uniform: the value that routing starts from.
        relative: whether children compete for parents.
        scores: scores of the classes, `(classes,)`.
    """

    maps: Tensor
    uniform: float
    relative: bool
    scores: Tensor


@torch.no_grad()
def coefficient_maps(network: ReconstructingCapsNet, image: Tensor) -> CoefficientMaps:
    """Compute the :class:`CoefficientMaps` of an image `(channels, height, width)`."""
    prediction = network(image.unsqueeze(0), return_coefficients=True)
    assert prediction.capsules is not None
    coefficients = prediction.capsules.coefficients
    lengths = network.primary_capsules(image.unsqueeze(0)).activations[0]
    by_position = coefficients[0].unflatten(0, lengths.shape).movedim(-1, 0)  # (classes, types, rows, columns)
    if network.class_capsules.routing.softmax == "parents":
        maps = (by_position * lengths).sum(1) / lengths.sum(0).clamp_min(1e-12)
        return CoefficientMaps(maps, 1 / len(maps), False, prediction.scores[0])
    return CoefficientMaps(by_position.sum(1) * lengths[0].numel(), 1.0, True, prediction.scores[0])


@torch.no_grad()
@checked
def perturb(
    network: ReconstructingCapsNet, image: FloatTensor, label: CountOrZero, tweaks: FloatTensor = TWEAKS
) -> Tensor:
    """Reconstruct an image while one entry of a class capsule's pose is tweaked: `(features, tweaks, *image)`.

    Args:
        network: CapsNet with a decoder.
        image: `(channels, height, width)`.
        label: class whose capsule to tweak.
        tweaks: values to add to each entry in turn, one or more, `(tweaks,)`.

    Raises:
        ValueError: the network has no such class, or the image or the tweaks have another shape.

    Reference:
        Sabour et al. 2017, section 5.1, Figure 4.
    """
    if tweaks.dim() != 1 or not len(tweaks):
        raise ValueError(f"tweaks must have the shape (tweaks,), with at least one, got {shown(tweaks)}")
    if image.shape != network.image_shape:
        raise ValueError(f"expected an image of shape {tuple(network.image_shape)}, got {tuple(image.shape)}")
    capsules = network(image.unsqueeze(0)).capsules
    classes = capsules.poses.shape[1]
    if label >= classes:
        raise ValueError(f"label must be from 0 to {classes - 1}, as the network has {classes} classes, got {label}")
    features = capsules.poses.shape[-1]
    tweaks = tweaks.to(capsules.poses)
    poses = capsules.poses.repeat(features * len(tweaks), 1, 1)
    tweaked = torch.eye(features).to(poses).unsqueeze(1) * tweaks.view(1, -1, 1)  # (feature, tweak, entry)
    poses[:, label] += tweaked.flatten(0, 1)
    labels = torch.full((len(poses),), label, device=poses.device)
    return network.reconstruct(capsules._replace(poses=poses), labels).unflatten(0, (features, len(tweaks)))
