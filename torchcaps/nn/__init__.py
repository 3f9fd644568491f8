"""Capsule layers, decoder and losses."""

from torchcaps.nn.conv import CapsuleConv1d, CapsuleConv2d
from torchcaps.nn.decoder import MaskedDecoder
from torchcaps.nn.encapsulated import CapsuleBlock2d, CapsuleFC
from torchcaps.nn.feedback import AgreementUnit, FeedbackAgreement, MapShape
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.linear import CapsuleLinear
from torchcaps.nn.losses import MarginLoss, SpreadLoss, margin_loss, spread_loss
from torchcaps.nn.pooling import RoutingPool2d, replace_pooling
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.nn.stack import CapsuleStack, Trace

__all__ = [
    "AgreementUnit",
    "CapsuleBlock2d",
    "CapsuleConv1d",
    "CapsuleConv2d",
    "CapsuleFC",
    "CapsuleLayer",
    "CapsuleLinear",
    "CapsuleStack",
    "FeedbackAgreement",
    "MapShape",
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
