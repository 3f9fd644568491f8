"""The squash of Sabour et al. 2017."""

from typing import Any

import torch
from torch import Tensor

from torchcaps.ops import at_least_float32, nonzero
from torchcaps.utils.arguments import FloatTensor, checked
from torchcaps.utils.private import is_traced


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
    if not -s.dim() <= dim < s.dim():
        raise ValueError(
            f"dim must be from {-s.dim()} to {s.dim() - 1} for a tensor of shape {tuple(s.shape)}, got {dim}"
        )
    x = at_least_float32(s)
    return (_squash(x, dim) if is_traced() else _Squash.apply(x, dim)).to(s.dtype)


def _squash(x: Tensor, dim: int) -> Tensor:
    """Squash in PyTorch's own operators, for compiling, tracing and second derivatives."""
    # Not vector_norm, which takes seven times as long where a vector's entries lie a plane apart in memory.
    square = x.square().sum(dim, keepdim=True)
    return x * (square / ((1 + square) * nonzero(square).sqrt()))


class _Squash(torch.autograd.Function):
    """Squash with half as many operators forward and backward: with few parents, launching them takes most of the
    time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        square = x.square().sum(dim, keepdim=True)
        length, divisor = square.sqrt(), 1 + square
        factor = length / divisor
        ctx.dim = dim
        ctx.save_for_backward(x, square, length, divisor, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad_v: Tensor) -> tuple[Tensor, None]:
        x, square, length, divisor, factor = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.autograd.grad(_squash(x, ctx.dim), x, grad_v, create_graph=True)[0], None
        # grad_x = f g + f' / l (g . x) x with g = grad_v and f = l / (1 + l^2). The second term is 0 at x = 0, where
        # the clamp keeps its divisor from being 0.
        along = (grad_v * x).sum(ctx.dim, keepdim=True)
        curve = (1 - square) / (length * divisor.square()).clamp_min(1e-30)
        return torch.addcmul(grad_v * factor, x, along * curve), None
