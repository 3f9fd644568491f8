"""The network of Mazzia, Salvetti, Chiaberge: Efficient-CapsNet (2021).

Three points follow the authors' code: each convolution has a ReLU before its batch normalization, the batch
normalizations average slowly over the batches, and the vote weights start at the width of He et al. for all votes of a
parent.
"""

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.models.reconstructing import ReconstructingCapsNet, check_presence
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleLinear, MaskedDecoder, PrimaryCapsules
from torchcaps.routing import EfficientRouting, Routing, exponential_squash
from torchcaps.utils.arguments import Count, checked

SMALLEST_SIDE = 27  # height and width of an image that the convolutions can take


class EfficientCapsNet(ReconstructingCapsNet):
    """Four convolutions, a depthwise convolution that makes few primary capsules, class capsules, and a decoder.

    `forward` and `reconstruct` are in `ReconstructingCapsNet` (reconstructing.py).

    Args:
        in_channels: number of channels of an image.
        image_size: height and width of an image.
        classes: number of class capsules.
        routing: routing between primary and class capsules; None for `EfficientRouting(init="paper")`.
        decoder: widths of the decoder's hidden layers; None for no decoder.

    Shape:
        - Input: `(batch, in_channels, image_size, image_size)`, values in [0, 1], at least 27x27 pixels.
        - Output: a Prediction: the activations of the class capsules `(batch, classes)`, with efficient routing their
          lengths, and the class capsules, poses `(batch, classes, 16)`.

    Reference:
        Mazzia et al. 2021, Figure 1.
    """

    @checked
    def __init__(
        self,
        in_channels: Count = 1,
        image_size: Count = 28,
        classes: Count = 10,
        routing: Routing | None = None,
        decoder: tuple[Count, ...] | None = (512, 1024),
    ):
        super().__init__()
        routing = EfficientRouting(init="paper") if routing is None else routing
        check_presence(routing)
        if image_size < SMALLEST_SIDE:
            raise ValueError(
                f"image_size must be at least {SMALLEST_SIDE}, which the convolutions need, got {image_size}"
            )
        self.image_shape = (in_channels, image_size, image_size)
        self.features = nn.Sequential(
            *_conv(in_channels, 32, 5), *_conv(32, 64, 3), *_conv(64, 64, 3), *_conv(64, 128, 3, stride=2)
        )
        side = (image_size - 9) // 2 - 8  # 9x9 for 28x28 pixels; after the depthwise convolution 1x1
        self.primary = PrimaryCapsules(128, 16, 8, kernel_size=9, groups=128, normalization=exponential_squash)
        self.class_capsules = CapsuleLinear(16 * side * side, classes, in_pose=8, out_pose=16, routing=routing)
        self.decoder = None if decoder is None else MaskedDecoder(classes, 16, self.image_shape, decoder)

    def primary_capsules(self, images: Tensor) -> Capsules:
        self.check_images(images)
        return self.primary(self.features(images))


def _conv(in_channels: int, channels: int, kernel_size: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, channels, kernel_size, stride)
    return [conv, nn.ReLU(), nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)]


@register_model
def efficient_capsnet(
    in_channels: Count = 1, image_size: Count = 28, classes: Count = 10, decoder: bool = True
) -> EfficientCapsNet:
    """Efficient-CapsNet for 28x28 digits: 1,573,168 parameters, 161,824 without the decoder."""
    return EfficientCapsNet(in_channels, image_size, classes, decoder=(512, 1024) if decoder else None)
