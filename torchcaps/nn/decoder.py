"""Reconstruction of the input from class capsules."""

import itertools
import math

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.inputs import check_labels
from torchcaps.utils.arguments import Count, Device, FloatType, check_input, checked


class MaskedDecoder(nn.Module):
    """Draw an image from the pose of one class; the poses of all other classes are set to zero.

    Args:
        classes: number of class capsules.
        features: number of entries in a class capsule's pose.
        image_shape: shape of an image, `(channels, height, width)`.
        hidden: widths of the hidden layers.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: capsules with poses `(batch, classes, *pose)`; labels `(batch,)`, or None for the most active class.
        - Output: `(batch, channels, height, width)`, in [0, 1].

    Reference:
        Sabour et al. 2017, section 4.1: fully connected, ReLU, ReLU, sigmoid.
    """

    @checked
    def __init__(
        self,
        classes: Count,
        features: Count,
        image_shape: tuple[Count, Count, Count],
        hidden: tuple[Count, ...] = (512, 1024),
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        widths = [classes * features, *hidden]
        layers: list[nn.Module] = []
        for width, wider in itertools.pairwise(widths):
            layers += [nn.Linear(width, wider, device=device, dtype=dtype), nn.ReLU()]
        pixels = nn.Linear(widths[-1], math.prod(image_shape), device=device, dtype=dtype)
        self.layers = nn.Sequential(*layers, pixels, nn.Sigmoid())
        self.classes, self.features, self.image_shape = classes, features, tuple(image_shape)

    @checked
    def forward(self, capsules: Capsules, labels: Tensor | None = None) -> Tensor:
        shape = tuple(capsules.poses.shape)
        check_input("poses", capsules.poses, next(self.parameters(), None))
        if len(shape) not in (3, 4) or shape[1] != self.classes or math.prod(shape[2:]) != self.features:
            raise ValueError(
                f"expected poses of shape (batch, {self.classes}, *pose) with {self.features} numbers in a pose, "
                f"got {shape}"
            )
        if capsules.scores is not None and capsules.scores.shape != shape[:2]:
            raise ValueError(f"expected scores of shape {shape[:2]}, got {tuple(capsules.scores.shape)}")
        if labels is None:
            labels = capsules.activations.argmax(1)
        check_labels(labels, self.classes, capsules.poses.device)
        if labels.shape[0] != shape[0]:
            raise ValueError(f"expected one label for each of {shape[0]} samples, got {labels.shape[0]}")
        poses = capsules.poses.flatten(2)
        mask = poses.new_zeros(poses.shape[:2]).scatter(1, labels.long().unsqueeze(1), 1)  # vmap has no one_hot
        return self.layers((poses * mask.unsqueeze(-1)).flatten(1)).unflatten(1, self.image_shape)
