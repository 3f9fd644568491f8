"""The reductions as operators that PyTorch can trace and differentiate, one set per backend.

`torchcaps.ops.tiled` says what they take: what the children are made of (poses, weight, bias, gates), then tensors
about the parents, then numbers. A backward operator adds to gradients of the children that it is given. In eager mode
`reduce` hands these on from one iteration of a routing to the one before, so that there is one gradient of the
children's size, and not one per iteration.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from torchcaps.ops import tiled
from torchcaps.ops.numerics import autocast_off

Children = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # poses, weight, bias, gates
GRADIENTS = ("grad_poses", "grad_weight", "grad_bias", "grad_gates")


class Reduction(NamedTuple):
    """An operator with its backward operator, which takes the gradients of the first `differentiable` results, the
    first `kept` results, all arguments, and the GRADIENTS; it returns gradients of the tensors about the parents."""

    forward: CustomOpDef
    backward: CustomOpDef
    differentiable: int
    kept: int


def _operator(backend: str, name: str, mutates: Sequence[str] = ()) -> CustomOpDef:
    @functools.wraps(getattr(tiled, name))  # all backends have the signatures of this one
    def run(*arguments: Any) -> Any:
        # Imported when used: Triton may be missing.
        module = importlib.import_module(f"torchcaps.ops.{backend}")
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        with autocast_off(device.type):
            return getattr(module, name)(*arguments)

    return custom_op(f"torchcaps::{backend}_{name}", run, mutates_args=mutates)


def _reduction(backend: str, name: str, differentiable: int, kept: int) -> Reduction:
    forward, backward = _operator(backend, name), _operator(backend, f"{name}_backward", GRADIENTS)
    forward.register_fake(getattr(tiled, f"{name}_shapes"))
    backward.register_fake(getattr(tiled, f"{name}_backward_shapes"))
    reduction = Reduction(forward, backward, differentiable, kept)

    def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        _save(ctx, reduction, inputs, output)

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grads, (None,) * len(GRADIENTS), ctx.needs_input_grad)

    forward.register_autograd(differentiate, setup_context=save)
    return reduction


REDUCTIONS = {
    (backend, name): _reduction(backend, name, differentiable, kept)
    for backend, name, differentiable, kept in (
        ("tiled", "vote_sum", 1, 0),
        ("tiled", "weighted_sum", 1, 2),
        ("tiled", "moments", 4, 3),
        ("triton", "weighted_sum", 1, 2),
        ("triton", "moments", 4, 3),
    )
}


def reduce(backend: str, name: str, children: Children, *rest: Any) -> tuple[tuple[Tensor, ...], Children]:
    """The results, and the children to give to the next reduction of the same votes."""
    reduction = REDUCTIONS[backend, name]
    half = any(x is not None and x.dtype in (torch.float16, torch.bfloat16) for x in children)  # they would sum in it
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or half:
        return _as_tuple(reduction.forward(*children, *rest)), children
    results = _SharedGradients.apply(reduction, *children, *rest)
    handed_on = (x if y is None else y for x, y in zip(children, results[-len(children) :], strict=True))
    return results[: -len(children)], cast(Children, tuple(handed_on))


class _SharedGradients(torch.autograd.Function):
    """A reduction that also returns the children as they are: what comes back for them in the backward pass are the
    gradients of later iterations, to which this one adds. Only this class sees these tensors, so it may."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, *arguments: Any) -> tuple[Tensor | None, ...]:
        results = _as_tuple(reduction.forward(*arguments))
        _save(ctx, reduction, arguments, results)
        ctx.mark_non_differentiable(*results[reduction.differentiable :])
        needed = ctx.needs_input_grad[1:]
        return *results, *(x if need else None for x, need in zip(arguments[: len(GRADIENTS)], needed, strict=False))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *_differentiate(ctx, grads[: -len(GRADIENTS)], grads[-len(GRADIENTS) :], needed)


def _save(ctx: Any, reduction: Reduction, arguments: Sequence[Any], results: Any) -> None:
    tensors = [x for x in arguments if x is None or isinstance(x, Tensor)]  # all of them come before the numbers
    results = _as_tuple(results)
    ctx.reduction, ctx.numbers = reduction, arguments[len(tensors) :]
    ctx.shapes = [(x.shape, x.dtype, x.device) for x in results[: reduction.differentiable]]
    ctx.save_for_backward(*results[: reduction.kept], *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grads: Sequence[Tensor | None], held: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments, those of the children added to the tensors that are `held`."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "votes that are not stored have no second derivatives (create_graph=True): use backend='reference'"
        )
    reduction: Reduction = ctx.reduction
    saved = ctx.saved_tensors
    kept, tensors = saved[: reduction.kept], saved[reduction.kept :]
    if all(grad is None for grad in grads):
        return *held, *(None,) * (len(tensors) - len(held) + len(ctx.numbers))
    buffers = [
        tiled.accumulator(x) if grad is None and x is not None and wanted else grad
        for grad, x, wanted in zip(held, tensors, needed, strict=False)
    ]
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.shapes, strict=False)
    ]
    about_parents = _as_tuple(reduction.backward(*whole, *kept, *tensors, *ctx.numbers, *buffers))
    found = [grad if x is not None else None for grad, x in zip(about_parents, tensors[len(GRADIENTS) :], strict=True)]
    return *buffers, *found, *(None,) * len(ctx.numbers)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    if results is None:
        return ()
    return (results,) if isinstance(results, Tensor) else tuple(results)
