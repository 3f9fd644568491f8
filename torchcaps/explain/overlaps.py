"""Two images laid over each other, and what the capsule of each class draws of them (Sabour et al. 2017, Figure 5)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.measures.predicting import class_poses, predict, reconstructed
from torchcaps.utils.arguments import Count, FloatTensor, checked, shown


class TakenApart(NamedTuple):
    """The highest-scoring classes of one image, each drawn from its own capsule.

    Fields:
        classes: classes with the highest scores, the highest first, `(count,)`.
        drawn: image drawn from the capsule of each of `classes` alone, `(count, channels, height, width)`.
    """

    classes: Tensor
    drawn: Tensor


@checked
def overlaid(a: FloatTensor, b: FloatTensor, shift: tuple[int, int] = (0, 0)) -> Tensor:
    """Lay image b over image a: gray levels in [0, 1] are added and clipped, as in MultiMNIST.

    Args:
        a, b: images of one shape, `(..., height, width)`.
        shift: whole pixels by which b moves, (down, right). What leaves the image is cut off, and what enters is black.

    Raises:
        ValueError: the images have different shapes.
    """
    if a.shape != b.shape or a.dim() < 2:
        raise ValueError(f"expected two images of one shape (..., height, width), got {shown(a)} and {shown(b)}")
    down, right = (max(-size, min(size, moved)) for size, moved in zip(a.shape[-2:], shift, strict=True))
    moved = F.pad(b, (right, -right, down, -down))  # a negative number cuts off
    return (a + moved).clamp(max=1)


@torch.no_grad()
@checked
def taken_apart(network: nn.Module, image: FloatTensor, count: Count = 2) -> TakenApart:
    """Draw an image from the capsule of each of its highest-scoring classes, one at a time.

    Args:
        network: network with a decoder that returns a `Prediction` with class capsules; it is run in evaluation mode
            and left as it was.
        image: image as the network takes it, `(channels, height, width)`.
        count: number of classes.

    Raises:
        TypeError: the network gives no class capsules.
        ValueError: the network has no decoder or fewer classes.

    Reference:
        Sabour et al. 2017, section 6 and Figure 5.
    """
    if image.dim() != 3:
        raise ValueError(f"expected an image of shape (channels, height, width), got {shown(image)}")
    prediction = predict(network, image.unsqueeze(0))
    poses, scores = class_poses(network, prediction), prediction.evidence[0]
    if count > min(len(scores), poses.shape[1]):
        raise ValueError(f"count must be at most {poses.shape[1]}, the number of class capsules, got {count}")
    assert prediction.capsules is not None
    classes = scores.topk(count).indices
    repeated = Capsules(prediction.capsules.poses.expand(count, *prediction.capsules.poses.shape[1:]))
    return TakenApart(classes, reconstructed(network, repeated, classes))
