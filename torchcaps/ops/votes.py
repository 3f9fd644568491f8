"""The interface between routing algorithms and votes.

A routing algorithm never touches a vote. It asks for sums over the children, weighted by the coefficients of an
agreement, and for the coefficients themselves only if the caller wants to see them. There are two implementations:
`reference` stores the votes, and `lazy` computes them inside the reductions.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.arguments import HALF
from torchcaps.capsules import Capsules
from torchcaps.ops.agreement import Agreement, Dot
from torchcaps.ops.children import Softmax


class Moments(NamedTuple):
    """Moments of the votes for each parent, weighted by the shares `D[i,j] = gate[i] c[i,j]`; c: the coefficients."""

    mass: Tensor  # (batch, parents): sum_i D[i,j]
    mean: Tensor  # (batch, parents, features): sum_i D[i,j] V[i,j] / (mass[j] + eps)
    variance: Tensor  # (batch, parents, features): sum_i D[i,j] (V[i,j] - mean[j])**2 / (mass[j] + eps)
    benefit: Tensor | None  # (batch, parents): sum_i beta[i,j] D[i,j]


class Linear(NamedTuple):
    """Numbers for each child and parent, `rows[g(i),j] + pose[b,i] . weight[j]`.

    Fields:
        rows: `(groups, parents or 1)`; consecutive children share a row in groups of equal size.
        weight: `(parents, features)`, or None for the rows alone.
    """

    rows: Tensor
    weight: Tensor | None = None


class Activation(NamedTuple):
    """Activations of the children, `sigmoid(scale[b] pose[b,i] . weight[g(i)] + bias[g(i)])`.

    Fields:
        weight, bias: `(groups, features)` and `(groups,)`.
        scale: `(batch,)`.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor


class Votes(ABC):
    """Votes `V[b,i,j,k]`: the pose that child i of sample b predicts for parent j, flattened to features k.

    Attributes:
        batch, children, parents: sizes.
        pose: shape of a parent's pose.
        device: device of the votes.
        dtype: precision of the parents; sums over children run in float32 at least.
        gates: how present each child is, `(batch, children)`, at least 0; None: all children are present, as with
            gates of 1. A child with gate 0 is padding and changes nothing. Scores become gates of at most 1.
        layout: how a layer got its children, in their order: `(children,)`, or on a grid `(types, height, width)`. With
            windows it is that of the whole grid.
    """

    batch: int
    children: int
    parents: int
    pose: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    gates: Tensor | None
    layout: tuple[int, ...]

    @abstractmethod
    def weighted_sum(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        """Return the sum of the votes for each parent, weighted by the coefficients, `(batch, parents, features)`:
        `sum_i gate[i] c[i,j] V[i,j]` (softmax over parents) or `sum_i c[i,j] V[i,j]` (over children)."""

    @abstractmethod
    def constant_sum(self, constants: Tensor) -> Tensor:
        """Return the sum of the votes for each parent, weighted by constants that all samples share,
        `sum_i gate[i] constants[g(i),j] V[i,j]`, `(batch, parents, features)`.

        Args:
            constants: `(groups, parents or 1)`, with as many groups as the weights of the votes.
        """

    @abstractmethod
    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        """Return mass, mean and variance of the votes for each parent; softmax over parents.

        Args:
            betas: `(groups, parents or 1)`, or None; consecutive children share a row in groups of equal size. With
                them the result has the benefit, the sum of beta-weighted shares.
            eps: number added to the mass where mean and variance are divided by it.
        """

    @abstractmethod
    def coefficients(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        """Return the coefficients `c[b,i,j]`, the softmax of the agreement's logits.

        Args:
            softmax: "parents": the coefficients of each child sum to one. "children": those of each parent do, and
                they contain the gates: `gate[i] exp(logit[i,j]) / sum_k gate[k] exp(logit[k,j])`.
            leaky: add a parent of logit 0 to a softmax over the parents, and drop its coefficient.
        """

    @abstractmethod
    def with_logits(self, weight: Tensor, offset: Tensor | None = None) -> Self:
        """Return the same votes with logits that depend on the children's poses: each logit gains
        `sum_r pose[i,r] . weight[g(i),j,r] + offset[g(i),j]`. `None` as agreement then means these logits alone.

        Args:
            weight: `(groups, parents or 1, rows, d)`, with as many groups as the weights of the votes.
            offset: `(groups, parents or 1)`, or None.
        """

    def net_sum(
        self,
        agreement: Dot | None,
        betas: tuple[Linear, Linear] | None = None,
        activation: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the net sums of the votes for each parent, `sum_i phi[i,j] V[i,j]`, `(batch, parents, features)`, and
        `sum_i phi[i,j]`, `(batch, parents)`, with

            phi[i,j] = gate[i] activation[i] (use[i,j] c[i,j] - ignore[i,j] (1 - c[i,j]))

        where use and ignore are the betas, with a softmax over the parents. Without betas phi is
        `gate[i] activation[i] c[i,j]`. The votes must be the poses of the children.
        """
        raise ValueError("a net sum needs votes that are the poses of the children: use this routing in CapsuleShared")

    def net_factors(
        self,
        agreement: Dot | None,
        betas: tuple[Linear, Linear] | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Return the phi of `net_sum`, `(batch, children, parents)`, for inspection."""
        raise ValueError("a net sum needs votes that are the poses of the children: use this routing in CapsuleShared")

    def with_poses(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the votes of children whose poses, `(..., rows, d)`, a function of each child's pose has changed. The
        votes must be the poses of the children."""
        raise ValueError("these votes are not the poses of the children: use this routing in CapsuleShared")

    def without_logits(self) -> Self:
        """Return the votes without the logits of `with_logits`."""
        return self

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield the votes themselves, for inspection, block by block: a slice of the samples, votes of some of their
        children, `(samples, children, parents, features)`, and the gates of these, `(samples, children)` or None."""

    @abstractmethod
    def lengths(self) -> Tensor:
        """Return the lengths of the votes, `(batch, children, parents)`, for inspection."""

    @abstractmethod
    def detach(self) -> Self:
        """Return the same votes as constants: no gradient flows to the children or the weights."""

    def gated(self, gates: Tensor | None) -> Self:
        """Return the same votes with other gates, `(batch, children)`; None: all children are present."""
        if gates is not None and gates.shape != (self.batch, self.children):
            expected = (self.batch, self.children)
            raise ValueError(f"expected scores of shape (batch, children) = {expected}, got {tuple(gates.shape)}")
        votes = copy.copy(self)
        # In the precision of the sums, whatever the scores have: kernels add to all gradients in one precision.
        votes.gates = None if gates is None else gates.to(torch.float32 if self.dtype in HALF else self.dtype)
        return votes

    def count(self) -> Tensor:
        """Return how many children of each sample are present, the sum of their gates, `(batch,)`."""
        if self.gates is None:
            return torch.full((self.batch,), float(self.children), dtype=self.sum_dtype, device=self.device)
        return self.gates.sum(1)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Precision of the sums over children."""
        return torch.promote_types(self.dtype, torch.float32)

    def parents_like(self) -> Tensor:
        """Return zeros of the parents' shape, `(batch, parents, features)`, in float32 at least."""
        return torch.zeros(self.batch, self.parents, math.prod(self.pose), dtype=self.sum_dtype, device=self.device)

    def capsules(self, poses: Tensor, scores: Tensor | None = None, variances: Tensor | None = None) -> Capsules:
        """Return parents as capsules, in the layer's output shape and in the precision of the votes."""
        return Capsules(
            self._shaped(poses, self.pose),
            None if scores is None else self._shaped(scores, ()),
            None if variances is None else self._shaped(variances, self.pose),
        )

    def with_coefficients(self, parents: Capsules, coefficients: Tensor) -> Capsules:
        """Return the parents with their coefficients."""
        return parents._replace(coefficients=coefficients.to(self.dtype))

    def _shaped(self, x: Tensor, pose: tuple[int, ...]) -> Tensor:
        return x.reshape(self.batch, self.parents, *pose).to(self.dtype)


def per_child(x: Tensor, children: int) -> Tensor:
    """Repeat the rows of `(groups, ...)` so that each child has one. A single row stays, to be broadcast."""
    return x if x.shape[0] == 1 else x.repeat_interleave(children // x.shape[0], dim=0)
