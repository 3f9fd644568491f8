"""Votes that are computed inside the reductions, and again for the gradients: none is stored.

`LinearVotes`, those of the capsule layers with weights, are here; `PoseVotes`, which are the poses, in `poses.py`.
"""

import copy
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.capsules import Capsules
from torchcaps.ops.agreement import Agreement, Dot, Gaussian, PoseLogits, SigmoidDot, UnitDot
from torchcaps.ops.backend import Backend, choose_backend
from torchcaps.ops.children import Children, Options, ParentTensors, Softmax, check_children, check_device, grid_of
from torchcaps.ops.grid import Pair, windows
from torchcaps.ops.numerics import at_least_float32, contract, nonzero
from torchcaps.ops.operators import BACKENDS, Operator, apply_operator
from torchcaps.ops.stored import StoredVotes, coefficients_of
from torchcaps.ops.votes import Moments, Votes, per_child


@dataclass
class Cache:
    """What computed votes keep between reductions.

    Attributes:
        stored: the stored votes of the reference backend, keyed by `is_grad_enabled()`: votes made under `no_grad`
            must not be reused with gradients.
        handed_on: the children, and the carriers of their gradients to give to the next reduction, see
            :func:`torchcaps.ops.operators.apply_operator`, with the same keys.
    """

    stored: dict[bool, StoredVotes] = field(default_factory=dict)
    handed_on: dict[bool, tuple[Children, Children]] = field(default_factory=dict)


