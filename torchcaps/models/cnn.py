"""Networks without capsules, used as baselines and as backbones.

The residual networks are those of He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (2016), with basic
blocks of two 3x3 convolutions. Where the shape changes, the shortcut is a 1x1 convolution (option B, "projection") or
adds channels of zeros (option A, "padding").
"""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.models.inputs import ANY_IMAGE, InputShape, check_images
from torchcaps.nn.head import FeatureCapsules
from torchcaps.nn.primary import CONVOLUTIONS
from torchcaps.utils.arguments import Count, checked

Shortcut = Literal["projection", "padding"]
Trainable = Literal["head", "all"]


class Standardize(nn.Module):
    """Standardize each channel by `(images - mean) / std`, so that a network takes images in [0, 1].

    Args:
        mean, std: mean and standard deviation of each channel over a training set.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.values = {"mean": tuple(mean), "std": tuple(std)}
        for name, values in self.values.items():
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def reset_parameters(self) -> None:
        """Set both buffers anew: after `to_empty` a state dict does not bring them back."""
        for name, values in self.values.items():
            self.get_buffer(name).copy_(torch.tensor(values, device="cpu").view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-3] != len(self.mean):
            raise ValueError(f"expected images of {len(self.mean)} channels, got {tuple(images.shape)}")
        return (images - self.mean) / self.std


class StandardizeEach(nn.Module):
    """Subtract each image's mean, and divide by its standard deviation or by one gray level, 1/255, if that is more."""

    def forward(self, images: Tensor) -> Tensor:
        std, mean = torch.std_mean(images, dim=(1, 2, 3), correction=0, keepdim=True)
        return (images - mean) / std.clamp_min(1 / 255)


class Zeros(nn.Module):
    """Keep every `stride`-th row and column, and add channels of zeros, half before and half after the given ones."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.before = (channels - in_channels) // 2
        self.after = channels - in_channels - self.before
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    r"""Basic block `relu(x' + bn(conv(relu(bn(conv(x))))))`.

    x' is x or, where the shape changes, `bn(conv1x1(x))` (shortcut="projection") or x with channels of zeros
    (shortcut="padding").

    Shape:
        - Input: `(batch, in_channels, height, width)`; output: `(batch, channels, height / stride, width / stride)`.
    """

    def __init__(self, in_channels: int, channels: int, stride: int = 1, shortcut: Shortcut = "projection"):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if (stride != 1 or in_channels != channels) and shortcut == "padding":
            self.shortcut = Zeros(in_channels, channels, stride)
        elif stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def residual_features(
    in_channels: int,
    channels: Sequence[int],
    blocks: Sequence[int],
    strides: Sequence[int],
    shortcut: Shortcut = "projection",
) -> nn.Sequential:
    """Build a residual network without pool and classifier: a 3x3 convolution with batch normalization and ReLU, then
    stages of basic blocks.

    Args:
        in_channels: number of channels of the images.
        channels, blocks, strides: number of channels, number of blocks and stride of each stage; only the first block
            of a stage has the stride. The first convolution has the channels of the first stage.
        shortcut: kind of shortcut in blocks that change the shape.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(channels[0]),
        nn.ReLU(),
    ]
    before = channels[0]
    for width, count, stride in zip(channels, blocks, strides, strict=True):
        for k in range(count):
            layers.append(BasicBlock(before, width, stride if k == 0 else 1, shortcut))
            before = width
    return nn.Sequential(*layers)


BATCH_NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def conv_features(
    in_channels: int, channels: int, strides: Sequence[int], kernel_size: int, dims: int = 2
) -> nn.Sequential:
    """Build padded convolutions with batch normalization and ReLU, one for each stride, on maps of these dimensions."""
    layers: list[nn.Module] = []
    for index, stride in enumerate(strides):
        before, padding = channels if index else in_channels, kernel_size // 2
        layers.append(CONVOLUTIONS[dims](before, channels, kernel_size, stride, padding=padding, bias=False))
        layers += [BATCH_NORMS[dims](channels), nn.ReLU()]
    return nn.Sequential(*layers)


class FeatureClassifier(nn.Module):
    """Network of two parts: features of images, and a classifier of the features.

    Args:
        features: network from images to features.
        classifier: layer from features to logits or numbers, such as a `CapsuleHead` or a `CapsuleRegressor`.
        image_shape: channels, height and width of an image; channels and length of a signal; channels, depth, height
            and width of a volume; None for inputs of any shape.
        least: least size of each side.
        trainable: "all", or "head": the features then keep their weights and stay in evaluation mode, so that batch
            normalization keeps its statistics too.

    Shape:
        - Input: `(batch, channels, height, width)`, or other sides, see `image_shape`.
        - Output: a Prediction with logits `(batch, classes)` or numbers and, of a head of capsules, their capsules.
    """

    @checked
    def __init__(
        self,
        features: nn.Module,
        classifier: nn.Module,
        image_shape: InputShape | None = ANY_IMAGE,
        least: Count = 1,
        trainable: Trainable = "all",
    ):
        super().__init__()
        self.features, self.classifier = features, classifier
        self.image_shape, self.least, self.trainable = image_shape, least, trainable
        if trainable == "head":
            features.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.trainable == "head":
            self.features.eval()
        return self

    @checked
    def forward(self, images: Tensor, *, return_coefficients: bool = False) -> Prediction:
        if self.image_shape is not None:
            check_images(images, self.image_shape, next(self.parameters(), None), self.least)
        features = self.features(images)
        if isinstance(self.classifier, FeatureCapsules):
            return self.classifier.predict(features, return_coefficients=return_coefficients)
        if return_coefficients:
            raise ValueError("this network has no capsules, so that there are no coefficients to return")
        return Prediction(self.classifier(features))
