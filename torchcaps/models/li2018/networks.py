"""The networks of Li, Guo, Dai, Ouyang, Wang: Neural Network Encapsulation (2018).

The copy of the paper that we used lacks its formulas and most table entries. The networks follow its words, its
arithmetic and the authors' code (github.com/hli2020/nn_encapsulation):

- EncapNet has 18 layers: a stem, four modules with one layer of type I and three of type II each (two by default in the
  code), and capFC (`CapsuleFC`, the layer of class capsules). The paper does not say how 101 layers divide; here they
  divide as in ResNet-101.
- capConv and capFC are initialized as in the code, all other layers as in PyTorch and this library. The code differs
  there: Xavier convolutions, vote weights of the order of 0.01 and normal vote biases in CapNet, uniform betas in EM
  routing. With such biases the lengths of all class capsules were saturated for the first hundred steps.
- The least variance of CapNet's EM routing (`least_variance`) is ours. Its default, 1e-6, is too small: in 16
  dimensions the E-step then gives nearly all of a class's mass to one child, and the network stays at chance. The
  recipes set a larger one, with which it learns (docs/papers/li2018.md).
- CapNet's 2048 children route to 512 parents in the code (a 4x4 grid) and to 2048 in the paper's arithmetic (an 8x8
  grid: 1,048,576 channels of votes, 4,194,304 coefficients). With 2048 parents and 16 bytes per parameter, the two
  CapNets take 151.26 and 152.45 MB, where Table 1 has 151.24 and 152.44 "Mb". The EncapNet without the aide branch
  takes the published 25.76 if its layer has a skip. (With 4 bytes per parameter, all take a fourth.) The CNNs are those
  of the code at commit f1ebc4b (`resnet_same_shape`, `resnet_similar_param`), without biases before a batch
  normalization: 24.03 MB instead of 24.44, and 146.82 instead of 146.88. The EncapNet with the 7x7 kernel of the code's
  aide does not match: 124.08 instead of 60.68.
"""

from typing import Annotated, Literal

from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.cnn import FeatureClassifier
from torchcaps.models.inputs import ANY_IMAGE, ImageShape, check_images
from torchcaps.models.li2018.encapsulated import CapsuleBlock2d, CapsuleFC, Coefficients, as_poses
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleLinear
from torchcaps.nn.losses import Reads
from torchcaps.routing import DynamicRouting, EMRouting
from torchcaps.routing.base import Start
from torchcaps.utils.arguments import Count, CountOrZero, Range, checked

Skips = Literal["type1", "type2", "both"]

LEAST_VARIANCE = 1e-6  # of EM routing by default


class CrossEntropyOfLengths(nn.CrossEntropyLoss):
    """Cross-entropy that takes the lengths of class capsules for logits (Table 5). They are from 0 to 1, so with 10
    classes the loss stays above 1.46."""

    reads: Reads = "activations"


class EncapsulatedModule2d(nn.Module):
    """Module of one layer of type I, which makes capsules larger, and layers of type II, which keep their size.

    Args:
        capsules: number of capsule types.
        in_pose, out_pose: number of features of a child and of a parent; both are vectors.
        depth: number of layers of type II.
        stride: stride of the layer of type I.
        coefficients: source of the branches' coefficients, see :class:`torchcaps.CapsuleBlock2d`.
        skips: skips over the layer of "type1", over the layers of "type2", or over "both"; None for no skip.
        skip_span: number of layers of type II that one skip spans; None for all of them, as in the authors' code.

    Shape:
        - Input: `(batch, capsules, height, width, in_pose)`; output: `(batch, capsules, height / stride, width /
          stride, out_pose)`.

    Reference:
        Li et al. 2018, section 3.1 and Figure 3a.
    """

    @checked
    def __init__(
        self,
        capsules: Count,
        in_pose: Count,
        out_pose: Count,
        depth: CountOrZero,
        stride: Count = 2,
        coefficients: Coefficients | None = "both",
        skips: Skips | None = "both",
        skip_span: Count | None = None,
    ):
        super().__init__()
        self.type1 = CapsuleBlock2d(
            capsules, in_pose, out_pose, 3, stride, coefficients=coefficients, skip=skips in ("type1", "both")
        )
        self.type2 = nn.ModuleList(
            CapsuleBlock2d(capsules, out_pose, out_pose, 1, coefficients=coefficients) for _ in range(depth)
        )
        self.skip_span = (skip_span or depth) if skips in ("type2", "both") else 0

    def forward(self, capsules: Capsules | Tensor) -> Capsules:
        start = routed = self.type1(capsules)
        for index, layer in enumerate(self.type2, start=1):
            ends = self.skip_span > 0 and (index % self.skip_span == 0 or index == len(self.type2))
            routed = layer(routed, start if ends else None)
            if ends:
                start = routed
        return routed


