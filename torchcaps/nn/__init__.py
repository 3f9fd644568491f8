"""Capsule layers, stacks, the head for any network, routing pools, the decoder and losses."""

from torchcaps.nn.conv import CapsuleConv1d, CapsuleConv2d
from torchcaps.nn.decoder import MaskedDecoder
from torchcaps.nn.head import CapsuleHead, CapsuleRegressor
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.linear import CapsuleLinear
from torchcaps.nn.losses import MarginLoss, SegmentationLoss, SpreadLoss, margin_loss, segmentation_loss, spread_loss
from torchcaps.nn.map import CapsuleMap
from torchcaps.nn.pooling import RoutingPool2d
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.nn.shared import CapsuleShared
from torchcaps.nn.stack import CapsuleStack
from torchcaps.nn.surgery import replace_pooling

__all__ = [
    "CapsuleConv1d",
    "CapsuleConv2d",
    "CapsuleHead",
    "CapsuleLayer",
    "CapsuleLinear",
    "CapsuleMap",
    "CapsuleRegressor",
    "CapsuleShared",
    "CapsuleStack",
    "MarginLoss",
    "MaskedDecoder",
    "PrimaryCapsules",
    "RoutingPool2d",
    "SegmentationLoss",
    "SpreadLoss",
    "margin_loss",
    "replace_pooling",
    "segmentation_loss",
    "spread_loss",
]
