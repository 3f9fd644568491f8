"""Mass, mean and variance of the votes, and the sum of their shares times betas."""

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors
from torchcaps.ops.numerics import at_least_float32, nonzero
from torchcaps.ops.triton.problem import Parents, Problem


def moments(children: Children, parents: ParentTensors, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mass, mean, variance and benefit, which is empty without betas.

    The splits of the children are joined by the parallel formula of Chan, Golub and LeVeque (1979), with deviations
    from the votes of the first child. So no digits are lost when the votes agree far from zero.
    """
    p = Problem(children, options, parents.offset, parents.betas, moments=True)
    first = at_least_float32(p.tensors.poses[:, 0]), at_least_float32(p.tensors.weight[0])
    center = torch.einsum("nrd,dhj->njrh", *first)
    if p.tensors.bias is not None:
        center = center + p.tensors.bias[0].movedim(-1, 0)
    center = center.flatten(2)
    totals, masses, squares, benefits, _ = p.sums(Parents(*parents[:3], center))
    assert masses is not None
    assert squares is not None
    mass, weights = masses.sum(0), masses.unsqueeze(-1)
    whole = mass.unsqueeze(-1)
    distance = (weights * totals).sum(0) / nonzero(whole)
    square = (squares + weights * (totals - distance).square()).sum(0)
    divisor = nonzero(whole + options.eps)
    mean = (center + distance) * (whole / divisor)
    # The variance is around the returned mean, which eps pulls towards zero.
    variance = square / divisor + whole / divisor * (center + distance - mean).square()
    return mass, mean, variance, p.new(0) if benefits is None else benefits.sum(0)


def moments_backward(
    grads: Tensors, results: Tensors, children: Children, parents: ParentTensors, options: Options, into: Gradients
) -> ParentTensors:
    """Add the gradients of the children to `into`; return those of query, precision, prior, offset and betas."""
    grad_mass, grad_mean, grad_variance = (at_least_float32(x) for x in grads[:3])
    mass, mean, variance = results
    scale = 1 / nonzero(mass + options.eps).unsqueeze(-1)
    curve = scale * grad_variance
    slope = scale * (grad_mean - 2 * options.eps * mean * curve)
    base = grad_mass - (curve * variance).sum(-1)
    known = Parents(*parents[:3], mean, slope, curve, base, None if parents.betas is None else grads[3])
    return Problem(children, options, parents.offset, parents.betas, moments=True).backward(known, into)
