"""One small network on which only the routing changes, and plain controls of about the same size.

The controls are those that Paik, Kwak, Kim: Capsule Networks Need an Improved Routing Algorithm (2019) and Gu, Tresp,
Hu: Capsule Network is Not More Robust than Convolutional Network (2021) ask for: average pooling in place of the
routing, and three convolutions with 9x9 kernels. A ResNet-20 is `pooling_resnet(pooling="average")` of zhao2019.py.
The network itself is from neither paper. Uniform and random coefficients are routings: `UniformRouting`,
`RandomRouting`.
"""

from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.cnn import FeatureClassifier
from torchcaps.models.inputs import check_images
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleHead, PrimaryCapsules
from torchcaps.nn.head import ChannelNorm
from torchcaps.routing import Routing
from torchcaps.utils.arguments import Count, checked


class CompareNet(nn.Module):
    r"""Three convolutions and a :class:`torchcaps.CapsuleHead` with a layer of parts, for every routing.

    Capsules at all positions share their vote weights, so that images may have any size. A routing that needs the poses
    of the children as votes, such as slot attention, has layers without vote weights (`CapsuleShared`).

    Args:
        routing: routing of both capsule layers; None for `DynamicRouting()`.
        in_channels: number of channels of an image.
        classes: number of class capsules.
        channels: number of channels of the convolutions.
        types, parts: number of primary capsule types, and number of capsules in the layer between.
        pose: number of features of every capsule.

    Shape:
        - Input: `(batch, in_channels, height, width)`.
        - Output: a Prediction: scores `(batch, classes)`, which are logits, and the class capsules, poses
          `(batch, classes, pose)`.

    Raises:
        ValueError: if the images have another number of channels.
    """

    @checked
    def __init__(
        self,
        routing: Routing | None = None,
        in_channels: Count = 3,
        classes: Count = 10,
        channels: Count = 64,
        types: Count = 8,
        parts: Count = 8,
        pose: Count = 8,
    ):
        super().__init__()
        self.image_shape = (in_channels, None, None)
        self.backbone = _convolutions(in_channels, channels, kernel_size=3)
        self.head = CapsuleHead(channels, classes, routing, types, pose, parts)

    @checked
    def forward(self, images: Tensor, *, return_coefficients: bool = False) -> Prediction:
        check_images(images, self.image_shape, self.head.classifier.weight)
        return self.head.predict(self.backbone(images), return_coefficients=return_coefficients)


class MeanPoses(nn.Module):
    """Average of the capsules of each type over all positions, `(batch, types * pose)`."""

    def forward(self, capsules: Capsules) -> Tensor:
        return capsules.poses.mean((2, 3)).flatten(1)


@register_model
def compare(
    routing: Routing | None = None,
    in_channels: Count = 3,
    classes: Count = 10,
    channels: Count = 64,
    types: Count = 8,
    parts: Count = 8,
    pose: Count = 8,
) -> CompareNet:
    """One small network for every routing: 89,225 parameters with dynamic routing, 88,073 on gray images."""
    return CompareNet(routing, in_channels, classes, channels, types, parts, pose)


@register_model
def compare_average(
    in_channels: Count = 3, classes: Count = 10, channels: Count = 64, types: Count = 8, pose: Count = 8
) -> FeatureClassifier:
    """Control: the primary capsules of compare, their average, a linear layer: 80,650 parameters, 79,498 on gray."""
    features = nn.Sequential(
        _convolutions(in_channels, channels, kernel_size=3),
        ChannelNorm(),
        PrimaryCapsules(channels, types, pose),
        MeanPoses(),
    )
    return FeatureClassifier(features, nn.Linear(types * pose, classes), (in_channels, None, None))


@register_model
def compare_cnn(in_channels: Count = 3, classes: Count = 10, channels: Count = 23) -> FeatureClassifier:
    """Control: three 9x9 convolutions, average pooling, a linear layer: 91,665 parameters, 87,939 on gray images."""
    features = nn.Sequential(_convolutions(in_channels, channels, kernel_size=9), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FeatureClassifier(features, nn.Linear(channels, classes), (in_channels, None, None))


def _convolutions(in_channels: int, channels: int, kernel_size: int) -> nn.Sequential:
    """Build three convolutions with batch normalization and ReLU, the second with stride 2; all are padded."""
    layers: list[nn.Module] = []
    for before, stride in ((in_channels, 1), (channels, 2), (channels, 1)):
        conv = nn.Conv2d(before, channels, kernel_size, stride, padding=kernel_size // 2, bias=False)
        layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)
