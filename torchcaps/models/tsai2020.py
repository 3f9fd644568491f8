"""The networks of Tsai, Srivastava, Goh, Salakhutdinov: Capsules with Inverted Dot-Product Attention Routing (2020).

The numbers of parameters are those of Table 1 and Figure 5. What the text leaves out follows from these numbers or from
the authors' code: the primary convolutions of inverted attention have no bias, images of DiverseMultiMNIST have one
channel, and the last EM layer shares its weights over positions (with coordinates added, as in Hinton et al. 2018).
"""

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.cnn import FeatureClassifier, Standardize, residual_features
from torchcaps.models.inputs import ANY_IMAGE, ImageShape, check_images
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleConv2d, CapsuleLinear, CapsuleStack, PrimaryCapsules
from torchcaps.nn.stack import Schedule
from torchcaps.routing import DynamicRouting, EMRouting, InvertedAttentionRouting, Routing, squash
from torchcaps.routing.base import Start
from torchcaps.utils.arguments import Count, checked

Backbone = Literal["simple", "resnet"]

# Mean and standard deviation of CIFAR's channels; the authors' code uses these numbers for CIFAR-10 and CIFAR-100.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

# Images of CIFAR, and of DiverseMultiMNIST.
CIFAR, DIGITS = (3, 32, 32), (1, 36, 36)


class CapsuleClassifier(nn.Module):
    """Network of a backbone, primary capsules and capsule layers, with one capsule of the last layer per class.

    Args:
        backbone: network from images to a feature map.
        primary: layer from the feature map to capsules on a grid.
        capsules: stack from the primary capsules to the class capsules.
        classifier: layer from a class capsule's flattened pose to its logit, shared by the classes; None for a
            prediction that has the activations of the class capsules and no scores.
        image_shape: channels, height and width of an image; None for any.

    Shape:
        - Input: `(batch, channels, height, width)`.
        - Output: a Prediction: scores `(batch, classes)`, or activations without a classifier, and the class capsules.

    Reference:
        Tsai et al. 2020, Procedure 2.
    """

    @checked
    def __init__(
        self,
        backbone: nn.Module,
        primary: PrimaryCapsules,
        capsules: CapsuleStack,
        classifier: nn.Module | None = None,
        image_shape: ImageShape = ANY_IMAGE,
    ):
        super().__init__()
        last = capsules.layers[-1].routing
        if classifier is None and not last.measures_presence:
            raise ValueError(
                f"{type(last).__name__} does not say how present a class is: give the network a classifier"
            )
        self.backbone, self.primary, self.capsules, self.classifier = backbone, primary, capsules, classifier
        self.image_shape = image_shape
        self.gives_logits = classifier is not None  # otherwise activations, for a MarginLoss

    @checked
    def forward(self, images: Tensor, *, return_coefficients: bool = False) -> Prediction:
        capsules = self.capsules(self.primary_capsules(images), return_coefficients=return_coefficients)
        if self.classifier is None:
            dims = len(self.capsules.layers[-1].out_pose)  # which layers of nn.DataParallel's replicas leave out
            return Prediction(activations=capsules._replace(pose_dims=dims).activations, capsules=capsules)
        return Prediction(self.classifier(capsules.poses.flatten(2)).squeeze(-1), capsules)

    def primary_capsules(self, images: Tensor) -> Capsules:
        """Return the children of the first capsule layer."""
        check_images(images, self.image_shape, self.primary.pose_conv.weight)
        return self.primary(self.backbone(images))


@register_model
def inverted_attention_cifar10(
    backbone: Backbone = "simple",
    iterations: Count = 2,
    schedule: Schedule = "concurrent",
    layer_norm: bool = True,
    activations: bool = False,
    start: Start = "zero",
    classes: Count = 10,
) -> CapsuleClassifier:
    """Inverted attention on 32x32 images, Table 8: 561,297 parameters; backbone="resnet": 1,828,817."""
    routing = InvertedAttentionRouting(iterations, layer_norm, activations, start, init="paper")
    # Without activations, because the classifier does not read them.
    last = InvertedAttentionRouting(iterations, layer_norm, start=start, init="paper")
    features, channels = _backbone(backbone, nn.Conv2d(3, 256, 3, stride=2, padding=1))
    return CapsuleClassifier(
        features,
        _primary(channels, 32, (4, 4), activations),
        CapsuleStack(
            CapsuleConv2d(32, 32, (4, 4), (4, 4), kernel_size=3, stride=2, routing=routing),  # 16x16 to 7x7
            CapsuleConv2d(32, 32, (4, 4), (4, 4), kernel_size=3, stride=1, routing=routing),  # to 5x5
            CapsuleLinear(32 * 5 * 5, classes, (4, 4), (4, 4), routing=last),
            schedule=schedule,
        ),
        classifier=nn.Linear(16, 1),
        image_shape=CIFAR,
    )


