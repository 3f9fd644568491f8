"""Votes that are the children's own poses, as a pool has them."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops.agreement import Agreement, Dot
from torchcaps.ops.numerics import autocast_off, nonzero
from torchcaps.ops.votes import Over, StoredVotes, softmax

BLOCK = 2**17  # numbers: what is larger the allocator asks of the system each time, for more than the sums take


class OwnVotes(StoredVotes):
    """Votes of children for one parent, each its own pose.

    Nothing is transformed and nothing stored, and features come first, as in a feature map: few passes over the poses,
    forward and backward, without a copy. Values are those of `StoredVotes`.

    Args:
        poses: `(batch, features, children)`.
    """

    def __init__(self, poses: Tensor):
        super().__init__(poses.transpose(1, 2).unsqueeze(2))
        self._lengths: Tensor | None = None
        self._next: Tensor | None = None  # the poses to give to the next sum, see `_Sum`

    def detach(self) -> Self:
        votes = super().detach()
        votes._next = None
        return votes

    def gated(self, gates: Tensor | None) -> Self:
        votes = super().gated(gates)
        votes._next = None
        return votes

    def weighted_sum(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        # Left to the reference: what no pool asks for, gates that learn among it, and what a compiler will fuse.
        learned = self.gates is not None and self.gates.requires_grad
        needless = over == "parents" or not isinstance(agreement, Dot | None) or learned
        if needless or torch.compiler.is_compiling():
            return super().weighted_sum(agreement, over, leaky)
        poses = self.votes.squeeze(2).transpose(1, 2)
        query, lengths = None, None
        if agreement is not None:
            query = agreement.query.squeeze(1)
            if agreement.unit:
                lengths = self._lengths = _lengths(poses) if self._lengths is None else self._lengths
        with autocast_off(poses.device.type):
            total, handed_on = _Sum.apply(poses if self._next is None else self._next, query, self.gates, lengths)
        if torch.is_grad_enabled():
            self._next = handed_on
        return total.unsqueeze(1)


class _Sum(torch.autograd.Function):
    r"""`s = sum_i c_i u_i`, where c is the softmax over the children of `(u_i / l_i) . q`, and the poses as they are.

    What comes back for these are the gradients of later iterations, to which this one adds: one tensor of the poses'
    size, and not one per iteration. With g the gradient of s, that of logit i is
    :math:`b_i = c_i (u_i \cdot g - \sum_k c_k u_k \cdot g)`, that of q :math:`\sum_i b_i u_i / l_i`, and that of
    :math:`u_i`, if :math:`l_i = |u_i|`,

    .. math:: c_i g + \frac{b_i}{l_i} q - \frac{b_i}{l_i^2} \left(\frac{u_i}{l_i} \cdot q\right) u_i.

    Batched matrix products throughout, for they need no memory of the poses' size.
    """

    @staticmethod
    def forward(
        ctx: Any, poses: Tensor, query: Tensor | None, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        if query is None:
            logits = poses.new_zeros(poses.shape[0], poses.shape[2])
        else:
            logits = _over_features(query, poses)
        if lengths is not None:
            logits = logits / lengths
        coefficients = softmax(logits.unsqueeze(2), gates, "children", leaky=False).squeeze(2)
        ctx.save_for_backward(poses, query, lengths, logits, coefficients)
        return _over_children(coefficients, poses), poses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, held: Tensor | None) -> tuple[Tensor | None, ...]:
        poses, query, lengths, logits, coefficients = ctx.saved_tensors
        if gradient is None:
            return held, None, None, None
        if query is None:
            return _add_products(held, [gradient], [coefficients]), None, None, None
        of_logits = coefficients * _over_features(gradient, poses)
        of_logits = of_logits - coefficients * of_logits.sum(1, keepdim=True)
        if lengths is not None:
            of_logits = of_logits / lengths
        of_poses = None
        if ctx.needs_input_grad[0]:
            of_poses = _add_products(held, [gradient, query], [coefficients, of_logits])
            if lengths is not None:
                of_poses.addcmul_(poses, (of_logits * logits / lengths).unsqueeze(1), value=-1)
        return of_poses, _over_children(of_logits, poses), None, None


def _over_features(x: Tensor, poses: Tensor) -> Tensor:
    """`(n, features) . (n, features, children)`, a number per child."""
    return torch.bmm(x.unsqueeze(1), poses).squeeze(1)


def _over_children(x: Tensor, poses: Tensor) -> Tensor:
    """`(n, children) . (n, features, children)`, a vector of features."""
    return torch.bmm(x.unsqueeze(1), poses.transpose(1, 2)).squeeze(1)


def _add_products(held: Tensor | None, features: list[Tensor], children: list[Tensor]) -> Tensor:
    """The sum of `held` and of the outer products, `(n, features, children)`; in place, if there is something."""
    a, b = torch.stack(features, 2), torch.stack(children, 1)
    return torch.bmm(a, b) if held is None else held.baddbmm_(a, b)


def _lengths(poses: Tensor) -> Tensor:
    """Of the poses `(n, features, children)`, with 1 in place of 0."""
    with torch.no_grad():
        if poses.device.type != "cpu":
            return nonzero(poses.square().sum(1).sqrt())
        # Not vector_norm, which is many times slower along this dimension.
        blocks = poses.split(max(1, BLOCK // max(1, poses[0].numel())))
        return nonzero(torch.cat([block.square().sum(1) for block in blocks]).sqrt())