class EncapNet(nn.Module):
    """EncapNet of Li et al. 2018: convolutions, encapsulated layers, and one capsule per class.

    Args:
        stem: network from images to a map whose channels are capsules of `stem_pose` features.
        layers: layers from the stem's capsules to the children of the class capsules.
        class_capsules: layer from these children to the class capsules.
        stem_pose: number of features of the stem's capsules.
        image_shape: channels, height and width of an image; None for any.

    Shape:
        - Input: `(batch, channels, height, width)`, values in [0, 1], of the size for which `class_capsules` was made.
        - Output: a Prediction: activations `(batch, classes)`, which are the lengths of the class capsules, and the
          class capsules.

    Reference:
        Li et al. 2018, Table 2.
    """

    gives_logits = False  # but lengths, for a MarginLoss

    @checked
    def __init__(
        self,
        stem: nn.Module,
        layers: nn.Sequential,
        class_capsules: CapsuleFC,
        stem_pose: Count = 1,
        image_shape: ImageShape = ANY_IMAGE,
    ):
        super().__init__()
        self.stem, self.layers, self.class_capsules, self.stem_pose = stem, layers, class_capsules, stem_pose
        self.image_shape = image_shape

    def forward(self, images: Tensor) -> Prediction:
        check_images(images, self.image_shape, self.class_capsules.weight)
        children = self.layers(as_poses(self.stem(images), self.stem_pose)).poses
        if children.shape[1:4].numel() != self.class_capsules.in_capsules:
            raise ValueError(
                f"images of {images.shape[2]}x{images.shape[3]} give {children.shape[1:4].numel()} capsules, and the "
                f"class layer takes {self.class_capsules.in_capsules}: build the model with the images' image_size"
            )
        capsules = self.class_capsules(children)
        return Prediction(activations=capsules.activations, capsules=capsules)


@register_model
def encapnet_v1(
    classes: Count = 10,
    image_size: Count = 32,
    coefficients: Coefficients | None = "both",
    skips: Skips | None = "both",
    capsules: Count = 32,
    depth: CountOrZero = 3,
) -> EncapNet:
    """EncapNet of 18 layers, Table 2: 34,466,400 parameters; without aide: 1,738,848."""
    return _encapnet(classes, image_size, coefficients, skips, capsules, (depth,) * 4)


@register_model
def encapnet_v2(
    classes: Count = 10,
    image_size: Count = 32,
    coefficients: Coefficients | None = "both",
    skips: Skips | None = "both",
    capsules: Count = 32,
) -> EncapNet:
    """EncapNet of 101 layers: 174,722,784 parameters; each layer of type II has a skip of its own.

    With 200 classes it has 176,279,264 parameters on images of 128 pixels, and on images of 224, as EncapNet_v3
    (appendix C), 179,658,464.
    """
    return _encapnet(classes, image_size, coefficients, skips, capsules, (8, 11, 68, 8), skip_span=1)


