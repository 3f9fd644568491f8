"""What each pose entry of a CapsNet's class capsule means; :mod:`torchcaps.explain.drawing.capsnet` draws it."""

import torch
from torch import Tensor

from torchcaps.models.reconstructing import ReconstructingCapsNet
from torchcaps.utils.arguments import CountOrZero, FloatTensor, checked, shown

# Sabour et al. 2017, Figure 4: [-0.25, 0.25] in steps of 0.05.
TWEAKS = torch.linspace(-0.25, 0.25, 11)


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
