"""The network of Ronneberger, Fischer, Brox: U-Net (2015), the control of capsules that segment."""

import itertools

import torch
from torch import Tensor, nn

from torchcaps.capsules import Segmentation
from torchcaps.models.inputs import check_images, padded_to
from torchcaps.models.registry import register_model
from torchcaps.utils.arguments import Count, checked


class UNet(nn.Module):
    """U-Net with padded convolutions and batch normalization, which halves a map three times.

    Args:
        in_channels: number of channels of an image.
        classes: number of classes.
        channels: number of channels of the largest maps; each smaller map has twice as many.

    Shape:
        - Input: `(batch, in_channels, height, width)`, of any size: it is padded by zeros to multiples of 8.
        - Output: a Segmentation with logits of the classes, `(batch, classes, height, width)`.
    """

    gives_masks = True

    @checked
    def __init__(self, in_channels: Count = 1, classes: Count = 1, channels: Count = 28):
        super().__init__()
        self.in_channels = in_channels
        widths = [channels * 2**i for i in range(4)]
        self.down = nn.ModuleList(_block(*pair) for pair in itertools.pairwise([in_channels, *widths]))
        smaller = list(itertools.pairwise(widths[::-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, 2) for before, after in smaller)
        self.after_skip = nn.ModuleList(_block(before, after) for before, after in smaller)
        self.scores = nn.Conv2d(channels, classes, 1)

    @checked
    def forward(self, images: Tensor) -> Segmentation:
        check_images(images, (self.in_channels, None, None), self.scores.weight)
        height, width = images.shape[2:]
        x = padded_to(8, images)
        maps: list[Tensor] = []
        for block in self.down:
            x = block(nn.functional.max_pool2d(x, 2) if maps else x)
            maps.append(x)
        for up, block, skipped in zip(self.up, self.after_skip, maps[-2::-1], strict=True):
            x = block(torch.cat([up(x), skipped], dim=1))
        return Segmentation(self.scores(x)[:, :, :height, :width])


def _block(before: int, after: int) -> nn.Sequential:
    convs = nn.Conv2d(before, after, 3, padding=1, bias=False), nn.Conv2d(after, after, 3, padding=1, bias=False)
    return nn.Sequential(convs[0], nn.BatchNorm2d(after), nn.ReLU(), convs[1], nn.BatchNorm2d(after), nn.ReLU())


@register_model
def unet(in_channels: Count = 1, classes: Count = 1, channels: Count = 28) -> UNet:
    """A U-Net with about as many parameters as SegCaps: 1,475,293."""
    return UNet(in_channels, classes, channels)
