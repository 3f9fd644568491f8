"""The reductions as `torch.library` operators, which PyTorch can trace and differentiate: one set for each backend.

An operator takes a flat list of arguments: the tensors of the children, the tensors of the parents, and the options.
Its callers and the backends use `Children`, tensors and `Options` instead. A backward operator adds to gradients of the
children that it is given. In eager mode `reduce` hands these on from one iteration of a routing to the one before it,
so that there is one gradient of the children's size, and not one for each iteration.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.library import Library

from torchcaps.ops import native, tiled, triton
from torchcaps.ops.children import Children, Gradients, Options, check_tensors, count_samples
from torchcaps.ops.numerics import accumulator, autocast_off
from torchcaps.private import is_batched

Parents = tuple[Tensor | None, ...]
Tensors = tuple[Tensor, ...]

LIBRARY = Library("torchcaps", "FRAGMENT")
CHILDREN = "Tensor poses, Tensor weight, Tensor? bias, Tensor? gates"
OPTIONS = "str softmax, bool unit, bool leaky, float eps, SymInt[] stride, SymInt[] dilation, bool shared"
GRADIENTS = "Tensor(a!)? grad_poses, Tensor(b!)? grad_weight, Tensor(c!)? grad_bias, Tensor(d!)? grad_gates"


class Reduction(NamedTuple):
    """Signature of a reduction over votes.

    Fields:
        parents: tensors of the parents that it takes, as in the schema of an operator.
        results: number of results.
        differentiable: number of results that have gradients, counted from the first.
        kept: number of results that the backward function needs, counted from the first.
        shapes: function that returns the shapes of the results, given `(samples, parents)`, `(samples, parents,
            features)`, the tensors of the parents and the options.
    """

    parents: tuple[str, ...]
    results: int
    differentiable: int
    kept: int
    shapes: Callable[[tuple[int, ...], tuple[int, ...], Parents, Options], list[tuple[int, ...]]]


# Sum of the votes, `sum_i gate_i V_ij`, `(samples, parents, features)`.
VOTE_SUM = Reduction((), 1, 1, 0, lambda scores, poses, parents, options: [poses])
# Sum of the votes weighted by the coefficients of a dot agreement, `(samples, parents, features)`, and the logarithm of
# the denominators of a softmax over the children, `(samples, parents)`; it is empty for a softmax over the parents.
# `query` is `(samples, parents, features)`, `offset` is `(groups, kernel, kernel, parents)`.
WEIGHTED_SUM = Reduction(
    ("Tensor query", "Tensor? offset"),
    2,
    1,
    2,
    lambda scores, poses, parents, options: [poses, scores if options.softmax == "children" else (0,)],
)
# Mass, mean, variance, and the sum of beta-weighted shares (empty without betas); softmax over the parents. `target`,
# `precision` and `prior` are the mean, precision and prior of a Gaussian agreement; or a query and None twice; or None
# three times. `betas` is `(groups, kernel, kernel, parents or 1)`.
MOMENTS = Reduction(
    ("Tensor? target", "Tensor? precision", "Tensor? prior", "Tensor? offset", "Tensor? betas"),
    4,
    4,
    3,
    lambda scores, poses, parents, options: [scores, poses, poses, (0,) if parents[4] is None else scores],
)

# Net sums of votes that are the poses of the children, and the sums of their factors, `(samples, parents)`. The tensors
# are those of `tiled.Net`.
NET_SUM = Reduction(
    tuple(f"Tensor? {name}" for name in tiled.Net._fields),
    2,
    2,
    0,
    lambda scores, poses, parents, options: [poses, scores],
)


class Operators(NamedTuple):
    """Operators of a reduction in one backend."""

    reduction: Reduction
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _operators(
    name: str, reduction: Reduction, forward: Callable[..., Tensors], backward: Callable[..., Parents]
) -> Operators:
    parent_count, result_count = len(reduction.parents), reduction.results
    names = [argument.split()[1] for argument in reduction.parents]
    arguments = ", ".join((CHILDREN, *reduction.parents, OPTIONS))

    def split(flat: Sequence[Any]) -> tuple[Children, Parents, Options]:
        options = Options(*flat[4 + parent_count :])
        (down, across), (down_apart, across_apart) = options.stride, options.dilation  # operators pass lists
        options = options._replace(stride=(down, across), dilation=(down_apart, across_apart))
        return Children(*flat[:4]), tuple(flat[4 : 4 + parent_count]), options

    def run(*flat: Any) -> Any:
        children, parents, options = split(flat)
        check_tensors(children, zip(names, parents, strict=True), options)
        with autocast_off(children.poses.device.type):
            return _flat(forward(children, *parents, options))

    def fake(*flat: Any) -> Any:
        children, parents, options = split(flat)
        scores = (count_samples(children, options), children.parents)
        poses = (*scores, children.poses.shape[4] * children.weight.shape[5])
        shapes = reduction.shapes(scores, poses, parents, options)
        return _flat(tuple(accumulator(children.poses, *shape) for shape in shapes))

    def parts(flat: Sequence[Any]) -> tuple[Tensors, Tensors, Sequence[Any], Gradients]:
        first = reduction.differentiable
        kept = first + reduction.kept
        return tuple(flat[:first]), tuple(flat[first:kept]), flat[kept:-4], Gradients(*flat[-4:])

    def run_backward(*flat: Any) -> Any:
        grads, results, rest, into = parts(flat)
        children, parents, options = split(rest)
        with autocast_off(children.poses.device.type):
            found = backward(grads, results, children, *parents, options, into)
        return _flat(tuple(children.poses.new_empty(0) if x is None else x.contiguous() for x in found))

    def fake_backward(*flat: Any) -> Any:
        children, parents, _ = split(parts(flat)[2])
        return _flat(tuple(children.poses.new_empty(0) if x is None else accumulator(x, *x.shape) for x in parents))

    forward_op = _operator(name, f"({arguments}) -> {_tensors(result_count)}", run, fake)
    before = [f"Tensor {what}_{i}" for what in ("grad", "result") for i in range(getattr(reduction, NUMBERS[what]))]
    schema = f"({', '.join((*before, arguments, GRADIENTS))}) -> {_tensors(parent_count)}"
    backward_op = _operator(f"{name}_backward", schema, run_backward, fake_backward)
    operators = Operators(reduction, forward_op, backward_op)

    def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        _save(ctx, operators, inputs, output)

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grads, (None,) * 4, ctx.needs_input_grad)

    torch.library.register_autograd(f"torchcaps::{name}", differentiate, setup_context=save, lib=LIBRARY)
    return operators


def _operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    # Not torch.library.custom_op: its layers of Python take longer than a small reduction.
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchcaps::{name}", fake, lib=LIBRARY)
    return cast(Callable[..., Any], getattr(torch.ops.torchcaps, name).default)


NUMBERS = {"grad": "differentiable", "result": "kept"}


def _tensors(count: int) -> str:
    """Return the schema of an operator's results."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _flat(results: Tensors) -> Any:
    """Return results as an operator must: nothing, one tensor, or a tuple."""
    return None if not results else results[0] if len(results) == 1 else results


