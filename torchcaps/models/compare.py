"""One small network on which only the routing changes, and plain controls of about the same size.

The controls are those that Paik, Kwak, Kim: Capsule Networks Need an Improved Routing Algorithm (2019) and Gu, Tresp,
Hu: Capsule Network is Not More Robust than Convolutional Network (2021) ask for: average pooling in place of the
routing, and three convolutions with 9x9 kernels. A ResNet-20 is `pooling_resnet(pooling="average")` of zhao2019.py,
and with a head `capsule_resnet` of backbone.py. The network itself is from neither paper. Uniform and random
coefficients are routings: `UniformRouting`, `RandomRouting`.
"""

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.models.cnn import FeatureClassifier, conv_features
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleHead, PrimaryCapsules
from torchcaps.nn.head import ChannelNorm
from torchcaps.routing import Routing
from torchcaps.utils.arguments import Count


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
    convolutions: Count = 3,
    types: Count = 8,
    parts: Count = 8,
    pose: Count = 8,
) -> FeatureClassifier:
    """Convolutions and a CapsuleHead with a layer of parts: 89,225 parameters, 88,073 on gray images (dynamic routing).

    Every second convolution halves the map. Capsules at all positions share their vote weights, so that images may have
    any size. A routing that takes the poses of the children as votes has layers without vote weights (`CapsuleShared`).
    """
    features = _convolutions(in_channels, channels, convolutions, kernel_size=3)
    head = CapsuleHead(channels, classes, routing, types, pose, parts, dims=2)
    return FeatureClassifier(features, head, (in_channels, None, None))


@register_model
def compare_average(
    in_channels: Count = 3,
    classes: Count = 10,
    channels: Count = 64,
    convolutions: Count = 3,
    types: Count = 8,
    pose: Count = 8,
) -> FeatureClassifier:
    """Control: the primary capsules of compare, their average, a linear layer: 80,650 parameters, 79,498 on gray."""
    features = nn.Sequential(
        _convolutions(in_channels, channels, convolutions, kernel_size=3),
        ChannelNorm(),
        PrimaryCapsules(channels, types, pose),
        MeanPoses(),
    )
    return FeatureClassifier(features, nn.Linear(types * pose, classes), (in_channels, None, None))


@register_model
def compare_cnn(in_channels: Count = 3, classes: Count = 10, channels: Count = 23) -> FeatureClassifier:
    """Control: three 9x9 convolutions, average pooling, a linear layer: 91,665 parameters, 87,939 on gray images."""
    features = nn.Sequential(
        _convolutions(in_channels, channels, 3, kernel_size=9), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return FeatureClassifier(features, nn.Linear(channels, classes), (in_channels, None, None))


def _convolutions(in_channels: int, channels: int, count: int, kernel_size: int) -> nn.Sequential:
    """Build convolutions, every second one with stride 2."""
    return conv_features(in_channels, channels, [1 + index % 2 for index in range(count)], kernel_size)
