"""Routing to a fixed point, with implicit gradients.

Tsai et al. (2020) name infinitely many iterations as future work. The method is that of Bai, Kolter, Koltun: Deep
Equilibrium Models (2019), with Anderson acceleration (1965) in the form of Walker and Ni (2011).
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from torchcaps.ops import Votes, autocast_off
from torchcaps.routing.base import Iteration, Routing
from torchcaps.utils.arguments import Count, CountOrZero, Range, check_fields
from torchcaps.utils.private import is_exported, is_transformed

RIDGE = 1e-8  # relative ridge of the normal equations: near the fixed point the differences become parallel


@dataclass(frozen=True)
class Equilibrium:
    r"""Schedule of a :class:`torchcaps.CapsuleStack` that iterates each layer until its state no longer changes.

    Let z be the state that a routing carries from one iteration to the next and f the routing's step: the parents, or
    for EM and Heinsen routing the mean, the logarithm of sigma and the score. The schedule finds
    :math:`z^* = f(z^*, \theta)` and differentiates at this point, independently of the iterations that led to it:

    .. math:: \frac{\partial L}{\partial \theta} = g \frac{\partial f}{\partial \theta}, \quad
        g = \frac{\partial L}{\partial z^*} + g \frac{\partial f}{\partial z}

    where g is found by iteration, like z. Intermediate results of the iterations are not kept. A routing that depends
    on the iteration, such as EM with its temperature, uses its limit for infinitely many iterations. If a routing has
    several fixed points, plain iteration finds that of sequential routing, provided that it converges; acceleration may
    find any of them.

    There are no second derivatives. The loops depend on the data, so `torch.export`, `torch.func.grad` and
    `torch.compile(fullgraph=True)` do not work.

    Args:
        tolerance: largest relative change :math:`|f(z) - z| / |f(z)|` of a sample's state (in a convolution, of a
            window's state) at which the iteration stops.
        max_iterations: largest number of iterations, in place of the routing's own. A routing need not converge: see
            :attr:`torchcaps.CapsuleStack.convergence`.
        history: number of past differences that Anderson acceleration combines; 0 for plain iteration.
    """

    tolerance: Annotated[float, Range(0, open="least")] = 1e-4
    max_iterations: Count = 50
    history: CountOrZero = 5

    def __post_init__(self) -> None:
        check_fields(self)

    def route(self, routing: Routing, votes: Votes) -> tuple[Iteration, "Convergence"]:
        """Return the iteration at the fixed point of prepared votes, and how the point was found."""
        check_equilibrium(routing)
        if is_transformed() or is_exported():
            raise RuntimeError("an equilibrium stops when its numbers say so: use schedule='sequential'")
        # Under torch.func.functional_call the module has other parameters by the time of the backward pass.
        as_now = _with_own_tables(routing)  # which nobody watches
        as_now.is_uniform = routing.is_uniform
        with torch.no_grad():
            _, like = as_now.advance(votes, as_now.first_state(votes), torch.inf)
        if like is None:  # there is no state to iterate
            return routing.advance(votes, None, torch.inf)[0], Convergence(torch.zeros(1, device=votes.device))
        if any(len(x) != votes.batch for x in _tensors(like)):
            sizes = [tuple(x.shape) for x in _tensors(like)]
            raise ValueError(
                f"an equilibrium iterates a state for each of {votes.batch} samples, but the state of "
                f"{type(routing).__name__} has tensors {sizes}: add what all samples share in `agreement`"
            )

        def state_after(votes: Votes, state: Tensor) -> Tensor:
            return flatten(as_now.advance(votes, unflatten(state, like), torch.inf)[1])

        with torch.no_grad():
            state, residuals = self.solve(lambda z: state_after(votes, z), flatten(like))
        convergence = Convergence(residuals)
        attached = state_after(votes, state)
        if attached.requires_grad:
            constants = votes.detach()
            hook = partial(self._implicit_gradient, lambda z: state_after(constants, z), state, convergence)
            attached.register_hook(hook)
        return routing.advance(votes, unflatten(attached, like), torch.inf)[0], convergence

    def solve(
        self, function: Callable[[Tensor], Tensor], start: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find a fixed point of `function`.

        Args:
            function: maps points `(samples, n)` to values `(samples, n)`.
            start: first points `(samples, n)`.
            scale: norms `(samples,)` to which residuals are relative; None for the norms of the values.

        Returns:
            The best value found for each sample, `(samples, n)`, and the largest relative residual of a sample in each
            iteration, `(iterations,)`.
        """
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
            # A sample whose residual grew restarts with a plain iteration.
            age = torch.where(residual > last, 1, age + 1)
            last = residual
            points, values = points[-self.history - 1 :], values[-self.history - 1 :]
            points.append(_anderson(points, values, age))
        return best, torch.stack(residuals)

    def _implicit_gradient(
        self, state_after: Callable[[Tensor], Tensor], fixed: Tensor, convergence: "Convergence", grad: Tensor
    ) -> Tensor:
        """Turn the gradient of the state at the fixed point into g of the class docstring."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "an equilibrium has no second derivatives (create_graph=True): use schedule='sequential' and "
                "backend='reference'"
            )
        with torch.enable_grad():
            state = fixed.detach().requires_grad_()
            value = state_after(state)
        if not value.requires_grad:  # uniform coefficients do not depend on the state
            return grad

        def function(g: Tensor) -> Tensor:
            (through,) = torch.autograd.grad(
                value, state, g, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            return grad + through

        # Relative to grad, not to g: if g diverges, its largest iterate would have the smallest relative residual.
        g, convergence.backward = self.solve(function, grad, grad.norm(dim=1))
        return g


@dataclass
class Convergence:
    """Convergence of a fixed-point iteration: the largest relative residual of a sample per iteration, `(iterations,)`.

    Attributes:
        forward: residuals of the state.
        backward: residuals of its gradient; None before the backward pass.
    """

    forward: Tensor
    backward: Tensor | None = None


def check_equilibrium(routing: Routing) -> None:
    """Check that a routing can have a fixed point, and no start or gradient that an equilibrium would ignore."""
    if not routing.iterative:
        raise ValueError(f"{type(routing).__name__} has no iterations: an equilibrium needs an iterative routing")
    if not routing.comes_to_rest:
        raise ValueError(
            f"{type(routing).__name__}({routing.extra_repr()}) cannot be brought to a fixed point: an equilibrium "
            "needs a routing whose comes_to_rest is True, such as InvertedAttentionRouting or EMRouting"
        )
    if getattr(routing, "start", None) == "learned":
        raise ValueError("start='learned' learns nothing at an equilibrium: use another start")
    if routing.gradient != "unrolled":
        raise ValueError(
            f"an equilibrium computes its gradients implicitly: it needs gradient='unrolled', got {routing.gradient!r}"
        )


def flatten(state: Tensor | tuple[Tensor | None, ...]) -> Tensor:
    """Return a state as one tensor, `(batch, n)`."""
    return torch.cat([x.flatten(1) for x in _tensors(state)], dim=1)


def _tensors(state: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    return [x for x in ((state,) if isinstance(state, Tensor) else state) if x is not None]


def unflatten(flat: Tensor, like: Any) -> Any:
    """Return a flattened state in the form of another."""
    if isinstance(like, Tensor):
        return flat.view(like.shape)
    parts = flat.split([0 if x is None else x.shape[1:].numel() for x in like], dim=1)
    return type(like)(*(None if x is None else part.reshape(x.shape) for part, x in zip(parts, like, strict=True)))


def _with_own_tables(module: Any) -> Any:
    """Return a shallow copy of a module with tables of parameters of its own: `functional_call` replaces the entries of
    the module's."""
    copied = copy.copy(module)
    copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
    copied._modules = {name: None if x is None else _with_own_tables(x) for name, x in module._modules.items()}
    return copied