def _as_tuple(results: Any) -> Tensors:
    if results is None:
        return ()
    return (results,) if isinstance(results, Tensor) else tuple(results)


TILED = {
    "vote_sum": _operators("tiled_vote_sum", VOTE_SUM, tiled.vote_sum, tiled.vote_sum_backward),
    "weighted_sum": _operators("tiled_weighted_sum", WEIGHTED_SUM, tiled.weighted_sum, tiled.weighted_sum_backward),
    "moments": _operators("tiled_moments", MOMENTS, tiled.moments, tiled.moments_backward),
    "net_sum": _operators("tiled_net_sum", NET_SUM, tiled.net_sum, tiled.net_sum_backward),
}
NATIVE = {
    "vote_sum": _operators("native_vote_sum", VOTE_SUM, native.vote_sum, native.vote_sum_backward),
    "weighted_sum": _operators("native_weighted_sum", WEIGHTED_SUM, native.weighted_sum, native.weighted_sum_backward),
    "moments": _operators("native_moments", MOMENTS, native.moments, native.moments_backward),
}
TRITON = {
    "vote_sum": _operators("triton_vote_sum", VOTE_SUM, triton.vote_sum, triton.vote_sum_backward),
    "weighted_sum": _operators("triton_weighted_sum", WEIGHTED_SUM, triton.weighted_sum, triton.weighted_sum_backward),
    "moments": _operators("triton_moments", MOMENTS, triton.moments, triton.moments_backward),
}
BACKENDS: dict[str, dict[str, Operators]] = {"reference": {}, "tiled": TILED, "native": NATIVE, "triton": TRITON}


