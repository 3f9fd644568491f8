"""Routing algorithms, a file for each, and what they share.

    base.py          the loop, and what an algorithm defines
    parameters.py    a layer's copy of an algorithm, and values given in place of learned ones
    shape.py         the shape of a layer, and its first vote weights
    gaussian.py, squash.py   formulas that several algorithms have

Agreements and votes are in `torchcaps.ops`.
"""

from torchcaps.routing.base import Gradient, Init, Iteration, Routing, Start, list_routings
from torchcaps.routing.controls import RandomRouting, UniformRouting
from torchcaps.routing.dynamic import DynamicRouting
from torchcaps.routing.efficient import EfficientRouting, exponential_squash
from torchcaps.routing.em import EMRouting
from torchcaps.routing.heinsen import HeinsenRouting
from torchcaps.routing.heinsen_vector import HeinsenVectorRouting
from torchcaps.routing.inverted_attention import InvertedAttentionRouting
from torchcaps.routing.self_routing import SelfRouting
from torchcaps.routing.shape import LayerShape
from torchcaps.routing.slot_attention import SlotAttention
from torchcaps.routing.squash import squash
from torchcaps.routing.variational_bayes import VBRouting
from torchcaps.routing.vector_norm import VectorNormRouting

__all__ = [
    "DynamicRouting",
    "EMRouting",
    "EfficientRouting",
    "Gradient",
    "HeinsenRouting",
    "HeinsenVectorRouting",
    "Init",
    "InvertedAttentionRouting",
    "Iteration",
    "LayerShape",
    "RandomRouting",
    "Routing",
    "SelfRouting",
    "SlotAttention",
    "Start",
    "UniformRouting",
    "VBRouting",
    "VectorNormRouting",
    "exponential_squash",
    "list_routings",
    "squash",
]
