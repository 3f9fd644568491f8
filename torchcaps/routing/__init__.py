"""Routing algorithms, one file per paper."""

from torchcaps.routing.base import Routing
from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMRouting, em_routing
from torchcaps.routing.heinsen import HeinsenRouting, heinsen_routing
from torchcaps.routing.inverted_attention import InvertedAttentionRouting, inverted_attention_routing
from torchcaps.routing.squash import squash
from torchcaps.routing.vector_norm import VectorNormRouting, vector_norm_routing

__all__ = [
    "DynamicRouting",
    "EMRouting",
    "HeinsenRouting",
    "InvertedAttentionRouting",
    "Routing",
    "VectorNormRouting",
    "dynamic_routing",
    "em_routing",
    "heinsen_routing",
    "inverted_attention_routing",
    "squash",
    "vector_norm_routing",
]
