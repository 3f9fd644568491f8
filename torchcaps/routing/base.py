"""Base class of all routing algorithms: what a subclass defines, and what it inherits."""

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, as_logits
from torchcaps.ops import Agreement, Softmax, StoredVotes, Votes, WeightedVotes, gates_of
from torchcaps.routing.parameters import RoutingParameters
from torchcaps.routing.shape import LayerShape, fan_in_
from torchcaps.utils.arguments import CountOrZero, check_input, checked, shown_with_type

Gradient = Literal["unrolled", "last"]
Init = Literal["fan_in", "paper"]
AGREEMENTS = get_args(Agreement)
# State before the first iteration: zero, noise, or a learned value.
Start = Literal["zero", "random", "learned"]


class Iteration(NamedTuple):
    """One routing iteration as a watcher sees it: the votes with its coefficients, and the parents that followed. `t`
    counts from 0."""

    votes: WeightedVotes
    parents: Capsules
    t: int

    def with_coefficients(self) -> Capsules:
        """Return the parents with their coefficients."""
        return self.votes.votes.with_coefficients(self.parents, self.votes.coefficients())


class Routing(RoutingParameters, ABC):
    """A routing algorithm that plugs into any capsule layer.

    A subclass defines `step` and, where its paper has them, `build`, `prepare`, `first_state` and `agreement`. What
    iterates is the state: a tensor, a NamedTuple of tensors, or None while all logits are equal. A layer keeps
    `routing.for_layer(...)`, a copy with parameters of its own, so that one instance can be given to many layers. Order
    of the calls: `forward`, `iterate`, `advance`, `step`.

    Args:
        iterations: number of routing iterations.
        gradient: "unrolled" differentiates through all iterations; "last" through the last one only, with the state
            that enters it as a constant.
        init: how a layer draws its vote weights: "fan_in" keeps capsules alive through any number of layers, see
            `torchcaps.routing.shape.fan_in_`; "paper" follows the paper or its authors' code, whose weights
            are normal with standard deviation 1 / in_features if the routing does not say otherwise.

    Attributes:
        softmax: axis over which the coefficients sum to one.
        leaky: whether an extra parent of logit 0 joins the softmax and is then dropped.
        averages: whether a parent is a mean of votes, not a sum.
        gain: length of the first parents, before a squash, relative to that of the children, see `fan_in_`: above 1 to
            make up for a squash, below 1 where coefficients become peaked.
        shared_variance: fraction of the variance of the first vote weights that all parents share, see `fan_in_`;
            `torchcaps.testing.propose_gain` proposes this and the gain.
        max_difference: bound of the part of a first vote that the parents do not share, see `fan_in_`.
        gives_scores: whether the parents have scores.
        measures_presence: whether `Capsules.activations` of the parents say how present they are, by a score or
            by a length below one.
        last_state_contains_first: whether the last state contains the first one, as a sum of logits does; then the
            first state learns with gradient="last", too.
        iterative: whether the algorithm iterates; otherwise `step` runs once.
        needs_poses: whether the votes must be the poses of the children, as in :class:`torchcaps.CapsuleShared`.
        transforms: whether the parents may have other poses than the votes.
        shape: shape of the layer that this routing belongs to, or None.
        is_uniform: whether the coefficients are uniform at the moment, see `uniform`.
    """

    softmax: Softmax = "parents"
    leaky: bool = False
    averages: bool = False
    gain: float = 1.0
    shared_variance: float = 0.0
    max_difference: float = math.inf
    gives_scores: bool = False
    measures_presence: bool = True
    last_state_contains_first: bool = False
    iterative: bool = True
    needs_poses: bool = False
    transforms: bool = False

    @checked
    def __init__(self, iterations: CountOrZero = 1, gradient: Gradient = "unrolled", init: Init = "fan_in"):
        super().__init__()
        self.iterations, self.gradient, self.init = iterations, gradient, init
        if self.steps < 1:
            raise ValueError(f"iterations must be an int of at least 1, got {iterations}")
        self.is_uniform = False
        self._watchers: list[Callable[[Iteration], None]] = []

    # ------------------------------------------------------------ defined by an algorithm

    @abstractmethod
    def step(self, votes: WeightedVotes, state: Any, t: int) -> tuple[Capsules, Any]:
        """Run one iteration: return the parents that follow from the weighted votes, and the next state.

        Args:
            votes: the votes with the coefficients that follow from the state.
            state: what the previous step or `first_state` returned.
            t: iteration, counted from 0.
        """

    def build(self, shape: LayerShape) -> None:
        """Set the parameters, buffers and modules that a layer of this shape needs, as plain attributes."""

    def prepare(self, votes: Votes) -> Votes:
        """Return votes of children that the algorithm changes once, before the first step."""
        return votes

    def first_state(self, votes: Votes) -> Any:
        """Return the state that the first step starts from."""
        return None

    def agreement(self, state: Any) -> Agreement:
        """Return the rule for the logits that follows from a state, never None; by default the state is this rule."""
        return state

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        """Draw the vote weights `(..., parents, d, h)` as the paper does, in place."""
        nn.init.normal_(weight, std=1 / shape.in_features)

    @property
    def steps(self) -> int:
        """Number of times that `step` runs, at least 1."""
        return self.iterations

    def reset_weight(self, weight: Tensor, shape: LayerShape) -> None:
        """Draw the vote weights `(..., parents, d, h)` of a layer, in place, as `init` says."""
        if self.init == "paper":
            self.reset_weight_as_in_paper(weight, shape)
        else:
            fan_in_(weight, shape, self.averages, self.gain, self.shared_variance, self.max_difference)

    # ------------------------------------------------------------ iterations

    def advance(self, votes: Votes, state: Any, t: int) -> tuple[Iteration, Any]:
        """Run one iteration: return it and the next state. Every schedule iterates by this method."""
        name = type(self).__name__
        agreement = None if state is None or self.is_uniform else self.agreement(state)
        if agreement is not None and not isinstance(agreement, AGREEMENTS):
            if type(self).agreement is Routing.agreement:
                raise TypeError(
                    f"{name} has no agreement: write agreement(state), or let step return a rule such as Dot as the "
                    f"next state, got {shown_with_type(agreement)}"
                )
            raise TypeError(f"{name}.agreement must return an agreement, such as Dot, got {shown_with_type(agreement)}")
        weighted = WeightedVotes(votes, agreement, self.softmax, self.leaky)
        result = self.step(weighted, state, t)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Capsules)):
            raise TypeError(f"{name}.step must return Capsules and the next state, got {shown_with_type(result)}")
        parents, state = result
        iteration = Iteration(weighted, parents, t)
        self.show(iteration)
        return iteration, state

    def iterate(self, votes: Votes) -> Iteration:
        """Run all iterations on prepared votes, and return the last one."""
        state = self.first_state(votes)
        for t in range(self.steps - 1):
            with torch.no_grad() if self.gradient == "last" else contextlib.nullcontext():
                _, state = self.advance(votes, state, t)
        return self.advance(votes, state, self.steps - 1)[0]

    @checked
    def forward(
        self, votes: Tensor | Votes, scores: Tensor | None = None, return_coefficients: bool = False
    ) -> Capsules:
        """Route children to parents.

        Args:
            votes: tensor of votes `(batch, children, parents, *pose)`, or the votes of a layer.
            scores: scores of the children, `(batch, children)`. Their sigmoids are the children's gates; a child of
                score -inf, or of any below about -55, does not count at all. A bool mask may stand for them: True for a
                child, False for padding (the opposite of PyTorch's `key_padding_mask`). None keeps the gates of the
                votes.
            return_coefficients: also return the coefficients of the last iteration.

        Raises:
            RuntimeError: if the routing needs parameters and has none, because it belongs to no layer.
            ValueError: if the routing belongs to a layer with another number of children or parents than the votes.
        """
        if isinstance(votes, Tensor):
            check_input("votes", votes, next(self.parameters(), None))
            votes = StoredVotes(votes)
        if self.shape is None and not torch.compiler.is_compiling():  # compiled code cannot enter the meta device
            self.check_values(votes)
        if self.shape is not None and isinstance(votes, StoredVotes):  # a layer's own votes fit
            self.shape.check_sizes(votes)
        if scores is not None:
            votes = votes.gated(gates_of(as_logits(scores, votes)))
        last = self.iterate(self.prepare(votes))
        return last.with_coefficients() if return_coefficients else last.parents

    # ------------------------------------------------------------ seen and changed from outside

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watchers": [], "is_uniform": False}  # a copy is not in the contexts of the original

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[Iteration], None]) -> Iterator[None]:
        """Call `watcher` after every iteration within this context."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def show(self, iteration: Iteration) -> None:
        """Call all watchers with an iteration."""
        for watcher in self._watchers:
            watcher(iteration)

    @property
    def is_watched(self) -> bool:
        """Whether a watcher waits for iterations."""
        return bool(self._watchers)

    @contextlib.contextmanager
    def uniform(self) -> Iterator[None]:
        """Route by uniform coefficients within this context: no step sees the agreement of its state.

        With the softmax over parents each coefficient is 1 / parents, or 1 / (parents + 1) with a leak; over children
        it is the child's gate divided by the sum of the gates. Learned parameters, iterations, states and watchers stay
        as they are. A copy of the routing that is made within the context is not in it.
        """
        before, self.is_uniform = self.is_uniform, True
        try:
            yield
        finally:
            self.is_uniform = before


def list_routings() -> list[str]:
    """Return the sorted names of all routing algorithms that have been imported."""
    classes: list[type] = [Routing]
    for routing in classes:  # grows by the subclasses of what it has
        classes += routing.__subclasses__()
    return sorted({x.__name__ for x in classes if not inspect.isabstract(x)})