@register_model
def inverted_attention_cifar100(
    backbone: Backbone = "simple",
    iterations: Count = 2,
    schedule: Schedule = "concurrent",
    layer_norm: bool = True,
    activations: bool = False,
    start: Start = "zero",
    classes: Count = 100,
) -> CapsuleClassifier:
    """Inverted attention for 100 classes, Table 9: 1,462,989 parameters; backbone="resnet": 2,799,629."""
    routing = InvertedAttentionRouting(iterations, layer_norm, activations, start, init="paper")
    # Without activations, because the classifier does not read them.
    last = InvertedAttentionRouting(iterations, layer_norm, start=start, init="paper")
    features, channels = _backbone(backbone, nn.Conv2d(3, 128, 3, stride=2, padding=1))
    return CapsuleClassifier(
        features,
        _primary(channels, 32, (6, 6), activations),
        CapsuleStack(
            CapsuleConv2d(32, 32, (6, 6), (6, 6), kernel_size=3, stride=2, routing=routing),
            CapsuleConv2d(32, 32, (6, 6), (6, 6), kernel_size=3, stride=1, routing=routing),
            CapsuleLinear(32 * 5 * 5, 20, (6, 6), (6, 6), routing=routing),
            CapsuleLinear(20, classes, (6, 6), (6, 6), routing=last),
            schedule=schedule,
        ),
        classifier=nn.Linear(36, 1),
        image_shape=CIFAR,
    )


@register_model
def dynamic_cifar(classes: Count = 10, backbone: Backbone = "simple", iterations: Count = 3) -> CapsuleClassifier:
    """Dynamic routing on 32x32 images, Tables 4 and 5: 7,992,576 parameters; 100 classes: 31,585,536.

    With backbone="resnet" there are 6,616,128 and 30,209,088 parameters. The paper has 12.45M and 36.04M, which do not
    follow from its text. The 9x9 primary convolution reads the 16x16x128 features and is padded by 4, because the
    difference between the two published counts implies 2048 children.
    """
    features, channels = _backbone(backbone, nn.Conv2d(3, 256, 9))
    padding = 0 if backbone == "simple" else 4
    return CapsuleClassifier(
        features,
        PrimaryCapsules(channels, 32, 8, kernel_size=9, stride=2, padding=padding, normalization=squash),
        CapsuleStack(CapsuleLinear(32 * 8 * 8, classes, 8, 16, routing=DynamicRouting(iterations, init="paper"))),
        image_shape=CIFAR,
    )


@register_model
def em_cifar(classes: Count = 10, backbone: Backbone = "simple", iterations: Count = 2) -> CapsuleClassifier:
    """EM routing on 32x32 images, Tables 6 and 7: 453,044 parameters; 100 classes: 499,304; ResNet: 1.71M, 1.76M."""
    routing = EMRouting(iterations, init="paper")
    if backbone == "simple":
        conv = nn.Conv2d(3, 256, 4, stride=2, padding=1)
        features: nn.Module = nn.Sequential(Standardize(MEAN, STD), conv, nn.BatchNorm2d(256), nn.ReLU())
        channels = 256
    else:
        features, channels = _backbone(backbone)
    return CapsuleClassifier(
        features,
        PrimaryCapsules(channels, 32, (4, 4), normalization=None, scores=True),
        CapsuleStack(
            CapsuleConv2d(32, 32, (4, 4), (4, 4), kernel_size=3, stride=2, routing=routing),
            CapsuleConv2d(32, 32, (4, 4), (4, 4), kernel_size=3, stride=1, routing=routing),
            CapsuleLinear(32, classes, (4, 4), (4, 4), routing=routing, share_positions=True, coordinates=True),
        ),
        image_shape=(3, None, None),
    )


