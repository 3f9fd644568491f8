"""Numerical helpers of the reductions and routings: divisions that stay finite, and sums in float32 at least."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.utils.arguments import HALF


def at_least_float32(x: Tensor) -> Tensor:
    """Return half precision as float32, and other precisions unchanged."""
    return x.float() if x.dtype in HALF else x


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which numbers are summed: float32 at least."""
    return torch.float32 if dtype in HALF else dtype


def accumulator(x: Tensor, *shape: int) -> Tensor:
    """Return zeros to sum into, in float32 at least: of x's shape and memory layout, or of the given shape."""
    dtype = sum_dtype(x.dtype)
    return x.new_zeros(shape, dtype=dtype) if shape else torch.zeros_like(x, dtype=dtype)


def gates_of(scores: Tensor) -> Tensor:
    """Return the gates of scores, their sigmoids, in float32 at least. Gates below 1e-24, of scores below about -55,
    are 0: the mean of children that are hardly there would divide by numbers that count as 0."""
    return F.threshold(at_least_float32(scores).sigmoid(), 1e-24, 0)


def nonzero(x: Tensor) -> Tensor:
    """Replace 0 by 1, for divisors: a zero numerator stays zero, and gradients stay finite. Numbers below
    1e-30 count as 0: products with their reciprocal may overflow."""
    return torch.where(x.abs() < 1e-30, 1, x)


def evenly_spaced(count: int, like: Tensor) -> Tensor:
    """Return `count` numbers from -1 to 1 with equal distances, -1 alone for one, in the precision of `like`."""
    # Not linspace: torch.export would fix its length.
    steps = torch.arange(count, device=like.device, dtype=like.dtype)
    return 2 * steps / steps[-1:].clamp_min(1) - 1


def normalize(x: Tensor) -> Tensor:
    """Scale vectors along the last dimension to length 1. Zero vectors stay zero and have finite gradients."""
    return x / nonzero(vector_norm(x, dim=-1, keepdim=True))


def autocast_off(device: str) -> contextlib.AbstractContextManager[None]:
    """Return a context without autocast: operators run in the precision of their operands."""
    # Without autocast, as on "meta", or where it is off already, there is nothing to do.
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def contract(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Compute an einsum in the precision of its operands, whatever autocast says."""
    with autocast_off(a.device.type):
        return torch.einsum(equation, a, b)
