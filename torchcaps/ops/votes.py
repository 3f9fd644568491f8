"""The interface between routing algorithms and votes.

A routing algorithm never touches a vote. In each iteration it gets :class:`WeightedVotes`, and asks them for sums over
the children. Behind them are votes of three kinds: `StoredVotes` are a tensor, `LinearVotes` are computed from poses
and weights inside the reductions, and `PoseVotes` are the poses of the children themselves.

Words of all reductions, for child i and parent j: the gate `a_i` says how present the child is; the coefficient `c_ij`
is the softmax of the logits; the share is gate times coefficient; the factor of a vote is what it is multiplied by in
all sums that a step has asked for; `g(i)` is the group of children that share vote weights with the child.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self, get_args

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.ops.agreement import Agreement
from torchcaps.ops.children import BLOCK, ON_DEVICE, Softmax, check_device
from torchcaps.ops.numerics import at_least_float32, sum_dtype
from torchcaps.utils.checks import check_choice

NOT_POSES = "these votes are not the poses of the children: use this routing in a CapsuleShared"


class Moments(NamedTuple):
    """Moments of the votes for each parent, weighted by the shares `D[i,j] = gate[i] c[i,j]`; c: the coefficients."""

    mass: Tensor  # (batch, parents): sum_i D[i,j]
    mean: Tensor  # (batch, parents, features): sum_i D[i,j] V[i,j] / (mass[j] + eps)
    variance: Tensor  # (batch, parents, features): sum_i D[i,j] (V[i,j] - mean[j])**2 / (mass[j] + eps)
    benefit: Tensor | None  # (batch, parents): sum_i beta[i,j] D[i,j]


class Beta(NamedTuple):
    """Benefit or cost of each child for each parent in a net sum, `rows[g(i),j] + pose[b,i] . weight[j]`.

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
        layout: how a layer got its children, in their order: `(children,)`, on a line `(types, length)`, on a grid
            `(types, height, width)`, or in a volume `(types, depth, height, width)`. With windows it is that of the
            whole line or grid.
    """

    batch: int
    children: int
    parents: int
    pose: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    gates: Tensor | None
    layout: tuple[int, ...]

    # ------------------------------------------------------------ reductions

    @abstractmethod
    def vote_sum(self) -> Tensor:
        """Return `sum_i gate[i] V[i,j]`, `(batch, parents, features)`."""

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

    def times_gates(self, x: Tensor) -> Tensor:
        """Multiply numbers of the children, `(batch or 1, children, parents or 1)`, by the gates."""
        return x if self.gates is None else x * self.gates.unsqueeze(-1)

    # ------------------------------------------------------------ for votes that are the poses of the children

    def with_poses(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the votes of children whose poses, `(..., rows, d)`, a function of each child's pose has changed."""
        raise ValueError(NOT_POSES)

    def net_sum(
        self, agreement: Agreement | None, betas: tuple[Beta, Beta] | None = None, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the net sums for each parent, `sum_i phi[i,j] V[i,j]`, `(batch, parents, features)`, and
        `sum_i phi[i,j]`, `(batch, parents)`, with

            phi[i,j] = gate[i] activation[i] (use[i,j] c[i,j] - ignore[i,j] (1 - c[i,j]))

        where use and ignore are the betas, with a softmax over the parents. Without betas phi is
        `gate[i] activation[i] c[i,j]`.
        """
        raise ValueError(NOT_POSES)

    def net_factors(
        self, agreement: Agreement | None, betas: tuple[Beta, Beta] | None, activation: Activation | None
    ) -> Tensor:
        """Return the phi of `net_sum`, `(batch, children, parents)`."""
        raise ValueError(NOT_POSES)

    # ------------------------------------------------------------ the votes themselves, for inspection

    @abstractmethod
    def stored(self, children: slice) -> Tensor:
        """Return the votes of some children, `(batch, children, parents, features)`, in float32 at least."""

    def few_children(self) -> Iterator[slice]:
        """Yield slices of the children, whose votes are few enough to be stored."""
        entries = BLOCK if self.device.type == "cpu" else ON_DEVICE * BLOCK
        step = max(1, entries // max(1, self.batch * self.parents * math.prod(self.pose)))
        return (slice(first, first + step) for first in range(0, self.children, step))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the votes of a few children at a time, `(batch, children, parents, features)`, and the gates of these,
        `(batch, children)` or None."""
        for few in self.few_children():
            yield self.stored(few), None if self.gates is None else self.gates[:, few]

    def lengths(self) -> Tensor:
        """Return the lengths of the votes, `(batch, children, parents)`."""
        return torch.cat([votes.square().sum(-1).sqrt() for votes, _ in self.blocks()], dim=1)

    # ------------------------------------------------------------ variants

    @abstractmethod
    def detach(self) -> Self:
        """Return the same votes as constants: no gradient flows to the children or the weights."""

    def gated(self, gates: Tensor | None) -> Self:
        """Return the same votes with other gates, `(batch, children)`; None: all children are present."""
        if gates is not None and gates.shape != (self.batch, self.children):
            expected = (self.batch, self.children)
            raise ValueError(f"expected scores of shape (batch, children) = {expected}, got {tuple(gates.shape)}")
        if gates is not None:
            check_device("scores", gates, "votes", self.device)
        votes = copy.copy(self)
        # In the precision of the sums, whatever the scores have: kernels add to all gradients in one precision.
        votes.gates = None if gates is None else gates.to(self.sum_dtype)
        return votes

    # ------------------------------------------------------------ sizes and parents

    def count(self) -> Tensor:
        """Return how many children of each sample are present, the sum of their gates, `(batch,)`."""
        if self.gates is None:
            return torch.full((self.batch,), float(self.children), dtype=self.sum_dtype, device=self.device)
        return self.gates.sum(1)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Precision of the sums over children."""
        return sum_dtype(self.dtype)

    def parents_like(self) -> Tensor:
        """Return zeros of the parents' shape, `(batch, parents, features)`, in float32 at least."""
        return torch.zeros(self.batch, self.parents, math.prod(self.pose), dtype=self.sum_dtype, device=self.device)

    def capsules(self, poses: Tensor, scores: Tensor | None = None, variances: Tensor | None = None) -> Capsules:
        """Return parents as capsules, in the layer's output shape and in the precision of the votes."""
        shaped, dims = self._shaped(poses, self.pose), len(self.pose)
        return Capsules(
            shaped,
            None if scores is None else self._shaped(scores, ()),
            None if variances is None else self._shaped(variances, self.pose),
            pose_dims=None if shaped.dim() == 3 or (shaped.dim() == 5 and dims == 1) else dims,
        )

    def with_coefficients(self, parents: Capsules, coefficients: Tensor) -> Capsules:
        """Return the parents with their coefficients."""
        return parents._replace(coefficients=coefficients.to(self.dtype))

    def _shaped(self, x: Tensor, pose: tuple[int, ...]) -> Tensor:
        shape = (self.batch, self.parents, *pose)
        return (x if x.shape == shape else x.reshape(shape)).to(self.dtype)


class WeightedVotes:
    """Votes with the coefficients of one iteration: all that a routing algorithm may ask for in its `step`.

    The coefficients are the softmax of an agreement's logits. The reductions know it, and a step only asks for them.

    Args:
        votes: the votes.
        agreement: agreement of this iteration; None for uniform coefficients.
        softmax, leaky: the routing's, see :class:`torchcaps.Routing`.
    """

    def __init__(self, votes: Votes, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False):
        check_choice("softmax", softmax, get_args(Softmax))
        if leaky and softmax == "children":
            raise ValueError("leaky=True adds a parent to the softmax: it needs softmax='parents'")
        self.votes, self.agreement, self.softmax, self.leaky = votes, agreement, softmax, leaky
        self.parents, self.children, self.gates = votes.parents, votes.children, votes.gates
        # What the step has asked for beside the weighted votes, for `factors`.
        self._net: tuple[tuple[Beta, Beta] | None, Activation | None] | None = None
        self._constants: list[Tensor] = []

    # ------------------------------------------------------------ reductions

    def weighted_sum(self) -> Tensor:
        """Return `sum_i share[i,j] V[i,j]`, `(batch, parents, features)`. A share is a coefficient times the child's
        gate; over the children the coefficients contain the gates."""
        return self.votes.weighted_sum(self.agreement, self.softmax, self.leaky)

    def moments(self, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        """Return mass, mean and variance of the votes for each parent, see :meth:`Votes.moments`."""
        if self.softmax == "children" or self.leaky:
            raise ValueError("moments need a softmax over the parents without a leak: use weighted_sum")
        return self.votes.moments(self.agreement, betas, eps)

    def constant_sum(self, constants: Tensor) -> Tensor:
        """Return `sum_i gate[i] constants[g(i),j] V[i,j]`, see :meth:`Votes.constant_sum`."""
        self._constants.append(constants)
        return self.votes.constant_sum(constants)

    def net_sum(
        self, betas: tuple[Beta, Beta] | None = None, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the net sums of votes that are the poses, see :meth:`Votes.net_sum`."""
        self._net = betas, activation
        return self.votes.net_sum(self.agreement, betas, activation)

    def vote_sum(self) -> Tensor:
        """Return `sum_i gate[i] V[i,j]`, `(batch, parents, features)`, without coefficients."""
        total = self.votes.vote_sum()
        self._constants.append(total.new_ones(1, 1))
        return total

    @property
    def has_kernels(self) -> bool:
        """Whether Triton's kernels compute the reductions, and what they take of a step as well."""
        return getattr(self.votes, "backend", None) == "triton"

    # ------------------------------------------------------------ sizes and parents, as of the votes

    def count(self) -> Tensor:
        return self.votes.count()

    def parents_like(self) -> Tensor:
        return self.votes.parents_like()

    def capsules(self, poses: Tensor, scores: Tensor | None = None, variances: Tensor | None = None) -> Capsules:
        return self.votes.capsules(poses, scores, variances)

    # ------------------------------------------------------------ the coefficients, for inspection

    def coefficients(self) -> Tensor:
        """Return the coefficients, `(batch, children, parents)`."""
        return self.votes.coefficients(self.agreement, self.softmax, self.leaky)

    def shares(self) -> Tensor:
        """Return the coefficients times the gates, `(batch, children, parents)`."""
        coefficients = at_least_float32(self.coefficients())
        return coefficients if self.softmax == "children" else self.votes.times_gates(coefficients)

    def factors(self) -> Tensor:
        """Return the factor of each vote in the sums that the step has asked for, `(batch, children, parents)`: its
        share, or its factor in a net sum, plus those of all constant sums."""
        factors = self.shares() if self._net is None else self.votes.net_factors(self.agreement, *self._net)
        return factors + sum(self.votes.times_gates(per_child(x, self.children)) for x in self._constants)


def per_child(x: Tensor, children: int) -> Tensor:
    """Repeat the rows of `(groups, ...)` so that each child has one. A single row stays, to be broadcast."""
    return x if x.shape[0] == 1 else x.repeat_interleave(children // x.shape[0], dim=0)