@register_model
def narrow_cifar10(
    routing: Routing | None = None,
    types: Count = 8,
    channels: Count = 128,
    schedule: Schedule = "concurrent",
    classes: Count = 10,
) -> nn.Module:
    """Tsai et al.'s network with 8 types and 128 channels, for small machines: any routing, or none and pooling.

    With `routing=None` it is a CNN with the same layers and the same number of neurons per layer, as in the paper's
    comparison on digits. Convolutions, batch normalization and ReLU replace the capsule layers, and average pooling
    follows.
    """
    backbone, _ = _backbone("simple", nn.Conv2d(3, channels, 3, stride=2, padding=1))
    width = 16 * types
    if routing is None:
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for stride in (2, 1):
            layers += [nn.Conv2d(width, width, 3, stride, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        return FeatureClassifier(
            nn.Sequential(backbone, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(width, classes), CIFAR
        )
    return CapsuleClassifier(
        backbone,
        _primary(channels, types, (4, 4), routing.gives_scores),
        CapsuleStack(
            CapsuleConv2d(types, types, (4, 4), (4, 4), kernel_size=3, stride=2, routing=routing),
            CapsuleConv2d(types, types, (4, 4), (4, 4), kernel_size=3, routing=routing),
            CapsuleLinear(types * 5 * 5, classes, (4, 4), (4, 4), routing=routing),
            schedule=schedule,
        ),
        classifier=nn.Linear(16, 1),
        image_shape=CIFAR,
    )


@register_model
def cnn_cifar(classes: Count = 10) -> FeatureClassifier:
    """CNN of Tsai et al. on 32x32 images, Tables 2 and 3: 18,919,434 parameters; 100 classes: 19,011,684."""
    return FeatureClassifier(
        nn.Sequential(
            Standardize(MEAN, STD),
            nn.Conv2d(3, 1024, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(1024, 1024, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(1024),
            nn.AvgPool2d(2),
            nn.Conv2d(1024, 1024, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(1024),
            nn.AvgPool2d(2),
            nn.Flatten(),
        ),
        nn.Linear(1024, classes),
        CIFAR,
    )


@register_model
def resnet18_cifar(classes: Count = 10) -> FeatureClassifier:
    """ResNet-18 on 32x32 images: 11,173,962 parameters; 100 classes: 11,220,132."""
    features = residual_features(3, channels=(64, 128, 256, 512), blocks=(2, 2, 2, 2), strides=(1, 2, 2, 2))
    layers = Standardize(MEAN, STD), features, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return FeatureClassifier(nn.Sequential(*layers), nn.Linear(512, classes), (3, None, None))


@register_model
def inverted_attention_multimnist(
    types: Count = 16,
    pose: tuple[Count, ...] = (8, 8),
    iterations: Count = 2,
    schedule: Schedule = "concurrent",
    classes: Count = 10,
) -> CapsuleClassifier:
    """Inverted attention on 36x36 digits, Table 10: 9,963,969 parameters; pose=[64], Table 11: 42,478,017."""
    normalization = nn.LayerNorm(math.prod(pose))
    return _multimnist(
        types, pose, InvertedAttentionRouting(iterations, init="paper"), normalization, schedule, classes
    )


@register_model
def dynamic_multimnist(
    types: Count = 16, pose: tuple[Count, ...] = (64,), iterations: Count = 3, classes: Count = 10
) -> CapsuleClassifier:
    """Dynamic routing on 36x36 digits, Figure 5's CapsNet*: Table 11 with squash, 42,477,633 parameters."""
    return _multimnist(types, pose, DynamicRouting(iterations, init="paper"), squash, "sequential", classes)


@register_model
def cnn_multimnist(
    channels: Count = 1024,
    hidden: Count = 640,
    pooling: Literal["average", "linear"] = "average",
    classes: Count = 10,
) -> FeatureClassifier:
    """CNN of Tsai et al. on 36x36 digits, Table 12: 19,553,162 parameters; pooling="linear": 42,490,762."""
    layers: list[nn.Module] = [
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2),
        nn.ReLU(),
        nn.BatchNorm2d(channels),
        nn.Conv2d(channels, channels, 3),
        nn.ReLU(),
        nn.BatchNorm2d(channels),
    ]
    if pooling == "average":
        # The table has the linear layer before the average. The result is the same in this order, which is cheaper.
        layers += [nn.AvgPool2d(6), nn.Flatten(), nn.Linear(channels, hidden)]
    else:
        layers += [nn.Flatten(), nn.Linear(channels * 6 * 6, hidden)]
    return FeatureClassifier(nn.Sequential(*layers), nn.Linear(hidden, classes), DIGITS)


def _multimnist(
    types: int,
    pose: tuple[int, ...],
    routing: Routing,
    normalization: Callable[[Tensor], Tensor],
    schedule: Schedule,
    classes: int,
) -> CapsuleClassifier:
    """Build a capsule network with as many neurons per layer as the CNN: 18x18, 8x8 and 6x6 maps of `types * features`
    channels."""
    features = math.prod(pose)
    channels = types * features
    return CapsuleClassifier(
        nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU()),
        PrimaryCapsules(channels, types, pose, kernel_size=3, stride=2, bias=False, normalization=normalization),
        CapsuleStack(
            CapsuleConv2d(types, types, pose, pose, kernel_size=3, routing=routing),
            CapsuleLinear(types * 6 * 6, classes, pose, pose, routing=routing),
            schedule=schedule,
        ),
        classifier=nn.Linear(features, 1),
        image_shape=DIGITS,
    )


def _backbone(name: str, simple: nn.Conv2d | None = None) -> tuple[nn.Module, int]:
    """Build a backbone and return it with its number of channels: the convolution `simple` and a ReLU, or the residual
    blocks of appendix A.1."""
    if name == "simple":
        assert simple is not None
        return nn.Sequential(Standardize(MEAN, STD), simple, nn.ReLU()), simple.out_channels
    features = residual_features(3, channels=(64, 128), blocks=(3, 4), strides=(1, 2))
    return nn.Sequential(Standardize(MEAN, STD), features), 128


def _primary(channels: int, types: int, pose: tuple[int, int], scores: bool) -> PrimaryCapsules:
    normalization = nn.LayerNorm(pose[0] * pose[1])
    return PrimaryCapsules(channels, types, pose, bias=False, normalization=normalization, scores=scores)