class ComputedVotes(Votes):
    """Votes that a backend computes from tensors of the children's size.

    The backend "reference" stores all votes. Coefficients that a caller asks for are computed from the stored votes of
    a few children at a time; in compiled code, which has no such loops, from those of all children at once.

    Attributes:
        poses: poses of the children.
        backend: the backend that computes the reductions.
        operators: its operators, by the names of the reductions.
        options: stride and dilation of the windows, and whether the votes are the poses.
        window: height and width of a window, 1 and 1 without a grid.
        grid: number of images, and rows and columns of their windows; empty without a grid.
        unfolds: whether the operators take the children of all windows unfolded, as those of samples without a grid.
    """

    poses: Tensor
    backend: str
    operators: dict[str, Operator]
    options: Options
    window: Pair = (1, 1)
    grid: tuple[int, ...] = ()
    unfolds: bool = False
    cache: Cache

    # ------------------------------------------------------------ defined by the kinds of votes

    @abstractmethod
    def tensors(self, gates: Tensor | None) -> Children:
        """Return the children as the operators take them.

        Args:
            gates: gates in the operators' shape.
        """

    @abstractmethod
    def with_logits(self, agreement: PoseLogits) -> tuple[Self, Dot]:
        """Return votes and a dot agreement whose logits are those of the poses."""

    def drop_logit_columns(self, x: Tensor) -> Tensor:
        """Drop the features that `with_logits` has appended to the votes."""
        return x

    # ------------------------------------------------------------ variants

    def gated(self, gates: Tensor | None) -> Self:
        votes = super().gated(gates)
        votes.cache = Cache(self.cache.stored)
        return votes

    def detach(self) -> Self:
        votes = copy.copy(self)
        votes.poses, votes.cache = self.poses.detach(), Cache()
        votes.gates = None if self.gates is None else self.gates.detach()
        return votes

    def first(self, count: int) -> Self:
        """Return a copy of the votes in the first samples, as constants; on a grid, those of the first maps."""
        votes = self.detach()
        votes.poses = votes.poses[:count].clone()
        votes.batch = self.batch // len(self.poses) * len(votes.poses)
        votes.grid = (len(votes.poses), *self.grid[1:]) if self.grid else ()
        votes.gates = None if votes.gates is None else votes.gates[: votes.batch].clone()
        return votes

    # ------------------------------------------------------------ reductions

    def weighted_sum(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        if agreement is None:  # all coefficients are equal
            if softmax == "parents":
                return self.vote_sum() / (self.parents + int(leaky))  # torch.jit.trace cannot add a bool
            return self.vote_sum() / (self.children if self.gates is None else nonzero(self.count())[:, None, None])
        if isinstance(agreement, PoseLogits):
            votes, dot = self.with_logits(agreement)
            return self.drop_logit_columns(votes.weighted_sum(dot, softmax, leaky))
        if self.backend == "reference":
            return self.all_stored().weighted_sum(agreement, softmax, leaky)
        if isinstance(agreement, Gaussian):
            if softmax == "children" or leaky:
                raise ValueError(
                    "a sum weighted by a Gaussian has a softmax over the parents alone: use Dot or UnitDot"
                )
            m = self.moments(agreement, eps=1.0)  # any eps, so that a mass of 0 has gradients
            return m.mean * (m.mass + 1).unsqueeze(-1)
        if isinstance(agreement, SigmoidDot):
            raise ValueError("a SigmoidDot weights net sums alone: use net_sum, or Dot")
        options = self.options._replace(softmax=softmax, unit=isinstance(agreement, UnitDot), leaky=leaky)
        return self.reduce("weighted_sum", self._tensors_of(agreement), options)[0]

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        if isinstance(agreement, PoseLogits):
            votes, dot = self.with_logits(agreement)
            m = votes.moments(dot, betas, eps)
            return m._replace(mean=self.drop_logit_columns(m.mean), variance=self.drop_logit_columns(m.variance))
        if self.backend == "reference":
            return self.all_stored().moments(agreement, betas, eps)
        if isinstance(agreement, (UnitDot, SigmoidDot)):
            kind = type(agreement).__name__
            other = "weighted_sum" if isinstance(agreement, UnitDot) else "net_sum"
            raise ValueError(f"moments cannot be weighted by a {kind}: use Dot or Gaussian, or {other}")
        tensors = self._tensors_of(agreement)._replace(betas=self.rows_by_place(betas))
        mass, mean, variance, benefit = self.reduce("moments", tensors, self.options._replace(eps=eps))
        return Moments(mass, mean, variance, None if betas is None else benefit)

    def coefficients(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        if isinstance(agreement, PoseLogits):
            votes, dot = self.with_logits(agreement)
            return votes.coefficients(dot, softmax, leaky)
        if agreement is None:
            zeros = torch.zeros(self.batch, self.children, self.parents, dtype=self.sum_dtype, device=self.device)
            return coefficients_of(zeros, self.gates, softmax, leaky)
        if self.backend == "reference" or torch.compiler.is_compiling():
            return self.all_stored().coefficients(agreement, softmax, leaky)
        # Only the logits are stored: the votes of a block are computed, used, and computed again for gradients.
        again = partial(checkpoint, self._logits, use_reentrant=False, preserve_rng_state=False)  # nothing is random
        logits = [again(agreement, some) for some in self.few_children()]
        return coefficients_of(torch.cat(logits, dim=1), self.gates, softmax, leaky)

    # ------------------------------------------------------------ helpers of the reductions

    def reduce(self, name: str, parents: tuple[Tensor | None, ...], options: Options) -> tuple[Tensor, ...]:
        """Run a reduction of the backend, such as `native.weighted_sum`.

        Args:
            name: name of the reduction.
            parents: the tensors of the parents that it takes.
            options: how the votes are reduced.
        """
        for what, x in zip(self.operators[name].reduction.parents._fields, parents, strict=True):
            if x is not None:  # with one on "meta" PyTorch would not call the operator, which checks all else
                check_device(what, x, "votes", self.device)
        with_gradient, handed_on = torch.is_grad_enabled(), self.cache.handed_on
        children, carriers = handed_on.get(with_gradient) or (self._children(), None)
        results, carriers = apply_operator(self.operators[name], children, parents, options, carriers)
        if not torch.compiler.is_compiling():
            handed_on[with_gradient] = children, carriers
        return results

    def _tensors_of(self, agreement: Dot | UnitDot | Gaussian | None) -> ParentTensors:
        if agreement is None:
            return ParentTensors()
        if isinstance(agreement, Gaussian):
            return ParentTensors(*agreement)
        return ParentTensors(agreement.query, offset=self.rows_by_place(getattr(agreement, "offset", None)))

    def rows_by_place(self, rows: Tensor | None) -> Tensor | None:
        """Return rows that groups of children share, `(groups, parents or 1)`, as the operators take them: `(groups,
        *window, ...)`."""
        if rows is None:
            return None
        fits = rows.dim() == 2 and len(rows) and self.children % len(rows) == 0
        if self.window == (1, 1) or self.unfolds or not fits:  # the operators refuse what does not fit
            return rows[:, None, None]
        if rows.shape[0] == 1:
            return rows[:, None, None].expand(-1, *self.window, -1)
        return per_child(rows, self.children).unflatten(0, (-1, *self.window))  # a group may be part of a window

    def all_stored(self) -> StoredVotes:
        """Return all votes as stored votes, which later calls use again."""
        with_gradient = torch.is_grad_enabled()
        if with_gradient not in self.cache.stored:
            self.cache.stored[with_gradient] = StoredVotes(self.stored(slice(None)))
        return self.cache.stored[with_gradient].gated(self.gates)

    def _children(self) -> Children:
        return self.tensors(None if self.gates is None else self.gates.unflatten(1, (-1, *self.window)))

    def _logits(self, agreement: Agreement, some: slice) -> Tensor:
        """Return the logits of some children."""
        index = torch.arange(self.children, device=self.device)[some]
        rows = {name: getattr(agreement, name, None) for name in ("slope", "offset")}
        of_some = {
            name: x[index // (self.children // len(x))] for name, x in rows.items() if x is not None and len(x) > 1
        }
        return StoredVotes(self.stored(some)).logits(agreement._replace(**of_some))


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
            rows, d)`, weight is `(types, *window, parents, d, h)` and bias `(types, *window, parents or
            1, rows, h)`. Each window is a sample, images before positions, and its children are in the order of the
            weights.
        line: whether the grid is a sequence: a grid of height 1 whose height is left out of the parents' shape.
        backend: "auto", "reference", "tiled", "native" or "triton"; see :func:`torchcaps.use_backend`.

    On a grid `capsules` and `with_coefficients` return parents `(images, parents, rows, columns, ...)` and coefficients
    `(images, rows, columns, types, *window, parents)`; on a line there are no rows, in the grid and in the window.
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
            poses = poses.reshape(*poses.shape[:2], 1, 1, *poses.shape[2:])
            weight = weight.reshape(weight.shape[0], 1, 1, *weight.shape[1:])
            bias = None if bias is None else bias.reshape(bias.shape[0], 1, 1, *bias.shape[1:])
        children, self.options = Children(poses, weight, bias, None), Options(stride=stride, dilation=dilation)
        check_children(children)
        self.poses, self.pose, self.line = poses, pose, line
        grid = poses.shape[0], *grid_of(children, self.options)
        if min(grid[1:]) < 1:
            raise ValueError(f"a map of {poses.shape[2]}x{poses.shape[3]} has no window of {children.window}")
        self.batch, self.grid, self.window = math.prod(grid), grid if on_grid else (), children.window
        self.children, self.parents = poses.shape[1] * math.prod(self.window), children.parents
        self.device, self.dtype, self.gates = poses.device, poses.dtype, None
        self.layout = tuple(poses.shape[1:4]) if on_grid else (self.children,)
        self._requested_backend = backend
        self._with_weights(weight, bias)

    def _with_weights(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set weight and bias, and the backend that can take votes of their size."""
        self.weight, self.bias, self.cache = weight, bias, Cache()
        rows, depth, width = *self.poses.shape[-2:], weight.shape[-1]
        stored = self.batch * self.children * self.parents * rows * width * self.sum_dtype.itemsize
        sizes = self.parents, rows, depth, width
        self.backend = choose_backend(self._requested_backend, self.device, sizes, stored)
        self.operators = BACKENDS[self.backend]

    def detach(self) -> Self:
        votes = super().detach()
        votes.weight, votes.bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        return votes

    # ------------------------------------------------------------ reductions

    def vote_sum(self) -> Tensor:
        if self.backend == "reference":
            return self.all_stored().vote_sum()
        return self.reduce("vote_sum", ParentTensors(), self.options)[0]

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
        for name, x, shape in (("weight", weight, (rows, d)), ("offset", offset, ())):
            if x is not None and (x.shape[0], *x.shape[2:]) != (groups, *shape):
                expected = (groups, "parents or 1", *shape)
                raise ValueError(f"expected the {name} of the logits of shape {expected}, got {tuple(x.shape)}")
        columns = weight.transpose(2, 3).unflatten(0, self.weight.shape[:3]).to(self.weight.dtype)
        columns = columns.expand(*self.weight.shape[:-1], rows)
        votes = copy.copy(self)
        votes._with_weights(
            torch.cat([self.weight, columns], dim=-1), None if self.bias is None else F.pad(self.bias, (0, rows))
        )
        identity = torch.eye(rows, dtype=self.sum_dtype, device=self.device)
        query = F.pad(identity, (self.weight.shape[-1], 0)).flatten().expand(self.batch, self.parents, -1)
        if offset is not None:
            offset = self._unfolded(offset.unflatten(0, self.weight.shape[:3])).expand(-1, self.parents)
        return votes, Dot(query, offset)

    def drop_logit_columns(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.poses.shape[-2], -1))[..., : self.weight.shape[-1]].flatten(-2)

    def tensors(self, gates: Tensor | None) -> Children:
        poses, weight, bias = self.poses, self.weight, self.bias
        # Triton's kernels read half precision. On a CPU it would be no faster, and compiled code would round the
        # gradients that iterations sum up.
        if self.backend != "triton" or torch.compiler.is_compiling():
            poses, weight = at_least_float32(poses), at_least_float32(weight)
            bias = None if bias is None else at_least_float32(bias)
        if self.unfolds:
            poses = windows(poses, self.window, self.options.stride, self.options.dilation)[:, :, None, None]
            weight = self._unfolded(weight)[:, None, None]
            bias = None if bias is None else self._unfolded(bias)[:, None, None]
            gates = None if gates is None else gates.flatten(1)[:, :, None, None]
        if self.backend == "native":  # one copy for all iterations
            poses, weight = poses.contiguous(), weight.contiguous()
        elif self.backend == "triton":  # its kernels read weights and biases with the parents innermost
            poses, weight = poses.contiguous(), weight.movedim(3, -1).contiguous().movedim(-1, 3)
            bias = None if bias is None else bias.movedim(3, -1).contiguous().movedim(-1, 3)
        return Children(poses, weight, bias, gates)

    @property
    def unfolds(self) -> bool:  # type: ignore[override]
        # Windows are copied out of the map once for all iterations: Triton's kernels know none, and "tiled" would start
        # its operators for each place in a window, which takes time on a GPU.
        on_device = self.backend == "tiled" and self.device.type != "cpu"
        return self.grid != () and (self.backend == "triton" or on_device)

    def _unfolded(self, rows: Tensor) -> Tensor:
        """Return rows `(groups, *window, ...)` as those of groups of children, `(groups, ...)`. In a window of several
        places each child has its own: those of a group of types do not follow one another."""
        types = self.poses.shape[1]
        if self.window != (1, 1) and len(rows) < types:
            rows = rows.repeat_interleave(types // len(rows), dim=0)
        return rows.flatten(0, 2)

    def stored(self, children: slice) -> Tensor:
        weight, bias = self._unfolded(self.weight), None if self.bias is None else self._unfolded(self.bias)
        poses, places = self.poses, math.prod(self.window)
        if children != slice(None):  # only their types have to be cut into windows
            first, last, _ = children.indices(self.children)
            index = torch.arange(first, last, device=poses.device)
            poses = poses[:, first // places : (last - 1) // places + 1]
            children = slice(first % places, first % places + last - first)
            weight = weight[index // (self.children // weight.shape[0])]
            bias = None if bias is None else bias[index // (self.children // bias.shape[0])]
        if self.grid:
            poses = windows(poses, self.window, self.options.stride, self.options.dilation)
        else:
            poses = poses.flatten(1, 3)
        poses = poses[:, children]
        dtype = torch.promote_types(poses.dtype, weight.dtype)
        poses = poses.to(dtype).unflatten(1, (weight.shape[0], -1))
        votes = contract("bgprd,gjdh->bgpjrh", poses, weight.to(dtype)).flatten(1, 2)
        if bias is not None:
            votes = (votes.unflatten(1, (bias.shape[0], -1)) + bias.unsqueeze(1)).flatten(1, 2)
        return at_least_float32(votes).flatten(3)

    # ------------------------------------------------------------ shapes of the parents

    def with_coefficients(self, parents: Capsules, coefficients: Tensor) -> Capsules:
        if self.grid:
            coefficients = coefficients.unflatten(0, self.grid).unflatten(3, (self.weight.shape[0], *self.window))
        if self.line:
            coefficients = coefficients.squeeze(4).squeeze(1)
        return super().with_coefficients(parents, coefficients)

    def _shaped(self, x: Tensor, pose: tuple[int, ...]) -> Tensor:
        x = super()._shaped(x, pose)
        if self.grid:
            x = x.unflatten(0, self.grid).movedim(3, 1)
        return x.squeeze(2) if self.line else x
