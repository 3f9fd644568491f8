"""Routing algorithms, losses and optimal transport as functions.

A routing function runs a routing module on stored votes. The equations are in the modules; capsule layers run them
without storing the votes. All routing functions share these arguments:

- `votes`: `(batch, children, parents, *pose)`.
- `scores`: scores of the children, logits `(batch, children)`; or None if all children are present.
- by name: the learned parameters of the module, as tensors.
- `return_coefficients`: whether the returned Capsules have the coefficients that the parents follow from.
- by name: the options of the module.
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps.arguments import FloatTensor, NotNegative, checked
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


@checked
def dynamic_routing(
    votes: FloatTensor | Votes,
    scores: Tensor | None = None,
    *,
    bias: FloatTensor | None = None,
    first_logits: FloatTensor | None = None,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.DynamicRouting` as a function.

    Args:
        votes, scores, return_coefficients: see :mod:`torchcaps.functional`.
        bias: learned bias of the parents before the squash, `(parents, *pose)`, or `(1, *pose)` for all parents.
        first_logits: logits b of the first iteration, `(groups, parents or 1)`, the same for all samples. Consecutive
            children share a row in groups of equal size.
        options: options of the module.
    """
    votes = as_votes(votes)
    if bias is not None:
        _check("bias", bias, ("parents or 1", "*pose"), (votes.parents, *votes.pose), free=(0,))
        bias = bias.flatten(1)
    _imply(options, "learn_bias", bias is not None, "bias")
    if first_logits is not None:
        _check("first_logits", first_logits, *_rows(votes))
        _imply(options, "start", "learned", "first_logits")
    routing = DynamicRouting(**options)
    return _run(routing, votes, scores, return_coefficients, bias=bias, first_logits=first_logits)


