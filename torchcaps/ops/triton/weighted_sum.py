"""Sum of the votes weighted by the coefficients of a dot agreement."""

from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors
from torchcaps.ops.triton.problem import Parents, Problem


def weighted_sum(children: Children, parents: ParentTensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return the sums, and the logarithms of the denominators of a softmax over the children (else nothing)."""
    p = Problem(children, options, parents.offset)
    splits, (totals, masses, _, _, peaks, _) = p.sums(Parents(query=parents.query))
    if not p.over_children:
        (sums,) = p.joined([totals], [None])
        assert sums is not None
        return sums, p.new(0)
    results = p.vectors(), p.scores()
    p.join("over_children", results[0].numel(), splits, *results, totals, masses, peaks, *p.of_parents())
    return results


def weighted_sum_backward(
    grads: Tensors, results: Tensors, children: Children, parents: ParentTensors, options: Options, into: Gradients
) -> ParentTensors:
    """Add the gradients of the children to `into`; return those of query and offset."""
    p, known = Problem(children, options, parents.offset), Parents(parents.query, grad=grads[0])
    if p.over_children:
        known = known._replace(center=results[0], log_masses=results[1])
    return p.backward(known, into)
