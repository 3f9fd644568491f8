"""How well a child's vote agrees with a parent, stated in tensors of the parents' size.

An agreement holds no vote: it says how a logit follows from one. `None` in place of an agreement
means that nothing is known yet and the coefficients are uniform: every algorithm's first iteration.
"""

from typing import NamedTuple

from torch import Tensor


class Dot(NamedTuple):
    """`logit[i,j] = V[i,j] . query[j]`, or `(V[i,j] / |V[i,j]|) . query[j]` if `unit`.

    `query` is `(batch, parents, features)`.
    """

    query: Tensor
    unit: bool = False


class Gaussian(NamedTuple):
    """`logit[i,j] = prior[j] - sum_k precision[j,k] (V[i,j,k] - mean[j,k])**2 / 2`.

    `mean` and `precision` are `(batch, parents, features)`, `prior` is `(batch, parents)`
    and takes whatever does not depend on the child.
    """

    mean: Tensor
    precision: Tensor
    prior: Tensor


Agreement = Dot | Gaussian
