"""What a routing may ask of the votes of children for parents.

A routing algorithm never touches a vote. It asks for sums over the children, weighted by coefficients that follow from
an agreement, and for the coefficients themselves only if somebody wants to see them. Where the votes live is decided in
`reference` (in memory) and `lazy` (nowhere), and in no other place.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops.agreement import Agreement
from torchcaps.ops.children import Softmax
from torchcaps.ops.numerics import at_least_float32


class Moments(NamedTuple):
    """Moments of the votes for each parent, weighted by the shares `D[i,j] = gate[i] c[i,j]`."""

    mass: Tensor  # (batch, parents): sum_i D[i,j]
    mean: Tensor  # (batch, parents, features): sum_i D[i,j] V[i,j] / (mass[j] + eps)
    variance: Tensor  # (batch, parents, features): sum_i D[i,j] (V[i,j] - mean[j])**2 / (mass[j] + eps)
    benefit: Tensor | None  # (batch, parents): sum_i beta[i,j] D[i,j]


class Votes(ABC):
    """`V[b,i,j,k]`: what child i of sample b takes parent j to be, poses flattened to features k.

    Attributes:
        batch, children, parents: sizes.
        pose: shape of a parent's pose.
        device: where the votes are.
        dtype: precision of the parents; sums over children run in float32 at least.
        gates: `(batch, children)` in [0, 1], how present each child is; None: all are.
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
    def weighted_sum(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        """`sum_i gate[i] c[i,j] V[i,j]` (softmax over parents) or `sum_i c[i,j] V[i,j]` (over children),
        of shape `(batch, parents, features)`."""

    @abstractmethod
    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        """Mass, mean and variance of the votes for each parent, softmax over parents. With `betas`, of shape
        `(groups, parents or 1)` where children in `groups` of equal size share a row, also the sum of beta-weighted
        shares."""

    @abstractmethod
    def coefficients(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        """`c[b,i,j]`: softmax of the agreement over the parents of each child, or over the children of each
        parent, where the gates join it: `gate[i] exp(logit[i,j]) / sum_k gate[k] exp(logit[k,j])`.
        `leaky` adds a parent of logit 0 that joins the softmax and is dropped."""

    @abstractmethod
    def with_logits(self, weight: Tensor, offset: Tensor | None = None) -> Self:
        """The same votes of children whose poses tell which parents they prefer: each logit gains
        `sum_r pose[i,r] . weight[g(i),j,r] + offset[g(i),j]`, and `None` as agreement means these logits alone.

        Args:
            weight: `(groups, parents or 1, rows, d)`, with as many groups as the weights of the votes.
            offset: `(groups, parents or 1)`, or None.
        """

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The votes themselves, to look at, a block at a time: a slice of the samples, the votes of some children of
        theirs, `(samples, children, parents, features)`, and the gates of these, `(samples, children)` or None."""

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

    def parents_like(self) -> Tensor:
        """Zeros of the parents' shape, `(batch, parents, features)`: float32 at least."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.zeros(self.batch, self.parents, math.prod(self.pose), dtype=dtype, device=self.device)

    def capsules(self, poses: Tensor, scores: Tensor | None = None, variances: Tensor | None = None) -> Capsules:
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


def per_child(x: Tensor, children: int) -> Tensor:
    """A row for each child of `(groups, ...)`, or one row that all share."""
    return x if x.shape[0] == 1 else x.repeat_interleave(children // x.shape[0], dim=0)
