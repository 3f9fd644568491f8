"""Votes that are not stored, but computed from poses and weights inside the reductions. Capsule layers route these."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.capsules import Capsules
from torchcaps.checks import check_choice
from torchcaps.ops import library, tiled
from torchcaps.ops.agreement import Agreement, Dot
from torchcaps.ops.backend import Backend, choose_backend
from torchcaps.ops.children import BLOCK, SOFTMAXES, Children, Options, Pair, Softmax, count_samples, grid_of
from torchcaps.ops.numerics import at_least_float32, autocast_off, contract, nonzero
from torchcaps.ops.reference import StoredVotes, coefficients_of, net_factors
from torchcaps.ops.votes import Activation, Linear, Moments, Votes, per_child
from torchcaps.ops.windows import windows


@dataclass
class Cache:
    """State that lazy votes keep between reductions.

    Attributes:
        stored: the stored votes of the reference backend, keyed by `is_grad_enabled()`: votes made under `no_grad`
            must not be reused with gradients.
        handed_on: the children to give to the next reduction, see :func:`torchcaps.ops.library.reduce`.
    """

    stored: dict[bool, StoredVotes] = field(default_factory=dict)
    handed_on: Children | None = None


class LazyVotes(Votes):
    """Votes computed from poses and weights: `V[b,i,j] = pose[b,i] @ weight[g(i),j] + bias[g(i),j]`.

    Consecutive children share weights in `groups` of equal size: with as many groups as children each child has its
    own, with one group all children share one. On a grid all positions share the weights.

    Args:
        poses: `(batch, children, rows, d)`.
        weight: `(groups, parents, d, h)`; the number of children is a multiple of groups. An int, the number of
            parents: the votes for all parents are the poses themselves, `V[b,i,j] = pose[b,i]`. They are then as cheap
            as children x parents x features, because no weights are needed.
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
        weight: Tensor | int,
        bias: Tensor | None,
        pose: tuple[int, ...],
        stride: Pair = (1, 1),
        dilation: Pair = (1, 1),
        line: bool = False,
        backend: Backend = "auto",
    ):
        on_grid, shared = poses.dim() == 6, isinstance(weight, int)
        if isinstance(weight, int):
            weight = _no_weights(poses, weight)
        if not on_grid:
            poses, weight = poses[:, :, None, None], weight[:, None, None]
            bias = None if bias is None else bias[:, None, None]
        self.poses, self.weight, self.bias, self.pose, self.line = poses, weight, bias, pose, line
        self.windows = Options(stride=stride, dilation=dilation, shared=shared)
        children = Children(poses, weight, bias, None)
        self.batch, self.kernel = count_samples(children, self.windows), children.kernel
        self.grid = (poses.shape[0], *grid_of(children, self.windows)) if on_grid else ()
        self.children, self.parents = poses.shape[1] * math.prod(self.kernel), children.parents
        self.device, self.dtype, self.gates = poses.device, poses.dtype, None
        self.layout: tuple[int, ...] = tuple(poses.shape[1:4]) if on_grid else (self.children,)
        self.backend_asked = backend
        self.backend = choose_backend(backend, poses.device, self._sizes())
        self.logit_columns = 0  # columns that with_logits has appended to each vote
        self.logit_query: Tensor | None = None  # of `with_logits` where the votes are the poses themselves
        self.logit_offset: Tensor | None = None
        self.plain: Self | None = None  # the votes without the logits of `with_logits`
        self.cache = Cache()

    @property
    def shared(self) -> bool:
        """Whether the votes are the poses of the children."""
        return self.windows.shared

    # ------------------------------------------------------------ variants of the votes

    def gated(self, gates: Tensor | None) -> Self:
        votes = super().gated(gates)
        votes.cache = Cache(self.cache.stored)
        return votes

    def detach(self) -> Self:
        votes = copy.copy(self)
        votes.poses, votes.weight = self.poses.detach(), self.weight.detach()
        votes.bias, votes.gates, votes.logit_offset, votes.logit_query = (
            None if x is None else x.detach() for x in (self.bias, self.gates, self.logit_offset, self.logit_query)
        )
        votes.cache = Cache()
        return votes

    def first_maps(self, count: int) -> Self:
        """Return a copy of the votes in the first samples, as constants; on a grid, those of the first maps."""
        votes = self.detach()
        votes.poses = votes.poses[:count].clone()
        votes.batch = self.batch // len(self.poses) * len(votes.poses)
        votes.grid = (len(votes.poses), *self.grid[1:]) if self.grid else ()
        votes.gates = None if votes.gates is None else votes.gates[: votes.batch].clone()
        votes.plain = None if self.plain is None else self.plain.first_maps(count)
        return votes

    def with_logits(self, weight: Tensor, offset: Tensor | None = None) -> Self:
        # `rows` columns are appended to each vote: entry (r, c) is pose[r] . weight[c]. An identity matrix appended to
        # the query sums the entries with r = c.
        groups, rows, d = self.weight.shape[:3].numel(), *self.poses.shape[-2:]
        if self.shared and len(weight) > 1:
            raise ValueError(
                "children whose poses are their votes must share the weights of their logits: use in_capsules=None"
            )
        for name, x, own in (("weight", weight, (rows, d)), ("offset", offset, ())):
            if x is not None and (x.shape[0], *x.shape[2:]) != (groups, *own):
                expected = (groups, "parents or 1", *own)
                raise ValueError(f"expected the {name} of the logits of shape {expected}, got {tuple(x.shape)}")
        votes = copy.copy(self)
        votes.plain = self
        votes.logit_offset = None if offset is None else offset.expand(-1, self.parents)
        votes.cache = Cache()
        if self.shared:
            votes.logit_query = weight.expand(1, self.parents, rows, d).flatten(2)
            return votes
        columns = weight.transpose(2, 3).unflatten(0, self.weight.shape[:3]).to(self.weight.dtype)
        votes.weight = torch.cat([self.weight, columns.expand(*self.weight.shape[:-1], rows)], dim=-1)
        votes.bias = None if self.bias is None else F.pad(self.bias, (0, rows))
        votes.logit_columns = rows
        votes.backend = choose_backend(self.backend_asked, self.device, votes._sizes())
        return votes

    # ------------------------------------------------------------ reductions

    def weighted_sum(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        check_choice("softmax", softmax, SOFTMAXES)
        agreement = self._widened(agreement)
        if agreement is None:
            return self._uniform_sum(softmax, leaky)
        if self.backend == "reference":
            return self._narrowed(self._stored().weighted_sum(agreement, softmax, leaky))
        if not isinstance(agreement, Dot):
            raise self._impossible("a weighted sum with a Gaussian agreement")
        self._check_slope(agreement)
        operators = self._operators()["weighted_sum"]
        parents = agreement.scaled_query(), self._by_place(agreement.offset)
        sums, _ = self._reduce(operators, parents, Options(softmax, agreement.unit, leaky))
        return self._narrowed(sums)

    def constant_sum(self, constants: Tensor) -> Tensor:
        if self.shared:
            if not len(constants) or self.children % len(constants) or constants.shape[1] not in (1, self.parents):
                raise ValueError(f"expected constants of shape (groups, parents or 1), got {tuple(constants.shape)}")
            poses = at_least_float32(self.poses).flatten(1, 3).flatten(2)
            poses = poses if self.gates is None else poses * self.gates.unsqueeze(2)
            sums = poses.unflatten(1, (len(constants), -1)).sum(2)
            return contract("bgk,gj->bjk", sums, at_least_float32(constants).expand(-1, self.parents))
        groups = self.weight.shape[:3].numel()
        if constants.shape[0] != groups or constants.shape[1] not in (1, self.parents):
            raise ValueError(f"expected constants of shape ({groups}, parents or 1), got {tuple(constants.shape)}")
        constants = constants.expand(-1, self.parents)
        votes = copy.copy(self)
        rows = constants.to(self.weight.dtype).unflatten(0, self.weight.shape[:3])
        votes.weight = self.weight * rows[..., None, None]
        if self.bias is not None:
            types = max(len(rows), len(self.bias))
            votes.bias = per_child(self.bias, types) * per_child(rows, types)[..., None, None]
        votes.cache = Cache()
        return votes._narrowed(votes._plain_sum())

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        agreement = self._widened(agreement)
        if self.backend == "reference":
            mass, mean, variance, benefit = self._stored().moments(agreement, betas, eps)
        else:
            if isinstance(agreement, Dot) and agreement.unit:
                raise self._impossible("moments with a dot agreement of unit votes")
            self._check_slope(agreement)
            tensors: tuple[Tensor | None, ...] = (None, None, None, None)
            if isinstance(agreement, Dot):
                tensors = (agreement.scaled_query(), None, None, self._by_place(agreement.offset))
            elif agreement is not None:
                tensors = (*agreement, None)
            operators = self._operators()["moments"]
            found = self._reduce(operators, (*tensors, self._by_place(betas)), Options(eps=eps))
            mass, mean, variance, benefit = *found[:3], None if betas is None else found[3]
        return Moments(mass, self._narrowed(mean), self._narrowed(variance), benefit)

    def net_sum(
        self,
        agreement: Dot | None,
        betas: tuple[Linear, Linear] | None = None,
        activation: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not self.shared:
            return super().net_sum(agreement, betas, activation)
        widened = self._widened(agreement)
        assert widened is None or isinstance(widened, Dot)
        if self.backend == "reference":
            phi = self.net_factors(agreement, betas, activation)
            poses = at_least_float32(self.poses.flatten(1, 3).flatten(2))
            return contract("bij,bik->bjk", phi.to(poses.dtype), poses), phi.sum(1)
        if widened is not None and widened.unit:
            raise self._impossible("a net sum with a dot agreement of unit votes")
        query, slope, offset = (
            (None,) * 3 if widened is None else (widened.scaled_query(), widened.slope, widened.offset)
        )
        tensors: list[Tensor | None] = [query, self._by_place(slope), self._by_place(offset)]
        for own in betas or (None, None):
            rows = None if own is None else own.rows.expand(-1, self.parents)
            weight = None if own is None or own.weight is None else own.weight.expand(self.parents, -1)
            tensors += [self._by_place(rows), weight]
        tensors += (None,) * 3 if activation is None else activation
        sums, masses = self._reduce(self._operators()["net_sum"], tuple(tensors), Options())
        return sums, masses

    def net_factors(
        self,
        agreement: Dot | None,
        betas: tuple[Linear, Linear] | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        if not self.shared:
            return super().net_factors(agreement, betas, activation)
        poses = at_least_float32(self.poses.flatten(1, 3).flatten(2))
        return net_factors(poses, self.coefficients(agreement), self.gates, betas, activation)

    def with_poses(self, function: Callable[[Tensor], Tensor]) -> Self:
        if not self.shared:
            return super().with_poses(function)
        votes = copy.copy(self)
        votes.poses, votes.cache = function(self.poses), Cache()
        return votes

    def without_logits(self) -> Self:
        return self if self.plain is None else self.plain.gated(self.gates)

    def coefficients(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        agreement = self._widened(agreement)
        if agreement is None:
            zeros = torch.zeros(self.batch, self.children, self.parents, dtype=self.sum_dtype, device=self.device)
            return coefficients_of(zeros, self.gates, softmax, leaky)
        if self.backend == "reference" or torch.compiler.is_compiling():
            return self._stored().coefficients(agreement, softmax, leaky)
        # Only the logits are stored: the votes of a block are computed, used, and computed again for gradients.
        logits = [checkpoint(self._logits, agreement, some, use_reentrant=False) for some in self._some_children()]
        return coefficients_of(torch.cat(logits, dim=1), self.gates, softmax, leaky)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        gates = None if self.gates is None else self.gates.unflatten(1, (-1, *self.kernel))
        children = Children(self.poses, self.weight, self.bias, gates)
        layout = tiled.Layout(children, self.windows)
        for block in tiled.vote_blocks(children, self.windows):
            with autocast_off(self.device.type):
                votes = layout.unpack_votes(tiled.vote_tile(block, layout, children, self.windows).votes())
            own_gates = None if gates is None else block.read_gates(gates).T
            yield block.samples, self._narrowed(votes), own_gates

    def lengths(self) -> Tensor:
        found = []
        for some in self._some_children():
            votes = self._narrowed(self._stored_block(some).votes)
            found.append(votes.square().sum(-1).sqrt())
        return torch.cat(found, dim=1)

    # ------------------------------------------------------------ shapes of the parents

    def capsules(self, poses: Tensor, scores: Tensor | None = None, variances: Tensor | None = None) -> Capsules:
        parents = super().capsules(poses, scores, variances)
        return parents._replace(pose_dims=len(self.pose)) if self.line else parents

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

    # ------------------------------------------------------------ helpers of the reductions

    def _sizes(self) -> tuple[int, int, int]:
        """Return rows and columns of a child's pose, and columns of a vote."""
        rows, columns = self.poses.shape[-2:]
        return rows, columns, self.weight.shape[-1]

    def _widened(self, agreement: Agreement | None) -> Agreement | None:
        """Return the agreement for votes with the columns of `with_logits`."""
        if not self.logit_columns and self.logit_query is None:
            return agreement
        if agreement is None:
            agreement = Dot(self.parents_like())
        if not isinstance(agreement, Dot) or agreement.unit:
            kind = "unit votes" if isinstance(agreement, Dot) else "a Gaussian agreement"
            raise ValueError(f"logits of the children need a dot agreement without unit votes, got {kind}")
        rows, offset, query = self.logit_columns, agreement.offset, agreement.scaled_query()
        if self.logit_offset is not None:
            offset = self.logit_offset if offset is None else _sum_of_rows(offset, self.logit_offset)
        if self.logit_query is not None:
            return agreement._replace(query=query + self.logit_query, scale=1.0, offset=offset)
        query = query.unflatten(-1, (rows, -1))
        ones = torch.eye(rows, dtype=query.dtype, device=query.device).expand(*query.shape[:-1], rows)
        return Dot(torch.cat([query, ones], dim=-1).flatten(-2), offset=offset)

    def _narrowed(self, x: Tensor) -> Tensor:
        """Return features of votes without the columns of `with_logits`."""
        if not self.logit_columns:
            return x
        return x.unflatten(-1, (self.logit_columns, -1))[..., : -self.logit_columns].flatten(-2)

    def _uniform_sum(self, softmax: Softmax, leaky: bool) -> Tensor:
        """Return the weighted sum with uniform coefficients."""
        total = self._plain_sum()
        if softmax == "parents":
            return total / (self.parents + int(leaky))  # torch.jit.trace cannot add a bool
        if self.gates is None:
            return total / self.children
        return total / nonzero(self.gates.sum(1))[:, None, None]

    def _plain_sum(self) -> Tensor:
        """Return `sum_i gate[i] V[i,j]`. It needs one matrix product and no votes."""
        if self.backend != "reference":
            return self._reduce(self._operators()["vote_sum"], (), Options())[0]
        if self.shared:
            return self._stored().weighted_sum(None) * self.parents
        poses, weight, bias = self._windows()
        poses, weight = at_least_float32(poses), at_least_float32(weight)
        gates = poses.new_ones(self.batch, self.children) if self.gates is None else self.gates
        group_sums = (poses * gates[..., None, None]).unflatten(1, (weight.shape[0], -1)).sum(2)
        total = contract("bgrd,gjdh->bjrh", group_sums, weight)
        if bias is not None:
            masses = gates.unflatten(1, (bias.shape[0], -1)).sum(2)
            total = total + contract("bg,gjrh->bjrh", masses, at_least_float32(bias))
        return total.flatten(2)

    def _operators(self) -> dict[str, library.Operators]:
        """Return the operators of the backend. Votes that are the poses need products of matrices only, for which
        PyTorch calls the fastest libraries of each device: these are in "tiled"."""
        return library.BACKENDS["tiled" if self.shared and self.backend != "reference" else self.backend]

    def _reduce(
        self, operators: library.Operators, parents: tuple[Tensor | None, ...], options: Options
    ) -> tuple[Tensor, ...]:
        """Run a reduction. `library.reduce` calls the backend's function of the same name, such as
        `native.weighted_sum`."""
        windows = self.windows
        options = options._replace(stride=windows.stride, dilation=windows.dilation, shared=windows.shared)
        results, children = library.reduce(operators, self.cache.handed_on or self._children(), parents, options)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.cache.handed_on = children
        return results

    def _children(self) -> Children:
        """Return the children as the backend takes them."""
        # Half precision would be no faster here, and it would round the gradients that iterations sum up.
        poses = at_least_float32(self.poses)
        gates = None if self.gates is None else at_least_float32(self.gates).unflatten(1, (-1, *self.kernel))
        if self.shared:  # not the weights in another precision, which would take memory
            return Children(poses, _no_weights(poses, self.parents)[:, None, None], None, gates)
        weight = at_least_float32(self.weight)
        bias = None if self.bias is None else at_least_float32(self.bias)
        if self.backend == "native":  # one copy for all iterations
            poses, weight = poses.contiguous(), weight.contiguous()
        elif self.backend == "triton":  # its kernels read weights with the parents innermost
            poses, weight = poses.contiguous(), weight.movedim(3, -1).contiguous().movedim(-1, 3)
        return Children(poses, weight, bias, gates)

    def _by_place(self, rows: Tensor | None) -> Tensor | None:
        """Return rows that groups of children share, `(groups, parents or 1)`, as `(groups, kernel, kernel, ...)`."""
        if rows is None:
            return None
        if self.kernel == (1, 1):
            return rows[:, None, None]
        if rows.shape[0] == 1:
            return rows[:, None, None].expand(-1, *self.kernel, -1)
        return per_child(rows, self.children).unflatten(0, (-1, *self.kernel))  # a group may be part of a window

    def _windows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return poses `(batch, children, rows, d)`, and weight and bias in their shapes without a grid."""
        weight, bias = self.weight.flatten(0, 2), None if self.bias is None else self.bias.flatten(0, 2)
        if not self.grid:
            return self.poses.flatten(1, 3), weight, bias
        return windows(self.poses, self.kernel, self.windows.stride, self.windows.dilation), weight, bias

    def _stored(self) -> StoredVotes:
        with_gradient = torch.is_grad_enabled()
        if with_gradient not in self.cache.stored:
            votes = self._repeated(self.poses.flatten(1, 3)) if self.shared else _votes(*self._windows())
            self.cache.stored[with_gradient] = StoredVotes(votes)
        return self.cache.stored[with_gradient].gated(self.gates)

    def _repeated(self, poses: Tensor) -> Tensor:
        """Return poses `(batch, children, rows, d)` as the votes for every parent."""
        return poses.unsqueeze(2).expand(-1, -1, self.parents, -1, -1)

    def _some_children(self) -> Iterator[slice]:
        """Yield slices of the children whose votes are few enough to be stored."""
        step = max(1, BLOCK // max(1, self.batch * self.parents * math.prod(self.pose)))
        for first in range(0, self.children, step):
            yield slice(first, first + step)

    def _stored_block(self, children: slice) -> StoredVotes:
        """Return the votes of some children."""
        if self.shared:
            return StoredVotes(self._repeated(self.poses.flatten(1, 3)[:, children]))
        poses, weight, bias = self._windows()
        index = torch.arange(poses.shape[1], device=poses.device)[children]
        weight = weight[index // (poses.shape[1] // weight.shape[0])]
        bias = None if bias is None else bias[index // (poses.shape[1] // bias.shape[0])]
        return StoredVotes(_votes(poses[:, children], weight, bias))

    def _logits(self, agreement: Agreement, children: slice) -> Tensor:
        if isinstance(agreement, Dot):
            index = torch.arange(self.children, device=self.device)[children]
            offset, slope = (
                x if x is None or len(x) == 1 else x[index // (self.children // len(x))]
                for x in (agreement.offset, agreement.slope)
            )
            agreement = agreement._replace(offset=offset, slope=slope)
        return self._stored_block(children).logits(agreement)

    def _check_slope(self, agreement: Agreement | None) -> None:
        if isinstance(agreement, Dot) and agreement.slope is not None:
            raise self._impossible("this reduction with a slope, but net sums only")

    def _impossible(self, what: str) -> ValueError:
        return ValueError(f"backend={self.backend!r} cannot compute {what}: use backend='reference'")


def _votes(poses: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute all votes, `(batch, children, parents, rows, h)`."""
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    poses = poses.to(dtype).unflatten(1, (weight.shape[0], -1))
    votes = contract("bgprd,gjdh->bgpjrh", poses, weight.to(dtype)).flatten(1, 2)
    if bias is None:
        return votes
    return (votes.unflatten(1, (bias.shape[0], -1)) + bias.unsqueeze(1)).flatten(1, 2)


def _no_weights(poses: Tensor, parents: int) -> Tensor:
    """Return a tensor of the shape `(1, parents, d, d)`, which takes no memory and is never read."""
    d = poses.shape[-1]
    return poses.new_zeros(()).expand(1, parents, d, d)


def _sum_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """Add two tensors `(groups, parents)`. The number of groups of one is a multiple of the other's."""
    groups = max(len(a), len(b))
    return per_child(a, groups) + per_child(b, groups)
