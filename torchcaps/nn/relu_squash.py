"""ReLU and squash of capsules in a map, as one function with a backward pass of its own.

Capsules in a map `(batch, channels, height, width)` have their features a whole plane apart, where PyTorch's
`vector_norm` takes some thirty times as long as a sum. And what the backward pass needs is the output, which the next
convolution keeps anyway, and the lengths: a network of capsules then keeps as much as one of neurons. (In half
precision it needs the input, for the output is rounded.)
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps.ops import choose_backend
from torchcaps.ops.numerics import at_least_float32
from torchcaps.private import is_traced


def relu_squash(x: Tensor, features: int) -> Tensor:
    r"""The squash of the ReLU of each capsule in a map.

    .. math:: v = \frac{l}{1 + l^2} \max(0, s), \quad l = |\max(0, s)|

    Args:
        x: `(batch, capsules * features, height, width)`.
        features: of a capsule; so many channels in a row are one.

    Returns:
        A map like `x`. What is compiled, traced or transformed, or runs with the backend "reference", is left to
        PyTorch's own operators.
    """
    if is_traced() or choose_backend("auto", x.device) == "reference":
        return _relu_squash(x, features)
    return _ReLUSquash.apply(x, features)


def _relu_squash(x: Tensor, features: int) -> Tensor:
    """The same for who fuses, traces or differentiates twice."""
    s = at_least_float32(x).relu().unflatten(1, (-1, features))
    squared = s.square().sum(2, keepdim=True)
    present = squared > 0
    length = torch.where(present, squared, 1).sqrt()  # whose gradient at 0 would be infinite
    return (s * torch.where(present, length / (1 + squared), 0)).flatten(1, 2).to(x.dtype)


class _ReLUSquash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, features: int) -> Tensor:
        s = at_least_float32(x).relu().unflatten(1, (-1, features))
        squared = s.square().sum(2, keepdim=True)
        length = squared.sqrt()
        v = s.mul_(length / (1 + squared)).flatten(1, 2).to(x.dtype)
        ctx.half = v.dtype != length.dtype  # the output is rounded, and the input is what it is
        ctx.save_for_backward(x if ctx.half else v, length)
        return v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "encapsulated layers have no second derivatives (create_graph=True) but with use_backend('reference')"
            )
        kept, length = ctx.saved_tensors
        poses = at_least_float32(kept.relu() if ctx.half else kept)
        poses = poses.view(*length.shape[:2], -1, *kept.shape[2:])
        gradient = at_least_float32(gradient).reshape(poses.shape)
        squared = length.square()
        # ds = f g + f' / l (g . s) s with f = l / (1 + l^2), and with s = v / f it is f g + (1 - l^2) / l^3 (g . v) v.
        # In this order no factor overflows; where l^2 is next to nothing, the second term is as small as the first one.
        inverse = torch.where(squared > 1e-30, squared, torch.inf).reciprocal()
        along = (gradient * poses).sum(2, keepdim=True)
        if ctx.half:
            along = along * (length * inverse) * (1 - squared) / (1 + squared).square()
        else:
            along = along * inverse * ((1 - squared) * (length * inverse))
        ds = torch.addcmul(gradient * (length / (1 + squared)), poses, along)
        return ds.mul_(poses > 0).flatten(1, 2).to(kept.dtype), None
