"""What a routing computes of its parents between two reductions, as one kernel each way.

The routings have the same formulas as operators of PyTorch, for other devices and for compiled code; `takes` says when
kernels compute them. `formulas.py` has the kernels.
"""

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.backend import INTERPRETED
from torchcaps.ops.numerics import sum_dtype
from torchcaps.ops.operators import refuse_transforms
from torchcaps.ops.triton import problem
from torchcaps.ops.triton.problem import PER_WARP, language_dtype, plain, power_of_2
from torchcaps.utils.arguments import HALF
from torchcaps.utils.private import has_plain_values, is_traced

MOST_NUMBERS = 2**13  # of a vector, or of all parents of a sample: a program holds them in registers
BLOCK = 8 if INTERPRETED else 1024  # numbers of a program, where it can have several vectors

Tensors = tuple[Tensor | None, ...]


def takes(numbers: int, *tensors: Tensor | None) -> bool:
    """Return whether kernels take tensors, of which a program holds so many numbers at once. Compiled and traced code
    has operators alone."""
    if is_traced() or not 0 < numbers <= MOST_NUMBERS or not has_plain_values(*tensors):
        return False
    return {x.dtype for x in tensors if x is not None} <= {*HALF, torch.float32, torch.float64}


def scaled(x: Tensor, grad: Tensor | None = None, dim: int = -1, unit: bool = False) -> Tensor:
    """Squash vectors along a dimension, or scale them to length 1; or return the gradient of the vectors for a gradient
    of the result."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)  # as the numbers lie in memory
    place, back = order.index(dim % x.dim()), sorted(range(x.dim()), key=order.__getitem__)
    given = plain(x.permute(order))
    out, size, inner = torch.empty_like(given), x.shape[dim], math.prod(given.shape[place + 1 :])
    grad = None if grad is None else plain(grad.permute(order))
    _launch("scale_by_length", given.numel() // size, size, (out, given, grad), (size, inner, unit))
    return out.permute(back)


def squash(x: Tensor) -> Tensor:
    """Squash vectors along the last dimension, as `torchcaps.squash` does."""
    result: Tensor = _Formula.apply(scaled, _squash_backward, x)
    return result


def _squash_backward(grads: Tensors, x: Tensor) -> Tensors:
    return (scaled(x, grads[0]),)


def unit(x: Tensor) -> Tensor:
    """Scale vectors along the last dimension to length 1, as `numerics.normalize` does."""
    result: Tensor = _Formula.apply(_unit, _unit_backward, x)
    return result


def _unit(x: Tensor) -> Tensor:
    return scaled(x, unit=True)


def _unit_backward(grads: Tensors, x: Tensor) -> Tensors:
    return (scaled(x, grads[0], unit=True),)


def fit(
    variance: Tensor,
    score: Tensor | None = None,
    mass: Tensor | None = None,
    beta_a: Tensor | None = None,
    beta_u: Tensor | None = None,
    factor: float = 0.0,
    floor: float = 0.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Return variance, score, precision and prior of the Gaussian of each parent, all `(samples, parents, ...)`:

        variance' = max(variance, floor) + eps,  log_sigma = 1/2 sum_h log variance'_h,
        score = factor (beta_a - (features beta_u + log_sigma) mass),
        precision = 1 / variance',  prior = log sigmoid(score) - log_sigma

    Args:
        variance: `(samples, parents, features)`.
        score: `(samples, parents)`, or None: then it follows from mass and betas.
        mass: `(samples, parents)`.
        beta_a, beta_u: `(parents,)` or `(1,)`.
    """
    shape, size = variance.shape[:-1], variance.shape[-1]
    rows = shape.numel()
    shared = 1 if beta_a is None else len(beta_a)
    # The factor is no constant of the kernel, which would be compiled for each value of a schedule. Triton takes it
    # in float32 alone, so it also gets the rest.
    (rounded,) = struct.unpack("f", struct.pack("f", factor))
    options = shared, size, rounded, factor - rounded, floor, eps

    def run(variance: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        results = tuple(variance.new_empty(x) for x in 2 * (variance.shape, shape))
        _launch("fit", rows, size, (*results, (variance, *rest)), options)
        return results

    def run_backward(grads: Tensors, variance: Tensor, *rest: Tensor | None) -> Tensors:
        grad_variance, grad, given = torch.empty_like(variance), variance.new_empty(shape), (variance, *rest)
        if rest[0] is None:  # there is no mass
            _launch("fit_grads", rows, size, (grad_variance, None, grad, None, None, grads, given), options)
            return grad_variance, None, grad, None, None
        of_betas = variance.new_empty(2, *shape)  # for each sample
        _launch("fit_grads", rows, size, (grad_variance, grad, None, *of_betas, grads, given), options)
        return grad_variance, grad, None, *of_betas.sum((1, 2) if shared == 1 else 1).view(2, shared)

    results: tuple[Tensor, Tensor, Tensor, Tensor] = _Formula.apply(
        run, run_backward, variance, mass, score, beta_a, beta_u
    )
    return results


def posterior(mass: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return means, precisions, priors and scores of the Gaussians of Variational Bayes routing, before its batch
    normalization; see :class:`torchcaps.VBRouting`."""
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _Formula.apply(
        _posterior, _posterior_backward, mass, mean, variance
    )
    return results


def _posterior(*given: Tensor) -> tuple[Tensor, ...]:
    mass, mean, _ = given
    results = tuple(torch.empty_like(x) for x in (mean, mean, mass, mass))
    _launch_for_samples("posterior", mean, *results, given)
    return results


def _posterior_backward(grads: Tensors, *given: Tensor) -> Tensors:
    results = tuple(torch.empty_like(x) for x in given)
    _launch_for_samples("posterior_grads", given[1], *results, grads, given)
    return results


def share_logits(mass: Tensor) -> Tensor:
    """Return the logits of the shares `mass_j / sum_k mass_k` that the parents of a sample have; see
    :class:`torchcaps.SelfRouting`."""
    result: Tensor = _Formula.apply(_share_logits, _share_logits_backward, mass)
    return result


def _share_logits(mass: Tensor) -> Tensor:
    scores = torch.empty_like(mass)
    _launch_for_samples("share_logits", mass, scores, mass)
    return scores


def _share_logits_backward(grads: Tensors, mass: Tensor) -> Tensors:
    grad_mass = torch.empty_like(mass)
    _launch_for_samples("share_logits_grads", mass, grad_mass, grads[0], mass)
    return (grad_mass,)


class _Formula(torch.autograd.Function):
    """A function with kernels: `run(*tensors)` returns the results, and `run_backward(grads, *tensors)` the gradients
    of the tensors. There are no second derivatives, as there are none of the kernels for votes."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], run_backward: Callable[..., Any], *tensors: Tensor | None) -> Any:
        ctx.run_backward = run_backward
        tensors = tuple(None if x is None else plain(x) for x in tensors)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_transforms(grads)
        tensors = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(tensors))
        return None, None, *ctx.run_backward(tuple(None if x is None else plain(x) for x in grads), *tensors)


def _launch(kernel: str, rows: int, size: int, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Start a kernel whose programs take some rows of `size` numbers."""
    block_f = power_of_2(size)
    block_r = max(1, BLOCK // block_f)
    x = next(y for y in tensors if isinstance(y, Tensor))
    dtype = language_dtype(sum_dtype(x.dtype))
    arguments = *tensors, rows, *options, dtype, block_r, block_f
    problem.launch(f"formulas.{kernel}", (-(-rows // block_r),), x.device, *arguments)


def _launch_for_samples(kernel: str, like: Tensor, *tensors: Any) -> None:
    """Start a kernel whose programs take all parents of some samples, with the numbers that each has in `like`."""
    blocks = [power_of_2(x) for x in like.shape[1:]]
    tile = math.prod(blocks)
    block_n = max(1, BLOCK // tile)
    arguments = *tensors, *like.shape, language_dtype(like.dtype), block_n, *blocks
    warps = max(1, min(8, block_n * tile // PER_WARP))
    problem.launch(f"formulas.{kernel}", (-(-len(like) // block_n),), like.device, *arguments, warps=warps)
