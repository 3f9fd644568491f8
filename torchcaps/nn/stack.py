"""Stacks of capsule layers, and schedules for the order in which the layers route."""

from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.first_pass import look_at
from torchcaps.nn.layer import CapsuleLayer, gatherable
from torchcaps.ops import Votes
from torchcaps.routing import Iteration
from torchcaps.utils.arguments import checked

Schedule = Literal["sequential", "concurrent"]


class CapsuleStack(nn.Module):
    """Stack of capsule layers: the parents of each layer are the children of the next.

    Args:
        layers: capsule layers.
        schedule: order of the iterations.

            - "sequential": each layer finishes its routing before the next one starts.
            - "concurrent": one iteration layer by layer, then all layers at once, each from the state of its neighbors
              one iteration before (Tsai et al. 2020, Procedure 2). All routings must have the same number of
              iterations. Passes of lower layers that come too late to reach the last layer are left out. It calls the
              votes and the routing of a layer separately, so hooks on a layer's `forward` do not run.

    Shape:
        - Input: children in the form that the first layer takes; output: parents of the last layer.
    """

    @checked
    def __init__(self, *layers: CapsuleLayer, schedule: Schedule = "sequential"):
        super().__init__()
        if not layers:
            raise ValueError("a stack needs at least one capsule layer")
        self.layers: Any = nn.ModuleList(layers)
        self.schedule = schedule
        self._check()

    def _check(self) -> None:
        """Check the schedule. Called again by `forward`, because users may change the schedule and the routings."""
        routings = [layer.routing for layer in self.layers]
        if self.schedule == "concurrent":
            steps = {routing.steps for routing in routings}
            if len(steps) > 1:
                raise ValueError(f"concurrent layers need the same number of iterations, got {sorted(steps)}")
            for routing in routings:
                if any(isinstance(part, nn.BatchNorm1d) for part in routing.modules()):
                    raise ValueError(
                        f"{type(routing).__name__} has batch norms, whose running values follow the last iteration, "
                        "which lower layers of a concurrent stack leave out: use schedule='sequential'"
                    )
            if any(routing.gradient != "unrolled" for routing in routings):
                raise ValueError(
                    "gradient='last' would cut off the gradient of all but the last layer of a concurrent stack: use "
                    "gradient='unrolled'"
                )
        elif self.schedule != "sequential":
            raise ValueError(f"schedule must be 'sequential' or 'concurrent', got {self.schedule!r}")

    @checked
    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        """Route children through all layers.

        Args:
            capsules: children of the first layer, as Capsules or as a tensor of poses.
            return_coefficients: also return the coefficients of the last layer.
        """
        self._check()
        routed = look_at(list(self.layers), capsules, partial(self._route, capsules, return_coefficients))
        return gatherable(self, routed)

    def _route(self, parents: Capsules | Tensor, return_coefficients: bool) -> Capsules:
        if self.schedule == "sequential":
            *lower, last = self.layers
            for layer in lower:
                parents = layer(parents)
            return last(parents, return_coefficients=return_coefficients)
        last = self._concurrent(parents)
        return last.with_coefficients() if return_coefficients else last.parents

    def _concurrent(self, children: Capsules | Tensor) -> Iteration:
        layers = list(self.layers)
        iterations = layers[0].routing.steps
        routed: list[_Routed] = []
        states: list[Any] = []  # those after the previous pass
        for layer in layers:  # Procedure 2, lines 5, 6
            votes = _votes(layer, children)
            last, state = layer.routing.advance(votes, layer.routing.first_state(votes), 0)
            children = last.parents
            routed.append(_Routed(votes, last))
            states.append(state)
        for t in range(1, iterations):  # lines 7 to 9
            before = list(routed)
            for k, layer in enumerate(layers):
                above = len(layers) - 1 - k
                if t >= iterations - above:
                    continue  # too late to reach the last layer
                # At t = 1 the votes of the first pass still hold: the parents of the layer below are the same.
                votes = before[k].votes if t == 1 or k == 0 else _votes(layer, before[k - 1].last.parents)
                last, states[k] = layer.routing.advance(votes, states[k], t)
                routed[k] = _Routed(votes, last)
        return routed[-1].last

    def extra_repr(self) -> str:
        return f"schedule={self.schedule!r}"


class _Routed(NamedTuple):
    """Prepared votes of a layer and the last iteration on them."""

    votes: Votes
    last: Iteration


def _votes(layer: CapsuleLayer, children: Capsules | Tensor) -> Votes:
    """Return the prepared votes on which the layer's routing iterates."""
    return layer.routing.prepare(layer.votes(children))
