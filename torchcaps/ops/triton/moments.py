"""Mass, mean and variance of the votes, and the sum of their shares times betas."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options
from torchcaps.ops.triton import launches
from torchcaps.ops.triton.problem import Problem


def moments(
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mass, mean, variance and benefit, which is empty without betas."""
    p = Problem(children, options, target, precision, prior, offset, betas, moments=True)
    mass, mean = p.new(p.samples, p.parents), p.new(p.samples, p.parents, p.features)
    variance, benefit = torch.empty_like(mean), p.new(0) if betas is None else torch.empty_like(mass)
    if p.empty:
        return mass.zero_(), mean.zero_(), variance.zero_(), benefit.zero_()
    parts = launches.sums(p)
    # The kernel's means are relative to a Gaussian's mean, or to the votes of the first child.
    center = parts["origins"] if precision is None else p.agreement_tensors[0]
    launches.merge(p, parts, center, result=mean, variance=variance, mass=mass, benefit=benefit)
    return mass, mean, variance, benefit


def moments_backward(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
    into: Gradients,
) -> tuple[Tensor | None, ...]:
    """Add the gradients of the children to `into`; return those of target, precision, prior, offset and betas."""
    grad_mass, grad_mean, grad_variance, grad_benefit = grads
    mass, mean, variance = results
    return launches.backward(
        Problem(children, options, target, precision, prior, offset, betas, moments=True), into,
        grad=grad_mean, grad_mass=grad_mass, grad_variance=grad_variance,
        grad_benefit=None if betas is None else grad_benefit, mass=mass, sums=mean, variance=variance,
    )  # fmt: skip
