"""What a capsule layer expects of a routing algorithm."""

import copy
from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Over, Votes


class Routing(nn.Module, ABC):
    """A routing algorithm that plugs into any capsule layer.

    A layer keeps `routing.for_layer(...)`, a copy with parameters of its own, so that one instance can be
    given to many layers and none shares its parameters with another.

    Attributes:
        softmax: what the coefficients sum to one over.
        measures_presence: whether `Capsules.activations` of the parents say how present they are, by a score or
            by a length below one.
    """

    softmax: Over = "parents"
    measures_presence: bool = True

    def for_layer(self, children: int, parents: int, features: int) -> Self:
        """A copy for a layer with that many sets of vote weights (`children`, 1 if all children share them),
        parents (1 if there may be any number) and features of a parent's pose."""
        routing = copy.deepcopy(self)
        routing.make_parameters(children, parents, features)
        routing.reset_parameters()
        return routing

    def make_parameters(self, children: int, parents: int, features: int) -> None:
        """Create what the algorithm learns, without values. Most learn nothing."""

    def reset_parameters(self) -> None:
        """Set what the algorithm learns to its first values."""

    def reset_weight(self, weight: Tensor, children: int) -> None:
        """Initialise a layer's vote weights `(..., parents, d, h)`, given its number of children, in place."""
        nn.init.normal_(weight, std=1 / weight.shape[-2])

    @abstractmethod
    def forward(
        self, votes: Tensor | Votes, scores: Tensor | None = None, return_coefficients: bool = False
    ) -> Capsules:
        """Route `votes` (batch, children, parents, *pose) of children with `scores` (batch, children)."""


def presence(scores: Tensor | None) -> Tensor | None:
    """Scores as gates in [0, 1]; no scores, no gates."""
    return None if scores is None else scores.sigmoid()


def missing_parameters(routing: nn.Module) -> RuntimeError:
    name = type(routing).__name__
    return RuntimeError(
        f"{name} has no parameters yet: give it to a capsule layer, or call {name}(...).for_layer(...) first"
    )
