"""What all capsule layers share."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Votes
from torchcaps.routing import Routing


class CapsuleLayer(nn.Module, ABC):
    """Children vote for parents, and a routing algorithm decides which votes count.

    Attributes:
        routing: the algorithm, with parameters of its own.
    """

    routing: Routing

    @abstractmethod
    def votes(self, capsules: Capsules | Tensor) -> Votes:
        """The votes of these children, as present as their scores say: what `routing` takes."""

    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        """Route children to parents."""
        return self.routing(self.votes(capsules), return_coefficients=return_coefficients)
