"""Routing algorithms, one file per paper."""

from torchcaps.routing.base import Routing, presence
from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMRouting, em_routing
from torchcaps.routing.equilibrium import Convergence, Equilibrium, check_equilibrium
from torchcaps.routing.heinsen import HeinsenRouting, heinsen_routing
from torchcaps.routing.inverted_attention import InvertedAttentionRouting, inverted_attention_routing
from torchcaps.routing.squash import squash
from torchcaps.routing.vector_norm import VectorNormRouting, vector_norm_routing

__all__ = [
    "Convergence",
    "DynamicRouting",
    "EMRouting",
    "Equilibrium",
    "HeinsenRouting",
    "InvertedAttentionRouting",
    "Routing",
    "VectorNormRouting",
    "check_equilibrium",
    "dynamic_routing",
    "em_routing",
    "heinsen_routing",
    "inverted_attention_routing",
    "presence",
    "squash",
    "vector_norm_routing",
]
