"""Inverted dot-product attention routing.

Tsai, Srivastava, Goh, Salakhutdinov: Capsules with Inverted Dot-Product Attention Routing (2020), Procedure 1.

The agreement is scaled by 1/sqrt(pose size), which the paper does not print and the authors' code does.
LayerNorm has a learned scale and shift per pose entry and is left out for poses of one entry, as there.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Dot, Votes, as_votes, at_least_float32
from torchcaps.routing.base import Routing, Start, check_start, missing_parameters, presence
from torchcaps.routing.em import em_inverse_temperature, em_score
from torchcaps.routing.loop import Gradient, Step, iterate

LEAST_VARIANCE = 1e-6  # as in EM routing


def inverted_attention_routing(
    votes: Tensor | Votes,
    iterations: int = 2,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    layer_norm: bool = True,
    eps: float = 1e-5,
    scale: float | None = None,
    scores: Tensor | None = None,
    gradient: Gradient = "unrolled",
    start: Tensor | None = None,
    beta_a: Tensor | None = None,
    beta_u: Tensor | None = None,
    return_coefficients: bool = True,
) -> Capsules:
    r"""Parents compete for the attention of children.

    With :math:`p_j = 0` at first, so that the first coefficients are uniform, in each iteration

    .. math::
        a_{ij} = \text{scale} \cdot p_j \cdot V_{ij}, \quad
        r_{ij} = \frac{\exp a_{ij}}{\sum_k \exp a_{ik}}, \quad
        p_j = \text{LayerNorm}\Big(\sum_i r_{ij} V_{ij}\Big)

    Args:
        votes: `(batch, children, parents, *pose)`.
        iterations: at least 1; with 1 the coefficients stay uniform, unless there is a `start`.
        weight, bias: of the LayerNorm, `(features,)`; None is one and zero.
        layer_norm: False leaves it out (the paper's ablation A).
        eps: of the LayerNorm.
        scale: of the agreement; None is 1/sqrt(features).
        scores: `(batch, children)` logits; a child counts as much as their sigmoid, at -inf not at all.
        gradient: "unrolled", or "last": through the last iteration only.
        start: poses of the parents before the first iteration, `(batch or 1, parents, features)`; None is zeros.
        beta_a, beta_u: `(parents,)`; with them the parents have scores, as in EM routing (the paper's ablation C):
            :math:`\text{inverse temperature} \cdot (\beta_{a,j} - \text{cost}_j)`, where the cost follows from mass and
            variance of the votes, weighted by :math:`r_{ij}`, for the parent.
        return_coefficients: return those of the last weighted sum, `(batch, children, parents)`.

    Reference:
        Tsai et al. 2020, Procedure 1, equations 2 to 4.
    """
    if (beta_a is None) != (beta_u is None):
        raise ValueError("beta_a and beta_u come together: with one of them alone there is no score")
    votes = as_votes(votes).gated(presence(scores))
    step = _step(votes, weight, bias, layer_norm, eps, scale, beta_a, beta_u)
    parents, agreement = iterate(step, iterations, gradient, _first_agreement(votes, start, scale))
    return votes.with_coefficients(parents, votes.coefficients(agreement)) if return_coefficients else parents


def _step(
    votes: Votes,
    weight: Tensor | None,
    bias: Tensor | None,
    layer_norm: bool,
    eps: float = 1e-5,
    scale: float | None = None,
    beta_a: Tensor | None = None,
    beta_u: Tensor | None = None,
) -> Step:
    def step(agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        score = None
        if beta_a is None or beta_u is None:
            p = votes.weighted_sum(agreement)  # lines 3 to 5
        else:
            m = votes.moments(agreement)
            p = m.mean * m.mass.unsqueeze(-1)
            variance = m.variance.clamp_min(LEAST_VARIANCE)
            score = em_score(variance, m.mass, beta_a, beta_u, em_inverse_temperature(t))
        features = p.shape[-1]
        if layer_norm and features > 1:
            p = F.layer_norm(p, (features,), _like(weight, p), _like(bias, p), eps)  # line 6
        return votes.capsules(p, score), _agreement(p, scale)

    return step


def _agreement(p: Tensor, scale: float | None) -> Dot:
    return Dot(p * (p.shape[-1] ** -0.5 if scale is None else scale))


def _first_agreement(votes: Votes, start: Tensor | None, scale: float | None = None) -> Dot | None:
    if start is None:
        return None
    shape = (votes.batch, votes.parents, math.prod(votes.pose))
    if start.dim() != 3 or any(n not in (1, m) for n, m in zip(start.shape, shape, strict=True)):
        raise ValueError(f"expected start of shape (batch or 1, parents, features) = {shape}, got {tuple(start.shape)}")
    return _agreement(at_least_float32(start).expand(shape), scale)


def _like(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(x.dtype)


class InvertedAttentionRouting(Routing):
    """Inverted dot-product attention routing (Tsai et al. 2020) as a plug-in for capsule layers.

    Args:
        iterations: at least 1.
        layer_norm: normalise the parents, with a learned scale and shift per pose entry. Of poses of two entries that
            leaves only which one is larger, and no gradient to learn it by: take larger ones, or False.
        activations: give parents a score as EM routing does, by which they count as children (the paper's ablation
            C); learns beta_a and beta_u, one each per parent, starting at zero.
        start: the parents' poses before the first iteration: "zero", "random" (normal, drawn anew at every call) or
            "learned" (the same for all samples, from zero on).
        gradient: "unrolled" or "last".

    See :func:`torchcaps.functional.inverted_attention_routing`.
    """

    def __init__(
        self,
        iterations: int = 2,
        layer_norm: bool = True,
        activations: bool = False,
        start: Start = "zero",
        gradient: Gradient = "unrolled",
    ):
        super().__init__(iterations, gradient)
        check_start(start)
        if start == "learned" and gradient == "last" and iterations > 1:
            raise ValueError("start='learned' learns nothing through the last iteration: use gradient='unrolled'")
        self.layer_norm, self.activations, self.start = layer_norm, activations, start
        # LayerNorm gives all parents the same length.
        self.gives_scores = self.measures_presence = activations
        for name in ("first_poses", "beta_a", "beta_u"):
            self.register_parameter(name, None)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def make_parameters(self, children: int, parents: int, features: int) -> None:
        if self.layer_norm and features > 1:
            self.weight = nn.Parameter(torch.empty(features))
            self.bias = nn.Parameter(torch.empty(features))
        if self.start == "learned":
            self.first_poses = nn.Parameter(torch.empty(1, parents, features))
        if self.activations:
            self.beta_a = nn.Parameter(torch.empty(parents))
            self.beta_u = nn.Parameter(torch.empty(parents))

    def reset_parameters(self) -> None:
        for parameter in (self.first_poses, self.beta_a, self.beta_u):
            if parameter is not None:
                nn.init.zeros_(parameter)
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def reset_weight(self, weight: Tensor, children: int) -> None:
        parents, d = weight.shape[-3:-1]
        nn.init.normal_(weight, std=(parents / (d * children)) ** 0.5)  # the authors' code

    def first_agreement(self, votes: Votes) -> Agreement | None:
        if self.start == "random":
            shape = (votes.batch, votes.parents, math.prod(votes.pose))
            dtype = torch.promote_types(votes.dtype, torch.float32)
            return _first_agreement(votes, torch.randn(shape, device=votes.device, dtype=dtype))
        return _first_agreement(votes, self.first_poses)

    def step(self, votes: Votes) -> Step:
        if self.activations and self.beta_a is None:
            raise missing_parameters(self)
        return _step(votes, self.weight, self.bias, self.layer_norm, beta_a=self.beta_a, beta_u=self.beta_u)

    def extra_repr(self) -> str:
        return (
            f"iterations={self.iterations}, layer_norm={self.layer_norm}, activations={self.activations}, "
            f"start={self.start!r}, gradient={self.gradient!r}"
        )
