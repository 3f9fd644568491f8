"""Self-routing.

Hahn, Pyeon, Kim: Self-Routing Capsule Networks (2019).

There are no iterations and no agreement: each child chooses its parents from its own pose.
"""

import torch
from torch import nn

from torchcaps.capsules import Capsules
from torchcaps.ops import PoseLogits, Votes, WeightedVotes, nonzero
from torchcaps.ops.triton import parents
from torchcaps.routing.base import Routing
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import checked


class SelfRouting(Routing):
    r"""Compute each child's coefficients from its own pose, by a learned linear map and a softmax over parents.

    With the poses :math:`x_i` and the gates :math:`a_i` of the children,

    .. math::
        c_{ij} = \text{softmax}_j (x_i \cdot w_{ij} + \beta_{ij}), \quad
        a_j = \frac{\sum_i a_i c_{ij}}{\sum_i a_i}, \quad
        v_j = \frac{\sum_i a_i c_{ij} V_{ij}}{\sum_i a_i c_{ij}}

    The :math:`a_j` sum to one over the parents; their logits are the parents' scores, so that :math:`\log a_j` is the
    logsigmoid of a score.

    The learned parameters are route_weight, `(groups, parents, rows, in_features)`, and route_bias, `(groups,
    parents)`, initially zero as in the authors' code. Children that share their vote weights share these too. The
    algorithm needs the poses of the children, so it does not run on stored votes.

    Reference:
        Hahn et al. 2019.
    """

    averages = True
    gives_scores = True
    iterative = False

    @checked
    def __init__(self) -> None:
        super().__init__()

    def build(self, shape: LayerShape) -> None:
        if shape.any_parents:
            raise ValueError("SelfRouting needs a number of parents, whose weights differ: give the layer out_capsules")
        self.route_weight = nn.Parameter(torch.zeros(shape.groups, shape.parents, shape.rows, shape.in_features))
        self.route_bias = nn.Parameter(torch.zeros(shape.groups, shape.parents))

    def first_state(self, votes: Votes) -> PoseLogits:
        return PoseLogits(self.route_weight, self.route_bias)

    def step(self, votes: WeightedVotes, logits: PoseLogits, t: int) -> tuple[Capsules, PoseLogits]:
        m = votes.moments()
        if votes.has_kernels and parents.takes(votes.parents, m.mass):
            return votes.capsules(m.mean, parents.share_logits(m.mass)), logits
        share = m.mass / nonzero(m.mass.sum(-1, keepdim=True))
        # The logit of a share is log(share) - log(1 - share). At most one share is above one half; for this one the sum
        # of the others keeps all digits of 1 - share.
        total = share.sum(-1, keepdim=True)
        most = share > total / 2
        others = torch.where(most, torch.where(most, 0, share).sum(-1, keepdim=True), total - share)
        others = torch.where(share + others > 0, others, 1)  # without any child no parent is present
        return votes.capsules(m.mean, share.clamp_min(1e-30).log() - others.clamp_min(1e-30).log()), logits
