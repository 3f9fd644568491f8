"""Vector-normed routing where the votes are the children's own poses, as a pool has them.

There is nothing to transform and nothing to store, and features come first, as in a feature map. So cheap is what
remains that the number of operators counts: all iterations are one, forward and backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.ops.numerics import at_least_float32, autocast_off
from torchcaps.private import softmax_backward


def pool_by_agreement(poses: Tensor, iterations: int, sharpness: float | Tensor, present: Tensor | None) -> Tensor:
    r"""Algorithm 1 of Zhao & Huang 2019, up to its activation, for one parent.

    Args:
        poses: :math:`u_i`, `(n, features, children)`.
        iterations: agreements before the last sum.
        sharpness: lambda; a tensor has a gradient.
        present: `(n, children)` bool, at least one in each row, or None: all are.

    Returns:
        The last sum :math:`\sum_i c_i u_i`, `(n, features)`.
    """
    device = poses.device.type
    # Asked before, for the context alone takes as long as an operator.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with autocast_off(device):
            return pool_by_agreement(poses, iterations, sharpness, present)
    return _Pool.apply(at_least_float32(poses), sharpness, iterations, present).to(poses.dtype)


class _Pool(torch.autograd.Function):
    r"""With :math:`l_i = q \cdot u_i / |u_i|`, `c` their softmax, `s` the sum and :math:`v = s / |s|`, an iteration is
    s to v, :math:`q \leftarrow q + \lambda v` and the next sum. Backward, from the gradient g of a sum, those of

    - the logits: :math:`b_i = c_i (u_i \cdot g - \sum_k c_k u_k \cdot g)`;
    - q: :math:`\sum_i b_i u_i / |u_i|`, and what came from later iterations;
    - the sum before: :math:`(h - v (v \cdot h)) / |s|`, where h is lambda times that of q;
    - the poses: :math:`c_i g + b_i q / |u_i| - b_i l_i u_i / |u_i|^2`.

    Sums are batched matrix products, for they need no memory of the poses' size.
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
                logits.masked_fill_(~present, torch.finfo(logits.dtype).min)  # times 0 it is 0, as -inf is not
            kept += [coefficients, shrink, parent, query, logits]
            coefficients = logits.softmax(1)
            total = _over_children(coefficients, poses)
        ctx.save_for_backward(poses, shrinks, sharpness if isinstance(sharpness, Tensor) else None, coefficients, *kept)
        ctx.iterations, ctx.sharpness = iterations, sharpness
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a routing pool has no second derivatives (create_graph=True) but with backend='reference'"
            )
        poses, shrinks, sharpness, coefficients, *kept = ctx.saved_tensors
        of_poses = of_query = of_sharpness = None
        for t in reversed(range(ctx.iterations)):
            before, shrink, parent, query, logits = kept[5 * t : 5 * t + 5]
            of_poses = _add_product(of_poses, gradient, coefficients)
            of_cosines = softmax_backward(_over_features(gradient, poses), coefficients)
            of_cosines *= shrinks
            of_poses.addcmul_(query.unsqueeze(2), of_cosines.unsqueeze(1))
            of_poses.addcmul_(poses, (of_cosines * logits).mul_(shrinks).unsqueeze(1), value=-1)
            onto = _over_children(of_cosines, poses)
            of_query = onto if of_query is None else of_query + onto
            along = (of_query * parent).sum(1, keepdim=True)
            if sharpness is not None:
                of_sharpness = along.sum() if of_sharpness is None else of_sharpness + along.sum()
            gradient = torch.addcmul(of_query, parent, along, value=-1).mul_(ctx.sharpness * shrink)
            coefficients = before
        if coefficients is not None:
            of_poses = _add_product(of_poses, gradient, coefficients)
        elif of_poses is None:
            of_poses = (gradient / poses.shape[2]).unsqueeze(2).expand_as(poses)
        else:
            of_poses.add_(gradient.unsqueeze(2), alpha=1 / poses.shape[2])
        return of_poses, of_sharpness, None, None


def _add_product(total: Tensor | None, of_features: Tensor, of_children: Tensor) -> Tensor:
    """`total`, in place, and the outer product of `(n, features)` and `(n, children)`."""
    a, b = of_features.unsqueeze(2), of_children.unsqueeze(1)
    return a * b if total is None else total.addcmul_(a, b)


def _over_features(x: Tensor, poses: Tensor) -> Tensor:
    """`(n, features) . (n, features, children)`, a number per child."""
    return torch.bmm(x.unsqueeze(1), poses).squeeze(1)


def _over_children(x: Tensor, poses: Tensor) -> Tensor:
    """`(n, children) . (n, features, children)`, a vector of features."""
    return torch.bmm(x.unsqueeze(1), poses.transpose(1, 2)).squeeze(1)


def _inverse_lengths(poses: Tensor) -> Tensor:
    """Of the poses `(n, features, children)`, with 1 for zeros."""
    # Not vector_norm, which is many times slower along this dimension on the CPU.
    return poses.square().sum(1).rsqrt_().nan_to_num_(posinf=1)
