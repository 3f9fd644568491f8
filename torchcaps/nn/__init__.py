"""Capsule layers, decoder and losses."""

from torchcaps.nn.conv2d import CapsuleConv2d
from torchcaps.nn.decoder import MaskedDecoder
from torchcaps.nn.linear import CapsuleLinear
from torchcaps.nn.losses import MarginLoss, SpreadLoss, margin_loss, spread_loss
from torchcaps.nn.pooling import RoutingPool2d, replace_pooling
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.nn.stack import CapsuleStack, Trace

__all__ = [
    "CapsuleConv2d",
    "CapsuleLinear",
    "CapsuleStack",
    "MarginLoss",
    "MaskedDecoder",
    "PrimaryCapsules",
    "RoutingPool2d",
    "SpreadLoss",
    "Trace",
    "margin_loss",
    "replace_pooling",
    "spread_loss",
]
