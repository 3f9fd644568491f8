"""Random routing: a control, which routes by chance.

Every algorithm should be compared with it (Paik, Kwak, Kim: Capsule Networks Need an Improved Routing Algorithm, 2019).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.ops import Dot, Votes
from torchcaps.routing.shape import LayerShape
from torchcaps.routing.squash import squash
from torchcaps.routing.uniform_routing import UniformRouting
from torchcaps.utils.arguments import checked


class RandomRouting(UniformRouting):
    r"""Draw the coefficients at random, whatever the votes are:

    .. math::
        b_{ij} \sim N(0, 1), \quad c_{ij} = \frac{\exp b_{ij}}{\sum_k \exp b_{ik}}, \quad
        v_j = \text{activation} \Big( \sum_i a_i c_{ij} V_{ij} \Big)

    with the gates :math:`a_i` of the children. There is one logit for each set of vote weights and parent, the same for
    all samples.

    Args:
        fixed: draw the logits once for each layer, as a buffer `logits`, `(groups, parents)`, which the state dict
            keeps and `reset_parameters` draws anew; otherwise draw them at every call. A layer for any number of
            parents (`out_capsules=None`) needs `fixed=False`.
        activation: function of the sums, see :class:`torchcaps.UniformRouting`.

    Reference:
        Paik et al. 2019.
    """

    @checked
    def __init__(self, fixed: bool = True, activation: Callable[[Tensor], Tensor] | None = squash):
        super().__init__(activation)
        self.fixed = fixed
        self.gain /= 1.6  # unequal coefficients make the sums longer

    def build(self, shape: LayerShape) -> None:
        if self.fixed and shape.any_parents:
            raise ValueError("RandomRouting for any number of parents (out_capsules=None) needs fixed=False")
        if self.fixed:
            self.logits = nn.Buffer(torch.randn(shape.groups, shape.parents))

    def first_state(self, votes: Votes) -> Dot:
        zeros = votes.parents_like()
        return Dot(zeros, self.logits.to(zeros.dtype) if self.fixed else random_logits(self.shape, zeros))


def random_logits(shape: LayerShape | None, parents: Tensor) -> Tensor:
    """Draw a logit for each set of vote weights and each of these parents, `(groups, parents)`."""
    groups = 1 if shape is None else shape.groups
    return torch.randn(groups, parents.shape[1], device=parents.device, dtype=parents.dtype)
