"""Stored votes: they define what every backend must compute, in any precision, with second derivatives."""

import copy
from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.checks import check_choice
from torchcaps.ops.agreement import Agreement, Dot
from torchcaps.ops.children import BLOCK, SOFTMAXES, Softmax
from torchcaps.ops.numerics import at_least_float32, contract, nonzero, normalize
from torchcaps.ops.votes import Activation, Linear, Moments, Votes, per_child


class StoredVotes(Votes):
    """Votes stored as a tensor. The functions of :mod:`torchcaps.functional` route these.

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

    def weighted_sum(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        shares = self.coefficients(agreement, softmax, leaky)
        if self.gates is not None and softmax == "parents":
            shares = shares * self.gates.unsqueeze(-1)
        return contract("bij,bijk->bjk", shares, self.votes)

    def constant_sum(self, constants: Tensor) -> Tensor:
        shares = per_child(constants, self.children).expand(self.batch, self.children, self.parents)
        shares = shares if self.gates is None else shares * self.gates.unsqueeze(-1)
        return contract("bij,bijk->bjk", shares.to(self.votes.dtype), self.votes)

    def moments(self, agreement: Agreement | None, betas: Tensor | None = None, eps: float = 0.0) -> Moments:
        shares = self.coefficients(agreement)
        shares = shares if self.gates is None else shares * self.gates.unsqueeze(-1)
        mass = shares.sum(1)
        weights = shares / nonzero(mass + eps).unsqueeze(1)
        mean = contract("bij,bijk->bjk", weights, self.votes)
        # Subtract, then square: the expanded square loses all digits when the votes agree.
        variance = contract("bij,bijk->bjk", weights, (self.votes - mean.unsqueeze(1)).square())
        benefit = None if betas is None else (per_child(betas, self.children) * shares).sum(1)
        return Moments(mass, mean, variance, benefit)

    def coefficients(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        return coefficients_of(self.logits(agreement), self.gates, softmax, leaky)

    def logits(self, agreement: Agreement | None) -> Tensor:
        """Return the logits of an agreement, `(batch, children, parents)`."""
        if agreement is None:
            return self.votes.new_zeros(self.batch, self.children, self.parents)
        if isinstance(agreement, Dot):
            votes = normalize(self.votes) if agreement.unit else self.votes
            logits = contract("bijk,bjk->bij", votes, agreement.scaled_query())
            if agreement.slope is not None:
                logits = logits * per_child(agreement.slope, self.children)
            if agreement.offset is not None:
                logits = logits + per_child(agreement.offset, self.children)
            return logits if agreement.slope is None else F.logsigmoid(logits)
        deviations = (self.votes - agreement.mean.unsqueeze(1)).square()
        return agreement.prior.unsqueeze(1) - 0.5 * contract("bijk,bjk->bij", deviations, agreement.precision)

    def with_logits(self, weight: Tensor, offset: Tensor | None = None) -> Self:
        raise ValueError("stored votes do not know the poses of the children: use this routing in a capsule layer")

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        step = max(1, BLOCK // max(1, self.votes[:1].numel()))
        for first in range(0, self.batch, step):
            samples = slice(first, first + step)
            yield samples, self.votes[samples], None if self.gates is None else self.gates[samples]

    def lengths(self) -> Tensor:
        return self.votes.square().sum(-1).sqrt()

    def detach(self) -> Self:
        votes = copy.copy(self)
        votes.votes = self.votes.detach()
        votes.gates = None if self.gates is None else self.gates.detach()
        return votes


def net_factors(
    poses: Tensor,
    coefficients: Tensor,
    gates: Tensor | None,
    betas: tuple[Linear, Linear] | None,
    activation: Activation | None,
) -> Tensor:
    """Return the phi of :meth:`Votes.net_sum` for poses `(batch, children, features)`."""
    children = poses.shape[1]

    def rows(x: Linear) -> Tensor:
        own = per_child(x.rows, children)
        return own if x.weight is None else own + contract("bik,jk->bij", poses, x.weight.to(poses.dtype))

    phi = coefficients
    if betas is not None:
        phi = rows(betas[0]) * phi - rows(betas[1]) * (1 - phi)
    if activation is not None:
        products = (poses * per_child(activation.weight, children)).sum(-1)
        active = products * activation.scale.unsqueeze(1) + per_child(activation.bias, children)
        phi = phi * active.sigmoid().unsqueeze(-1)
    return phi if gates is None else phi * gates.unsqueeze(-1)


def coefficients_of(logits: Tensor, gates: Tensor | None, softmax: Softmax, leaky: bool) -> Tensor:
    """Return the coefficients of logits, `(batch, children, parents)`; see :meth:`Votes.coefficients`."""
    check_choice("softmax", softmax, SOFTMAXES)
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


def as_votes(votes: Tensor | Votes) -> Votes:
    """Return votes unchanged, and a tensor `(batch, children, parents, *pose)` as stored votes."""
    return StoredVotes(votes) if isinstance(votes, Tensor) else votes
