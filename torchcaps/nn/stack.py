"""Capsule layers on top of each other, and the order in which they route."""

import itertools
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.pose import as_capsules
from torchcaps.ops import Agreement, Votes
from torchcaps.routing import Equilibrium, Routing, check_equilibrium, iterate
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


class CapsuleStack(nn.Sequential):
    """Capsule layers, each the children of the next.

    Args:
        layers: capsule layers.
        schedule: the order of the iterations.

            - "sequential": each layer routes to its end before the next one starts.
            - "concurrent": one iteration layer by layer, then all layers at once, each from what its neighbours were
              an iteration before (Tsai et al. 2020, Procedure 2). The layers' routings have equally many iterations.
              Passes of lower layers that cannot reach the last one any more are left out.
            - an :class:`torchcaps.Equilibrium`: each layer to its fixed point, differentiated implicitly. Both
              schedules above tend to it with more and more iterations, if they converge.

    Shape:
        - Input: children as the first layer takes them; output: parents of the last layer.
    """

    def __init__(self, *layers: CapsuleLayer, schedule: Schedule = "sequential"):
        super().__init__(*layers)
        self.schedule = schedule
        if not layers:
            raise ValueError("a stack needs at least one capsule layer")
        for layer in layers:
            if not isinstance(layer, CapsuleLayer):
                raise TypeError(
                    f"a stack is made of capsule layers, got {type(layer).__name__}: put what comes before into the "
                    "network around it"
                )
        if isinstance(schedule, Equilibrium):
            for layer in layers:
                check_equilibrium(layer.routing)
        elif schedule == "concurrent":
            steps = {layer.routing.steps for layer in layers}
            if len(steps) > 1:
                raise ValueError(f"concurrent layers iterate together, and these have iterations of {sorted(steps)}")
            if any(layer.routing.gradient != "unrolled" for layer in layers):
                raise ValueError(
                    "gradient='last' would cut all but the last layer off a concurrent stack: use 'unrolled'"
                )
        elif schedule != "sequential":
            raise ValueError(f"schedule must be 'sequential', 'concurrent' or an Equilibrium, got {schedule!r}")

    @property
    def layers(self) -> list[CapsuleLayer]:
        return cast(list[CapsuleLayer], list(self))

    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        """Route children through all layers.

        Args:
            capsules: the children of the first layer.
            return_coefficients: also return the coefficients of the last layer.
        """
        *_, last = self._route(as_capsules(capsules), trace=False)
        return last.with_coefficients() if return_coefficients else last.parents

    @torch.no_grad()
    def trace(self, capsules: Capsules | Tensor) -> list[Trace]:
        """What each layer makes of these children, to look at: without gradients."""
        routed = self._route(as_capsules(capsules), trace=True)
        return [Trace(x.with_coefficients(), torch.empty(0) if x.changes is None else x.changes) for x in routed]

    def _route(self, children: Capsules, trace: bool) -> list["_Routed"]:
        if self.schedule == "concurrent":
            return self._concurrent(children, trace)
        routed: list[_Routed] = []
        for layer in self.layers:
            routed.append(self._to_its_end(layer.routing, layer.votes(children), trace))
            children = routed[-1].parents
        return routed

    def _to_its_end(self, routing: Routing, votes: Votes, trace: bool) -> "_Routed":
        if isinstance(self.schedule, Equilibrium):
            return _Routed(routing, votes, *self.schedule.route(routing, votes))
        poses: list[Tensor] = []
        step = routing.step(votes)

        def traced(agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
            parents, agreement = step(agreement, t)
            poses.append(parents.poses)
            return parents, agreement

        first = routing.first_agreement(votes)
        parents, agreement = iterate(traced if trace else step, routing.steps, routing.gradient, first)
        return _Routed(routing, votes, parents, agreement, _changes(poses) if trace else None)

    def _concurrent(self, children: Capsules, trace: bool) -> list["_Routed"]:
        layers = self.layers
        iterations = layers[0].routing.steps
        routed: list[_Routed] = []
        after: list[Agreement] = []  # with the parents of the pass before
        poses: list[list[Tensor]] = []
        for layer in layers:  # Procedure 2, lines 5, 6
            votes = layer.votes(children)
            first = layer.routing.first_agreement(votes)
            children, agreement = layer.routing.step(votes)(first, 0)
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
                votes = before[k].votes if t == 1 or k == 0 else layer.votes(before[k - 1].parents)
                parents, agreement = layer.routing.step(votes)(after[k], t)
                routed[k] = _Routed(layer.routing, votes, parents, after[k])
                after[k] = agreement
                poses[k].append(parents.poses)
        return [x._replace(changes=_changes(p)) for x, p in zip(routed, poses, strict=True)] if trace else routed

    def extra_repr(self) -> str:
        return f"schedule={self.schedule!r}"


class _Routed(NamedTuple):
    """A layer's parents, and what they were computed from."""

    routing: Routing
    votes: Votes
    parents: Capsules
    agreement: Agreement | None
    changes: Tensor | None = None

    def with_coefficients(self) -> Capsules:
        coefficients = self.routing.coefficients(self.votes, self.agreement)
        return self.votes.with_coefficients(self.parents, coefficients)


def _changes(poses: list[Tensor]) -> Tensor:
    """The largest relative change of a sample, from each iteration to the next."""
    changes = [
        (after - before).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1).clamp_min(torch.finfo(after.dtype).tiny)
        for before, after in itertools.pairwise(poses)
    ]
    return torch.stack([largest(c) for c in changes]) if changes else torch.empty(0)
