"""Votes that are linear in the children's poses: those of the capsule layers with weights."""

import copy
import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops.agreement import Dot, PoseLogits
from torchcaps.ops.backend import Backend, choose_backend
from torchcaps.ops.children import Children, Options, check_children, count_samples, grid_of
from torchcaps.ops.computed import Cache, ComputedVotes
from torchcaps.ops.grid import Pair, windows
from torchcaps.ops.numerics import at_least_float32, contract
from torchcaps.ops.operators import BACKENDS
from torchcaps.ops.stored import StoredVotes
from torchcaps.ops.votes import per_child


class LinearVotes(ComputedVotes):
    """Votes computed from poses and weights: `V[b,i,j] = pose[b,i] @ weight[g(i),j] + bias[g(i),j]`.

    Consecutive children share weights in `groups` of equal size: with as many groups as children each child has its
    own, with one group all children share one. On a grid all positions share the weights.

    Args:
        poses: `(batch, children, rows, d)`.
        weight: `(groups, parents, d, h)`; the number of children is a multiple of groups.
        bias: `(groups, parents or 1, rows, h)`, or None; its number of groups may be another.
        pose: shape of a parent's pose, `(rows, h)` or `(h,)`.
        stride, dilation: stride and dilation of windows on a grid. On a grid poses are `(images, types, height, width,
            rows, d)`, weight is `(types, kernel, kernel, parents, d, h)` and bias `(types, kernel, kernel, parents or
            1, rows, h)`. Each window is a sample, images before positions, and its children are in the order of the
            weights.
        line: whether the grid is a sequence: a grid of height 1 whose height is left out of the parents' shape.
        backend: "auto", "reference", "tiled", "native" or "triton"; see :func:`torchcaps.use_backend`.

    On a grid `capsules` and `with_coefficients` return parents `(images, parents, rows, columns, ...)` and coefficients
    `(images, rows, columns, types, kernel, kernel, parents)`; on a line there are no rows, and one kernel.
    """

    def __init__(
        self,
        poses: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pose: tuple[int, ...],
        stride: Pair = (1, 1),
        dilation: Pair = (1, 1),
        line: bool = False,
        backend: Backend = "auto",
    ):
        on_grid = poses.dim() == 6
        if not on_grid:  # a map and a window of height and width 1
            poses, weight = poses[:, :, None, None], weight[:, None, None]
            bias = None if bias is None else bias[:, None, None]
        children, self.options = Children(poses, weight, bias, None), Options(stride=stride, dilation=dilation)
        check_children(children)
        self.poses, self.pose, self.line = poses, pose, line
        self.batch, self.kernel = count_samples(children, self.options), children.kernel
        self.grid = (poses.shape[0], *grid_of(children, self.options)) if on_grid else ()
        self.children, self.parents = poses.shape[1] * math.prod(self.kernel), children.parents
        self.device, self.dtype, self.gates = poses.device, poses.dtype, None
        self.layout = tuple(poses.shape[1:4]) if on_grid else (self.children,)
        self._asked = backend
        self._with_weights(weight, bias)

    def _with_weights(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set weight and bias, and the backend that can take votes of their size."""
        self.weight, self.bias, self.cache = weight, bias, Cache()
        sizes = (self.parents, *self.poses.shape[-2:], weight.shape[-1])
        self.backend = choose_backend(self._asked, self.device, sizes)
        self.operators = BACKENDS[self.backend]

    def detach(self) -> Self:
        votes = super().detach()
        votes.weight, votes.bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        return votes

    # ------------------------------------------------------------ reductions

    def vote_sum(self) -> Tensor:
        if "vote_sum" in self.operators:
            return self.reduce("vote_sum", (), self.options)[0]
        poses, weight, bias = self._in_windows()
        poses, weight = at_least_float32(poses), at_least_float32(weight)
        gates = poses.new_ones(self.batch, self.children) if self.gates is None else self.gates
        group_sums = (poses * gates[..., None, None]).unflatten(1, (weight.shape[0], -1)).sum(2)
        total = contract("bgrd,gjdh->bjrh", group_sums, weight)
        if bias is not None:
            masses = gates.unflatten(1, (bias.shape[0], -1)).sum(2)
            total = total + contract("bg,gjrh->bjrh", masses, at_least_float32(bias))
        return total.flatten(2)

    def constant_sum(self, constants: Tensor) -> Tensor:
        groups = self.weight.shape[:3].numel()
        if constants.shape[0] != groups or constants.shape[1] not in (1, self.parents):
            raise ValueError(f"expected constants of shape ({groups}, parents or 1), got {tuple(constants.shape)}")
        rows = constants.expand(-1, self.parents).to(self.weight.dtype).unflatten(0, self.weight.shape[:3])
        bias = self.bias
        if bias is not None:
            types = math.lcm(len(rows), len(bias))
            bias = per_child(bias, types) * per_child(rows, types)[..., None, None]
        votes = copy.copy(self)
        votes._with_weights(self.weight * rows[..., None, None], bias)
        return votes.vote_sum()

    def with_logits(self, agreement: PoseLogits) -> tuple[Self, Dot]:
        """Return votes and a dot agreement whose logits are those of the poses.

        For poses of r rows, r columns are appended to the weights. Row k of a vote then ends with pose[k] . weight[c]
        for c = 0, 1, ..., and the logit is the sum of the entries with k = c: the query is an identity matrix.
        """
        weight, offset = agreement
        groups, (rows, d) = self.weight.shape[:3].numel(), self.poses.shape[-2:]
        for name, x, own in (("weight", weight, (rows, d)), ("offset", offset, ())):
            if x is not None and (x.shape[0], *x.shape[2:]) != (groups, *own):
                expected = (groups, "parents or 1", *own)
                raise ValueError(f"expected the {name} of the logits of shape {expected}, got {tuple(x.shape)}")
        columns = weight.transpose(2, 3).unflatten(0, self.weight.shape[:3]).to(self.weight.dtype)
        columns = columns.expand(*self.weight.shape[:-1], rows)
        votes = copy.copy(self)
        votes._with_weights(
            torch.cat([self.weight, columns], dim=-1), None if self.bias is None else F.pad(self.bias, (0, rows))
        )
        identity = torch.eye(rows, dtype=self.sum_dtype, device=self.device)
        query = F.pad(identity, (self.weight.shape[-1], 0)).flatten().expand(self.batch, self.parents, -1)
        return votes, Dot(query, None if offset is None else offset.expand(-1, self.parents))

    def own_features(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.poses.shape[-2], -1))[..., : self.weight.shape[-1]].flatten(-2)

    def tensors(self, gates: Tensor | None) -> Children:
        # Half precision would be no faster here, and it would round the gradients that iterations sum up.
        poses, weight = at_least_float32(self.poses), at_least_float32(self.weight)
        bias = None if self.bias is None else at_least_float32(self.bias)
        if self.backend == "native":  # one copy for all iterations
            poses, weight = poses.contiguous(), weight.contiguous()
        elif self.backend == "triton":  # its kernels read weights with the parents innermost
            poses, weight = poses.contiguous(), weight.movedim(3, -1).contiguous().movedim(-1, 3)
        return Children(poses, weight, bias, gates)

    def stored(self, children: slice) -> StoredVotes:
        poses, weight, bias = self._in_windows()
        if children != slice(None):
            index = torch.arange(poses.shape[1], device=poses.device)[children]
            poses, weight = poses[:, children], weight[index // (poses.shape[1] // weight.shape[0])]
            bias = None if bias is None else bias[index // (self.children // bias.shape[0])]
        dtype = torch.promote_types(poses.dtype, weight.dtype)
        poses = poses.to(dtype).unflatten(1, (weight.shape[0], -1))
        votes = contract("bgprd,gjdh->bgpjrh", poses, weight.to(dtype)).flatten(1, 2)
        if bias is not None:
            votes = (votes.unflatten(1, (bias.shape[0], -1)) + bias.unsqueeze(1)).flatten(1, 2)
        return StoredVotes(votes)

    def _in_windows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return poses `(batch, children, rows, d)`, and weight and bias in their shapes without a grid."""
        weight, bias = self.weight.flatten(0, 2), None if self.bias is None else self.bias.flatten(0, 2)
        if not self.grid:
            return self.poses.flatten(1, 3), weight, bias
        return windows(self.poses, self.kernel, self.options.stride, self.options.dilation), weight, bias

    # ------------------------------------------------------------ shapes of the parents

    def with_coefficients(self, parents: Capsules, coefficients: Tensor) -> Capsules:
        if self.grid:
            coefficients = coefficients.unflatten(0, self.grid).unflatten(3, (self.weight.shape[0], *self.kernel))
        if self.line:
            coefficients = coefficients.squeeze(4).squeeze(1)
        return super().with_coefficients(parents, coefficients)

    def _shaped(self, x: Tensor, pose: tuple[int, ...]) -> Tensor:
        x = super()._shaped(x, pose)
        if self.grid:
            x = x.unflatten(0, self.grid).movedim(3, 1)
        return x.squeeze(2) if self.line else x
