"""How well a child's vote agrees with a parent, stated in tensors of the parents' size.

An agreement holds no vote. It says how a logit follows from a vote. `None` in place of an agreement means that nothing
is known yet and all logits are equal: the first iteration of most algorithms.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Dot(NamedTuple):
    r"""Agreement by a dot product: :math:`\text{logit}_{ij} = \text{scale}\, V_{ij} \cdot q_j + \text{offset}_{ij}`.

    Fields:
        query: :math:`q_j`, what votes are compared with, `(batch, parents, features)`.
        unit: compare :math:`V_{ij} / |V_{ij}|` in place of :math:`V_{ij}`.
        scale: a number, or a tensor that is learned.
        offset: `(groups, parents)`, the same for all samples, where children in groups of equal size share a row; or
            None.
    """

    query: Tensor
    unit: bool = False
    scale: float | Tensor = 1.0
    offset: Tensor | None = None

    @staticmethod
    def add(agreement: "Agreement | None", parents: Tensor, unit: bool = False) -> "Dot":
        """A dot agreement with these parents, added to the one before: `b_ij += V_ij . v_j` without the b."""
        if isinstance(agreement, Dot):
            return agreement._replace(query=agreement.query + parents)
        return Dot(parents, unit)

    def scaled_query(self) -> Tensor:
        """The query times the scale."""
        return self.query if isinstance(self.scale, float) and self.scale == 1 else self.query * self.scale

    def state(self) -> Tensor:
        """What the parents say, `(batch, n)`: any value is one that an agreement can have."""
        return self.query.flatten(1)

    def with_state(self, state: Tensor) -> Self:
        """The same kind of agreement in another state."""
        return self._replace(query=state.view(self.query.shape))


class Gaussian(NamedTuple):
    r"""Agreement by a likelihood: :math:`\text{logit}_{ij} = \text{prior}_j - \frac12 \sum_k \text{precision}_{jk}
    (V_{ijk} - \text{mean}_{jk})^2`.

    Fields:
        mean, precision: `(batch, parents, features)`.
        prior: `(batch, parents)`; it takes whatever does not depend on the child.
    """

    mean: Tensor
    precision: Tensor
    prior: Tensor

    def state(self) -> Tensor:
        """What the parents say, `(batch, n)`: any value is one that an agreement can have."""
        return torch.cat([self.mean.flatten(1), self.precision.log().flatten(1), self.prior], dim=1)

    def with_state(self, state: Tensor) -> Self:
        """The same kind of agreement in another state."""
        n, shape = math.prod(self.mean.shape[1:]), self.mean.shape
        return type(self)(state[:, :n].reshape(shape), state[:, n : 2 * n].exp().view(shape), state[:, 2 * n :])


Agreement = Dot | Gaussian
