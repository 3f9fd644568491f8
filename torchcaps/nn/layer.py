"""Base class of the capsule layers that route."""

from abc import ABC, abstractmethod
from functools import partial

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.first_pass import CountedLayer, Passes, look_at
from torchcaps.ops import Votes
from torchcaps.routing import LayerShape
from torchcaps.utils.arguments import checked


class CapsuleLayer(CountedLayer, ABC):
    """Layer in which children vote for parents and a routing algorithm decides which votes count.

    Attributes:
        weight: weights of the votes, or None.
        bias: biases of the votes, or None.
        layer_shape: shape of the layer, as its routing sees it.
        routing: routing algorithm, with parameters of its own.
        passes: count of the first passes in training mode, see `first_pass.py`.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    layer_shape: LayerShape

    @abstractmethod
    def votes(self, capsules: Capsules | Tensor) -> Votes:
        """Return the votes of these children, gated by their scores: the input of `routing`."""

    def reset_parameters(self) -> None:
        """Draw new vote weights as the routing does, and reset all other parameters."""
        self.passes = Passes()
        if self.weight is not None:
            self.routing.reset_weight(self.weight.data, self.layer_shape)
        self.routing.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @checked
    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        """Route children to parents.

        Args:
            capsules: the children, as Capsules or as a tensor of poses.
            return_coefficients: also return the coefficients of the last iteration.
        """
        return self.route(capsules, self.votes(capsules), return_coefficients)

    def route(self, capsules: Capsules | Tensor, votes: Votes, return_coefficients: bool) -> Capsules:
        """Route these votes of the children. The first pass in training mode warns if the layer cannot learn from its
        first weights."""
        route = partial(self.routing, votes, return_coefficients=return_coefficients)
        return gatherable(self, look_at([self], capsules, route))


def gatherable(module: nn.Module, parents: Capsules) -> Capsules:
    """Return parents as nn.DataParallel can gather them from the replicas of a module: it takes tensors and None, but
    no number, such as `pose_dims`."""
    return parents._replace(pose_dims=None) if getattr(module, "_is_replica", False) else parents
