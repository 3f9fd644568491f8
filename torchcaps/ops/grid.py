"""Windows on a grid: how many fit, and those of a map as rows of a batch."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.numerics import sum_dtype
from torchcaps.utils.private import is_traced

Pair = tuple[int, int]  # of a number down and a number across


def positions(size: int, kernel: int, stride: int, dilation: int) -> int:
    """Return how many windows fit along one side of a map."""
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def windows(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair = (1, 1)) -> Tensor:
    """Extract windows: `(images, types, height, width, ...)` to `(images * windows, types * kernel * kernel, ...)`.

    It uses slices and not `unfold`, whose gradient Inductor gets wrong on several CPU threads (PyTorch 2.13).
    """
    if is_traced():
        return _windows(x, kernel, stride, dilation)
    return _Windows.apply(x, kernel, stride, dilation)


def _windows(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair) -> Tensor:
    shown = torch.stack([x[place] for place in _places(x.shape, kernel, stride, dilation)], dim=2)
    height, width = shown.shape[3:5]
    shown = shown.unflatten(2, kernel).movedim((4, 5), (1, 2))  # (images, height, width, types, *window, ...)
    return shown.reshape(x.shape[0] * height * width, x.shape[1] * kernel[0] * kernel[1], *x.shape[4:])


def _places(shape: torch.Size, kernel: Pair, stride: Pair, dilation: Pair) -> Iterator[tuple[slice, ...]]:
    """Yield for each place in the window the part of the map that the windows have there."""
    sides = zip(shape[2:4], kernel, stride, dilation, strict=True)
    height, width = (positions(*side) for side in sides)
    for down, across in itertools.product(*(range(0, k * d, d) for k, d in zip(kernel, dilation, strict=True))):
        rows = slice(down, down + stride[0] * (height - 1) + 1, stride[0])
        yield slice(None), slice(None), rows, slice(across, across + stride[1] * (width - 1) + 1, stride[1])


def put_back(x: Tensor, shape: torch.Size, kernel: Pair, stride: Pair, dilation: Pair) -> Tensor:
    """Add windows to a map of this shape at their positions: the transpose of `windows`."""
    sides = zip(shape[2:4], kernel, stride, dilation, strict=True)
    height, width = (positions(*side) for side in sides)
    shown = x.reshape(shape[0], height, width, shape[1], kernel[0] * kernel[1], *shape[4:]).movedim((1, 2), (2, 3))
    total = x.new_zeros(shape, dtype=sum_dtype(x.dtype))
    for i, place in enumerate(_places(shape, kernel, stride, dilation)):
        total[place].add_(shown[:, :, :, :, i])
    return total


class _Windows(torch.autograd.Function):
    """Adds all gradients to one map. Autograd would make a map for each place in the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Pair, stride: Pair, dilation: Pair) -> Tensor:
        ctx.shape, ctx.sizes = x.shape, (kernel, stride, dilation)
        return _windows(x, kernel, stride, dilation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return put_back(gradient, ctx.shape, *ctx.sizes), None, None, None
