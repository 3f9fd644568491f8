"""Routing algorithms, losses and optimal transport as functions.

All routing functions take `votes`, `(batch, children, parents, *pose)`, then the children's `scores`, `(batch,
children)` logits or None, then what the algorithm learns, as tensors, by name, and then the options of its module, by
name. They return Capsules with the coefficients that the parents follow from, unless `return_coefficients=False`. The
modules have the formulas; a layer runs them on votes that it need not store.
"""

from typing import Any

from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.nn.losses import margin_loss, spread_loss
from torchcaps.nn.transport import feature_kl, sinkhorn_divergence, transport_cost, transport_plan
from torchcaps.ops import Votes, as_votes
from torchcaps.routing import (
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    Routing,
    VectorNormRouting,
    squash,
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


def dynamic_routing(
    votes: Tensor | Votes,
    scores: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    first_logits: Tensor | None = None,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.DynamicRouting` as a function.

    Args:
        votes, scores, return_coefficients: see above.
        bias: `(parents, *pose)`, or `(1, *pose)` for all parents.
        first_logits: the first b, `(groups, parents or 1)`, the same for all samples, where children in groups of equal
            size share a row.
        options: of the module.
    """
    votes = as_votes(votes)
    if bias is not None:
        _check("bias", bias, ("parents or 1", "*pose"), (votes.parents, *votes.pose), free=(0,))
        bias, options["learn_bias"] = bias.flatten(1), True
    if first_logits is not None:
        _check("first_logits", first_logits, *_rows(votes))
        options["start"] = "learned"
    routing = DynamicRouting(**options)
    return _run(routing, votes, scores, return_coefficients, bias=bias, first_logits=first_logits)


def vector_norm_routing(
    votes: Tensor | Votes,
    scores: Tensor | None = None,
    *,
    sharpness: float | Tensor = 1.0,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.VectorNormRouting` as a function.

    Args:
        votes, scores, return_coefficients: see above.
        sharpness: the paper's lambda, a number or a tensor.
        options: of the module.
    """
    if not isinstance(sharpness, Tensor):
        return _run(VectorNormRouting(sharpness=sharpness, **options), votes, scores, return_coefficients)
    return _run(VectorNormRouting(**options), votes, scores, return_coefficients, sharpness=sharpness)


def inverted_attention_routing(
    votes: Tensor | Votes,
    scores: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    first_poses: Tensor | None = None,
    beta_a: Tensor | None = None,
    beta_u: Tensor | None = None,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.InvertedAttentionRouting` as a function.

    Args:
        votes, scores, return_coefficients: see above.
        weight, bias: of the LayerNorm, `(features,)`; None is one and zero.
        first_poses: of the parents before the first iteration, `(batch or 1, parents, features)`.
        beta_a, beta_u: `(parents,)`, or one number for all; with them the parents have scores.
        options: of the module.
    """
    votes = as_votes(votes)
    zeros = votes.parents_like()
    if (beta_a is None) != (beta_u is None):
        raise ValueError("beta_a and beta_u come together: one of them alone gives no score")
    if beta_a is not None and beta_u is not None:
        _check_betas(votes, beta_a=beta_a, beta_u=beta_u)
        options["activations"] = True
    if first_poses is not None:
        _check("first_poses", first_poses, ("batch or 1", "parents", "features"), tuple(zeros.shape), free=(0, 1, 2))
        options["start"] = "learned"
    values = {
        "weight": zeros.new_ones(zeros.shape[2]) if weight is None else weight,
        "bias": zeros.new_zeros(zeros.shape[2]) if bias is None else bias,
        "first_poses": first_poses,
        "beta_a": beta_a,
        "beta_u": beta_u,
    }
    return _run(InvertedAttentionRouting(**options), votes, scores, return_coefficients, **values)


def em_routing(
    votes: Tensor | Votes,
    scores: Tensor | None = None,
    *,
    beta_a: Tensor,
    beta_u: Tensor,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.EMRouting` as a function.

    Args:
        votes, scores, return_coefficients: see above.
        beta_a, beta_u: `(parents,)`, or one number for all.
        options: of the module.
    """
    votes = as_votes(votes)
    _check_betas(votes, beta_a=beta_a, beta_u=beta_u)
    return _run(EMRouting(**options), votes, scores, return_coefficients, beta_a=beta_a, beta_u=beta_u)


def heinsen_routing(
    votes: Tensor | Votes,
    scores: Tensor | None = None,
    *,
    beta_use: Tensor,
    beta_ignore: Tensor | None = None,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.HeinsenRouting` as a function.

    Args:
        votes, scores, return_coefficients: see above.
        beta_use, beta_ignore: `(groups, parents or 1)`, where children in groups of equal size share a row; without
            beta_ignore one beta serves for both.
        options: of the module.
    """
    votes = as_votes(votes)
    for name, beta in (("beta_use", beta_use), ("beta_ignore", beta_ignore)):
        if beta is not None:
            _check(name, beta, *_rows(votes))
    routing = HeinsenRouting(single_beta=beta_ignore is None, **options)
    return _run(routing, votes, scores, return_coefficients, beta_use=beta_use, beta_ignore=beta_ignore)


def _run(
    routing: Routing, votes: Tensor | Votes, scores: Tensor | None, return_coefficients: bool, **values: Tensor | None
) -> Capsules:
    return routing.with_values(**values)(votes, scores, return_coefficients)


def _check_betas(votes: Votes, **betas: Tensor) -> None:
    for name, beta in betas.items():
        if beta.numel() != 1:
            _check(name, beta, ("parents",), (votes.parents,))


def _rows(votes: Votes) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], bool]:
    """What `_check` is to expect of rows that children in groups share."""
    return ("groups of children", "parents or 1"), (votes.children, votes.parents), (1,), True


def _check(
    name: str,
    x: Tensor,
    sizes: tuple[str, ...],
    expected: tuple[int, ...],
    free: tuple[int, ...] = (),
    groups: bool = False,
) -> None:
    """The sizes of x are the expected ones, or 1 where they are free; the first may be that of groups of children."""
    fits = x.dim() == len(expected) and all(
        n == m or (i in free and n == 1) or (groups and i == 0 and n > 0 and m % n == 0)
        for i, (n, m) in enumerate(zip(x.shape, expected, strict=True))
    )
    if not fits:
        raise ValueError(f"expected {name} of shape ({', '.join(sizes)}) = {expected}, got {tuple(x.shape)}")
