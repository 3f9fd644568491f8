"""Routing algorithms, losses and optimal transport as functions.

Votes are `(batch, children, parents, *pose)`. The layers run this same code on votes that they need not store.
"""

from torchcaps.nn.losses import margin_loss, spread_loss
from torchcaps.nn.transport import feature_kl, sinkhorn_divergence, transport_cost, transport_plan
from torchcaps.routing import (
    dynamic_routing,
    em_routing,
    heinsen_routing,
    inverted_attention_routing,
    squash,
    vector_norm_routing,
)

__all__ = [
    "dynamic_routing",
    "em_routing",
    "feature_kl",
    "heinsen_routing",
    "inverted_attention_routing",
    "margin_loss",
    "sinkhorn_divergence",
    "spread_loss",
    "squash",
    "transport_cost",
    "transport_plan",
    "vector_norm_routing",
]
