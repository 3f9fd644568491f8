"""Squash, losses and optimal transport as functions. Routing algorithms are modules: `DynamicRouting()(votes)`."""

from torchcaps.models.li2018.transport import feature_kl, sinkhorn_divergence, transport_cost, transport_plan
from torchcaps.nn.losses import margin_loss, segmentation_loss, spread_loss
from torchcaps.routing import squash

__all__ = [
    "feature_kl",
    "margin_loss",
    "segmentation_loss",
    "sinkhorn_divergence",
    "spread_loss",
    "squash",
    "transport_cost",
    "transport_plan",
]
