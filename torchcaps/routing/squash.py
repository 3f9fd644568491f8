"""The squash of Sabour et al. 2017."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops import at_least_float32, native
from torchcaps.ops.backend import INTERPRETED, NATIVE_MISSING, choose_backend
from torchcaps.ops.triton import parents
from torchcaps.utils.arguments import FloatTensor, checked
from torchcaps.utils.private import has_plain_values, is_batched, is_traced


@checked
def squash(s: FloatTensor, dim: int = -1) -> Tensor:
    r"""Shrink vectors to lengths below one and keep their directions.

    .. math:: v = \frac{|s|^2}{1 + |s|^2} \frac{s}{|s|}

    Zero vectors stay zero and have zero gradients. Half-precision inputs are computed in float32, where lengths beyond
    1e19 overflow.

    Args:
        s: vectors of any length, whose entries lie along `dim`.
        dim: dimension of the vectors' entries.

    Returns:
        The squashed vectors, in the shape and the precision of `s`.

    Reference:
        Sabour et al. 2017, equation 1.
    """
    if not s.dim():
        raise ValueError("s must have a dimension of vector entries, got a single number")
    if not -s.dim() <= dim < s.dim():
        raise ValueError(
            f"dim must be from {-s.dim()} to {s.dim() - 1} for a tensor of shape {tuple(s.shape)}, got {dim}"
        )
    if is_traced():
        return _by_operators(s, dim)[0]
    if torch.is_grad_enabled() and s.requires_grad:
        return _Squash.apply(s, dim)
    kernel = _kernel_for(s, dim)
    return _by_operators(s, dim)[0] if kernel is None else kernel(s)


def _by_operators(s: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return squashed vectors, their factors, and what these are computed from: squared lengths, one more than these,
    and lengths, above zero to be divided by."""
    x = at_least_float32(s)
    # Not vector_norm, which takes seven times as long where a vector's entries lie a plane apart in memory.
    square = x.square().sum(dim, keepdim=True)
    more, length = 1 + square, square.clamp_min(1e-30).sqrt()
    scale = square / more / length
    return (x * scale).to(s.dtype), scale, square, more, length


def _kernel_for(s: Tensor, dim: int) -> Callable[..., Tensor] | None:
    """Return the kernel that squashes vectors, and gives their gradient for one of the result; None for operators."""
    if not has_plain_values(s) or s.numel() == 0 or s.is_neg():
        return None
    on_device = s.device.type == "cuda" or INTERPRETED
    if on_device and choose_backend("auto", s.device) == "triton" and parents.takes(s.shape[dim], s):
        return partial(parents.scaled, dim=dim)
    known = s.dtype in (torch.float32, torch.float64) and s.device.type == "cpu" and NATIVE_MISSING is None
    return native.squash if known and dim in (-1, s.dim() - 1) else None


class _Squash(torch.autograd.Function):
    """Its gradient, f g + f' / l (g . s) s for the length l, f = l / (1 + l^2) and the gradient g of the result, takes
    half as many operators as those of the operators one by one. On a CPU, and where Triton's kernels run, one kernel
    computes it."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, dim: int) -> Any:
        ctx.dim = dim
        ctx.kernel = _kernel_for(s, dim)
        if ctx.kernel is not None:
            ctx.save_for_backward(s)
            return ctx.kernel(s)
        v, *rest = _by_operators(s, dim)
        ctx.save_for_backward(s, *rest)
        return v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        s, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            v = _by_operators(s, ctx.dim)[0]
            return torch.autograd.grad(v, s, grad, create_graph=True)[0], None
        if not rest and has_plain_values(grad) and not is_batched(grad):
            return ctx.kernel(s, grad), None
        x, g = at_least_float32(s), at_least_float32(grad)
        scale, square, more, length = rest or _by_operators(s, ctx.dim)[1:]
        # In this order no factor overflows.
        along = (g * x).sum(ctx.dim, keepdim=True) / length * ((1 - square) / more) / more
        return torch.addcmul(g * scale, x, along).to(s.dtype), None
