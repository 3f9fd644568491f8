"""Self-routing.

Hahn, Pyeon, Kim: Self-Routing Capsule Networks (2019).

There are no iterations and no agreement: each child chooses its parents from its own pose.
"""

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Votes, nonzero
from torchcaps.routing.base import LayerShape, Routing


class SelfRouting(Routing):
    r"""Compute each child's coefficients from its own pose, by a learned linear map and a softmax over parents.

    With the poses :math:`x_i` and the gates :math:`a_i` of the children,

    .. math::
        c_{ij} = \text{softmax}_j (x_i \cdot w_{ij} + \beta_{ij}), \quad
        a_j = \frac{\sum_i a_i c_{ij}}{\sum_i a_i}, \quad
        v_j = \frac{\sum_i a_i c_{ij} V_{ij}}{\sum_i a_i c_{ij}}

    The :math:`a_j` sum to one over the parents; their logits are the parents' scores.

    The learned parameters are route_weight, `(groups, parents, rows, in_features)`, and route_bias, `(groups,
    parents)`, initially zero as in the authors' code. Children that share their vote weights share these too. The
    algorithm needs the poses of the children, so it does not run on stored votes.

    Reference:
        Hahn et al. 2019.
    """

    averages = True
    gives_scores = True
    iterative = False

    def __init__(self) -> None:
        super().__init__()

    def learned(self, shape: LayerShape) -> dict[str, Tensor]:
        return {
            "route_weight": torch.zeros(shape.groups, shape.parents, shape.rows, shape.in_features),
            "route_bias": torch.zeros(shape.groups, shape.parents),
        }

    def prepare(self, votes: Votes) -> Votes:
        return votes.with_logits(self.route_weight, self.route_bias)

    def step(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement | None]:
        m = votes.moments(agreement)
        presence = m.mass / nonzero(m.mass.sum(-1, keepdim=True))
        return votes.capsules(m.mean, torch.logit(presence, eps=1e-6)), agreement
