"""Sum of the votes weighted by the coefficients of a dot agreement."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options
from torchcaps.ops.triton import launches
from torchcaps.ops.triton.problem import Problem


def weighted_sum(children: Children, query: Tensor, offset: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """Return the sums, and the logarithms of the denominators of a softmax over the children (else nothing)."""
    return sum_of(Problem(children, options, query, offset=offset))


def sum_of(p: Problem) -> tuple[Tensor, Tensor]:
    sums = p.new(p.samples, p.parents, p.features)
    lse = p.new(p.samples, p.parents) if p.over_children else p.new(0)
    if p.empty:
        return sums.zero_(), lse.fill_(torch.inf)
    parts = launches.sums(p)
    totals = parts["totals"]
    if p.over_children:
        launches.merge(p, parts, result=sums, lse=lse)
    elif totals is not None and len(totals) == 1:
        return totals[0], lse
    else:
        launches.merge(p, parts, result=sums)
    return sums, lse


def weighted_sum_backward(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    children: Children,
    query: Tensor,
    offset: Tensor | None,
    options: Options,
    into: Gradients,
) -> tuple[Tensor | None, ...]:
    """Add the gradients of the children to `into`; return those of query and offset."""
    (grad,), (sums, lse) = grads, results
    p = Problem(children, options, query, offset=offset)
    grad_query, _, _, grad_offset, _ = launches.backward(
        p, into, grad=grad, sums=sums, lse=lse if p.over_children else None
    )
    return grad_query, grad_offset
