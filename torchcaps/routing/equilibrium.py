"""Routing to a fixed point, with implicit gradients.

Tsai et al. (2020) name it as future work: infinitely many iterations, as in Bai, Kolter, Koltun: Deep Equilibrium
Models (2019). The acceleration is Anderson's (1965), in the form of Walker and Ni (2011).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Votes
from torchcaps.routing.base import Routing

RIDGE = 1e-8  # of the normal equations, relative: differences become parallel near the fixed point


@dataclass(frozen=True)
class Equilibrium:
    r"""Iterate until parents and agreement change no more.

    With z the state that a routing carries (of a dot agreement its query, of a Gaussian one mean, log precision and
    prior) and f its step, find :math:`z^* = f(z^*, \theta)` and differentiate there, whatever the way to it:

    .. math:: \frac{\partial L}{\partial \theta} = g \frac{\partial f}{\partial \theta}, \quad
        g = \frac{\partial L}{\partial z^*} + g \frac{\partial f}{\partial z}

    where g is found like z, by iteration. There are no second derivatives. No iteration's intermediate results are
    kept. A routing whose coefficients depend on the iteration, such as EM with its temperature, takes the values of its
    last. A routing may have several fixed points: plain iteration finds that of sequential routing, if it converges,
    acceleration any. The loops depend on the data: `torch.export`, `torch.func.grad` and `fullgraph=True` do not go
    through.

    Args:
        tolerance: largest relative change :math:`|f(z) - z| / |f(z)|` of a sample's state (in a convolution, a
            window's) to stop at.
        max_iterations: to stop at in any case. Nothing says that a routing must converge: look at
            :attr:`torchcaps.CapsuleStack.convergence`.
        history: differences that Anderson acceleration combines; 0 iterates plainly.
    """

    tolerance: float = 1e-4
    max_iterations: int = 50
    history: int = 5

    def __post_init__(self) -> None:
        if not self.tolerance > 0 or self.max_iterations < 1 or self.history < 0:
            raise ValueError(
                "expected tolerance > 0, max_iterations of at least 1 and history of at least 0, got "
                f"{self.tolerance}, {self.max_iterations}, {self.history}"
            )

    def route(self, routing: Routing, votes: Votes) -> tuple[Capsules, Agreement, "Convergence"]:
        """The parents, the agreement with them, and how it was found."""
        check_equilibrium(routing)

        with torch.no_grad():
            _, like = routing.step(votes, routing.first_agreement(votes), torch.inf)
            assert like is not None

        # The parameters may be others by the time of the backward pass, as under torch.func.functional_call.
        as_now = routing.with_values(**dict(routing.named_parameters()))

        def state_after(votes: Votes, state: Tensor) -> Tensor:
            _, agreement = as_now.step(votes, as_now.scaled(like.with_state(state)), torch.inf)
            assert agreement is not None
            return agreement.state()

        with torch.no_grad():
            state, residuals = self.solve(lambda z: state_after(votes, z), like.state())
        convergence = Convergence(residuals)
        attached = state_after(votes, state)
        if attached.requires_grad:
            constants = votes.detach()
            attached.register_hook(self._implicit(lambda z: state_after(constants, z), state, convergence))
        agreement = like.with_state(attached)
        return routing.advance(votes, agreement, torch.inf)[0], agreement, convergence

    def solve(
        self, function: Callable[[Tensor], Tensor], start: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A fixed point of `function` on `(samples, n)`: for each sample the best value found, and the largest residual
        of each iteration, `(iterations,)`, relative to the value, or to `scale`, `(samples,)`."""
        points, values, residuals = [start], [], []
        best, least = start, start.new_full(start.shape[:1], torch.inf)
        last, age = least, start.new_zeros(start.shape[:1])
        for _ in range(self.max_iterations):
            value = function(points[-1])
            size = value.norm(dim=1) if scale is None else scale
            residual = (value - points[-1]).norm(dim=1) / size.clamp_min(torch.finfo(value.dtype).tiny)
            finite = residual.isfinite()
            value = torch.where(finite.unsqueeze(1), value, best)
            residual = torch.where(finite, residual, torch.inf)
            best = torch.where((residual < least).unsqueeze(1), value, best)
            least = torch.minimum(least, residual)
            residuals.append(largest(residual))
            if residuals[-1] <= self.tolerance:
                break
            values.append(value)
            # A combination that made things worse: that sample starts anew, with a plain iteration.
            age = torch.where(residual > last, 1, age + 1)
            last = residual
            points, values = points[-self.history - 1 :], values[-self.history - 1 :]
            points.append(_anderson(points, values, age))
        return best, torch.stack(residuals)

    def _implicit(
        self, state_after: Callable[[Tensor], Tensor], fixed: Tensor, convergence: "Convergence"
    ) -> Callable[[Tensor], Tensor]:
        """A hook that turns the gradient of the state into the g above."""

        def hook(grad: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("an equilibrium has no second derivatives (create_graph=True)")

            with torch.enable_grad():
                state = fixed.detach().requires_grad_()
                value = state_after(state)

            def function(g: Tensor) -> Tensor:
                return grad + torch.autograd.grad(value, state, g, retain_graph=True)[0]

            # Not relative to g: if it grows without end, that would make the largest the best.
            found, convergence.backward = self.solve(function, grad, grad.norm(dim=1))
            return found

        return hook


@dataclass
class Convergence:
    """How a fixed point was found: the largest relative residual of a sample in each iteration, `(iterations,)`.

    Attributes:
        forward: of the state.
        backward: of its gradient, once there was a backward pass.
    """

    forward: Tensor
    backward: Tensor | None = None


def check_equilibrium(routing: Routing) -> None:
    if not routing.iterative:
        raise ValueError(f"{type(routing).__name__} has no iterations: an equilibrium needs a routing that has")
    if not routing.comes_to_rest:
        raise ValueError(
            f"{routing} never comes to rest: an equilibrium needs InvertedAttentionRouting, HeinsenRouting, or "
            "EMRouting with schedule='saturating'"
        )
    if getattr(routing, "start", None) == "learned":
        raise ValueError("start='learned' learns nothing at an equilibrium, which forgets its start: use 'zero'")
    if routing.gradient != "unrolled":
        raise ValueError(
            f"an equilibrium has gradients of its own: it needs gradient='unrolled', got {routing.gradient!r}"
        )


def largest(x: Tensor) -> Tensor:
    """The maximum, 0 of nothing."""
    return x.max() if len(x) else x.sum()


def _anderson(points: list[Tensor], values: list[Tensor], age: Tensor) -> Tensor:
    """The next point: the last value, less the combination of the past `age` differences, at most, that cancels most of
    its residual."""
    value, residual = values[-1], values[-1] - points[-1]
    if len(points) == 1:
        return value
    steps = torch.stack([b - a for a, b in itertools.pairwise(values)], dim=1)
    changes = steps - torch.stack([b - a for a, b in itertools.pairwise(points)], dim=1)
    known = torch.arange(len(values) - 1, 0, -1, device=age.device) < age.unsqueeze(1)
    changes = changes * known.unsqueeze(2)
    gram = (changes @ changes.transpose(1, 2)).double()
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.sum(1, keepdim=True) + torch.finfo(torch.float64).tiny
    factors = torch.linalg.solve(gram, (changes @ residual.unsqueeze(2)).double()).to(value.dtype)
    return value - (factors.transpose(1, 2) @ steps).squeeze(1)
