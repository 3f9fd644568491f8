"""The squash of Sabour et al. 2017, and lengths that are safe to divide by."""

import torch
from torch import Tensor
from torch.linalg import vector_norm


def squash(s: Tensor, dim: int = -1) -> Tensor:
    r"""Shrink vectors to lengths below one and keep their directions.

    .. math:: v = \frac{|s|^2}{1 + |s|^2} \frac{s}{|s|}

    Zero vectors stay zero and have zero gradients. Half precision is computed in float32.

    Args:
        s: vectors along `dim`.
        dim: the dimension that holds a vector's entries.

    Reference:
        Sabour et al. 2017, equation 1.
    """
    x = s.float() if s.dtype in (torch.float16, torch.bfloat16) else s
    length = vector_norm(x, dim=dim, keepdim=True)
    return (x * (length / (1 + length * length))).to(s.dtype)


def normalize(s: Tensor, dim: int = -1) -> Tensor:
    """Unit vectors `s / |s|`; zero vectors stay zero and have zero gradients."""
    length = vector_norm(s, dim=dim, keepdim=True)
    return s / torch.where(length == 0, 1, length)
