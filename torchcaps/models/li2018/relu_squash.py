"""ReLU and squash of capsules in a map, as one function with a backward pass of its own.

Compared with PyTorch's operators one after another it saves time and memory. Time: the features of a capsule in a map
`(batch, channels, height, width)` lie a whole plane apart, where `vector_norm` takes some thirty times as long as a
sum. Memory: the backward pass needs only the lengths and the output, which the next convolution keeps anyway, so a
network of capsules needs hardly more memory than one of neurons. (In half precision, where the output is rounded, it
needs the input.)
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps.ops import choose_backend
from torchcaps.ops.numerics import at_least_float32
from torchcaps.utils.private import is_batched, is_traced


def relu_squash(x: Tensor, features: int) -> Tensor:
    r"""Squash the ReLU of each capsule in a map.

    .. math:: v = \frac{l}{1 + l^2} \max(0, s), \quad l = |\max(0, s)|

    Code that is compiled, traced or transformed, or that runs with the backend "reference", uses PyTorch's own
    operators.

    Args:
        x: map `(batch, capsules * features, height, width)`.
        features: number of features of a capsule, which are consecutive channels.

    Returns:
        A map of the shape and the precision of `x`.
    """
    if is_traced() or choose_backend("auto", x.device) == "reference":
        return _relu_squash(x, features)
    return _ReLUSquash.apply(x, features)


def _relu_squash(x: Tensor, features: int) -> Tensor:
    """Squash the ReLU in PyTorch's own operators, for compiling, tracing and second derivatives."""
    s = at_least_float32(x).relu().unflatten(1, (-1, features))
    squared = s.square().sum(2, keepdim=True)
    present = squared > 0
    length = torch.where(present, squared, 1).sqrt()  # the gradient of sqrt at 0 is infinite
    return (s * torch.where(present, length / (1 + squared), 0)).flatten(1, 2).to(x.dtype)


class _ReLUSquash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, features: int) -> Tensor:
        s = at_least_float32(x).relu().unflatten(1, (-1, features))
        squared = s.square().sum(2, keepdim=True)
        length = squared.sqrt()
        v = s.mul_(length / (1 + squared)).flatten(1, 2).to(x.dtype)
        ctx.half = v.dtype != length.dtype  # then the output is rounded, and backward needs the input
        ctx.save_for_backward(x if ctx.half else v, length)
        return v

    @staticmethod
    def backward(ctx: Any, grad_v: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "encapsulated layers have no second derivatives (create_graph=True): use use_backend('reference')"
            )
        if is_batched(grad_v):
            raise RuntimeError(
                "encapsulated layers have no batched gradients (is_grads_batched=True, vectorize=True): use "
                "use_backend('reference')"
            )
        kept, length = ctx.saved_tensors
        poses = at_least_float32(kept.relu() if ctx.half else kept)
        poses = poses.unflatten(1, (length.shape[1], -1))
        grad_v = at_least_float32(grad_v).reshape(poses.shape)
        squared = length.square()
        # grad_s = f g + f' / l (g . s) s with g = grad_v and f = l / (1 + l^2). With s = v / f this is
        # f g + (1 - l^2) / l^3 (g . v) v. In this order no factor overflows. For tiny l^2 the second term is set to 0;
        # it is as small as the first one there.
        inverse = torch.where(squared > 1e-30, squared, torch.inf).reciprocal()
        along = (grad_v * poses).sum(2, keepdim=True)
        if ctx.half:
            along = along * (length * inverse) * (1 - squared) / (1 + squared).square()
        else:
            along = along * inverse * ((1 - squared) * (length * inverse))
        grad_s = torch.addcmul(grad_v * (length / (1 + squared)), poses, along)
        return grad_s.mul_(poses > 0).flatten(1, 2).to(kept.dtype), None
