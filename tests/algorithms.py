"""The six algorithms of the design, ready to run in tests, as `route(votes, scores, ...)`."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import torchcaps
import torchcaps.functional as F
from torchcaps import Capsules, Routing


def loss_of(results: Iterable[Tensor]) -> Tensor:
    """In which every entry counts, with a weight of its own."""
    return sum(
        (torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x) * (x + x.square())).sum() for x in results
    )


def ones(votes, *shape: int) -> Tensor:
    reference = votes if isinstance(votes, Tensor) else votes.poses
    return torch.ones(shape, dtype=reference.dtype if reference.dtype.itemsize > 2 else torch.float32)


def dynamic(votes, scores=None, **kw) -> Capsules:
    return F.dynamic_routing(votes, scores=scores, **kw)


def dynamic_over_children(votes, scores=None, **kw) -> Capsules:
    return F.dynamic_routing(votes, scores=scores, softmax="children", **kw)


def vector_norm(votes, scores=None, **kw) -> Capsules:
    return F.vector_norm_routing(votes, scores=scores, **kw)


def inverted_attention(votes, scores=None, **kw) -> Capsules:
    return F.inverted_attention_routing(votes, scores=scores, **kw)


def em(votes, scores=None, **kw) -> Capsules:
    activations = None if scores is None else scores.sigmoid()
    return F.em_routing(votes, activations, 0.5 * ones(votes), 0.2 * ones(votes), inverse_temperature=0.5, **kw)


def heinsen(votes, scores=None, **kw) -> Capsules:
    return F.heinsen_routing(votes, scores, 0.3 * ones(votes, 1, 1), -0.2 * ones(votes, 1, 1), **kw)


def heinsen_kmeans(votes, scores=None, **kw) -> Capsules:
    return F.heinsen_routing(votes, scores, 0.3 * ones(votes, 1, 1), None, model="kmeans", **kw)


ROUTES: dict[str, Callable[..., Capsules]] = {
    f.__name__: f
    for f in (dynamic, dynamic_over_children, vector_norm, inverted_attention, em, heinsen, heinsen_kmeans)
}
OVER_CHILDREN = ("dynamic_over_children", "vector_norm")

ROUTINGS: dict[str, Callable[..., Routing]] = {
    "dynamic": torchcaps.DynamicRouting,
    "dynamic_over_children": lambda **kw: torchcaps.DynamicRouting(softmax="children", bias=True, **kw),
    "dynamic_leaky": lambda **kw: torchcaps.DynamicRouting(leaky=True, **kw),
    "vector_norm": torchcaps.VectorNormRouting,
    "inverted_attention": torchcaps.InvertedAttentionRouting,
    "inverted_attention_c": lambda **kw: torchcaps.InvertedAttentionRouting(activations=True, **kw),
    "em": torchcaps.EMRouting,
    "heinsen": torchcaps.HeinsenRouting,
    "heinsen_kmeans": lambda **kw: torchcaps.HeinsenRouting(model="kmeans", single_beta=True, **kw),
}
