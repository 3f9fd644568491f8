"""Mass, mean and variance of the votes, and the sum of their shares times betas."""

from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors
from torchcaps.ops.triton.problem import Parents, Problem


def moments(children: Children, parents: ParentTensors, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mass, mean, variance and benefit, which is empty without betas."""
    p = Problem(children, options, parents.offset, parents.betas, moments=True)
    splits, (totals, masses, squares, benefits, _, centers) = p.sums(Parents(*parents[:3]))
    results = p.scores(), p.vectors(), p.vectors(), p.new(0) if benefits is None else p.scores()
    parts = totals, masses, squares, benefits, centers
    p.join("moments", results[1].numel(), splits, *results, *parts, *p.of_parents(), eps=options.eps)
    return results


def moments_backward(
    grads: tuple[Tensor | None, ...],
    results: Tensors,
    children: Children,
    parents: ParentTensors,
    options: Options,
    into: Gradients,
) -> ParentTensors:
    """Add the gradients of the children to `into`; return those of query, precision, prior, offset and betas. Those of
    `grads` that are None are zero."""
    (grad_mass, grad_mean, grad_variance, grad_benefit), (mass, mean, variance) = grads, results
    known = Parents(
        *parents[:3], mean, variance, mass, None,
        grad_mean, grad_variance, grad_mass, None if parents.betas is None else grad_benefit,
    )  # fmt: skip
    return Problem(children, options, parents.offset, parents.betas, moments=True).backward(known, into)
