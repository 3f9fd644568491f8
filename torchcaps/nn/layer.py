"""What all capsule layers share."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Votes
from torchcaps.routing import LayerShape, Routing


class CapsuleLayer(nn.Module, ABC):
    """Children vote for parents, and a routing algorithm decides which votes count.

    Attributes:
        weight: of the votes.
        bias: of the votes, or None.
        layer_shape: what the routing knows of the layer.
        routing: the algorithm, with parameters of its own.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    layer_shape: LayerShape
    routing: Routing

    @abstractmethod
    def votes(self, capsules: Capsules | Tensor) -> Votes:
        """The votes of these children, as present as their scores say: what `routing` takes."""

    def reset_parameters(self) -> None:
        """Draw new vote weights as the routing does; all else starts anew too."""
        self.routing.reset_weight(self.weight.data, self.layer_shape)
        self.routing.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        """Route children to parents."""
        return self.routing(self.votes(capsules), return_coefficients=return_coefficients)
