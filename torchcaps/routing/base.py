"""Base class of all routing algorithms: what a subclass defines, and what it inherits."""

import contextlib
import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchcaps.arguments import CountOrZero, check_input, checked, kinds_of, refusal, shown_with_type
from torchcaps.capsules import Capsules, as_logits
from torchcaps.ops import Agreement, Dot, Gaussian, Softmax, StoredVotes, Votes, as_votes, at_least_float32

Gradient = Literal["unrolled", "last"]
Init = Literal["fan_in", "paper"]
# State before the first iteration: zero, noise, or a learned value.
Start = Literal["zero", "random", "learned"]
# Maps an agreement (None before the first iteration) and the iteration, counted from 0, to the parents that follow from
# the agreement and the new agreement with those parents. At an equilibrium the iteration is infinite.
Step = Callable[[Agreement | None, float], tuple[Capsules, Agreement | None]]

CHILDREN = 16  # assumed when the vote weights of a layer for any number of children are drawn


class LayerShape(NamedTuple):
    """Shape of a capsule layer, as its routing sees it.

    Fields:
        groups: number of sets of vote weights; the children form as many groups of equal size, one set for each.
        children: number of children per parent, in the layer or in one window; None for any number.
        parents: number of parents; 1 if the layer takes any number.
        rows: number of rows of a pose; a vector has one.
        in_features, out_features: number of features in a row of a child's pose, and of a parent's pose.
        shared: whether the poses of the children are their votes. The layer then has no vote weights; groups says how
            many sets of other parameters the children have.
        any_parents: whether the layer takes any number of parents.
    """

    groups: int
    children: int | None
    parents: int
    rows: int
    in_features: int
    out_features: int
    shared: bool = False
    any_parents: bool = False

    @property
    def features(self) -> int:
        """Number of entries in a parent's pose."""
        return self.rows * self.out_features


class Iteration(NamedTuple):
    """One routing iteration as a watcher sees it: the parents that followed from the votes and the agreement at t."""

    votes: Votes
    agreement: Agreement | None
    parents: Capsules
    t: float


