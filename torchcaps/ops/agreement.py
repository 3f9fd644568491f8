"""Agreement: the rule that turns a child's vote for a parent into a routing logit.

An agreement holds tensors of the parents' size and no votes. A routing algorithm makes one in each iteration; the
reductions in `votes` apply it. `None` in place of an agreement means that all logits are equal, as in the first
iteration of most algorithms.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Dot(NamedTuple):
    r"""Agreement by a dot product: :math:`\text{logit}_{ij} = \text{scale}\, V_{ij} \cdot q_j + \text{offset}_{ij}`.

    Fields:
        query: vector :math:`q_j` that votes are compared with, `(batch, parents, features)`.
        unit: compare the direction :math:`V_{ij} / |V_{ij}|` in place of :math:`V_{ij}`.
        scale: factor of the dot product, a number or a learned tensor.
        offset: added to the logits of every sample, `(groups, parents)`, or None. Consecutive children share a row in
            groups of equal size.
        slope: a second factor of the dot product, with a row for each group as the offset has. With a slope the logit
            is :math:`\log \text{sigmoid}(\text{slope}_{ij} V_{ij} \cdot q_j + \text{offset}_{ij})`. Only net sums
            take it.
        parents: poses that the query was computed from, where these are what an algorithm iterates; None if it iterates
            the query.
    """

    query: Tensor
    unit: bool = False
    scale: float | Tensor = 1.0
    offset: Tensor | None = None
    slope: Tensor | None = None
    parents: Tensor | None = None

    @staticmethod
    def add(agreement: "Agreement | None", parents: Tensor, unit: bool = False) -> "Dot":
        """Add these parents to the query, or start with them: `b_ij += V_ij . v_j` without storing b."""
        if isinstance(agreement, Dot):
            return agreement._replace(query=agreement.query + parents)
        return Dot(parents, unit)

    def scaled_query(self) -> Tensor:
        """Return the query times the scale."""
        return self.query if isinstance(self.scale, float) and self.scale == 1 else self.query * self.scale

    def state(self) -> Tensor:
        """Return the parameters as one unconstrained tensor, `(batch, n)`: every value is valid."""
        return (self.query if self.parents is None else self.parents).flatten(1)

    def with_state(self, state: Tensor) -> Self:
        """Return an agreement of the same kind with the parameters in `state`."""
        if self.parents is None:
            return self._replace(query=state.view(self.query.shape))
        return self._replace(parents=state.view(self.parents.shape))


class Gaussian(NamedTuple):
    r"""Agreement by a likelihood: :math:`\text{logit}_{ij} = \text{prior}_j - \frac12 \sum_k \text{precision}_{jk}
    (V_{ijk} - \text{mean}_{jk})^2`.

    Fields:
        mean, precision: parameters of each parent's Gaussian, `(batch, parents, features)`.
        prior: all terms of the logit that do not depend on the child, `(batch, parents)`.
    """

    mean: Tensor
    precision: Tensor
    prior: Tensor

    def state(self) -> Tensor:
        """Return the parameters as one unconstrained tensor, `(batch, n)`: every value is valid."""
        return torch.cat([self.mean.flatten(1), self.precision.log().flatten(1), self.prior], dim=1)

    def with_state(self, state: Tensor) -> Self:
        """Return an agreement of the same kind with the parameters in `state`."""
        n, shape = math.prod(self.mean.shape[1:]), self.mean.shape
        return type(self)(state[:, :n].reshape(shape), state[:, n : 2 * n].exp().view(shape), state[:, 2 * n :])


Agreement = Dot | Gaussian
