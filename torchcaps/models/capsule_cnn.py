"""A small network of capsules for one's own signals, images and volumes. It is in no paper."""

from typing import Any

from torchcaps.models.backbone import capsules_of
from torchcaps.models.cnn import FeatureClassifier, conv_features
from torchcaps.models.registry import register_model
from torchcaps.nn.primary import Dims
from torchcaps.routing import Routing
from torchcaps.utils.arguments import Count

KERNEL_SIZES = {1: 9, 2: 3, 3: 3}


@register_model
def capsule_cnn(
    in_channels: Count = 1,
    classes: Count = 10,
    numbers: Count | None = None,
    dims: Dims = 2,
    width: Count = 32,
    depth: Count = 3,
    kernel_size: Count | None = None,
    routing: Routing | None = None,
    types: Count = 16,
    pose: Count = 16,
) -> FeatureClassifier:
    """Convolutions and capsules for signals, images or volumes of any size: 68,337 parameters; one number: 28,518.

    All convolutions but the last have stride 2. Behind them is a `CapsuleHead`, or, with numbers, a `CapsuleRegressor`.

    Args:
        in_channels: number of channels, such as the leads of a signal.
        classes: number of classes, or of labels.
        numbers: how many numbers it gives, in place of classes.
        dims: number of dimensions: 1 for signals `(batch, in_channels, length)`, 2 for images, 3 for volumes.
        width: number of channels of each convolution.
        depth: number of convolutions.
        kernel_size: size of the windows; None for 9 on signals and 3 on images and volumes.
        routing, types, pose: see :class:`CapsuleHead` and :class:`CapsuleRegressor`.
    """
    strides = [2] * (depth - 1) + [1]
    features = conv_features(in_channels, width, strides, kernel_size or KERNEL_SIZES[dims], dims)
    end = capsules_of(width, classes, numbers, routing, types, pose, dims=dims)
    shape: Any = (in_channels, *[None] * dims)
    return FeatureClassifier(features, end, shape)