def largest(x: Tensor) -> Tensor:
    """Return the maximum, or 0 for an empty tensor."""
    return x.max() if len(x) else x.sum()


def _anderson(points: list[Tensor], values: list[Tensor], age: Tensor) -> Tensor:
    """Return the next point: the last value minus the combination of past differences that best cancels its residual.

    Args:
        points, values: past arguments and results of the function, `(samples, n)` each.
        age: number of points since each sample's restart, `(samples,)`; older ones are ignored.
    """
    value, residual = values[-1], values[-1] - points[-1]
    if len(points) == 1:
        return value
    steps = torch.stack([b - a for a, b in itertools.pairwise(values)], dim=1)
    changes = steps - torch.stack([b - a for a, b in itertools.pairwise(points)], dim=1)
    known = torch.arange(len(values) - 1, 0, -1, device=age.device) < age.unsqueeze(1)
    changes = changes * known.unsqueeze(2)
    with autocast_off(value.device.type):  # in bfloat16 the iteration would come to another fixed point, or to none
        gram = (changes @ changes.transpose(1, 2)).double()
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal += RIDGE * diagonal.sum(1, keepdim=True) + torch.finfo(torch.float64).tiny
        factors = torch.linalg.solve(gram, (changes @ residual.unsqueeze(2)).double()).to(value.dtype)
        return value - (factors.transpose(1, 2) @ steps).squeeze(1)