def reduce(operators: Operators, children: Children, parents: Parents, options: Options) -> tuple[Tensors, Children]:
    """Run a reduction. Return its results, and the children to give to the next reduction of the same votes."""
    flat = (*children, *parents, *options)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _as_tuple(operators.forward(*flat)), children
    results = _SharedGradients.apply(operators, *flat)
    handed_on: Any = (x if y is None else y for x, y in zip(children, results[-4:], strict=True))
    return results[:-4], Children(*handed_on)


class _SharedGradients(torch.autograd.Function):
    """A reduction that also returns the children unchanged, for the next iteration.

    In the backward pass they bring the gradients of the later iterations, and this one adds its own in place. That is
    safe because no other autograd function sees these tensors.
    """

    @staticmethod
    def forward(ctx: Any, operators: Operators, *flat: Any) -> tuple[Tensor | None, ...]:
        results = _as_tuple(operators.forward(*flat))
        _save(ctx, operators, flat, results)
        ctx.mark_non_differentiable(*results[operators.reduction.differentiable :])
        needed = ctx.needs_input_grad[1:]
        return *results, *(x if need else None for x, need in zip(flat[:4], needed, strict=False))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_differentiate(ctx, grads[:-4], grads[-4:], ctx.needs_input_grad[1:])


def _save(ctx: Any, operators: Operators, flat: Sequence[Any], results: Any) -> None:
    results, reduction = _as_tuple(results), operators.reduction
    count = 4 + len(reduction.parents)
    ctx.operators, ctx.options = operators, tuple(flat[count:])
    ctx.shapes = [(x.shape, x.dtype, x.device) for x in results[: reduction.differentiable]]
    ctx.save_for_backward(*results[: reduction.kept], *flat[:count])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grads: Sequence[Tensor | None], held: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments; those of the children are added to the tensors in `held`."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "votes that are not stored have no second derivatives (create_graph=True): use backend='reference'"
        )
    if any(grad is not None and is_batched(grad) for grad in grads):
        raise RuntimeError(
            "votes that are not stored have no batched gradients (is_grads_batched=True, vectorize=True): use "
            "backend='reference'"
        )
    reduction = cast(Operators, ctx.operators).reduction
    saved = ctx.saved_tensors  # read once: activation checkpointing gives each tensor once
    results, tensors = saved[: reduction.kept], saved[reduction.kept :]
    no_options = (None,) * len(ctx.options)
    if all(grad is None for grad in grads):
        return *held, *(None,) * len(reduction.parents), *no_options
    into = [
        accumulator(x) if grad is None and x is not None and wanted else grad
        for grad, x, wanted in zip(held, tensors, needed, strict=False)
    ]
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.shapes, strict=False)
    ]
    found = _as_tuple(ctx.operators.backward(*whole, *results, *tensors, *ctx.options, *into))
    parent_grads = [grad if x is not None else None for grad, x in zip(found, tensors[4:], strict=True)]
    return *into, *parent_grads, *no_options
