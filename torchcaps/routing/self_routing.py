"""Self-routing.

Hahn, Pyeon, Kim: Self-Routing Capsule Networks (2019).

There are no iterations and no agreement: each child decides by its own pose where it belongs.
"""

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Votes, nonzero
from torchcaps.routing.base import LayerShape, Routing


class SelfRouting(Routing):
    r"""A child's coefficients are a learned map of its own pose.

    With a child's pose :math:`x_i` and presence :math:`a_i`,

    .. math::
        c_{ij} = \text{softmax}_j (x_i \cdot w_{ij} + \beta_{ij}), \quad
        a_j = \frac{\sum_i a_i c_{ij}}{\sum_i a_i}, \quad
        v_j = \frac{\sum_i a_i c_{ij} V_{ij}}{\sum_i a_i c_{ij}}

    Parents have scores, the logits of :math:`a_j`, which sum to one over the parents. Learns route_weight, `(groups,
    parents, rows, in_features)`, and route_bias, `(groups, parents)`, from zero on as the authors' code: children that
    share their vote weights share these too. It needs the poses of the children, which stored votes do not know.

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
