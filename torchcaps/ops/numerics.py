"""Arithmetic that stays finite, and sums in enough digits."""

import contextlib

import torch
from torch import Tensor
from torch.linalg import vector_norm

HALF = (torch.float16, torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def accumulator(x: Tensor, *shape: int) -> Tensor:
    """Zeros of x's shape and order in memory, or of another shape, to sum into: float32 at least."""
    dtype = torch.float32 if x.dtype in HALF else x.dtype
    return x.new_zeros(shape, dtype=dtype) if shape else torch.zeros_like(x, dtype=dtype)


def nonzero(x: Tensor) -> Tensor:
    """x, with 1 in place of 0: a divisor that leaves a zero numerator zero, and gradients finite. A number whose
    reciprocal overflows counts as 0."""
    return torch.where(x.abs() < 1e-30, 1, x)


def normalize(x: Tensor) -> Tensor:
    """Unit vectors along the last dimension; zero vectors stay zero and have finite gradients."""
    return x / nonzero(vector_norm(x, dim=-1, keepdim=True))


def autocast_off(device: str) -> contextlib.AbstractContextManager[None]:
    """Leave what follows in the precision of its operands."""
    if not torch.amp.is_autocast_available(device):  # as on meta tensors
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def contract(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """An einsum that autocast leaves in the precision of its operands."""
    with autocast_off(a.device.type):
        return torch.einsum(equation, a, b)
