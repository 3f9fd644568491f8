"""The votes of children for parents, behind three reductions.

A routing algorithm never touches a vote. It asks for sums over the children, weighted by
coefficients that follow from an agreement, and for the coefficients themselves only if somebody
wants to see them. Where the votes live is decided here, and nowhere else.
"""

import copy
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops.agreement import Agreement, Dot
from torchcaps.ops.numerics import at_least_float32, contract, nonzero, normalize

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
        dtype: precision of what comes out; sums over children run in float32 at least.
        gates: `(batch, children)` in [0, 1], how present each child is, or None (all of them are).
            A child with gate 0 is padding and changes nothing.
    """

    batch: int
    children: int
    parents: int
    pose: tuple[int, ...]
    dtype: torch.dtype
    gates: Tensor | None

    @abstractmethod
    def weighted_sum(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        """`sum_i gate[i] c[i,j] V[i,j]` (softmax over parents) or `sum_i c[i,j] V[i,j]` (over children),
        of shape `(batch, parents, features)`."""

    @abstractmethod
    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        """Mass, mean and variance of the votes for each parent, softmax over parents; with `betas`, of shape
        `(children or 1, parents or 1)`, also the sum of beta-weighted shares."""

    @abstractmethod
    def coefficients(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        """`c[b,i,j]`: softmax of the agreement over the parents of each child, or over the children of each
        parent, where the gates join it: `gate[i] exp(logit[i,j]) / sum_k gate[k] exp(logit[k,j])`.
        `leaky` adds a parent of logit 0 that joins the softmax and is dropped."""

    def capsules(
        self,
        poses: Tensor,
        scores: Tensor | None = None,
        variances: Tensor | None = None,
        coefficients: Tensor | None = None,
    ) -> Capsules:
        """The parents, poses in their own shape and everything in the precision of the votes."""

        def shaped(x: Tensor) -> Tensor:
            return x.reshape(self.batch, self.parents, *self.pose).to(self.dtype)

        return Capsules(
            shaped(poses),
            None if scores is None else scores.to(self.dtype),
            None if variances is None else shaped(variances),
            None if coefficients is None else coefficients.to(self.dtype),
        )

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
        self.pose, self.dtype, self.gates = tuple(votes.shape[3:]), votes.dtype, None
        self.votes = at_least_float32(votes).flatten(3)

    def weighted_sum(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        return contract("bij,bijk->bjk", self._weights(agreement, over, leaky), self.votes)

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        weights = self._weights(agreement, "parents", leaky=False)
        mass = weights.sum(1)
        shares = weights / nonzero(mass + eps).unsqueeze(1)
        mean = contract("bij,bijk->bjk", shares, self.votes)
        # Deviations first, squares after: expanding the square loses all digits when the votes agree.
        variance = contract("bij,bijk->bjk", shares, (self.votes - mean.unsqueeze(1)).square())
        benefit = None if betas is None else (betas * weights).sum(1)
        return Moments(mass, mean, variance, benefit)

    def coefficients(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        logits = self._logits(agreement)
        if over == "children":
            return _gated_softmax(logits, self.gates)
        if leaky:
            logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], dim=-1)
        return logits.softmax(-1)[..., : self.parents]

    def _logits(self, agreement: Agreement | None) -> Tensor:
        if agreement is None:
            return self.votes.new_zeros(self.batch, self.children, self.parents)
        if isinstance(agreement, Dot):
            votes = self.votes
            if agreement.unit:
                votes = normalize(votes)
            return contract("bijk,bjk->bij", votes, agreement.query)
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
    """

    def __init__(self, poses: Tensor, weight: Tensor, bias: Tensor | None, pose: tuple[int, ...]):
        self.poses, self.weight, self.bias, self.pose = poses, weight, bias, pose
        self.batch, self.children = poses.shape[:2]
        self.parents, self.dtype, self.gates = weight.shape[1], poses.dtype, None
        self._cache: tuple[bool, StoredVotes] | None = None

    def weighted_sum(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        if agreement is None:
            return self._uniform_sum(over, leaky)
        return self._stored().weighted_sum(agreement, over, leaky)

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        return self._stored().moments(agreement, betas, eps)

    def coefficients(self, agreement: Agreement | None, over: Over = "parents", leaky: bool = False) -> Tensor:
        return self._stored().coefficients(agreement, over, leaky)

    def _uniform_sum(self, over: Over, leaky: bool) -> Tensor:
        """The sum with uniform coefficients: one matrix product, and no votes."""
        poses, weight = at_least_float32(self.poses), at_least_float32(self.weight)
        gates = poses.new_ones(self.batch, self.children) if self.gates is None else self.gates
        if over == "children":
            gates = gates / nonzero(gates.sum(1, keepdim=True))
        else:
            gates = gates / (self.parents + leaky)
        group_sums = (poses * gates[..., None, None]).unflatten(1, (weight.shape[0], -1)).sum(2)
        total = contract("bgrd,gjdh->bjrh", group_sums, weight)
        if self.bias is not None:
            masses = gates.unflatten(1, (self.bias.shape[0], -1)).sum(2)
            total = total + contract("bg,gjrh->bjrh", masses, at_least_float32(self.bias))
        return total.flatten(2)

    def _stored(self) -> StoredVotes:
        # Votes made under no_grad, as all but the last iteration may run, would cut the gradient of the last.
        with_gradient = torch.is_grad_enabled()
        if self._cache is None or self._cache[0] != with_gradient:
            poses = self.poses.unflatten(1, (self.weight.shape[0], -1))
            votes = torch.einsum("bgprd,gjdh->bgpjrh", poses, self.weight).flatten(1, 2)
            if self.bias is not None:
                votes = votes.unflatten(1, (self.bias.shape[0], -1)) + self.bias.unsqueeze(1)
                votes = votes.flatten(1, 2)
            self._cache = with_gradient, StoredVotes(votes)
        return self._cache[1].gated(self.gates)


def as_votes(votes: Tensor | Votes) -> Votes:
    """Votes as they are, or stored votes of a tensor `(batch, children, parents, *pose)`."""
    return StoredVotes(votes) if isinstance(votes, Tensor) else votes


def _gated_softmax(logits: Tensor, gates: Tensor | None) -> Tensor:
    """Softmax over dim 1 with weights; zeros where no child is present."""
    if gates is None:
        return logits.softmax(1)
    gates = gates.unsqueeze(-1)
    logits = logits.masked_fill(gates == 0, -torch.inf)
    largest = logits.detach().amax(1, keepdim=True)
    weights = gates * (logits - torch.where(largest.isinf(), 0, largest)).exp()
    return weights / nonzero(weights.sum(1, keepdim=True))
