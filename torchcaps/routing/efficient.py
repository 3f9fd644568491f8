"""Efficient routing: the self-attention routing of Efficient-CapsNet.

Mazzia, Salvetti, Chiaberge: Efficient-CapsNet: Capsule Network with Self-Attention Routing (2021).

Two points follow the authors' code: the coefficients are a softmax over parents, and the learned log priors of the
paper are added after the softmax, as a bias of the coefficients.
"""

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Dot, Votes, WeightedVotes, at_least_float32, nonzero
from torchcaps.routing.base import Init, Routing
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import FloatTensor, checked


class EfficientRouting(Routing):
    r"""Compute each coefficient from the agreement of a vote with the sum of all votes, in one pass.

    With the gates :math:`a_i` of the children and poses of D entries (all of a matrix),

    .. math::
        c_{ij} = \text{softmax}_j \Big( \frac{V_{ij} \cdot \sum_k a_k V_{kj}}{\sqrt{D}} \Big), \quad
        s_j = \sum_i a_i (c_{ij} + b_{ij}) V_{ij}, \quad
        v_j = (1 - e^{-|s_j|}) \frac{s_j}{|s_j|}

    A parent's length, in [0, 1), says how present it is. The coefficients that a layer returns are the :math:`c_{ij}`,
    without the learned parameter coefficient_bias, b, `(groups, parents)`, initially zero. Children that share their
    vote weights share it too.

    Args:
        init: initial vote weights, see :class:`torchcaps.Routing`; "paper" draws them as the authors' code does,
            normal with variance 2 / (in_features parents children), cut at twice the standard deviation.

    Reference:
        Mazzia et al. 2021, section "Self-attention routing".
    """

    iterative = False
    gain = 1.4
    max_difference = 0.1
    shared_variance = 0.98  # otherwise the first coefficients would be hard: each vote agrees with itself

    @checked
    def __init__(self, init: Init = "fan_in"):
        super().__init__(init=init)

    def build(self, shape: LayerShape) -> None:
        self.coefficient_bias = nn.Parameter(torch.zeros(shape.groups, shape.parents))

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        children = shape.children or shape.groups
        std = (2 / (shape.in_features * shape.parents * children)) ** 0.5 / 0.8796  # which the cut makes smaller
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

    def first_state(self, votes: Votes) -> Tensor:
        return votes.vote_sum()

    def agreement(self, total: Tensor) -> Dot:
        return Dot(total * total.shape[-1] ** -0.5)

    def step(self, votes: WeightedVotes, total: Tensor, t: int) -> tuple[Capsules, Tensor]:
        s = votes.weighted_sum() + votes.constant_sum(self.coefficient_bias)
        return votes.capsules(exponential_squash(s)), total


@checked
def exponential_squash(s: FloatTensor) -> Tensor:
    r"""Shrink vectors along the last dimension to lengths below one: :math:`(1 - e^{-|s|}) \, s / |s|`.

    Short vectors keep their lengths; those of :func:`torchcaps.squash` become quadratically shorter. Zero vectors stay
    zero and have finite gradients.

    Reference:
        Mazzia et al. 2021, where it replaces the squash of Sabour et al.
    """
    x = at_least_float32(s)
    square = x.square().sum(-1, keepdim=True)
    length = nonzero(square).sqrt()
    return torch.where(square > 1e-30, x * (-torch.expm1(-length) / length), x).to(s.dtype)