class Routing(nn.Module, ABC):
    """A routing algorithm that plugs into any capsule layer.

    A subclass defines `step` and, where its paper has them, `learned`, `prepare`, `first_agreement`, `scale` and
    `reset_weight_as_in_paper`. A layer keeps `routing.for_layer(...)`, a copy with parameters of its own, so that one
    instance can be given to many layers. Order of the calls: `forward`, `iterate`, `advance`, `step`.

    Args:
        iterations: number of routing iterations.
        gradient: "unrolled" differentiates through all iterations; "last" through the last one only, with the
            agreement that enters it as a constant.
        init: how a layer draws its vote weights: "fan_in" keeps capsules alive through any number of layers, see
            `reset_weight`; "paper" follows the paper or its authors' code.
        least: least number of iterations that the algorithm allows.

    Attributes:
        softmax: axis over which the coefficients sum to one.
        leaky: whether an extra parent of logit 0 joins the softmax and is then dropped.
        averages: whether a parent is the mean of its votes; otherwise it is their sum.
        gain: gain of the fan-in initialization: above 1 where a squash shortens the parents, below 1 where the
            coefficients favor some votes, whose mean is longer than the mean of all.
        alike: fraction of the variance of a child's first vote weights that all parents share.
        apart: bound of the part of a first vote that the parents do not share, as a multiple of the child's length.
        gives_scores: whether the parents have scores.
        measures_presence: whether `Capsules.activations` of the parents say how present they are, by a score or
            by a length below one.
        comes_to_rest: whether the iterations can reach a fixed point. They cannot where each agreement adds to the
            previous one.
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
    alike: float = 0.0
    apart: float = math.inf
    gives_scores: bool = False
    measures_presence: bool = True
    comes_to_rest: bool = True
    iterative: bool = True
    needs_poses: bool = False
    transforms: bool = False

    @checked
    def __init__(
        self, iterations: CountOrZero = 1, gradient: Gradient = "unrolled", init: Init = "fan_in", least: int = 1
    ):
        super().__init__()
        if iterations < least:
            raise ValueError(f"iterations must be an int of at least {least}, got {iterations}")
        self.iterations, self.gradient, self.init = iterations, gradient, init
        self.shape: LayerShape | None = None
        self.is_uniform = False
        self._watchers: list[Callable[[Iteration], None]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        # An option that is changed later is checked like the argument of its name.
        kind = kinds_of(type(self).__init__).get(name)
        if kind is not None and not isinstance(value, (Tensor, nn.Module)) and not kind.fits(value):
            raise refusal(name, value, kind)
        super().__setattr__(name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the names that `learned` returns

    # ------------------------------------------------------------ defined by an algorithm

    @abstractmethod
    def step(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement | None]:
        """Run one iteration.

        Args:
            votes: votes that `prepare` returned.
            agreement: agreement that the previous step or `first_agreement` returned; None if there is none yet.
            t: iteration, counted from 0; infinite at an equilibrium.

        Returns:
            The parents that follow from the agreement, and the new agreement with these parents.
        """

    def learned(self, shape: LayerShape) -> Mapping[str, Tensor | nn.Module]:
        """Return by name what a layer's routing has of its own; `step` reads it as attributes.

        A tensor is the initial value of a learned parameter, an `nn.Buffer` that of a buffer, and a module is used as
        it is.
        """
        return {}

    def prepare(self, votes: Votes) -> Votes:
        """Return the votes that the steps work on; called once, before the first step."""
        return votes

    def first_agreement(self, votes: Votes) -> Agreement | None:
        """Return the agreement that the first step starts from, or None if all logits are equal."""
        return None

    def scale(self, features: int) -> float | Tensor | None:
        """Return the factor on the logits of a dot agreement, or None to keep the agreement's own factor.

        The factor may depend on learned parameters. It is computed anew before each step, so that they also get
        gradients with `gradient="last"` and at an equilibrium.

        Args:
            features: number of entries in a vote.
        """
        return None

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        """Draw the vote weights `(..., parents, d, h)` as the paper does, in place."""
        nn.init.normal_(weight, std=1 / shape.in_features)

    # ------------------------------------------------------------ inherited by an algorithm

    @property
    def steps(self) -> int:
        """Number of times that `step` runs."""
        return self.iterations

    def for_layer(
        self, shape: LayerShape, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return a copy with the parameters that a layer of this shape needs."""
        if self.needs_poses and not shape.shared:
            raise ValueError(
                f"{type(self).__name__} takes the poses of the children as their votes: use it in a CapsuleShared"
            )
        routing = copy.deepcopy(self)
        routing.shape = shape
        for name, value in routing._first_values(shape, device).items():
            fits = isinstance(value, nn.Module) or value.is_floating_point()
            if not fits or name in self.__dict__ or hasattr(type(self), name):
                raise ValueError(
                    f"{type(self).__name__}.learned must return floating-point values or modules under names that are "
                    f"not yet attributes, got {name!r}: {shown_with_type(value)}"
                )
            if isinstance(value, nn.Module):
                routing.add_module(name, value.to(device=device, dtype=dtype))
            elif isinstance(value, nn.Buffer):
                routing.register_buffer(name, value.to(device=device, dtype=dtype))
            else:
                routing.register_parameter(name, nn.Parameter(value.to(device=device, dtype=dtype)))
        return routing

    def reset_parameters(self) -> None:
        """Set the learned parameters and the buffers of the algorithm to their initial values."""
        own = self.state_dict()
        for name, value in {} if self.shape is None else self.first_values(self.shape, "cpu").items():
            own[name].copy_(value)

    def first_values(self, shape: LayerShape, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the initial values of parameters and buffers, with the names of a state dict."""
        values: dict[str, Tensor] = {}
        for name, value in self._first_values(shape, device).items():
            if isinstance(value, nn.Module):
                values |= {f"{name}.{key}": x for key, x in value.state_dict().items()}
            else:
                values[name] = value
        return values

    def _first_values(self, shape: LayerShape, device: torch.device | str | None) -> Mapping[str, Tensor | nn.Module]:
        """Return `learned(shape)` on a device; None for the default device, which may be "meta", without values."""
        with contextlib.nullcontext() if device is None else torch.device(device):
            return self.learned(shape)

    def reset_weight(self, weight: Tensor, shape: LayerShape) -> None:
        r"""Draw the vote weights `(..., parents, d, h)` of a layer, in place.

        With `init="fan_in"` the weights are normal with a standard deviation for which parents with uniform
        coefficients c, :math:`s_j = c \sum_i V_{ij}`, are `gain` times as long as children of random directions:

        .. math:: \sigma = \frac{\text{gain}}{c \sqrt{\text{children} \cdot \text{out\_features}}}

        A fraction `alike` of the variance is shared by all parents. Their first logits are then nearly equal, and the
        first coefficients are soft although the votes are long. The other part is at most `apart` times as long as
        the child: votes become longer with the number of parents, and without a bound, so would the differences of
        their logits. With `alike` 0 this bound shortens the votes themselves, which suits routings that normalize their
        parents.
        """
        if self.init == "paper":
            self.reset_weight_as_in_paper(weight, shape)
            return
        children = shape.children or CHILDREN
        coefficient = 1 / children if self.averages else 1 / shape.parents
        std = self.gain / (coefficient * (children * shape.out_features) ** 0.5)
        own = min(std * (1 - self.alike) ** 0.5, self.apart / shape.out_features**0.5)
        nn.init.normal_(weight, std=own)
        if self.alike:
            same = torch.empty_like(weight[..., :1, :, :])
            weight += nn.init.normal_(same, std=(std**2 - own**2) ** 0.5)

    def with_values(self, **values: Tensor | None) -> Self:
        """Return a copy that uses the given tensors in place of learned parameters, to call the routing as a
        function."""
        routing = copy.copy(self)
        routing.__dict__.update({name: value for name, value in values.items() if value is not None})
        return routing

    def advance(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement | None]:
        """Run `step` and report it to the watchers. Every schedule iterates by this method."""
        agreement = self.scaled(agreement)
        if self.is_uniform:
            agreement = _without_logits(agreement)
        found = self.step(votes, agreement, t)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Capsules)):
            raise TypeError(
                f"{type(self).__name__}.step must return two items, Capsules and an agreement or None, got "
                f"{shown_with_type(found)}"
            )
        parents, after = found
        if not isinstance(after, (Dot, Gaussian, type(None))):
            raise TypeError(
                f"{type(self).__name__}.step must return a Dot, a Gaussian or None as agreement, got "
                f"{shown_with_type(after)}"
            )
        for watcher in self._watchers:
            watcher(Iteration(votes, agreement, parents, t))
        return parents, after

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

    @property
    def is_watched(self) -> bool:
        """Whether a watcher waits for iterations."""
        return bool(self._watchers)

    @contextlib.contextmanager
    def uniform(self) -> Iterator[None]:
        """Route by uniform coefficients within this context: every step sees no agreement, in every schedule.

        With the softmax over parents each coefficient is 1 / parents, or 1 / (parents + 1) with a leak; over children
        it is the child's gate divided by the sum of the gates. Logits that `first_agreement` or `prepare` give have no
        effect. Learned parameters, iterations and watchers stay as they are, and so does what an algorithm iterates
        beside its logits. A copy of the routing that is made within the context is not in it.
        """
        before, self.is_uniform = self.is_uniform, True
        try:
            yield
        finally:
            self.is_uniform = before

    def prepared(self, votes: Votes) -> Votes:
        """Return the votes that the steps work on: what `prepare` returns, in `uniform` without logits of their own."""
        prepared = self.prepare(votes)
        return prepared.without_logits() if self.is_uniform else prepared

    def scaled(self, agreement: Agreement | None) -> Agreement | None:
        """Return the agreement with the scale of this algorithm."""
        scale = self.scale(agreement.query.shape[-1]) if isinstance(agreement, Dot) else None
        return agreement if scale is None else agreement._replace(scale=scale)  # type: ignore[union-attr, call-arg]

    def coefficients(self, votes: Votes, agreement: Agreement | None) -> Tensor:
        """Return the coefficients that follow from an agreement, `(batch, children, parents)`."""
        agreement = None if self.is_uniform else self.scaled(agreement)
        return votes.coefficients(agreement, self.softmax, self.leaky)

    def factors(self, votes: Votes, agreement: Agreement | None) -> Tensor:
        """Return the factor of each vote in the sum that becomes a parent, `(batch, children, parents)`, for
        inspection: the coefficients with the gates, unless an algorithm adds something to them."""
        coefficients = at_least_float32(self.coefficients(votes, agreement))
        if votes.gates is None or self.softmax == "children":  # these contain the gates
            return coefficients
        return coefficients * votes.gates.unsqueeze(-1)

    def _check_sizes(self, votes: Votes, shape: LayerShape) -> None:
        """Check that votes have the children and parents of the layer that this routing belongs to."""
        groups, each_its_own = shape.groups, shape.groups == shape.children
        fits = votes.children == groups if each_its_own else votes.children % groups == 0
        if not (fits and (shape.any_parents or votes.parents == shape.parents)):
            children = f"{'' if each_its_own else 'a multiple of '}{groups} children"
            parents = f"{'any number of' if shape.any_parents else shape.parents} parents"
            raise ValueError(
                f"this {type(self).__name__} belongs to a layer with {children} and {parents}, got votes of "
                f"{votes.children} children for {votes.parents} parents"
            )

    def _check_values(self) -> None:
        # On the meta device nothing is drawn, which would change the random numbers of what comes after.
        needed = self._first_values(LayerShape(1, 1, 1, 1, 1, 1), "meta")
        missing = [name for name in needed if name not in self.__dict__]
        if missing:
            raise RuntimeError(
                f"{type(self).__name__} has no {', '.join(missing)} yet: give it to a capsule layer, or set values by "
                "with_values"
            )

    def extra_repr(self) -> str:
        """Show the iterations, and the options that differ from their defaults."""
        options = [
            (name, getattr(self, name), x.default) for name, x in inspect.signature(type(self)).parameters.items()
        ]
        shown = [(name, value) for name, value, default in options if name == "iterations" or value != default]
        return ", ".join(f"{name}={getattr(value, '__name__', repr(value))}" for name, value in shown)

    @checked
    def forward(
        self, votes: Tensor | Votes, scores: Tensor | None = None, return_coefficients: bool = False
    ) -> Capsules:
        """Route children to parents.

        Args:
            votes: tensor of votes `(batch, children, parents, *pose)`, or the votes of a layer.
            scores: scores of the children, `(batch, children)`. Their sigmoids are the children's gates; a child of
                score -inf does not count at all. A bool mask may stand for them: True for a child, False for padding.
                None keeps the gates of the votes.
            return_coefficients: also return the coefficients that the parents follow from.

        Raises:
            RuntimeError: if the routing needs parameters and has none, because it belongs to no layer.
            ValueError: if the routing belongs to a layer with another number of children or parents than the votes.
        """
        if self.shape is None and not torch.compiler.is_compiling():  # compiled code cannot enter the meta device
            self._check_values()
        if isinstance(votes, Tensor):
            check_input("votes", votes, next(self.parameters(), None))
        votes = as_votes(votes)
        if self.shape is not None and isinstance(votes, StoredVotes):  # a layer's own votes fit
            self._check_sizes(votes, self.shape)
        if scores is not None:
            votes = votes.gated(presence(as_logits(scores, votes)))
        votes = self.prepared(votes)
        step = partial(self.advance, votes)
        parents, agreement = iterate(step, self.steps, self.gradient, self.first_agreement(votes))
        return votes.with_coefficients(parents, self.coefficients(votes, agreement)) if return_coefficients else parents


def _without_logits(agreement: Agreement | None) -> Agreement | None:
    """Return an agreement for which all logits are zero; it still has the poses that an algorithm iterates."""
    if not isinstance(agreement, Dot) or agreement.parents is None:
        return None
    return Dot(torch.zeros_like(agreement.query), parents=agreement.parents)


def iterate(
    step: Step, iterations: int, gradient: Gradient = "unrolled", agreement: Agreement | None = None
) -> tuple[Capsules, Agreement | None]:
    """Run `step` for `iterations` iterations, starting from `agreement`.

    Returns:
        The parents of the last step, and the agreement that they follow from.
    """
    for t in range(iterations - 1):
        with torch.no_grad() if gradient == "last" else contextlib.nullcontext():
            _, agreement = step(agreement, t)
    parents, _ = step(agreement, iterations - 1)
    return parents, agreement


def list_routings() -> list[str]:
    """Return the sorted names of all routing algorithms that have been imported."""

    def below(routing: type[Routing]) -> Iterator[type[Routing]]:
        for subclass in routing.__subclasses__():
            yield subclass
            yield from below(subclass)

    return sorted({x.__name__ for x in below(Routing) if not inspect.isabstract(x)})  # type: ignore[type-abstract]


def presence(scores: Tensor | None) -> Tensor | None:
    """Turn scores into gates in [0, 1]; None stays None."""
    return None if scores is None else scores.sigmoid()
