"""The votes of children for parents, behind three reductions.

A routing algorithm never touches a vote. It asks for sums over the children, weighted by
coefficients that follow from an agreement, and for the coefficients themselves only if somebody
wants to see them. Where the votes live is decided here, and nowhere else.
"""

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.capsules import Capsules
from torchcaps.ops import tiled
from torchcaps.ops.agreement import Agreement, Dot
from torchcaps.ops.backend import Backend, choose_backend
from torchcaps.ops.library import Children, reduce
from torchcaps.ops.numerics import at_least_float32, autocast_off, contract, nonzero, normalize

Over = Literal["parents", "children"]


class Moments(NamedTuple):
    """Moments of the votes for each parent, weighted by `D[i,j] = gate[i] c[i,j]`."""

    mass: Tensor  # (batch, parents): sum_i D[i,j]
    mean: Tensor  # (batch, parents, features): sum_i D[i,j] V[i,j] / (mass[j] + eps)
    variance: Tensor  # (batch, parents, features): sum_i D[i,j] (V[i,j] - mean[j])**2 / (mass[j] + eps)
    benefit: Tensor | None  # (batch, parents): sum_i beta[i,j] D[i,j]


class Votes(ABC):
    """`V[b,i,j,k]`: what child i of sample b takes parent j to be, poses flattened to features k.

    Attributes:
        batch, children, parents: sizes.
        pose: shape of a parent's pose.
        device: where they are.
        dtype: precision of what comes out; sums over children run in float32 at least.
        gates: `(batch, children)` in [0, 1], how present each child is, or None (all of them are).
            A child with gate 0 is padding and changes nothing.
    """

    batch: int
    children: int
    parents: int
    pose: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    gates: Tensor | None

    @abstractmethod
    def weighted_sum(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        """`sum_i gate[i] c[i,j] V[i,j]` (softmax over parents) or `sum_i c[i,j] V[i,j]` (over children),
        of shape `(batch, parents, features)`."""

    @abstractmethod
    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        """Mass, mean and variance of the votes for each parent, softmax over parents; with `betas`, of shape
        `(groups, parents or 1)` where children in `groups` of equal size share them, also the sum of beta-weighted
        shares."""

    @abstractmethod
    def coefficients(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        """`c[b,i,j]`: softmax of the agreement over the parents of each child, or over the children of each
        parent, where the gates join it: `gate[i] exp(logit[i,j]) / sum_k gate[k] exp(logit[k,j])`.
        `leaky` adds a parent of logit 0 that joins the softmax and is dropped."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The votes themselves, to look at, a block at a time: a slice of the samples, the votes of some children of
        theirs, `(samples, children, parents, features)`, and the gates of these, `(samples, children)` or None."""

    def capsules(
        self,
        poses: Tensor,
        scores: Tensor | None = None,
        variances: Tensor | None = None,
    ) -> Capsules:
        """The parents, in their own shape and in the precision of the votes."""
        return Capsules(
            self._shaped(poses, self.pose),
            None if scores is None else self._shaped(scores, ()),
            None if variances is None else self._shaped(variances, self.pose),
        )

    def with_coefficients(self, parents: Capsules, coefficients: Tensor) -> Capsules:
        """The parents with their coefficients."""
        return parents._replace(coefficients=coefficients.to(self.dtype))

    def _shaped(self, x: Tensor, pose: tuple[int, ...]) -> Tensor:
        return x.reshape(self.batch, self.parents, *pose).to(self.dtype)

    @abstractmethod
    def detach(self) -> Self:
        """The same votes as constants: no gradient goes to the children or the weights."""

    def gated(self, gates: Tensor | None) -> Self:
        """The same votes of children that are present to the degree of their gates."""
        if gates is not None and gates.shape != (self.batch, self.children):
            expected = (self.batch, self.children)
            raise ValueError(f"expected scores of shape (batch, children) = {expected}, got {tuple(gates.shape)}")
        votes = copy.copy(self)
        votes.gates = None if gates is None else at_least_float32(gates)
        return votes


class StoredVotes(Votes):
    """The reference: all votes in memory. It defines what every other way must compute.

    Args:
        votes: `(batch, children, parents, *pose)`.
    """

    def __init__(self, votes: Tensor):
        if votes.dim() < 4:
            raise ValueError(f"expected votes of shape (batch, children, parents, *pose), got {tuple(votes.shape)}")
        self.batch, self.children, self.parents = votes.shape[:3]
        self.pose, self.device, self.dtype = tuple(votes.shape[3:]), votes.device, votes.dtype
        self.gates = None
        self.votes = at_least_float32(votes).flatten(3)

    def detach(self) -> Self:
        votes = copy.copy(self)
        votes.votes = self.votes.detach()
        votes.gates = None if self.gates is None else self.gates.detach()
        return votes

    def weighted_sum(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        return contract("bij,bijk->bjk", self._weights(agreement, over, leaky), self.votes)

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        weights = self._weights(agreement, "parents", leaky=False)
        mass = weights.sum(1)
        shares = weights / nonzero(mass + eps).unsqueeze(1)
        mean = contract("bij,bijk->bjk", shares, self.votes)
        # Deviations first, squares after: expanding the square loses all digits when the votes agree.
        variance = contract("bij,bijk->bjk", shares, (self.votes - mean.unsqueeze(1)).square())
        benefit = None if betas is None else (per_child(betas, self.children) * weights).sum(1)
        return Moments(mass, mean, variance, benefit)

    def coefficients(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        return softmax(self.logits(agreement), self.gates, over, leaky)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        step = max(1, tiled.BLOCK // max(1, self.votes[:1].numel()))
        for first in range(0, self.batch, step):
            samples = slice(first, first + step)
            yield samples, self.votes[samples], None if self.gates is None else self.gates[samples]

    def logits(self, agreement: Agreement | None) -> Tensor:
        """`(batch, children, parents)`."""
        if agreement is None:
            return self.votes.new_zeros(self.batch, self.children, self.parents)
        if isinstance(agreement, Dot):
            votes = self.votes
            if agreement.unit:
                votes = normalize(votes)
            logits = contract("bijk,bjk->bij", votes, agreement.query)
            return logits if agreement.offset is None else logits + per_child(agreement.offset, self.children)
        deviations = (self.votes - agreement.mean.unsqueeze(1)).square()
        return agreement.prior.unsqueeze(1) - 0.5 * contract("bijk,bjk->bij", deviations, agreement.precision)

    def _weights(self, agreement: Agreement | None, over: Over, leaky: bool) -> Tensor:
        coefficients = self.coefficients(agreement, over, leaky)
        if self.gates is None or over == "children":
            return coefficients
        return coefficients * self.gates.unsqueeze(-1)


class LazyVotes(Votes):
    """Votes of poses through weights: `V[b,i,j] = pose[b,i] @ weight[g(i),j] + bias[g(i),j]`.

    Children share weights in `groups` of equal size, in order: as many groups as children is a weight
    per child, one group is a weight shared by all, and the types of a grid share theirs over positions.

    Args:
        poses: `(batch, children, rows, d)`.
        weight: `(groups, parents, d, h)`; the number of children is a multiple of groups.
        bias: `(groups, parents or 1, rows, h)`, with groups of its own, or None.
        pose: shape of a parent's pose, `(rows, h)` or `(h,)`.
        stride: of windows on a grid. There poses are `(images, types, height, width, rows, d)`, weight is
            `(types, kernel, kernel, parents, d, h)` and bias `(types, kernel, kernel, parents or 1, rows, h)`; each
            window is a sample, images before positions, and its children are in the order of the weights.
        backend: "auto", "reference", "tiled" or "triton"; see :func:`torchcaps.use_backend`.

    Windows' parents are put on a grid: `(images, parents, rows, columns, ...)`, coefficients
    `(images, rows, columns, types, kernel, kernel, parents)`.
    """

    def __init__(
        self,
        poses: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pose: tuple[int, ...],
        stride: int = 1,
        backend: Backend = "auto",
    ):
        self.grid: tuple[int, ...] = ()
        if poses.dim() == 6:
            places = ((size - weight.shape[1]) // stride + 1 for size in poses.shape[2:4])
            self.grid = (poses.shape[0], *places)
        else:
            poses, weight = poses[:, :, None, None], weight[:, None, None]
            bias = None if bias is None else bias[:, None, None]
        self.poses, self.weight, self.bias, self.pose, self.stride = poses, weight, bias, pose, stride
        self.batch, self.kernel = tiled.count_samples(poses, weight, stride), weight.shape[1]
        self.children, self.parents = poses.shape[1] * self.kernel**2, weight.shape[3]
        self.device, self.dtype, self.gates = poses.device, poses.dtype, None
        self.backend = choose_backend(backend, poses.device)
        # By whether gradients are on: what no_grad made, as all but the last iteration may run, has none to give.
        self._cache: dict[bool, StoredVotes] = {}
        self._next: Children | None = None
        self._lifted: dict[bool, tuple[Tensor, LazyVotes]] = {}

    def detach(self) -> Self:
        votes = copy.copy(self)
        votes.poses, votes.weight = self.poses.detach(), self.weight.detach()
        votes.bias, votes.gates = (None if x is None else x.detach() for x in (self.bias, self.gates))
        votes._cache, votes._next, votes._lifted = {}, None, {}
        return votes

    def gated(self, gates: Tensor | None) -> Self:
        votes = super().gated(gates)
        votes._next, votes._lifted = None, {}
        return votes

    def with_coefficients(self, parents: Capsules, coefficients: Tensor) -> Capsules:
        if self.grid:
            window = (self.weight.shape[0], self.kernel, self.kernel)
            coefficients = coefficients.unflatten(0, self.grid).unflatten(3, window)
        return super().with_coefficients(parents, coefficients)

    def _shaped(self, x: Tensor, pose: tuple[int, ...]) -> Tensor:
        x = super()._shaped(x, pose)
        return x.unflatten(0, self.grid).movedim(3, 1) if self.grid else x

    def weighted_sum(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        if agreement is None:
            return self._uniform_sum(over, leaky)
        if self.backend == "reference":
            return self._stored().weighted_sum(agreement, over, leaky)
        if not isinstance(agreement, Dot):
            raise self._impossible("a weighted sum with a Gaussian agreement")
        if agreement.offset is not None:
            votes, agreement = self._with_offset(agreement)
            sums = votes.weighted_sum(agreement, over, leaky)
            return sums.unflatten(-1, (-1, votes.pose[-1]))[..., :-1].flatten(-2)
        sums, _ = self._reduce("weighted_sum", agreement.query, agreement.unit, over == "children", leaky)
        return sums

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        if self.backend == "reference":
            return self._stored().moments(agreement, betas, eps)
        if isinstance(agreement, Dot) and (agreement.unit or agreement.offset is not None):
            raise self._impossible("moments with a dot agreement of unit votes or with an offset")
        if betas is not None:
            kernel = 1 if self.backend == "triton" else self.kernel
            betas = betas.expand(kernel**2, -1) if betas.shape[0] == 1 else betas
            betas = betas.unflatten(0, (-1, kernel, kernel))
        parameters: tuple[Tensor | None, ...] = (None, None, None)
        if agreement is not None:
            parameters = (agreement.query, None, None) if isinstance(agreement, Dot) else agreement
        mass, mean, variance, benefit = self._reduce("moments", *parameters, betas, eps)
        return Moments(mass, mean, variance, None if betas is None else benefit)

    def coefficients(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        if self.backend == "reference" or agreement is None or torch.compiler.is_compiling():
            return self._stored().coefficients(agreement, over, leaky)
        if isinstance(agreement, Dot) and agreement.offset is not None:
            votes, agreement = self._with_offset(agreement)
            return votes.coefficients(agreement, over, leaky)
        # As large as asked for, but no votes: a block's are computed, used, and computed again for gradients.
        step = max(1, tiled.BLOCK // max(1, self.batch * self.parents * math.prod(self.pose)))
        logits = [
            checkpoint(self._logits, agreement, slice(first, first + step), use_reentrant=False)
            for first in range(0, self.children, step)
        ]
        return softmax(torch.cat(logits, dim=1), self.gates, over, leaky)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        gates = None if self.gates is None else self.gates.unflatten(1, (-1, self.kernel, self.kernel))
        layout = tiled.Layout(self.poses, self.weight, self.stride)
        for block in tiled.vote_blocks(self.poses, self.weight, self.stride):
            with autocast_off(self.device.type):
                votes = tiled.Tile(block, layout, self.poses, self.weight).votes(self.bias)
            if layout.parents_last:
                votes = votes.permute(1, 0, 3, 2)
            else:
                votes = votes.unflatten(2, (layout.h, layout.rows)).permute(4, 0, 1, 3, 2).flatten(3)
            yield block.samples, votes, None if gates is None else block.read_gates(gates).T

    def _logits(self, agreement: Agreement, children: slice) -> Tensor:
        poses, weight, bias = self._windows()
        of_children = torch.arange(poses.shape[1], device=poses.device)[children]
        weight = weight[of_children // (poses.shape[1] // weight.shape[0])]
        bias = None if bias is None else bias[of_children // (poses.shape[1] // bias.shape[0])]
        return StoredVotes(_votes(poses[:, children], weight, bias)).logits(agreement)

    def _with_offset(self, agreement: Dot) -> tuple["LazyVotes", Dot]:
        """Votes and an agreement of the same logits without an offset: it is one more feature of the votes, last in
        the first row of a pose and 0 in other rows, with a query of 1."""
        if agreement.unit:
            raise self._impossible("an offset to the agreement of unit votes")
        assert agreement.offset is not None
        offset = agreement.offset
        with_gradient = torch.is_grad_enabled()
        if with_gradient not in self._lifted or self._lifted[with_gradient][0] is not offset:
            votes = copy.copy(self)
            votes._cache, votes._next, votes._lifted = {}, None, {}
            votes.pose = (*self.pose[:-1], self.pose[-1] + 1)
            votes.weight = F.pad(self.weight, (0, 1))
            rows, h = self.poses.shape[-2], self.weight.shape[-1]
            bias = self.weight.new_zeros(1, 1, 1, 1, rows, h) if self.bias is None else self.bias
            offsets = offset.unflatten(0, (-1, self.kernel, self.kernel)) if len(offset) > 1 else offset[None, None]
            offsets = F.pad(offsets[..., None, None].to(bias.dtype), (0, 0, 0, rows - 1))
            groups = max(len(bias), len(offsets))
            shape = (groups, self.kernel, self.kernel, self.parents, rows)
            parts = (bias, h), (offsets, 1)
            votes.bias = torch.cat([per_child(part, groups).expand(*shape, width) for part, width in parts], dim=-1)
            self._lifted[with_gradient] = offset, votes
        query = agreement.query.unflatten(-1, (-1, self.pose[-1]))
        return self._lifted[with_gradient][1], Dot(F.pad(query, (0, 1), value=1.0).flatten(-2))

    def _uniform_sum(self, over: Over, leaky: bool) -> Tensor:
        """The sum with uniform coefficients: one matrix product, and no votes."""
        if self.backend == "tiled":
            (total,) = self._reduce("vote_sum")
        else:
            total = self._vote_sum()
        if over == "parents":
            return total / (self.parents + leaky)
        if self.gates is None:
            return total / self.children
        return total / nonzero(self.gates.sum(1))[:, None, None]

    def _vote_sum(self) -> Tensor:
        """`sum_i gate[i] V[i,j]`."""
        poses, weight, bias = self._windows()
        poses, weight = at_least_float32(poses), at_least_float32(weight)
        gates = poses.new_ones(self.batch, self.children) if self.gates is None else self.gates
        group_sums = (poses * gates[..., None, None]).unflatten(1, (weight.shape[0], -1)).sum(2)
        total = contract("bgrd,gjdh->bjrh", group_sums, weight)
        if bias is not None:
            masses = gates.unflatten(1, (bias.shape[0], -1)).sum(2)
            total = total + contract("bg,gjrh->bjrh", masses, at_least_float32(bias))
        return total.flatten(2)

    def _reduce(self, name: str, *rest: Any) -> tuple[Tensor, ...]:
        """One of the operators that store no votes."""
        stride = 1 if self.backend == "triton" else self.stride
        results, children = reduce(self.backend, name, self._next or self._children(), *rest, stride)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._next = children
        return results

    def _children(self) -> Children:
        """What the operators are told of the children."""
        if self.backend == "triton":  # which knows no windows
            poses, weight, bias = self._windows()
            poses, weight = poses[:, :, None, None], weight[:, None, None]
            bias = None if bias is None else bias[:, None, None]
            return poses, weight, bias, None if self.gates is None else self.gates[:, :, None, None]
        # Half precision would be no faster here, and the gradients that iterations share are sums.
        poses, weight = at_least_float32(self.poses), at_least_float32(self.weight)
        bias = None if self.bias is None else at_least_float32(self.bias)
        gates = None if self.gates is None else self.gates.unflatten(1, (-1, self.kernel, self.kernel))
        return poses, weight, bias, gates

    def _impossible(self, what: str) -> ValueError:
        return ValueError(f"backend={self.backend!r} has no {what}: use backend='reference'")

    def _windows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Poses `(batch, children, rows, d)`, weight and bias as they are without a grid."""
        weight, bias = self.weight.flatten(0, 2), None if self.bias is None else self.bias.flatten(0, 2)
        poses = self.poses
        if self.kernel == 1 and self.stride == 1 and poses.shape[2:4] == (1, 1):
            return poses.flatten(1, 3), weight, bias
        return windows(poses, self.kernel, self.stride), weight, bias

    def _stored(self) -> StoredVotes:
        with_gradient = torch.is_grad_enabled()
        if with_gradient not in self._cache:
            self._cache[with_gradient] = StoredVotes(_votes(*self._windows()))
        return self._cache[with_gradient].gated(self.gates)


def _votes(poses: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All votes, `(batch, children, parents, rows, h)`."""
    poses = poses.unflatten(1, (weight.shape[0], -1))
    votes = torch.einsum("bgprd,gjdh->bgpjrh", poses, weight).flatten(1, 2)
    if bias is None:
        return votes
    return (votes.unflatten(1, (bias.shape[0], -1)) + bias.unsqueeze(1)).flatten(1, 2)


def as_votes(votes: Tensor | Votes) -> Votes:
    """Votes as they are, or stored votes of a tensor `(batch, children, parents, *pose)`."""
    return StoredVotes(votes) if isinstance(votes, Tensor) else votes


def windows(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Windows of a map: `(images, types, height, width, ...)` to `(images * windows, types * kernel * kernel, ...)`.

    From slices and not by `unfold`, whose gradient Inductor gets wrong on several CPU threads (PyTorch 2.13).
    """
    height, width = ((size - kernel) // stride + 1 for size in x.shape[2:4])

    def at(down: int, across: int) -> Tensor:
        return x[
            :, :, down : down + stride * (height - 1) + 1 : stride, across : across + stride * (width - 1) + 1 : stride
        ]

    places = torch.stack([at(*place) for place in itertools.product(range(kernel), repeat=2)], dim=2)
    return places.movedim((3, 4), (1, 2)).flatten(3, 4).flatten(0, 2)


def per_child(x: Tensor, children: int) -> Tensor:
    """A row for each child of `(groups, ...)`, or one row that all share."""
    return x if x.shape[0] == 1 else x.repeat_interleave(children // x.shape[0], dim=0)


def softmax(logits: Tensor, gates: Tensor | None, over: Over, leaky: bool) -> Tensor:
    """Coefficients `(batch, children, parents)`; see :meth:`Votes.coefficients`."""
    if over == "parents":
        parents = logits.shape[-1]
        if leaky:
            logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], dim=-1)
        return logits.softmax(-1)[..., :parents]
    if gates is None:
        return logits.softmax(1)
    gates = gates.unsqueeze(-1)
    logits = logits.masked_fill(gates == 0, -torch.inf)
    largest = logits.detach().amax(1, keepdim=True)
    weights = gates * (logits - torch.where(largest.isinf(), 0, largest)).exp()
    return weights / nonzero(weights.sum(1, keepdim=True))
