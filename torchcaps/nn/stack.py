"""Capsule layers on top of each other, and the order in which they route."""

import itertools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.pose import as_capsules
from torchcaps.ops import Agreement, Votes
from torchcaps.routing import Convergence, Equilibrium, Routing, check_equilibrium
from torchcaps.routing.equilibrium import largest

Schedule = Literal["sequential", "concurrent"] | Equilibrium


class Trace(NamedTuple):
    """How one layer of a stack routed.

    Fields:
        parents: with their coefficients.
        changes: of the parents' poses from each iteration to the next, the largest `|p_t - p_{t-1}| / |p_t|` of a
            sample, `(iterations - 1,)`; at an equilibrium the residuals, `(iterations,)`.
    """

    parents: Capsules
    changes: Tensor


class CapsuleStack(nn.Module):
    """Capsule layers, each the children of the next.

    Args:
        layers: capsule layers.
        schedule: the order of the iterations.

            - "sequential": each layer routes to its end before the next one starts.
            - "concurrent": one iteration layer by layer, then all layers at once, each from what its neighbours were
              an iteration before (Tsai et al. 2020, Procedure 2). The layers' routings have equally many iterations.
              Passes of lower layers that cannot reach the last one any more are left out.
            - an :class:`torchcaps.Equilibrium`: each layer to a fixed point, differentiated implicitly. Both
              schedules above tend to one with more and more iterations, if they converge.

            The last two take the layers' votes and routings apart: hooks on a layer's `forward` run with
            "sequential" only.

    Shape:
        - Input: children as the first layer takes them; output: parents of the last layer.

    Attributes:
        convergence: of the last call at an equilibrium, for each layer.
    """

    def __init__(self, *layers: CapsuleLayer, schedule: Schedule = "sequential"):
        super().__init__()
        for layer in layers:
            if not isinstance(layer, CapsuleLayer):
                raise TypeError(
                    f"a stack is made of capsule layers, got {type(layer).__name__}: put what comes before into the "
                    "network around it"
                )
        if not layers:
            raise ValueError("a stack needs at least one capsule layer")
        self.layers: Any = nn.ModuleList(layers)
        self.schedule = schedule
        self.convergence: tuple[Convergence, ...] = ()
        self._check()

    def _check(self) -> None:
        """Also at each call, for both the schedule and the numbers of iterations may be changed."""
        routings = [layer.routing for layer in self.layers]
        if isinstance(self.schedule, Equilibrium):
            for routing in routings:
                check_equilibrium(routing)
        elif self.schedule == "concurrent":
            steps = {routing.steps for routing in routings}
            if len(steps) > 1:
                raise ValueError(f"concurrent layers iterate together, and these have iterations of {sorted(steps)}")
            if any(routing.gradient != "unrolled" for routing in routings):
                raise ValueError(
                    "gradient='last' would cut all but the last layer off a concurrent stack: use 'unrolled'"
                )
        elif self.schedule != "sequential":
            raise ValueError(f"schedule must be 'sequential', 'concurrent' or an Equilibrium, got {self.schedule!r}")

    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        """Route children through all layers.

        Args:
            capsules: the children of the first layer.
            return_coefficients: also return the coefficients of the last layer.
        """
        self._check()
        parents = as_capsules(capsules)
        if self.schedule == "sequential":
            *lower, last = self.layers
            for layer in lower:
                parents = layer(parents)
            return last(parents, return_coefficients=return_coefficients)
        *_, routed = self._concurrent(parents) if self.schedule == "concurrent" else self._equilibrium(parents)
        return routed.with_coefficients() if return_coefficients else routed.parents

    @torch.no_grad()
    def trace(self, capsules: Capsules | Tensor) -> list[Trace]:
        """What each layer makes of these children, to look at: without gradients."""
        self._check()
        children = as_capsules(capsules)
        if self.schedule == "sequential":
            routed = self._sequential(children)
        else:
            routed = (
                self._concurrent(children, trace=True) if self.schedule == "concurrent" else self._equilibrium(children)
            )
        return [Trace(x.with_coefficients(), x.changes) for x in routed]

    def _sequential(self, children: Capsules) -> list["_Routed"]:
        """What `forward` does, with all that there is to see."""
        routed: list[_Routed] = []
        for layer in self.layers:
            votes, poses = _votes(layer, children), []
            agreement = layer.routing.first_agreement(votes)
            for t in range(layer.routing.steps):
                before = agreement
                children, agreement = layer.routing.advance(votes, before, t)
                poses.append(children.poses)
            routed.append(_Routed(layer.routing, votes, children, before, _changes(poses)))
        return routed

    def _equilibrium(self, children: Capsules) -> list["_Routed"]:
        assert isinstance(self.schedule, Equilibrium)
        routed: list[_Routed] = []
        convergence: list[Convergence] = []
        for layer in self.layers:
            votes = _votes(layer, children)
            children, agreement, found = self.schedule.route(layer.routing, votes)
            routed.append(_Routed(layer.routing, votes, children, agreement, found.forward))
            convergence.append(found)
        self.convergence = tuple(convergence)
        return routed

    def _concurrent(self, children: Capsules, trace: bool = False) -> list["_Routed"]:
        layers = list(self.layers)
        iterations = layers[0].routing.steps
        routed: list[_Routed] = []
        after: list[Agreement | None] = []  # with the parents of the pass before
        poses: list[list[Tensor]] = []
        for layer in layers:  # Procedure 2, lines 5, 6
            votes = _votes(layer, children)
            first = layer.routing.first_agreement(votes)
            children, agreement = layer.routing.advance(votes, first, 0)
            routed.append(_Routed(layer.routing, votes, children, first))
            after.append(agreement)
            poses.append([children.poses])
        for t in range(1, iterations):  # lines 7 to 9
            before = list(routed)
            for k, layer in enumerate(layers):
                above = len(layers) - 1 - k
                if t >= iterations - above and not trace:
                    continue  # too late to reach the last layer
                # In the first pass the layer below was already what it is now.
                votes = before[k].votes if t == 1 or k == 0 else _votes(layer, before[k - 1].parents)
                parents, agreement = layer.routing.advance(votes, after[k], t)
                routed[k] = _Routed(layer.routing, votes, parents, after[k])
                after[k] = agreement
                poses[k].append(parents.poses)
        if trace:
            routed = [x._replace(changes=_changes(p)) for x, p in zip(routed, poses, strict=True)]
        return routed

    def extra_repr(self) -> str:
        return f"schedule={self.schedule!r}"


class _Routed(NamedTuple):
    """A layer's parents, and what they were computed from."""

    routing: Routing
    votes: Votes
    parents: Capsules
    agreement: Agreement | None
    changes: Tensor = torch.empty(0)

    def with_coefficients(self) -> Capsules:
        coefficients = self.routing.coefficients(self.votes, self.agreement)
        return self.votes.with_coefficients(self.parents, coefficients)


def _votes(layer: CapsuleLayer, children: Capsules) -> Votes:
    """The votes as the layer's routing sees them."""
    return layer.routing.prepare(layer.votes(children))


def _changes(poses: list[Tensor]) -> Tensor:
    """The largest relative change of a sample, from each iteration to the next."""
    changes = [
        (after - before).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1).clamp_min(torch.finfo(after.dtype).tiny)
        for before, after in itertools.pairwise(poses)
    ]
    return torch.stack([largest(c) for c in changes]) if changes else torch.empty(0)
