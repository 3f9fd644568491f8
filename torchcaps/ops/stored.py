"""Votes stored as a tensor: they define what every backend must compute, in any precision, with second derivatives."""

import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.ops.agreement import Agreement, Dot, PoseLogits, SigmoidDot, UnitDot
from torchcaps.ops.children import Softmax
from torchcaps.ops.numerics import at_least_float32, contract, nonzero, normalize
from torchcaps.ops.votes import Moments, Votes, per_child


class StoredVotes(Votes):
    """Votes stored as a tensor.

    Args:
        votes: `(batch, children, parents, *pose)`.
    """

    def __init__(self, votes: Tensor):
        if votes.dim() < 4:
            raise ValueError(f"expected votes of shape (batch, children, parents, *pose), got {tuple(votes.shape)}")
        if 0 in votes.shape[1:]:
            raise ValueError(f"expected at least one child and one parent, got votes of shape {tuple(votes.shape)}")
        self.batch, self.children, self.parents = votes.shape[:3]
        self.pose, self.device, self.dtype = tuple(votes.shape[3:]), votes.device, votes.dtype
        self.gates, self.layout = None, (self.children,)
        self.votes = at_least_float32(votes).flatten(3)

    def vote_sum(self) -> Tensor:
        return self._sum(self.votes.new_ones(()).expand(self.votes.shape[:3]))

    def weighted_sum(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        coefficients = self.coefficients(agreement, softmax, leaky)
        if softmax == "children":  # the coefficients contain the gates
            return self._over_children(coefficients, self.votes)
        return self._sum(coefficients)

    def constant_sum(self, constants: Tensor) -> Tensor:
        return self._sum(per_child(constants, self.children).expand(self.votes.shape[:3]).to(self.votes.dtype))

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        shares = self.times_gates(self.coefficients(agreement))
        mass = shares.sum(1)
        weights = shares / nonzero(mass + eps).unsqueeze(1)
        mean = self._over_children(weights, self.votes)
        # Subtract, then square: the expanded square loses all digits when the votes agree.
        variance = self._over_children(weights, (self.votes - mean.unsqueeze(1)).square())
        benefit = None if betas is None else (per_child(betas, self.children) * shares).sum(1)
        return Moments(mass, mean, variance, benefit)

    def coefficients(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        return coefficients_of(self.logits(agreement), self.gates, softmax, leaky)

    def logits(self, agreement: Agreement | None) -> Tensor:
        """Return the logits of an agreement, `(batch, children, parents)`."""
        if agreement is None:
            return self.votes.new_zeros(self.votes.shape[:3])
        if isinstance(agreement, PoseLogits):
            raise ValueError("stored votes do not know the poses of the children: use this routing in a capsule layer")
        if isinstance(agreement, UnitDot):
            return self._over_features(normalize(self.votes), agreement.query)
        if isinstance(agreement, Dot):
            logits = self._over_features(self.votes, agreement.query)
            return logits if agreement.offset is None else logits + per_child(agreement.offset, self.children)
        if isinstance(agreement, SigmoidDot):
            slope, offset = (per_child(x, self.children) for x in (agreement.slope, agreement.offset))
            return F.logsigmoid(self._over_features(self.votes, agreement.query) * slope + offset)
        squares = (self.votes - agreement.mean.unsqueeze(1)).square()
        return agreement.prior.unsqueeze(1) - 0.5 * self._over_features(squares, agreement.precision)

    def stored(self, children: slice) -> Tensor:
        return self.votes[:, children]

    def detach(self) -> Self:
        votes = copy.copy(self)
        votes.votes = self.votes.detach()
        votes.gates = None if self.gates is None else self.gates.detach()
        return votes

    def _sum(self, weights: Tensor) -> Tensor:
        return self._over_children(self.times_gates(weights), self.votes)

    def _over_children(self, weights: Tensor, votes: Tensor) -> Tensor:
        """Return the sums over the children of votes times weights `(batch, children, parents)`."""
        return contract("bij,bijk->bjk", weights, votes)

    def _over_features(self, votes: Tensor, query: Tensor) -> Tensor:
        """Return the sums over the features of votes times a query `(batch, parents, features)`."""
        return contract("bijk,bjk->bij", votes, query)


def coefficients_of(logits: Tensor, gates: Tensor | None, softmax: Softmax, leaky: bool) -> Tensor:
    """Return the coefficients of logits, `(batch, children, parents)`; see :meth:`Votes.coefficients`."""
    if softmax == "parents":
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
