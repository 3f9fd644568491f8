"""Uniform routing: a control, which does not route.

Every algorithm should be compared with it (Paik, Kwak, Kim: Capsule Networks Need an Improved Routing Algorithm, 2019).
`Routing.uniform` leaves out the coefficients of another algorithm after training; this one is trained without any.
"""

from collections.abc import Callable

from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops import Dot, WeightedVotes
from torchcaps.routing.base import Routing
from torchcaps.routing.squash import squash
from torchcaps.utils.arguments import apply, checked


class UniformRouting(Routing):
    r"""Give each child's vote to all parents alike:

    .. math:: c_{ij} = \frac{1}{\text{parents}}, \quad v_j = \text{activation} \Big( \sum_i a_i c_{ij} V_{ij} \Big)

    with the gates :math:`a_i` of the children. A layer of it is a linear map, followed by the activation.

    Args:
        activation: function of the sums, flattened to `(batch, parents, features)`; None for the identity, with which
            nothing says how present a parent is. With :func:`torchcaps.squash` the result is the first iteration of
            :class:`torchcaps.DynamicRouting`.

    Reference:
        Paik et al. 2019; Sabour et al. 2017, Procedure 1 with one iteration.
    """

    iterative = False

    @checked
    def __init__(self, activation: Callable[[Tensor], Tensor] | None = squash):
        super().__init__()
        self.activation = activation
        self.measures_presence = activation is not None
        self.gain = 1.0 if activation is None else 2.2  # assumes that an activation squashes

    def step(self, votes: WeightedVotes, logits: Dot | None, t: float) -> tuple[Capsules, Dot | None]:
        return votes.capsules(apply("activation", self.activation, votes.weighted_sum())), logits
