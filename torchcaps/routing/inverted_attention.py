"""Inverted dot-product attention routing.

Tsai, Srivastava, Goh, Salakhutdinov: Capsules with Inverted Dot-Product Attention Routing (2020), Procedure 1.

Two points follow the authors' code: the agreement is scaled by 1/sqrt(pose size), which the paper does not print;
LayerNorm has a learned scale and shift per pose entry, and is left out for poses of one entry.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Dot, Votes, WeightedVotes
from torchcaps.routing.base import Gradient, Init, Routing, Start
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import Count, checked


class InvertedAttentionRouting(Routing):
    r"""Route by attention in which the parents compete for each child.

    The parents start at :math:`p_j = 0`, which makes the first coefficients uniform, or as `start` says. With the gates
    :math:`g_i` of the children and poses of D entries (all of a matrix), each iteration computes

    .. math::
        a_{ij} = \frac{p_j \cdot V_{ij}}{\sqrt{D}}, \quad
        r_{ij} = \frac{\exp a_{ij}}{\sum_k \exp a_{ik}}, \quad
        p_j = \text{LayerNorm}\Big(\sum_i g_i r_{ij} V_{ij}\Big)

    Args:
        iterations: number of iterations, at least 1; with 1 and start="zero" the coefficients are uniform.
        layer_norm: normalize the parents, with a learned scale and shift per pose entry (False is the paper's ablation
            A). LayerNorm of a pose of two entries keeps only which entry is larger, and gives no gradient: use larger
            poses or False. Poses of one entry are never normalized.
        activations: give parents a score as EM routing does, which gates them as children of the next layer (the
            paper's ablation C): :math:`\lambda_t (\beta_{a,j} - \text{cost}_j)` with the cost and the
            :math:`\lambda_t` of :class:`EMRouting` and its defaults, the weights :math:`g_i r_{ij}`, and variances of
            at least 1e-6. The learned parameters are beta_a and beta_u, `(parents,)` each, initially zero.
        start: poses of the parents before the first iteration: "zero", "random" (normal, drawn anew at every call) or
            "learned" (the same for all samples, initially zero).
        gradient, init: see :class:`torchcaps.Routing`; init="paper" draws the vote weights as the authors' code does,
            normal with variance parents / (in_features children).

    Reference:
        Tsai et al. 2020, Procedure 1, equations 2 to 4.
    """

    @checked
    def __init__(
        self,
        iterations: Count = 2,
        layer_norm: bool = True,
        activations: bool = False,
        start: Start = "zero",
        gradient: Gradient = "unrolled",
        init: Init = "fan_in",
    ):
        super().__init__(iterations, gradient, init)
        self.layer_norm, self.activations, self.start = layer_norm, activations, start
        self.max_difference = 1.0 if layer_norm else math.inf  # a LayerNorm sets the lengths of the parents

    @property
    def gives_scores(self) -> bool:  # type: ignore[override]
        return self.activations

    @property
    def measures_presence(self) -> bool:  # type: ignore[override]
        return self.activations  # LayerNorm gives all parents the same length

    def build(self, shape: LayerShape) -> None:
        if self.layer_norm and shape.features > 1:
            self.weight = nn.Parameter(torch.ones(shape.features))
            self.bias = nn.Parameter(torch.zeros(shape.features))
        if self.start == "learned":
            self.first_poses = nn.Parameter(torch.zeros(1, shape.parents, shape.features))
        if self.activations:
            self.beta_a, self.beta_u = (nn.Parameter(torch.zeros(shape.parents)) for _ in range(2))

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        nn.init.normal_(weight, std=(shape.parents / (shape.in_features * (shape.children or shape.groups))) ** 0.5)

    def first_state(self, votes: Votes) -> Tensor | None:
        if self.start == "zero":
            return None
        zeros = votes.parents_like()
        return torch.randn_like(zeros) if self.start == "random" else self.first_poses.to(zeros.dtype).expand_as(zeros)

    def agreement(self, p: Tensor) -> Dot:
        return Dot(p * p.shape[-1] ** -0.5)  # line 3

    def step(self, votes: WeightedVotes, p: Tensor | None, t: int) -> tuple[Capsules, Tensor]:
        score = None
        if self.activations:
            m = votes.moments()
            p, log_sigma = m.mean * m.mass.unsqueeze(-1), 0.5 * m.variance.clamp_min(1e-6).log()
            cost = (self.beta_u.unsqueeze(-1) + log_sigma).sum(-1) * m.mass
            score = 0.01 * (1 - 0.95 ** (t + 1)) * (self.beta_a - cost)
        else:
            p = votes.weighted_sum()  # lines 4, 5
        if self.layer_norm and p.shape[-1] > 1:
            weight, bias = (x.to(p.dtype).expand(p.shape[-1:]) for x in (self.weight, self.bias))
            p = F.layer_norm(p, p.shape[-1:], weight, bias)  # line 6
        return votes.capsules(p, score), p
