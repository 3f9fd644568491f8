"""The network of LaLonde, Bagci: Capsules for Object Segmentation (2018), SegCaps.

The paper leaves open the iterations of the first capsule layer, the bias within the squash and the first weights: they
follow the authors' code.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Segmentation
from torchcaps.models.inputs import check_images, padded_to
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleMap
from torchcaps.routing import DynamicRouting
from torchcaps.utils.arguments import Count, check_input, checked

Variant = Literal["R3", "R1", "uniform"]


class SegCaps(nn.Module):
    """Capsules that halve a map three times and double it again, with skip connections, as a U-Net.

    Args:
        in_channels: number of channels of an image.
        classes: number of classes, each with a type of capsules in the last map.
        variant: "R3" routes by three iterations, "R1" by one where the sides of the map do not change. The first
            capsule layer always has one. With "uniform" all layers have one, whose coefficients are uniform: a control.
        features: features of a capsule in the largest maps, 16 as published; smaller maps have two and four times as
            many.
        decoder: reconstruct the images from the class capsules, see `reconstruct`.

    Shape:
        - Input: `(batch, in_channels, height, width)`, values in [0, 1], of any size: it is padded by zeros to
          multiples of 8.
        - Output: a Segmentation: the activations of the class capsules, their lengths, `(batch, classes, height,
          width)`, and the class capsules, poses `(batch, classes, height, width, features)`.

    Reference:
        LaLonde & Bagci 2018, Figure 2 and sections 3 and 4.
    """

    gives_logits = False  # but activations
    gives_masks = True

    @checked
    def __init__(
        self,
        in_channels: Count = 1,
        classes: Count = 1,
        variant: Variant = "R3",
        features: Count = 16,
        decoder: bool = True,
    ):
        super().__init__()
        self.in_channels, self.classes = in_channels, classes
        self.conv = nn.Conv2d(in_channels, features, 5, padding=2)

        def layer(of: tuple[int, int], to: tuple[int, int], kernel: int = 5, stride: int = 1) -> CapsuleMap:
            (types, width), (types_out, width_out) = of, to
            once = types == 1 or variant == "uniform" or (variant == "R1" and stride == 1)
            routing = DynamicRouting(1 if once else 3, learn_bias=True, init="paper")
            sizes = types, types_out, width * features, width_out * features
            return CapsuleMap(*sizes, kernel, routing, stride, "same", transposed=kernel == 4)

        # Types and features, these as a multiple of those of the largest maps.
        self.down = nn.ModuleList(
            [
                nn.Sequential(layer((1, 1), (2, 1), stride=2), layer((2, 1), (4, 1))),
                nn.Sequential(layer((4, 1), (4, 2), stride=2), layer((4, 2), (8, 2))),
                nn.Sequential(layer((8, 2), (8, 4), stride=2), layer((8, 4), (8, 2))),
            ]
        )
        self.up = nn.ModuleList(
            [
                layer((8, 2), (8, 2), kernel=4, stride=2),
                layer((4, 2), (4, 1), kernel=4, stride=2),
                layer((4, 1), (2, 1), kernel=4, stride=2),
            ]
        )
        self.after_skip = nn.ModuleList(
            [layer((16, 2), (4, 2)), layer((8, 1), (4, 1)), layer((3, 1), (classes, 1), kernel=1)]
        )
        self.decoder = None
        if decoder:
            convs = nn.Conv2d(classes * features, 64, 1), nn.Conv2d(64, 128, 1), nn.Conv2d(128, in_channels, 1)
            self.decoder = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2], nn.Sigmoid())
        for module in self.modules():
            if module is self.conv:
                nn.init.xavier_uniform_(module.weight)
            elif isinstance(module, (CapsuleMap, nn.Conv2d)):  # he_normal of Keras
                std = (2 / module.weight[0].numel()) ** 0.5
                nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @checked
    def forward(self, images: Tensor) -> Segmentation:
        check_images(images, (self.in_channels, None, None), self.conv.weight)
        height, width = images.shape[2:]
        maps = [F.relu(self.conv(padded_to(8, images))).movedim(1, -1).unsqueeze(1).contiguous()]
        for layers in self.down:
            maps.append(layers(maps[-1]).poses)
        poses = maps.pop()
        for up, after_skip in zip(self.up, self.after_skip, strict=True):
            poses = after_skip(torch.cat([up(poses).poses, maps.pop()], dim=1)).poses
        capsules = Capsules(poses[:, :, :height, :width])
        return Segmentation(activations=capsules.activations, capsules=capsules)

    @checked
    def reconstruct(self, capsules: Capsules, masks: Tensor | None = None) -> Tensor:
        """Reconstruct the images, `(batch, in_channels, height, width)`, from the class capsules.

        Args:
            capsules: the class capsules of `forward`.
            masks: where each class is, `(batch, classes, height, width)`, bool or from 0 to 1; capsules elsewhere count
                as zeros. In training they are the true masks; None, as published in evaluation, takes all capsules.
        """
        if self.decoder is None:
            raise RuntimeError("this SegCaps has no decoder: build it with decoder=True")
        poses, shape = capsules.poses, tuple(capsules.poses.shape)
        check_input("poses", poses, self.conv.weight)
        if len(shape) != 5 or (shape[1], shape[-1]) != (self.classes, self.conv.out_channels):
            expected = f"(batch, {self.classes}, height, width, {self.conv.out_channels})"
            raise ValueError(f"expected poses of shape {expected}, got {shape}")
        if masks is not None:
            if tuple(masks.shape) != shape[:-1]:
                raise ValueError(f"expected masks of shape {shape[:-1]}, got {tuple(masks.shape)}")
            poses = poses * masks.to(poses).unsqueeze(-1)
        images: Tensor = self.decoder(poses.movedim(-1, 2).flatten(1, 2))
        return images


@register_model
def segcaps(
    in_channels: Count = 1, classes: Count = 1, variant: Variant = "R3", features: Count = 16, decoder: bool = True
) -> SegCaps:
    """SegCaps for images of any size: 1,425,649 parameters (published 1.4M), 1,416,112 without the decoder."""
    return SegCaps(in_channels, classes, variant, features, decoder)
