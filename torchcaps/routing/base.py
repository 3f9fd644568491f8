"""What a capsule layer expects of a routing algorithm."""

import copy
from abc import ABC, abstractmethod
from typing import Literal, Self

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Over, Votes, as_votes
from torchcaps.routing.loop import Gradient, Step, check_iterations, iterate

# What an algorithm knows before its first iteration: nothing, noise, or what it has learned.
Start = Literal["zero", "random", "learned"]


class Routing(nn.Module, ABC):
    """A routing algorithm that plugs into any capsule layer.

    A layer keeps `routing.for_layer(...)`, a copy with parameters of its own, so that one instance can be
    given to many layers and none shares its parameters with another.

    Args:
        iterations, gradient: as in the algorithm's function.
        least: number of iterations.

    Attributes:
        softmax: what the coefficients sum to one over.
        gives_scores: whether the parents have scores.
        measures_presence: whether `Capsules.activations` of the parents say how present they are, by a score or
            by a length below one.
        accumulates: whether an agreement adds to the one before, so that it never comes to rest.
    """

    softmax: Over = "parents"
    gives_scores: bool = False
    measures_presence: bool = True
    accumulates: bool = False

    def __init__(self, iterations: int, gradient: Gradient = "unrolled", least: int = 1):
        super().__init__()
        check_iterations(iterations, gradient, least)
        self.iterations, self.gradient = iterations, gradient

    @property
    def steps(self) -> int:
        """How often `step` runs."""
        return self.iterations

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

    def first_agreement(self, votes: Votes) -> Agreement | None:
        """What is known before the first iteration: mostly nothing."""
        return None

    @abstractmethod
    def step(self, votes: Votes) -> Step:
        """One iteration on these votes, as a function."""

    def coefficients(self, votes: Votes, agreement: Agreement | None) -> Tensor:
        """The coefficients that follow from an agreement, `(batch, children, parents)`."""
        return votes.coefficients(agreement, self.softmax)

    def forward(
        self, votes: Tensor | Votes, scores: Tensor | None = None, return_coefficients: bool = False
    ) -> Capsules:
        """Route `votes` (batch, children, parents, *pose) of children with `scores` (batch, children), or votes that
        have gates already."""
        votes = as_votes(votes)
        votes = votes if scores is None else votes.gated(presence(scores))
        first = self.first_agreement(votes)
        parents, agreement = iterate(self.step(votes), self.steps, self.gradient, first)
        if not return_coefficients:
            return parents
        return votes.with_coefficients(parents, self.coefficients(votes, agreement))


def presence(scores: Tensor | None) -> Tensor | None:
    """Scores as gates in [0, 1]; no scores, no gates."""
    return None if scores is None else scores.sigmoid()


def check_start(start: str) -> None:
    if start not in ("zero", "random", "learned"):
        raise ValueError(f"start must be 'zero', 'random' or 'learned', got {start!r}")


def missing_parameters(routing: nn.Module) -> RuntimeError:
    name = type(routing).__name__
    return RuntimeError(
        f"{name} has no parameters yet: give it to a capsule layer, or call {name}(...).for_layer(...) first"
    )
