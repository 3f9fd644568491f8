"""Votes that are computed inside the reductions, and again for the gradients: none is stored."""

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.ops import tiled
from torchcaps.ops.agreement import Agreement, Dot, Gaussian, PoseLogits, SigmoidDot, UnitDot
from torchcaps.ops.children import BLOCK, SOFTMAXES, Children, Options, Pair, Softmax, check_device
from torchcaps.ops.numerics import autocast_off
from torchcaps.ops.operators import Operator, apply_operator
from torchcaps.ops.stored import StoredVotes, coefficients_of
from torchcaps.ops.votes import Moments, Votes, per_child
from torchcaps.utils.checks import check_choice


@dataclass
class Cache:
    """What computed votes keep between reductions.

    Attributes:
        stored: the stored votes of the reference backend, keyed by `is_grad_enabled()`: votes made under `no_grad`
            must not be reused with gradients.
        handed_on: the children to give to the next reduction, see :func:`torchcaps.ops.operators.apply_operator`.
    """

    stored: dict[bool, StoredVotes] = field(default_factory=dict)
    handed_on: Children | None = None


class ComputedVotes(Votes):
    """Votes that a backend computes from tensors of the children's size.

    Votes are stored in two cases: all of them by the backend "reference", and those of a few children at a time for
    coefficients that a caller asks to see; of all children where code is compiled, which has no such loops.

    Attributes:
        poses: poses of the children.
        backend: the backend that computes the reductions.
        operators: its operators, by the names of the reductions.
        options: stride and dilation of the windows, and whether the votes are the poses.
        kernel: height and width of a window, 1 and 1 without a grid.
        grid: number of images, and rows and columns of their windows; empty without a grid.
    """

    poses: Tensor
    backend: str
    operators: dict[str, Operator]
    options: Options
    kernel: Pair = (1, 1)
    grid: tuple[int, ...] = ()
    cache: Cache

    # ------------------------------------------------------------ defined by the kinds of votes

    @abstractmethod
    def tensors(self, gates: Tensor | None) -> Children:
        """Return the children as the operators take them.

        Args:
            gates: gates in the operators' shape.
        """

    @abstractmethod
    def stored(self, children: slice) -> StoredVotes:
        """Return the votes of some children as stored votes, without gates."""

    @abstractmethod
    def with_logits(self, agreement: PoseLogits) -> tuple[Self, Dot]:
        """Return votes and a dot agreement whose logits are those of the poses."""

    def own_features(self, x: Tensor) -> Tensor:
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
        check_choice("softmax", softmax, SOFTMAXES)
        if agreement is None:
            return self.uniform_sum(softmax, leaky)
        if isinstance(agreement, PoseLogits):
            votes, dot = self.with_logits(agreement)
            return self.own_features(votes.weighted_sum(dot, softmax, leaky))
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
        offset = agreement.offset if isinstance(agreement, Dot) else None
        options = self.options._replace(softmax=softmax, unit=isinstance(agreement, UnitDot), leaky=leaky)
        return self.reduce("weighted_sum", (agreement.query, self.by_place(offset)), options)[0]

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        if isinstance(agreement, PoseLogits):
            votes, dot = self.with_logits(agreement)
            m = votes.moments(dot, betas, eps)
            return m._replace(mean=self.own_features(m.mean), variance=self.own_features(m.variance))
        if self.backend == "reference":
            return self.all_stored().moments(agreement, betas, eps)
        if isinstance(agreement, (UnitDot, SigmoidDot)):
            kind = type(agreement).__name__
            raise ValueError(f"moments cannot be weighted by a {kind}: use Dot or Gaussian, or weighted_sum")
        target, precision, prior, offset = None, None, None, None
        if isinstance(agreement, Dot):
            target, offset = agreement
        elif agreement is not None:
            target, precision, prior = agreement
        tensors = (target, precision, prior, self.by_place(offset), self.by_place(betas))
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
        logits = [checkpoint(self._logits, agreement, some, use_reentrant=False) for some in self._some_children()]
        return coefficients_of(torch.cat(logits, dim=1), self.gates, softmax, leaky)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        children = self._children()
        layout = tiled.Layout(children, self.options)
        for block in tiled.vote_blocks(children, self.options):
            with autocast_off(self.device.type):
                votes = layout.unpack_votes(tiled.vote_tile(block, layout, children, self.options).votes())
            yield block.samples, votes, None if children.gates is None else block.read_gates(children.gates).T

    def lengths(self) -> Tensor:
        return torch.cat([self.stored(some).lengths() for some in self._some_children()], dim=1)

    # ------------------------------------------------------------ helpers of the reductions

    def reduce(self, name: str, parents: tuple[Tensor | None, ...], options: Options) -> tuple[Tensor, ...]:
        """Run a reduction of the backend, such as `native.weighted_sum`.

        Args:
            name: name of the reduction.
            parents: the tensors of the parents that it takes.
            options: how the votes are reduced.
        """
        for what, x in zip(self.operators[name].reduction.names(), parents, strict=True):
            if x is not None:  # with one on "meta" PyTorch would not call the operator, which checks all else
                check_device(what, x, "votes", self.device)
        children = self.cache.handed_on or self._children()
        results, children = apply_operator(self.operators[name], children, parents, options)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.cache.handed_on = children
        return results

    def by_place(self, rows: Tensor | None) -> Tensor | None:
        """Return rows that groups of children share, `(groups, parents or 1)`, as `(groups, kernel, kernel, ...)`."""
        if rows is None:
            return None
        if self.kernel == (1, 1) or rows.dim() != 2 or not len(rows) or self.children % len(rows):
            return rows[:, None, None]  # the operators refuse what does not fit
        if rows.shape[0] == 1:
            return rows[:, None, None].expand(-1, *self.kernel, -1)
        return per_child(rows, self.children).unflatten(0, (-1, *self.kernel))  # a group may be part of a window

    def all_stored(self) -> StoredVotes:
        """Return all votes as stored votes, which later calls use again."""
        with_gradient = torch.is_grad_enabled()
        if with_gradient not in self.cache.stored:
            self.cache.stored[with_gradient] = self.stored(slice(None))
        return self.cache.stored[with_gradient].gated(self.gates)

    def _children(self) -> Children:
        return self.tensors(None if self.gates is None else self.gates.unflatten(1, (-1, *self.kernel)))

    def _some_children(self) -> Iterator[slice]:
        """Yield slices of the children whose votes are few enough to be stored."""
        step = max(1, BLOCK // max(1, self.batch * self.parents * math.prod(self.pose)))
        for first in range(0, self.children, step):
            yield slice(first, first + step)

    def _logits(self, agreement: Agreement, some: slice) -> Tensor:
        """Return the logits of some children."""
        index = torch.arange(self.children, device=self.device)[some]
        rows = {name: getattr(agreement, name, None) for name in ("slope", "offset")}
        own = {name: x[index // (self.children // len(x))] for name, x in rows.items() if x is not None and len(x) > 1}
        return self.stored(some).logits(agreement._replace(**own))