@checked
def vector_norm_routing(
    votes: FloatTensor | Votes,
    scores: Tensor | None = None,
    *,
    sharpness: NotNegative | FloatTensor = 1.0,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.VectorNormRouting` as a function.

    Args:
        votes, scores, return_coefficients: see :mod:`torchcaps.functional`.
        sharpness: the paper's lambda, a number or a learned tensor.
        options: options of the module.
    """
    if not isinstance(sharpness, Tensor):
        return _run(VectorNormRouting(sharpness=sharpness, **options), votes, scores, return_coefficients)
    if sharpness.shape not in ((), (1,)):
        raise ValueError(f"expected one number as sharpness, got {tuple(sharpness.shape)}")
    return _run(VectorNormRouting(**options), votes, scores, return_coefficients, sharpness=sharpness)


@checked
def inverted_attention_routing(
    votes: FloatTensor | Votes,
    scores: Tensor | None = None,
    *,
    weight: FloatTensor | None = None,
    bias: FloatTensor | None = None,
    first_poses: FloatTensor | None = None,
    beta_a: FloatTensor | None = None,
    beta_u: FloatTensor | None = None,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.InvertedAttentionRouting` as a function.

    Args:
        votes, scores, return_coefficients: see :mod:`torchcaps.functional`.
        weight, bias: weight and bias of the LayerNorm, `(features,)`; None stands for ones and zeros.
        first_poses: poses of the parents before the first iteration, `(batch or 1, parents, features)`.
        beta_a, beta_u: learned betas of the parents' scores, `(parents,)`, or one number for all; None: no scores.
        options: options of the module.
    """
    votes = as_votes(votes)
    zeros = votes.parents_like()
    if (beta_a is None) != (beta_u is None):
        raise ValueError("beta_a and beta_u must be given together, or neither of them, got only one")
    if beta_a is not None and beta_u is not None:
        _check_betas(votes, beta_a=beta_a, beta_u=beta_u)
    _imply(options, "activations", beta_a is not None, "beta_a and beta_u")
    if first_poses is not None:
        _check("first_poses", first_poses, ("batch or 1", "parents", "features"), tuple(zeros.shape), free=(0, 1, 2))
        _imply(options, "start", "learned", "first_poses")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            _check(name, value, ("features",), tuple(zeros.shape[2:]))
            _imply(options, "layer_norm", True, name)
    values = {
        "weight": zeros.new_ones(zeros.shape[2]) if weight is None else weight,
        "bias": zeros.new_zeros(zeros.shape[2]) if bias is None else bias,
        "first_poses": first_poses,
        "beta_a": beta_a,
        "beta_u": beta_u,
    }
    return _run(InvertedAttentionRouting(**options), votes, scores, return_coefficients, **values)


@checked
def em_routing(
    votes: FloatTensor | Votes,
    scores: Tensor | None = None,
    *,
    beta_a: FloatTensor,
    beta_u: FloatTensor,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.EMRouting` as a function.

    Args:
        votes, scores, return_coefficients: see :mod:`torchcaps.functional`.
        beta_a, beta_u: the paper's betas, `(parents,)`, or one number for all.
        options: options of the module.
    """
    votes = as_votes(votes)
    _check_betas(votes, beta_a=beta_a, beta_u=beta_u)
    return _run(EMRouting(**options), votes, scores, return_coefficients, beta_a=beta_a, beta_u=beta_u)


@checked
def heinsen_routing(
    votes: FloatTensor | Votes,
    scores: Tensor | None = None,
    *,
    beta_use: FloatTensor,
    beta_ignore: FloatTensor | None = None,
    return_coefficients: bool = True,
    **options: Any,
) -> Capsules:
    """:class:`torchcaps.HeinsenRouting` as a function.

    Args:
        votes, scores, return_coefficients: see :mod:`torchcaps.functional`.
        beta_use, beta_ignore: the paper's betas, `(groups, parents or 1)`. Consecutive children share a row in groups
            of equal size. If beta_ignore is None, beta_use serves for both.
        options: options of the module.
    """
    votes = as_votes(votes)
    for name, beta in (("beta_use", beta_use), ("beta_ignore", beta_ignore)):
        if beta is not None:
            _check(name, beta, *_rows(votes))
    if beta_ignore is not None and beta_ignore.shape[0] not in (1, beta_use.shape[0]) and beta_use.shape[0] != 1:
        groups = f"{beta_use.shape[0]} and {beta_ignore.shape[0]}"
        raise ValueError(f"beta_use and beta_ignore need the same number of groups, got {groups}")
    _imply(options, "single_beta", beta_ignore is None, "beta_ignore")
    routing = HeinsenRouting(**options)
    return _run(routing, votes, scores, return_coefficients, beta_use=beta_use, beta_ignore=beta_ignore)


def _run(
    routing: Routing, votes: Tensor | Votes, scores: Tensor | None, return_coefficients: bool, **values: Tensor | None
) -> Capsules:
    for name, value in values.items():
        if value is not None and value.device != votes.device:
            raise ValueError(f"{name} is on {value.device} and the votes are on {votes.device}: move one of them")
        if value is not None and torch.promote_types(value.dtype, votes.dtype) not in (votes.dtype, torch.float32):
            raise TypeError(f"{name} is {value.dtype} and the votes are {votes.dtype}: convert one of them")
    return routing.with_values(**values)(votes, scores, return_coefficients)


def _imply(options: dict[str, Any], name: str, value: Any, cause: str) -> None:
    """Set the option that follows from whether a learned value is given, unless the caller says otherwise."""
    if options.setdefault(name, value) != value:
        given = "is given" if value else "is not given"
        raise ValueError(f"{name}={options[name]!r} contradicts {cause}, which {given}: leave out one of them")


def _check_betas(votes: Votes, **betas: Tensor) -> None:
    for name, beta in betas.items():
        if beta.shape not in ((), (1,)):
            _check(name, beta, ("parents",), (votes.parents,))


def _rows(votes: Votes) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], bool]:
    """Return the arguments of `_check` for rows that groups of children share."""
    return ("groups of children", "parents or 1"), (votes.children, votes.parents), (1,), True


def _check(
    name: str,
    x: Tensor,
    sizes: tuple[str, ...],
    expected: tuple[int, ...],
    free: tuple[int, ...] = (),
    groups: bool = False,
) -> None:
    """Check the sizes of x. Those in `free` may also be 1; with `groups` the first may divide the expected one."""
    fits = x.dim() == len(expected) and all(
        n == m or (i in free and n == 1) or (groups and i == 0 and n > 0 and m % n == 0)
        for i, (n, m) in enumerate(zip(x.shape, expected, strict=True))
    )
    if not fits:
        raise ValueError(f"expected {name} of shape ({', '.join(sizes)}) = {expected}, got {tuple(x.shape)}")
