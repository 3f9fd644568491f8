"""The networks of Zhao, Huang: Exploring Dynamic Routing As A Pooling Layer (2019).

Of the points that the text leaves open, four concern the networks. Routing has one iteration here, because the paper's
sharpness is meant to replace further ones (section 3.2). Each color image is standardized on its own. Both are as in
later code of one author (github.com/bhneo/SparsePooling). The four convolutions of Table 1 have neither padding nor
strides, and they and the linear layer start with the weights of Glorot & Bengio 2010: these are defaults of TensorFlow,
in which that code is written.
"""

from typing import Literal

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.models.cnn import FeatureClassifier, StandardizeEach, residual_features
from torchcaps.models.reconstructing import ReconstructingCapsNet, check_presence
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleLinear, MaskedDecoder, RoutingPool2d
from torchcaps.routing import Routing, VectorNormRouting, squash
from torchcaps.utils.arguments import Count, CountOrZero, NotNegative, checked

Pooling = Literal["max", "average", "routing"]


@register_model
def pooling_cnn(
    in_channels: Count = 3,
    classes: Count = 10,
    pooling: Pooling = "routing",
    channels: Count = 64,
    features: Count = 16,
    sharpness: NotNegative = 0.5,
    iterations: CountOrZero = 1,
) -> FeatureClassifier:
    """Four 5x5 convolutions and a pool, Table 1: 312,906 parameters on 3 channels, 309,706 on one."""
    layers: list[nn.Module] = [StandardizeEach()] if in_channels == 3 else []
    for before in (in_channels, channels, channels, channels):
        layers += [nn.Conv2d(before, channels, 5), nn.ReLU()]
    pool = _pool(pooling, features, sharpness, iterations)
    network = FeatureClassifier(
        nn.Sequential(*layers, pool, nn.Flatten()),
        nn.Linear(channels, classes),
        image_shape=(in_channels, None, None),
        least=17,
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return network


@register_model
def pooling_resnet(
    depth: Count = 20,
    in_channels: Count = 3,
    classes: Count = 10,
    pooling: Pooling = "routing",
    features: Count = 16,
    sharpness: NotNegative = 5.0,
    iterations: CountOrZero = 1,
) -> FeatureClassifier:
    """ResNet of 20, 32, 44 or 56 layers on CIFAR, Table 2: 269,722, 464,154, 658,586 or 853,018 parameters."""
    _check_depth(depth)
    layers: list[nn.Module] = [StandardizeEach()] if in_channels == 3 else []
    layers += [*_resnet(in_channels, depth), _pool(pooling, features, sharpness, iterations), nn.Flatten()]
    return FeatureClassifier(nn.Sequential(*layers), nn.Linear(64, classes), (in_channels, None, None))


@register_model
def pooling_resnet_small(
    in_channels: Count = 3,
    classes: Count = 10,
    features: Count = 16,
    sharpness: NotNegative = 5.0,
    iterations: CountOrZero = 1,
) -> FeatureClassifier:
    """ResNet of 14 layers with a routing pool, not in the paper: 172,506 parameters."""
    return pooling_resnet(14, in_channels, classes, "routing", features, sharpness, iterations)


class ResNetCapsNet(ReconstructingCapsNet):
    """ResNet without its pool and its last layer, whose channels are primary capsules, then class capsules and a
    decoder.

    Args:
        in_channels: number of channels of an image.
        image_size: height and width of an image.
        classes: number of class capsules.
        routing: routing between primary and class capsules; None for `VectorNormRouting(1, sharpness=1.0,
            activation=squash, init="paper")`.
        depth: number of layers of the ResNet.
        primary_pose: number of features of a primary capsule, which must divide the 64 channels. The vote weights are
            shared over positions.
        class_pose: number of features of a class capsule.
        decoder: widths of the decoder's hidden layers; None for no decoder.

    Shape:
        - Input: `(batch, in_channels, image_size, image_size)`, values in [0, 1].
        - Output: a Prediction: the activations of the class capsules `(batch, classes)`, with this routing their
          lengths, and the class capsules.

    Reference:
        Zhao & Huang 2019, section 4.3 and Figure 2.
    """

    @checked
    def __init__(
        self,
        in_channels: Count = 1,
        image_size: Count = 40,
        classes: Count = 10,
        routing: Routing | None = None,
        depth: Count = 20,
        primary_pose: Count = 32,
        class_pose: Count = 16,
        decoder: tuple[Count, ...] | None = (512, 1024),
    ):
        super().__init__()
        _check_depth(depth)
        if 64 % primary_pose:
            raise ValueError(f"primary_pose must divide the ResNet's 64 channels, got {primary_pose}")
        routing = VectorNormRouting(1, sharpness=1.0, activation=squash, init="paper") if routing is None else routing
        check_presence(routing)
        self.image_shape = (in_channels, image_size, image_size)
        self.primary_pose = primary_pose
        self.features = nn.Sequential(*_resnet(in_channels, depth))
        self.class_capsules = CapsuleLinear(
            64 // primary_pose, classes, primary_pose, class_pose, routing, share_positions=True
        )
        self.decoder = None if decoder is None else MaskedDecoder(classes, class_pose, self.image_shape, decoder)

    def primary_capsules(self, images: Tensor) -> Capsules:
        self.check_images(images)
        return Capsules(self.features(images).unflatten(1, (-1, self.primary_pose)).movedim(2, -1))


@register_model
def resnet_capsnet(
    image_size: Count = 40,
    sharpness: NotNegative = 1.0,
    primary_pose: Count = 32,
    iterations: CountOrZero = 1,
    decoder: bool = True,
    classes: Count = 10,
    in_channels: Count = 1,
) -> ResNetCapsNet:
    """ResNet-20 with class capsules, Table 4: 2,526,768 parameters; image_size=36, MultiMNIST: 2,215,168."""
    return ResNetCapsNet(
        in_channels=in_channels,
        image_size=image_size,
        classes=classes,
        routing=VectorNormRouting(iterations, sharpness, activation=squash, init="paper"),
        primary_pose=primary_pose,
        decoder=(512, 1024) if decoder else None,
    )


@register_model
def resnet_capsnet_small(
    in_channels: Count = 1,
    image_size: Count = 40,
    classes: Count = 10,
    sharpness: NotNegative = 1.0,
    primary_pose: Count = 32,
    iterations: CountOrZero = 1,
) -> ResNetCapsNet:
    """ResNet-8 with class capsules and no decoder, not in the paper: 84,592 parameters."""
    return ResNetCapsNet(
        in_channels,
        image_size,
        classes,
        routing=VectorNormRouting(iterations, sharpness, activation=squash, init="paper"),
        depth=8,
        primary_pose=primary_pose,
        decoder=None,
    )


def _check_depth(depth: int) -> None:
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth must be 6n + 2, as 20, 32, 44 and 56 are, got {depth}")


def _resnet(in_channels: int, depth: int) -> nn.Sequential:
    """Build a ResNet with stages of 16, 32 and 64 channels and the first weights of He et al. 2016, section 4.2."""
    stages = ((depth - 2) // 6,) * 3
    layers = residual_features(in_channels, (16, 32, 64), stages, strides=(1, 2, 2), shortcut="padding")
    for layer in layers.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layers


def _pool(pooling: str, features: int, sharpness: float, iterations: int) -> nn.Module:
    if pooling == "max":
        return nn.AdaptiveMaxPool2d(1)
    if pooling == "average":
        return nn.AdaptiveAvgPool2d(1)
    return RoutingPool2d(features, sharpness, iterations)
