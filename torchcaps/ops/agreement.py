"""How well a child's vote agrees with a parent, stated in tensors of the parents' size.

An agreement holds no vote: it says how a logit follows from one. `None` in place of an agreement
means that nothing is known yet and the coefficients are uniform: every algorithm's first iteration.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Dot(NamedTuple):
    """`logit[i,j] = V[i,j] . query[j] + offset[i,j]`, with `V[i,j] / |V[i,j]|` for V if `unit`.

    `query` is `(batch, parents, features)`; `offset` is `(groups, parents)`, the same for all samples, where children
    in `groups` of equal size share it, or None.
    """

    query: Tensor
    unit: bool = False
    offset: Tensor | None = None

    def state(self) -> Tensor:
        """All that the parents say, `(batch, n)`: any value is one that an agreement can have."""
        return self.query.flatten(1)

    def with_state(self, state: Tensor) -> Self:
        """The same kind of agreement in another state."""
        return self._replace(query=state.view(self.query.shape))


class Gaussian(NamedTuple):
    """`logit[i,j] = prior[j] - sum_k precision[j,k] (V[i,j,k] - mean[j,k])**2 / 2`.

    `mean` and `precision` are `(batch, parents, features)`, `prior` is `(batch, parents)`
    and takes whatever does not depend on the child.
    """

    mean: Tensor
    precision: Tensor
    prior: Tensor

    def state(self) -> Tensor:
        """All that the parents say, `(batch, n)`: any value is one that an agreement can have."""
        return torch.cat([self.mean.flatten(1), self.precision.log().flatten(1), self.prior], dim=1)

    def with_state(self, state: Tensor) -> Self:
        """The same kind of agreement in another state."""
        n, shape = math.prod(self.mean.shape[1:]), self.mean.shape
        return type(self)(state[:, :n].reshape(shape), state[:, n : 2 * n].exp().view(shape), state[:, 2 * n :])


Agreement = Dot | Gaussian
