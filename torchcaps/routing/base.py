"""What an algorithm defines, and what it gets."""

import contextlib
import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Dot, Softmax, Votes, as_votes

Gradient = Literal["unrolled", "last"]
Init = Literal["fan_in", "paper"]
# What an algorithm knows before its first iteration: nothing, noise, or what it has learned.
Start = Literal["zero", "random", "learned"]
# From an agreement (None: nothing is known yet) and the iteration, counted from 0, to the parents that follow from it
# and the agreement with those parents. The iteration is infinite where a routing runs to its end.
Step = Callable[[Agreement | None, float], tuple[Capsules, Agreement | None]]

CHILDREN = 16  # that a layer is initialized for if it takes any number


class LayerShape(NamedTuple):
    """What a layer tells its routing about itself.

    Fields:
        groups: sets of vote weights; children in groups of equal size share a set.
        children: of a parent, in the layer or in a window; None: any number.
        parents: their number; 1 if there may be any number.
        rows: of a pose; a vector has one.
        in_features, out_features: of each row of a child's pose, and of a parent's.
    """

    groups: int
    children: int | None
    parents: int
    rows: int
    in_features: int
    out_features: int

    @property
    def features(self) -> int:
        """Entries of a parent's pose."""
        return self.rows * self.out_features


class Iteration(NamedTuple):
    """What a watcher is told: the parents that followed from votes and an agreement, in which iteration."""

    votes: Votes
    agreement: Agreement | None
    parents: Capsules
    t: float


