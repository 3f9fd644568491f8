"""The reductions as `torch.library` operators, which PyTorch can trace and differentiate: one set for each backend.

An operator takes a flat list of arguments, in this order: the tensors of the children, the tensors of the parents, and
the options. Its callers and the backends use `Children`, tensors and `Options` instead. A backward operator takes the
gradients of the results, the results that it needs, and all these arguments. It returns the gradients of the parents'
tensors, and adds those of the children to tensors that it is given. In eager mode `apply_operator` hands these on from
one iteration of a routing to the one before it, so that there is one gradient of the children's size, and not one for
each iteration: where each child has its own weights, a step takes a fifth less time.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.library import Library

from torchcaps.ops import native
from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors, check_parents, count_samples
from torchcaps.ops.numerics import accumulator, autocast_off, sum_dtype
from torchcaps.ops.tiled.net_sum import Net
from torchcaps.utils.arguments import HALF
from torchcaps.utils.private import has_plain_values, is_batched, is_profiled

Parents = tuple[Tensor | None, ...]

LIBRARY = Library("torchcaps", "FRAGMENT")
CHILDREN_ARGUMENTS = "Tensor poses, Tensor weight, Tensor? bias, Tensor? gates"
OPTION_ARGUMENTS = (
    "str softmax, bool unit, bool leaky, float eps, SymInt[] stride, SymInt[] dilation, bool poses_are_votes"
)
GRADIENT_ARGUMENTS = "Tensor(a!)? grad_poses, Tensor(b!)? grad_weight, Tensor(c!)? grad_bias, Tensor(d!)? grad_gates"


class Reduction(NamedTuple):
    """Signature of a reduction over votes.

    Fields:
        name: its name, as that of the backends' functions.
        parents: class of the tensors of the parents that it takes, `ParentTensors` or `Net`.
        results: names of the results.
        differentiable: number of results that have gradients, counted from the first.
        kept: number of results that the backward function needs, counted from the first.
        shapes: function that returns the shapes of the results, given `(samples, parents)`, `(samples, parents,
            features)`, the tensors of the parents and the options.
    """

    name: str
    parents: Any
    results: tuple[str, ...]
    differentiable: int
    kept: int
    shapes: Callable[[tuple[int, ...], tuple[int, ...], Any, Options], list[tuple[int, ...]]]

    def new_results(self, children: Children, parents: Any, options: Options) -> Tensors:
        """Return tensors without values in the shapes of the results."""
        scores = (count_samples(children, options), children.parents)
        poses = (*scores, children.poses.shape[4] * children.weight.shape[5])
        dtype = sum_dtype(children.poses.dtype)
        shapes = self.shapes(scores, poses, parents, options)
        return tuple(children.poses.new_empty(shape, dtype=dtype) for shape in shapes)


# Sum of the votes, `sum_i gate_i V_ij`, `(samples, parents, features)`.
VOTE_SUM = Reduction("vote_sum", ParentTensors, ("sums",), 1, 0, lambda scores, poses, parents, options: [poses])
# Sum of the votes weighted by the coefficients of a dot agreement, `(samples, parents, features)`, and the logarithm of
# the denominators of a softmax over the children, `(samples, parents)`; it is empty for a softmax over the parents.
WEIGHTED_SUM = Reduction(
    "weighted_sum",
    ParentTensors,
    ("sums", "log_masses"),
    1,
    2,
    lambda scores, poses, parents, options: [poses, scores if options.softmax == "children" else (0,)],
)
# Mass, mean, variance, and the sum of beta-weighted shares (empty without betas); softmax over the parents.
MOMENTS = Reduction(
    "moments",
    ParentTensors,
    ("mass", "mean", "variance", "benefit"),
    4,
    3,
    lambda scores, poses, parents, options: [scores, poses, poses, (0,) if parents.betas is None else scores],
)
# Net sums of votes that are the poses of the children, and the sums of their factors, `(samples, parents)`.
NET_SUM = Reduction("net_sum", Net, ("sums", "masses"), 2, 0, lambda scores, poses, parents, options: [poses, scores])


class Operator:
    """A reduction in one backend, as a forward and a backward operator.

    Args:
        backend: name of the backend.
        reduction: signature of the reduction.
        run: the backend's function: `run(children, parents, options)` returns the results.
        run_backward: `run_backward(grads, results, children, parents, options, into)` adds to the tensors `into` and
            returns the gradients of the parents' tensors, None where there is none.

    Attributes:
        takes_none: whether `run_backward` takes None for gradients of results that are zero.
    """

    def __init__(self, backend: str, reduction: Reduction, run: Callable[..., Any], run_backward: Callable[..., Any]):
        self.reduction, self._run, self._run_backward = reduction, run, run_backward
        self.takes_none = backend == "triton"  # zeros would be one more launch
        name = f"{backend}_{reduction.name}"
        parents = [f"Tensor? {x}" for x in reduction.parents._fields]
        arguments = ", ".join((CHILDREN_ARGUMENTS, *parents, OPTION_ARGUMENTS))
        before = [f"Tensor grad_of_{x}" for x in reduction.results[: reduction.differentiable]]
        before += [f"Tensor {x}" for x in reduction.results[: reduction.kept]]
        self.forward = _define(
            name, f"({arguments}) -> {_tensors(len(reduction.results))}", self._forward, self._fake_forward
        )
        self.backward = _define(
            f"{name}_backward",
            f"({', '.join((*before, arguments, GRADIENT_ARGUMENTS))}) -> {_tensors(len(parents))}",
            self._backward,
            self._fake_backward,
        )
        torch.library.register_autograd(
            f"torchcaps::{name}", self._differentiate, setup_context=self._save, lib=LIBRARY
        )

    def reduce(self, children: Children, parents: Parents, options: Options) -> Tensors:
        """Return the results. The operator is left out where PyTorch has nothing to do between a call of it and the
        backend: that would take longer than a small reduction."""
        if _can_be_left_out(*children, *parents):
            return self._reduce(children, parents, options)
        return _as_tuple(self.forward(*children, *parents, *options))

    def _reduce(self, children: Children, parents: Parents, options: Options) -> Tensors:
        check_parents(children, dict(zip(self.reduction.parents._fields, parents, strict=True)), options)
        with autocast_off(children.poses.device.type):
            results: Tensors = self._run(children, self.reduction.parents(*parents), options)
        return results

    def _forward(self, *flat: Any) -> Any:
        return _flat(self._reduce(*self._call(iter(flat))))

    def _fake_forward(self, *flat: Any) -> Any:
        return _flat(self.reduction.new_results(*self._call(iter(flat))))

    def _differentiated(
        self,
        grads: Tensors,
        results: Tensors,
        children: Children,
        parents: Parents,
        options: Options,
        into: Gradients,
    ) -> Parents:
        """Add the gradients of the children to `into`, and return those of the parents' tensors."""
        with autocast_off(children.poses.device.type):
            gradients = self._run_backward(grads, results, children, self.reduction.parents(*parents), options, into)
        return tuple(None if x is None else x.contiguous() for x in gradients)

    def _backward(self, *flat: Any) -> Any:
        given = iter(flat)
        grads, results = (tuple(islice(given, count)) for count in (self.reduction.differentiable, self.reduction.kept))
        children, parents, options = self._call(given)
        gradients = self._differentiated(grads, results, children, parents, options, Gradients(*given))
        return _flat(tuple(children.poses.new_empty(0) if x is None else x for x in gradients))

    def _fake_backward(self, *flat: Any) -> Any:
        children, parents, _ = self._call(islice(flat, self.reduction.differentiable + self.reduction.kept, None))
        return _flat(tuple(children.poses.new_empty(0) if x is None else accumulator(x, *x.shape) for x in parents))

    def _call(self, given: Iterator[Any]) -> tuple[Children, Any, Options]:
        """Take the children, the tensors of the parents and the options from a flat list, in this order."""
        children = Children(*islice(given, 4))
        parents = self.reduction.parents(*islice(given, len(self.reduction.parents._fields)))
        options = Options(*islice(given, len(Options._fields)))
        (down, across), (down_apart, across_apart) = options.stride, options.dilation  # operators pass lists
        return children, parents, options._replace(stride=(down, across), dilation=(down_apart, across_apart))

    # ------------------------------------------------------------ differentiation

    def save(self, ctx: Any, tensors: Sequence[Tensor | None], options: Options, results: Tensors) -> None:
        """Keep in a context what the backward pass needs: the tensors of the children and the parents, and the rest."""
        ctx.options = options
        ctx.results = [(x.shape, x.dtype, x.device) for x in results[: self.reduction.differentiable]]
        ctx.save_for_backward(*results[: self.reduction.kept], *tensors)
        ctx.set_materialize_grads(False)

    def _save(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        tensors = 4 + len(self.reduction.parents._fields)
        self.save(ctx, inputs[:tensors], Options(*inputs[tensors:]), _as_tuple(output))

    def _differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        no_options = (None,) * len(Options._fields)
        return *self.gradients(ctx, grads, Gradients(None, None, None, None), ctx.needs_input_grad), *no_options

    def gradients(
        self, ctx: Any, grads: Sequence[Tensor | None], held: Gradients, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the children and of the parents' tensors.

        Args:
            ctx: the context of `save`.
            grads: gradients of the results, None where there is none.
            held: tensors to which those of the children are added; where one is None, it is made if needed.
            needed: whether each child's tensor needs a gradient, and maybe more.
        """
        refuse_transforms(grads)
        saved = iter(ctx.saved_tensors)  # read once: activation checkpointing gives each tensor once
        results = tuple(islice(saved, self.reduction.kept))
        children, parents, options = Children(*islice(saved, 4)), tuple(saved), ctx.options
        if all(grad is None for grad in grads):
            return *held, *(None,) * len(parents)
        into = [
            accumulator(x) if grad is None and x is not None and wanted else grad
            for grad, x, wanted in zip(held, children, needed, strict=False)
        ]
        left_out = _can_be_left_out(*grads, *children, *parents)
        kept = left_out and self.takes_none
        full_grads: Any = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None and not kept else grad
            for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=False)
        ]
        if left_out:
            parent_grads = self._differentiated(
                tuple(full_grads), results, children, parents, options, Gradients(*into)
            )
        else:
            given = _as_tuple(self.backward(*full_grads, *results, *children, *parents, *options, *into))
            parent_grads = tuple(grad if x is not None else None for grad, x in zip(given, parents, strict=True))
        return *into, *parent_grads


def refuse_transforms(grads: Sequence[Tensor | None]) -> None:
    """Raise an error in a backward pass whose gradients shall be differentiated again, or are batched."""
    if torch.is_grad_enabled():
        raise RuntimeError("computed votes have no second derivatives (create_graph=True): use backend='reference'")
    if any(grad is not None and is_batched(grad) for grad in grads):
        raise RuntimeError("computed votes have no batched gradients (vectorize=True): use backend='reference'")


def _can_be_left_out(*tensors: Tensor | None) -> bool:
    """Return whether an operator of these tensors does no more than the backend's function, and nobody looks at it."""
    return has_plain_values(*tensors) and not is_profiled()


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    # Not torch.library.custom_op: its layers of Python take longer than a small reduction.
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchcaps::{name}", fake, lib=LIBRARY)
    return cast(Callable[..., Any], getattr(torch.ops.torchcaps, name).default)


def _tensors(count: int) -> str:
    """Return the schema of an operator's results."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _flat(results: Tensors) -> Any:
    """Return results as an operator must: one tensor, or a tuple."""
    return results[0] if len(results) == 1 else results


def _as_tuple(results: Any) -> Tensors:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _operator(backend: str, reduction: Reduction) -> Operator:
    """Return an operator of the functions in backend/reduction.py: that of the reduction's name, and `_backward`."""
    module = importlib.import_module(f"torchcaps.ops.{backend}.{reduction.name}")
    functions = getattr(module, reduction.name), getattr(module, f"{reduction.name}_backward")
    return Operator(backend, reduction, *functions)


def _native(reduction: Reduction) -> Operator:
    """Return an operator of the library, which writes to tensors that it is given."""
    operation = native.OPERATIONS[reduction.name]

    def run(children: Children, parents: ParentTensors, options: Options) -> Tensors:
        results = reduction.new_results(children, parents, options)
        native.reduce(operation, (), results, children, parents, options)
        return results

    return Operator("native", reduction, run, partial(native.reduce, operation + 1))


TILED = {x.name: _operator("tiled", x) for x in (VOTE_SUM, WEIGHTED_SUM, MOMENTS, NET_SUM)}
NATIVE = {x.name: _native(x) for x in (VOTE_SUM, WEIGHTED_SUM, MOMENTS)}
# A sum of the votes without coefficients needs no kernel: it is products of matrices.
TRITON = {x.name: _operator("triton", x) for x in (WEIGHTED_SUM, MOMENTS)} | {"vote_sum": TILED["vote_sum"]}
BACKENDS: dict[str, dict[str, Operator]] = {"reference": {}, "tiled": TILED, "native": NATIVE, "triton": TRITON}


def apply_operator(
    operator: Operator, children: Children, parents: Parents, options: Options, carriers: Children | None = None
) -> tuple[Tensors, Children]:
    """Run a reduction. Return its results, and the carriers to give to the next reduction of the same votes.

    Args:
        carriers: tensors that bring the gradients of the children from the later iterations, as the reduction before
            this one has returned them; None: there was none.
    """
    if torch.compiler.is_compiling():
        return _as_tuple(operator.forward(*children, *parents, *options)), children
    if not torch.is_grad_enabled():
        return operator.reduce(children, parents, options), children
    count = len(operator.reduction.results)
    carriers = carriers or Children._make(map(_carrier, children))
    given = _EagerReduction.apply(operator, options, children, *carriers, *parents)
    handed_on = (before if after is None else after for before, after in zip(carriers, given[count:], strict=True))
    return given[:count], Children._make(handed_on)


def _carrier(x: Tensor | None) -> Tensor | None:
    """Return a tensor whose gradient, in float32 at least, is that of x: x itself, if it has this precision."""
    return _Float32Gradient.apply(x) if x is not None and x.dtype in HALF and x.requires_grad else x


class _Float32Gradient(torch.autograd.Function):
    """A float32 tensor without values in place of one in half precision, whose gradient is rounded once: autograd gives
    gradients the precision of their tensors, and would round the sum after each iteration."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return x.new_empty((), dtype=torch.float32).expand(x.shape)  # it takes no memory

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(ctx.dtype)


class _EagerReduction(torch.autograd.Function):
    """A reduction that also returns the carriers unchanged, for the next iteration.

    In the backward pass they bring the gradients of the later iterations, and this one adds its own in place. That is
    safe because no other autograd function sees these tensors. The numbers of the children come apart from them.
    """

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, options: Options, children: Children, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        carriers, parents = tensors[:4], tensors[4:]
        results = operator.reduce(children, parents, options)
        operator.save(ctx, (*children, *parents), options, results)
        ctx.operator = operator
        ctx.mark_non_differentiable(*results[operator.reduction.differentiable :])
        return *results, *(x if need else None for x, need in zip(carriers, ctx.needs_input_grad[3:7], strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        count = len(operator.reduction.results)
        held = Gradients(*grads[count:])
        return None, None, None, *operator.gradients(ctx, grads[:count], held, ctx.needs_input_grad[3:])