def _encapnet(
    classes: int,
    image_size: int,
    coefficients: Coefficients | None,
    skips: Skips | None,
    capsules: int,
    depths: tuple[int, ...],
    skip_span: int | None = None,
) -> EncapNet:
    """Build an EncapNet of four modules, the first two without aide.

    Grids shrink from 32x32 to 4x4. For images larger than 64 pixels, two more strides of 2 give 128x128 images the same
    grids.
    """
    first_stride = 1 if image_size <= 64 else 2
    size, before, modules = -(-image_size // first_stride), 1, []
    for depth, pose, stride in zip(depths, (2, 4, 8, 16), (first_stride, 2, 2, 2), strict=True):
        branches = coefficients if pose > 4 else None
        modules.append(EncapsulatedModule2d(capsules, before, pose, depth, stride, branches, skips, skip_span))
        before, size = pose, -(-size // stride)
    stem = _conv(3, capsules, first_stride)
    class_capsules = CapsuleFC(capsules * size * size, classes, 16)
    return EncapNet(stem, nn.Sequential(*modules), class_capsules, image_shape=(3, image_size, image_size))


class CapNet(nn.Module):
    """CapNet of Li et al. 2018: four convolutions, capsules on a grid, and two capsule layers that route.

    Two points follow the authors' code for EM routing: the score of a class is the length of its mean, as with dynamic
    routing, and a convolution with BN and ReLU computes the activities of the children.

    Args:
        routing: "dynamic", with the softmax over children, or "em".
        in_channels: number of channels of an image.
        classes: number of class capsules.
        types: number of capsule types, the same for children and parents.
        grid: height and width of the grid on which the parents of the first routing lie.
        iterations: number of iterations of both routings.
        start: initial logits of dynamic routing, see :class:`torchcaps.DynamicRouting`.
        least_variance: least variance of EM routing in both layers, `eps` of :class:`torchcaps.EMRouting`; ours, not
            the paper's. The network does not learn with the default.

    Shape:
        - Input: `(batch, in_channels, height, width)`, values in [0, 1].
        - Output: a Prediction: activations `(batch, classes)`, which are the lengths of the class capsules' poses, and
          the class capsules.

    Reference:
        Li et al. 2018, section 2.2 and appendix A.1.
    """

    gives_logits = False  # but lengths, for a MarginLoss

    @checked
    def __init__(
        self,
        routing: Literal["dynamic", "em"] = "dynamic",
        in_channels: Count = 3,
        classes: Count = 10,
        types: Count = 32,
        grid: Count = 8,
        iterations: Count = 3,
        start: Start = "zero",
        least_variance: Annotated[float, Range(1e-6)] = LEAST_VARIANCE,
    ):
        super().__init__()
        if routing == "em" and start != "zero":
            raise ValueError(f"start={start!r} needs routing='dynamic': EM routing starts from uniform coefficients")
        if routing == "dynamic" and least_variance != LEAST_VARIANCE:
            raise ValueError(f"least_variance={least_variance:g} needs routing='em': dynamic routing has no variances")
        algorithm: DynamicRouting | EMRouting
        if routing == "dynamic":
            algorithm = DynamicRouting(iterations, softmax="children", start=start, init="paper")
        else:
            algorithm = EMRouting(iterations, 1.0, eps=least_variance, schedule="linear", cost_range=10.0, init="paper")
        self.in_channels, self.types, self.grid = in_channels, types, grid
        self.features = _stem(in_channels, types)
        self.activity = _conv(8 * types, types) if routing == "em" else None
        self.capsules = CapsuleLinear(types, types * grid * grid, 8, 16, algorithm, bias=True, share_positions=True)
        self.class_capsules = CapsuleLinear(types, classes, 16, 16, algorithm, bias=True, share_positions=True)

    def forward(self, images: Tensor) -> Prediction:
        check_images(images, (self.in_channels, None, None), self.capsules.weight)
        features = self.features(images)
        children = as_poses(features, 8)
        if self.activity is None:
            parents = self.capsules(children)
        else:  # activities are gates directly, not by a sigmoid of scores: ReLU's output can be larger than 1
            parents = self.capsules.routing(self.capsules.votes(children).gated(self.activity(features).flatten(1)))
        places = (self.types, self.grid, self.grid)
        scores = None if parents.scores is None else parents.scores.unflatten(1, places)
        capsules = self.class_capsules(Capsules(parents.poses.unflatten(1, places), scores))
        return Prediction(activations=capsules.poses.norm(dim=-1), capsules=capsules)


@register_model
def capnet_dynamic(
    classes: Count = 10,
    in_channels: Count = 3,
    types: Count = 32,
    grid: Count = 8,
    iterations: Count = 3,
    start: Start = "zero",
) -> CapNet:
    """CapNet with dynamic routing over children, Table 1a: 9,913,120 parameters; grid=4: 2,835,232."""
    return CapNet("dynamic", in_channels, classes, types, grid, iterations, start)


@register_model
def capnet_em(
    classes: Count = 10,
    in_channels: Count = 3,
    types: Count = 32,
    grid: Count = 8,
    iterations: Count = 3,
    least_variance: Annotated[float, Range(1e-6)] = LEAST_VARIANCE,
) -> CapNet:
    """CapNet with EM routing, Table 1b: 9,991,028 parameters; grid=4: 2,910,068.

    With the default least variance it stays at chance, see :class:`CapNet`. The recipes have 10 on CIFAR-10 and 1 on
    MNIST.
    """
    return CapNet("em", in_channels, classes, types, grid, iterations, least_variance=least_variance)


@register_model
def shallow_encapnet(
    classes: Count = 10,
    in_channels: Count = 3,
    image_size: Count = 32,
    types: Count = 32,
    coefficients: Coefficients | None = "both",
) -> EncapNet:
    """CapNet's convolutions, an encapsulated layer, capFC, Table 1f: 8,131,424 parameters; 1e, no aide: 1,688,352."""
    size = -(-image_size // 8)
    layers = nn.Sequential(CapsuleBlock2d(types, 8, 16, 3, stride=2, coefficients=coefficients, skip=True))
    class_capsules = CapsuleFC(types * size * size, classes, 16)
    return EncapNet(_stem(in_channels, types), layers, class_capsules, 8, (in_channels, image_size, image_size))


@register_model
def shallow_cnn(
    classes: Count = 10,
    in_channels: Count = 3,
    channels: tuple[Count, Count, Count, Count, Count] = (32, 64, 128, 256, 512),
) -> FeatureClassifier:
    """Five convolutions, Table 1c: 1,574,698 parameters; 1d, channels=(32, 256, 512, 512, 1300): 9,622,170."""
    inputs, strides = (in_channels, *channels[:-1]), (1, 1, 2, 2, 1)
    features = [_conv(*sizes) for sizes in zip(inputs, channels, strides, strict=True)]
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return FeatureClassifier(
        nn.Sequential(*features, *pool), nn.Linear(channels[-1], classes), (in_channels, None, None)
    )


def _stem(in_channels: int, channels: int) -> nn.Sequential:
    """Build four convolutions that reduce each side to a fourth and give 8 times `channels`."""
    return nn.Sequential(
        _conv(in_channels, channels),
        _conv(channels, 2 * channels),
        _conv(2 * channels, 4 * channels, stride=2),
        _conv(4 * channels, 8 * channels, stride=2),
    )


def _conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU()
    )
