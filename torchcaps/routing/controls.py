"""Uniform and random routing: two controls, which do not route.

Every algorithm should be compared with both (Paik, Kwak, Kim: Capsule Networks Need an Improved Routing Algorithm,
2019). `Routing.uniform` makes the coefficients of a trained network uniform; these are trained without routing.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Dot, Votes, WeightedVotes
from torchcaps.routing.base import Routing
from torchcaps.routing.shape import LayerShape
from torchcaps.routing.squash import squash
from torchcaps.utils.arguments import apply, checked


class UniformRouting(Routing):
    r"""Give each child's vote to all parents alike.

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
        self.gain = 1.0 if activation is None else 2.2  # assumes that an activation squashes

    @property
    def measures_presence(self) -> bool:  # type: ignore[override]
        return self.activation is not None

    def step(self, votes: WeightedVotes, logits: Dot | None, t: int) -> tuple[Capsules, Dot | None]:
        return votes.capsules(apply("activation", self.activation, votes.weighted_sum())), logits


class RandomRouting(UniformRouting):
    r"""Draw the coefficients at random, whatever the votes are.

    .. math::
        b_{ij} \sim N(0, 1), \quad c_{ij} = \frac{\exp b_{ij}}{\sum_k \exp b_{ik}}, \quad
        v_j = \text{activation} \Big( \sum_i a_i c_{ij} V_{ij} \Big)

    with the gates :math:`a_i` of the children. There is one logit for each set of vote weights and parent, the same for
    all samples.

    They are drawn once for each layer, as a buffer `logits`, `(groups, parents)`, which the state dict keeps and
    `reset_parameters` draws anew. `DynamicRouting(iterations=1, start="random")` draws them at every call.

    Args:
        activation: function of the sums, see :class:`torchcaps.UniformRouting`.

    Reference:
        Paik et al. 2019.
    """

    @checked
    def __init__(self, activation: Callable[[Tensor], Tensor] | None = squash):
        super().__init__(activation)
        self.gain /= 1.6  # unequal coefficients make the sums longer

    def build(self, shape: LayerShape) -> None:
        if shape.any_parents:
            raise ValueError("RandomRouting needs a number of parents: give the layer out_capsules")
        self.logits = nn.Buffer(torch.randn(shape.groups, shape.parents))

    def first_state(self, votes: Votes) -> Dot:
        zeros = votes.parents_like()
        return Dot(zeros, self.logits.to(zeros.dtype))