class Routing(nn.Module, ABC):
    """A routing algorithm that plugs into any capsule layer.

    A subclass defines `step`, and where the paper has them `learned`, `prepare`, `first_agreement` and
    `reset_weight_as_in_paper`. A layer keeps `routing.for_layer(...)`, a copy with parameters of its own, so that one
    instance can be given to many layers.

    Args:
        iterations: how often children and parents agree.
        gradient: "unrolled" differentiates through all iterations; "last" only through the last one, and takes the
            agreement that enters it as given.
        init: how a layer draws its vote weights: "fan_in" keeps capsules alive through any number of layers, see
            `reset_weight`; "paper" does as the paper or its authors' code.
        least: number of iterations.

    Attributes:
        softmax: what the coefficients sum to one over.
        leaky: whether a parent of logit 0 joins the softmax and is dropped.
        averages: whether a parent is a mean of its votes, and not their sum.
        gain: of the fan-in initialization: above 1 where a squash shortens the parents, below 1 where the coefficients
            favor some votes, whose mean is longer than that of all.
        alike: the part of a child's first vote weights, in variance, that is the same for all parents.
        gives_scores: whether the parents have scores.
        measures_presence: whether `Capsules.activations` of the parents say how present they are, by a score or
            by a length below one.
        comes_to_rest: whether there can be a fixed point; not where each agreement adds to the one before.
        iterative: whether there are iterations; without, `step` runs once.
        shape: of the layer that this routing belongs to, or None.
    """

    softmax: Softmax = "parents"
    leaky: bool = False
    averages: bool = False
    gain: float = 1.0
    alike: float = 0.0
    gives_scores: bool = False
    measures_presence: bool = True
    comes_to_rest: bool = True
    iterative: bool = True

    def __init__(self, iterations: int = 1, gradient: Gradient = "unrolled", init: Init = "fan_in", least: int = 1):
        super().__init__()
        if iterations < least:
            raise ValueError(f"iterations must be at least {least}, got {iterations}")
        check_choice("gradient", gradient, ("unrolled", "last"))
        check_choice("init", init, ("fan_in", "paper"))
        self.iterations, self.gradient, self.init = iterations, gradient, init
        self.shape: LayerShape | None = None
        self._watchers: list[Callable[[Iteration], None]] = []

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what `learned` names

    # ------------------------------------------------------------ what an algorithm defines

    @abstractmethod
    def step(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement | None]:
        """One iteration: the parents that follow from an agreement, and the agreement with these parents.

        Args:
            votes: what `prepare` returned.
            agreement: what the step before, or `first_agreement`, returned. None: nothing is known.
            t: the iteration, from 0 on; infinite at an equilibrium.
        """

    def learned(self, shape: LayerShape) -> dict[str, Tensor]:
        """What the algorithm learns: first values by name. In `step` they are attributes of that name."""
        return {}

    def prepare(self, votes: Votes) -> Votes:
        """The votes as the steps see them; called once, before the first step."""
        return votes

    def first_agreement(self, votes: Votes) -> Agreement | None:
        """The agreement that the first step starts from; None: all logits are equal."""
        return None

    def scale(self, features: int) -> float | Tensor | None:
        """The factor of a dot agreement's logits, given the number of a vote's features: a number, or a tensor that
        follows from what is learned. None: the agreement's own. It is computed before each step, so that what is
        learned has a gradient through the last iteration alone, and at an equilibrium."""
        return None

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        """Draw vote weights `(..., parents, d, h)` as the paper does, in place."""
        nn.init.normal_(weight, std=1 / shape.in_features)

    # ------------------------------------------------------------ what it gets

    @property
    def steps(self) -> int:
        """How often `step` runs."""
        return self.iterations

    def for_layer(
        self, shape: LayerShape, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """A copy with the parameters that a layer of this shape needs."""
        routing = copy.deepcopy(self)
        routing.shape = shape
        for name, value in routing.learned(shape).items():
            if not value.is_floating_point() or name in self.__dict__ or hasattr(type(self), name):
                raise ValueError(
                    f"{type(self).__name__}.learned: expected floating-point values under names that are no attributes "
                    f"yet, got {name!r} of {value.dtype}"
                )
            routing.register_parameter(name, nn.Parameter(value.to(device=device, dtype=dtype)))
        return routing

    def reset_parameters(self) -> None:
        """Set what the algorithm learns to its first values."""
        for name, value in {} if self.shape is None else self.learned(self.shape).items():
            self.get_parameter(name).data.copy_(value)

    def reset_weight(self, weight: Tensor, shape: LayerShape) -> None:
        r"""Draw the vote weights `(..., parents, d, h)` of a layer, in place.

        With `init="fan_in"` they are normal, with a standard deviation by which the parents of uniform coefficients
        c, :math:`s_j = c \sum_i V_{ij}`, are `gain` times as long as children of random directions:

        .. math:: \sigma = \frac{\text{gain}}{c \sqrt{\text{children} \cdot \text{out\_features}}}

        Parents that begin `alike` have nearly equal logits: the first coefficients are soft, though votes are long.
        """
        if self.init == "paper":
            self.reset_weight_as_in_paper(weight, shape)
            return
        children = shape.children or CHILDREN
        coefficient = 1 / children if self.averages else 1 / shape.parents
        std = self.gain / (coefficient * (children * shape.out_features) ** 0.5)
        nn.init.normal_(weight, std=std * (1 - self.alike) ** 0.5)
        if self.alike:
            same = torch.empty_like(weight[..., :1, :, :])
            weight += nn.init.normal_(same, std=std * self.alike**0.5)

    def with_values(self, **values: Tensor | None) -> Self:
        """A copy that uses given tensors in place of what it would learn: the routing as a function."""
        routing = copy.copy(self)
        routing.__dict__.update({name: value for name, value in values.items() if value is not None})
        return routing

    def advance(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement | None]:
        """`step`, of which the watchers are told. Every schedule goes on by this."""
        agreement = self.scaled(agreement)
        parents, after = self.step(votes, agreement, t)
        for watcher in self._watchers:
            watcher(Iteration(votes, agreement, parents, t))
        return parents, after

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[Iteration], None]) -> Iterator[None]:
        """Within this context, `watcher` is called after every iteration."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def scaled(self, agreement: Agreement | None) -> Agreement | None:
        """The agreement with the scale of this algorithm."""
        scale = self.scale(agreement.query.shape[-1]) if isinstance(agreement, Dot) else None
        return agreement if scale is None else agreement._replace(scale=scale)  # type: ignore[union-attr, call-arg]

    def coefficients(self, votes: Votes, agreement: Agreement | None) -> Tensor:
        """The coefficients that follow from an agreement, `(batch, children, parents)`."""
        return votes.coefficients(self.scaled(agreement), self.softmax, self.leaky)

    def forward(
        self, votes: Tensor | Votes, scores: Tensor | None = None, return_coefficients: bool = False
    ) -> Capsules:
        """Route children to parents.

        Args:
            votes: `(batch, children, parents, *pose)`, or votes of a layer.
            scores: of the children, `(batch, children)` logits; a child counts as much as their sigmoid, at -inf not at
                all. None: as much as the votes say.
            return_coefficients: return also the coefficients that the parents follow from.
        """
        if self.shape is None:
            self._check_values()
        votes = as_votes(votes)
        votes = self.prepare(votes if scores is None else votes.gated(presence(scores)))
        step = partial(self.advance, votes)
        parents, agreement = iterate(step, self.steps, self.gradient, self.first_agreement(votes))
        return votes.with_coefficients(parents, self.coefficients(votes, agreement)) if return_coefficients else parents

    def _check_values(self) -> None:
        missing = [name for name in self.learned(LayerShape(1, 1, 1, 1, 1, 1)) if name not in self.__dict__]
        if missing:
            raise RuntimeError(
                f"{type(self).__name__} has no {', '.join(missing)} yet: give it to a capsule layer, or give it values "
                "(with_values, as torchcaps.functional does)"
            )

    def extra_repr(self) -> str:
        """The iterations, and what was chosen otherwise than by default."""
        options = [
            (name, getattr(self, name), x.default) for name, x in inspect.signature(type(self)).parameters.items()
        ]
        shown = [(name, value) for name, value, default in options if name == "iterations" or value != default]
        return ", ".join(f"{name}={getattr(value, '__name__', repr(value))}" for name, value in shown)


def iterate(
    step: Step, iterations: int, gradient: Gradient = "unrolled", agreement: Agreement | None = None
) -> tuple[Capsules, Agreement | None]:
    """Let children and parents agree, `iterations` times, from `agreement` on.

    Returns:
        The parents of the last step, and the agreement that they follow from.
    """
    for t in range(iterations - 1):
        with torch.no_grad() if gradient == "last" else contextlib.nullcontext():
            _, agreement = step(agreement, t)
    parents, _ = step(agreement, iterations - 1)
    return parents, agreement


def list_routings() -> list[str]:
    """Names of all routing algorithms that have been imported, sorted."""

    def below(routing: type[Routing]) -> Iterator[type[Routing]]:
        for subclass in routing.__subclasses__():
            yield subclass
            yield from below(subclass)

    return sorted({x.__name__ for x in below(Routing) if not inspect.isabstract(x)})  # type: ignore[type-abstract]


def presence(scores: Tensor | None) -> Tensor | None:
    """Scores as gates in [0, 1]; no scores, no gates."""
    return None if scores is None else scores.sigmoid()


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
