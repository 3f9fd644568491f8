"""Vector-normed routing to one parent with the children's own poses as votes, for the routing pool.

Poses are not transformed, and features come before children, as in a feature map. The work is so small that the number
of operators determines the time. All iterations are therefore one autograd function with a backward pass of its own. On
the CPU it is a C++ kernel, which keeps a sample in the cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.ops import native
from torchcaps.ops.numerics import at_least_float32, autocast_off
from torchcaps.utils.private import in_dispatch_mode, is_batched, softmax_backward


def pool_by_agreement(
    poses: Tensor, iterations: int, sharpness: float | Tensor, present: Tensor | None, backend: str = "tiled"
) -> Tensor:
    r"""Run Algorithm 1 of Zhao & Huang 2019 up to its activation, for one parent.

    Args:
        poses: poses of the children :math:`u_i`, `(n, features, children)` or `(batch, groups, features, children)`,
            where n is batch * groups.
        iterations: number of agreements before the last sum.
        sharpness: the paper's lambda; a tensor gets a gradient.
        present: whether each child takes part, `(n, children)` bool with at least one child in each row; None for all.
        backend: "native" runs the C++ kernel where it takes the poses, which it reads as they lie in memory; others run
            PyTorch's operators.

    Returns:
        The last sum :math:`\sum_i c_i u_i`, `(n, features)`.
    """
    if backend == "native" and _kernel_takes(poses):
        return _NativePool.apply(poses if poses.dim() == 4 else poses.unsqueeze(1), sharpness, iterations, present)
    poses = poses.flatten(0, -3)
    with autocast_off(poses.device.type):
        return _Pool.apply(at_least_float32(poses), sharpness, iterations, present).to(poses.dtype)


def _kernel_takes(poses: Tensor) -> bool:
    known = poses.dtype in (torch.float32, torch.float64, torch.bfloat16) and poses.device.type == "cpu"
    return known and type(poses) is Tensor and not poses.is_neg() and not in_dispatch_mode()  # its memory has numbers


class _Pool(torch.autograd.Function):
    r"""All iterations as one autograd function.

    Let :math:`l_i = q \cdot u_i / |u_i|` be the logits, c their softmax, :math:`s = \sum_i c_i u_i` and
    :math:`v = s / |s|`. An iteration computes v from s, then :math:`q \leftarrow q + \lambda v`, then the next sum. The
    backward pass computes from the gradient g of a sum the gradients

    - of the logits: :math:`b_i = c_i (u_i \cdot g - \sum_k c_k u_k \cdot g)`;
    - of q: :math:`\sum_i b_i u_i / |u_i|`, plus the gradient from later iterations;
    - of the previous sum: :math:`(h - v (v \cdot h)) / |s|`, where h is lambda times the gradient of q;
    - of the poses: :math:`c_i g + b_i q / |u_i| - b_i l_i u_i / |u_i|^2`.

    Sums are batched matrix products, which need no intermediate results of the poses' size.
    """

    @staticmethod
    def forward(ctx: Any, poses: Tensor, sharpness: float | Tensor, iterations: int, present: Tensor | None) -> Tensor:
        coefficients = None if present is None else present.to(poses.dtype) / present.sum(1, keepdim=True)
        total = poses.mean(2) if coefficients is None else _over_children(coefficients, poses)
        shrinks: Any = _inverse_lengths(poses) if iterations else None
        kept, query = [], None
        for _ in range(iterations):
            shrink = vector_norm(total, dim=1, keepdim=True).reciprocal_().nan_to_num_(posinf=1)
            parent = total * shrink
            query = sharpness * parent if query is None else query + sharpness * parent
            logits = _over_features(query, poses).mul_(shrinks)
            if present is not None:
                logits.masked_fill_(~present, torch.finfo(logits.dtype).min)  # not -inf: 0 * -inf is NaN in backward
            kept += [coefficients, shrink, parent, query, logits]
            coefficients = logits.softmax(1)
            total = _over_children(coefficients, poses)
        ctx.save_for_backward(poses, shrinks, sharpness if isinstance(sharpness, Tensor) else None, coefficients, *kept)
        ctx.iterations, ctx.sharpness = iterations, sharpness
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        _refuse_second_derivatives()
        device = grad_total.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # backward() under autocast
            with autocast_off(device):
                return _Pool.backward(ctx, grad_total)
        poses, shrinks, sharpness, coefficients, *kept = ctx.saved_tensors
        grad_poses = grad_query = grad_sharpness = None
        for t in reversed(range(ctx.iterations)):
            before, shrink, parent, query, logits = kept[5 * t : 5 * t + 5]
            grad_poses = _add_product(grad_poses, grad_total, coefficients)
            grad_dots = softmax_backward(_over_features(grad_total, poses), coefficients)
            grad_dots *= shrinks  # b_i / |u_i|, the gradient of q . u_i
            grad_poses.addcmul_(query.unsqueeze(2), grad_dots.unsqueeze(1))
            grad_poses.addcmul_(poses, (grad_dots * logits).mul_(shrinks).unsqueeze(1), value=-1)
            added = _over_children(grad_dots, poses)
            grad_query = added if grad_query is None else grad_query + added
            along = (grad_query * parent).sum(1, keepdim=True)
            if sharpness is not None:
                grad_sharpness = along.sum() if grad_sharpness is None else grad_sharpness + along.sum()
            grad_total = torch.addcmul(grad_query, parent, along, value=-1).mul_(ctx.sharpness * shrink)
            coefficients = before
        if coefficients is not None:
            grad_poses = _add_product(grad_poses, grad_total, coefficients)
        elif grad_poses is None:
            grad_poses = (grad_total / poses.shape[2]).unsqueeze(2).expand_as(poses)
        else:
            grad_poses.add_(grad_total.unsqueeze(2), alpha=1 / poses.shape[2])
        return grad_poses, grad_sharpness, None, None


class _NativePool(torch.autograd.Function):
    """The same in C++."""

    @staticmethod
    def forward(ctx: Any, poses: Tensor, sharpness: float | Tensor, iterations: int, present: Tensor | None) -> Tensor:
        ctx.save_for_backward(poses, present, sharpness if isinstance(sharpness, Tensor) else None)
        ctx.iterations, ctx.sharpness = iterations, float(sharpness)
        return native.routing_pool(poses, iterations, ctx.sharpness, present)[0].to(poses.dtype)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        _refuse_second_derivatives()
        poses, present, sharpness = ctx.saved_tensors
        if is_batched(grad_total):  # has no numbers in memory
            leaves = [x.detach().requires_grad_() for x in (poses, sharpness) if x is not None]
            with torch.enable_grad():
                total = pool_by_agreement(
                    leaves[0], ctx.iterations, ctx.sharpness if sharpness is None else leaves[1], present
                )
            grads = torch.autograd.grad(total, leaves, grad_total)
            return grads[0], None if sharpness is None else grads[1], None, None
        into = torch.empty_like(poses) if ctx.needs_input_grad[0] else None
        grad_sharpness = native.routing_pool(poses, ctx.iterations, ctx.sharpness, present, grad_total, into)[1]
        return into, None if sharpness is None else grad_sharpness.to(sharpness.dtype), None, None


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("a routing pool has no second derivatives (create_graph=True): use backend='reference'")


def _add_product(total: Tensor | None, per_feature: Tensor, per_child: Tensor) -> Tensor:
    """Add the outer product of `(n, features)` and `(n, children)` to `total`, in place if there is one."""
    a, b = per_feature.unsqueeze(2), per_child.unsqueeze(1)
    return a * b if total is None else total.addcmul_(a, b)


def _over_features(x: Tensor, poses: Tensor) -> Tensor:
    """Contract `(n, features)` with `(n, features, children)` over the features: `(n, children)`."""
    return torch.bmm(x.unsqueeze(1), poses).squeeze(1)


def _over_children(x: Tensor, poses: Tensor) -> Tensor:
    """Contract `(n, children)` with `(n, features, children)` over the children: `(n, features)`."""
    return torch.bmm(x.unsqueeze(1), poses.transpose(1, 2)).squeeze(1)


def _inverse_lengths(poses: Tensor) -> Tensor:
    """Return the inverse lengths of poses `(n, features, children)`, with 1 for zero poses."""
    # Not vector_norm, which is many times slower along this dimension on the CPU.
    return poses.square().sum(1).rsqrt_().nan_to_num_(posinf=1)
