"""Sum of the votes weighted by the coefficients of a dot agreement."""

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors
from torchcaps.ops.numerics import at_least_float32, nonzero
from torchcaps.ops.triton.problem import Parents, Problem, joined


def weighted_sum(children: Children, parents: ParentTensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return the sums, and the logarithms of the denominators of a softmax over the children (else nothing)."""
    p = Problem(children, options, parents.offset)
    totals, masses, _, _, peaks = p.sums(Parents(query=parents.query))
    if masses is None or peaks is None:
        return joined(totals), p.new(0)
    peak = peaks.amax(0)
    finite = peak.masked_fill(peak == -torch.inf, 0)
    scale = (peaks - finite).exp()
    mass = (masses * scale).sum(0)
    sums = (totals * scale.unsqueeze(-1)).sum(0) / nonzero(mass).unsqueeze(-1)
    # Infinity where the mass counts as 0: all coefficients are 0 in the backward pass.
    return sums, torch.where(mass < 1e-30, torch.inf, finite + mass.log())


def weighted_sum_backward(
    grads: Tensors, results: Tensors, children: Children, parents: ParentTensors, options: Options, into: Gradients
) -> ParentTensors:
    """Add the gradients of the children to `into`; return those of query and offset."""
    (sums, log_masses), grad = results, at_least_float32(grads[0])
    p, base = Problem(children, options, parents.offset), None
    if p.over_children:  # minus the mean of the gradients of a parent's shares under its softmax
        base = -(grad * sums).sum(-1)
    known = Parents(parents.query, slope=grad, base=base, log_masses=log_masses if p.over_children else None)
    return p.backward(known, into)
