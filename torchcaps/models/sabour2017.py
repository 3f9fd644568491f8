"""The networks of Sabour, Frosst, Hinton: Dynamic Routing Between Capsules (2017)."""

import itertools
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.models.cnn import FeatureClassifier
from torchcaps.models.reconstructing import ReconstructingCapsNet, check_presence
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleLinear, MaskedDecoder, PrimaryCapsules
from torchcaps.routing import DynamicRouting, Routing
from torchcaps.utils.arguments import Count, Fraction, Range, checked


class CapsNet(ReconstructingCapsNet):
    """CapsNet: a convolution, primary capsules, class capsules, and a decoder that reconstructs the input.

    `forward` and `reconstruct` are in `ReconstructingCapsNet` (reconstructing.py).

    Args:
        in_channels: number of channels of an image.
        image_size: height and width of an image, or one number for both.
        classes: number of class capsules.
        routing: routing between primary and class capsules; None for `DynamicRouting(iterations=3, init="paper")`.
        channels, kernel_size: options of the first convolution.
        primary_types, primary_pose: number of primary capsule types, and number of features of a primary capsule.
        primary_kernel_size, primary_stride: options of the convolution that makes the primary capsules.
        class_pose: number of features of a class capsule.
        decoder: widths of the decoder's hidden layers; None for no decoder.

    Shape:
        - Input: `(batch, in_channels, height, width)`, values in [0, 1].
        - Output: a Prediction: the activations of the class capsules `(batch, classes)`, with dynamic routing their
          lengths, and the class capsules themselves.

    Reference:
        Sabour et al. 2017, sections 4 and 4.1.
    """

    @checked
    def __init__(
        self,
        in_channels: Count = 1,
        image_size: Count | tuple[Count, Count] = 28,
        classes: Count = 10,
        routing: Routing | None = None,
        channels: Count = 256,
        kernel_size: Count = 9,
        primary_types: Count = 32,
        primary_pose: Count = 8,
        primary_kernel_size: Count = 9,
        primary_stride: Count = 2,
        class_pose: Count = 16,
        decoder: tuple[Count, ...] | None = (512, 1024),
    ):
        super().__init__()
        routing = DynamicRouting(iterations=3, init="paper") if routing is None else routing
        check_presence(routing)
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        least = kernel_size + primary_kernel_size - 1
        if min(height, width) < least:
            raise ValueError(
                f"an image of {height}x{width} is too small for convolutions of {kernel_size}x{kernel_size} and "
                f"{primary_kernel_size}x{primary_kernel_size}: use {least}x{least} or more, or smaller kernel sizes"
            )
        rows, columns = ((side - least) // primary_stride + 1 for side in (height, width))
        self.image_shape = (in_channels, height, width)
        self.conv = nn.Conv2d(in_channels, channels, kernel_size)
        self.primary = PrimaryCapsules(channels, primary_types, primary_pose, primary_kernel_size, primary_stride)
        self.class_capsules = CapsuleLinear(
            primary_types * rows * columns,
            classes,
            in_pose=primary_pose,
            out_pose=class_pose,
            routing=routing,
        )
        self.decoder = None if decoder is None else MaskedDecoder(classes, class_pose, self.image_shape, decoder)

    def primary_capsules(self, images: Tensor) -> Capsules:
        self.check_images(images)
        return self.primary(F.relu(self.conv(images)))


def _capsnet(image_size: int, iterations: int, decoder: bool, classes: int) -> CapsNet:
    routing = DynamicRouting(iterations, init="paper")
    return CapsNet(1, image_size, classes, routing, decoder=(512, 1024) if decoder else None)


@register_model
def capsnet_mnist(iterations: Count = 3, decoder: bool = True, classes: Count = 10) -> CapsNet:
    """CapsNet for 28x28 digits: 8,215,568 parameters, 6,804,224 without the decoder."""
    return _capsnet(28, iterations, decoder, classes)


@register_model
def capsnet_multimnist(iterations: Count = 3, decoder: bool = True, classes: Count = 10) -> CapsNet:
    """CapsNet for 36x36 images of two digits: 11,361,808 parameters (published 11.36M)."""
    return _capsnet(36, iterations, decoder, classes)


@register_model
def capsnet_affnist(iterations: Count = 3, decoder: bool = True, classes: Count = 10) -> CapsNet:
    """CapsNet for 40x40 digits: 13,475,648 parameters, the baseline of Zhao & Huang 2019, Table 4."""
    return _capsnet(40, iterations, decoder, classes)


@register_model
def capsnet_digits(
    iterations: Count = 3, decoder: bool = True, classes: Count = 10, routing: Routing | None = None
) -> CapsNet:
    """A small CapsNet for the 8x8 UCI digits: 3x3 kernels, 16 types."""
    if routing is not None and iterations != 3:
        raise ValueError(f"iterations={iterations} is of the dynamic routing, and routing has its own: leave it out")
    return CapsNet(
        image_size=8,
        classes=classes,
        routing=DynamicRouting(iterations, init="paper") if routing is None else routing,
        channels=128,
        kernel_size=3,
        primary_types=16,
        primary_kernel_size=3,
        primary_stride=1,
        decoder=(256, 512) if decoder else None,
    )


@register_model
def capsnet_small(
    in_channels: Count = 1,
    image_size: Count | tuple[Count, Count] = 28,
    classes: Count = 10,
    iterations: Count = 3,
    decoder: bool = True,
) -> CapsNet:
    """A narrow CapsNet, not in the paper: 902,416 parameters on 28x28 images, 705,728 without the decoder."""
    return CapsNet(
        in_channels,
        image_size,
        classes,
        routing=DynamicRouting(iterations, init="paper"),
        channels=64,
        primary_types=8,
        decoder=(128, 192) if decoder else None,
    )


@register_model
def convnet_mnist(
    dropout: Fraction = 0.5,
    classes: Count = 10,
    channels: tuple[Count, Count, Count] = (256, 256, 128),
    hidden: tuple[Count, Count] = (328, 192),
) -> FeatureClassifier:
    """CNN of Sabour et al. for 28x28 digits (section 5): 35,445,522 parameters, with zero padding."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((1, *channels)):
        layers += [nn.Conv2d(before, after, 5, padding=2), nn.ReLU()]
    classifier = nn.Sequential(
        nn.Linear(channels[-1] * 28**2, hidden[0]),
        nn.ReLU(),
        nn.Linear(*hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden[1], classes),
    )
    return FeatureClassifier(nn.Sequential(*layers, nn.Flatten()), classifier, (1, 28, 28))


@register_model
def convnet_multimnist(
    image_size: Annotated[int, Range(4)] = 36, hidden: Count = 1024, dropout: Fraction = 0.0, classes: Count = 10
) -> FeatureClassifier:
    """CNN of Sabour et al. for MultiMNIST (section 6.1): 24,563,978 parameters, with zero padding."""
    features = nn.Sequential(
        nn.Conv2d(1, 512, 9, padding=4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(512, 256, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256 * (image_size // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    return FeatureClassifier(features, nn.Linear(hidden, classes), image_shape=(1, image_size, image_size))
