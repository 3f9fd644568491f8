"""Reconstruction of the input from class capsules."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules


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

    def __init__(
        self,
        classes: int,
        features: int,
        image_shape: tuple[int, int, int],
        hidden: tuple[int, ...] = (512, 1024),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        widths = [classes * features, *hidden]
        layers: list[nn.Module] = []
        for width, wider in itertools.pairwise(widths):
            layers += [nn.Linear(width, wider, device=device, dtype=dtype), nn.ReLU()]
        pixels = nn.Linear(widths[-1], math.prod(image_shape), device=device, dtype=dtype)
        self.layers = nn.Sequential(*layers, pixels, nn.Sigmoid())
        self.image_shape = tuple(image_shape)

    def forward(self, capsules: Capsules, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            labels = capsules.activations.argmax(1)
        poses = capsules.poses.flatten(2)
        mask = F.one_hot(labels, poses.shape[1]).to(poses.dtype)
        return self.layers((poses * mask.unsqueeze(-1)).flatten(1)).unflatten(1, self.image_shape)
