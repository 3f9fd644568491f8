"""Agreements: the rules that turn a child's vote for a parent into a routing logit.

An agreement holds tensors of the parents' size and no votes. A routing algorithm makes one in each iteration, and the
reductions over the votes apply it. `None` in place of an agreement means that all logits are equal, as in the first
iteration of most algorithms.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Dot(NamedTuple):
    r"""Agreement by a dot product: :math:`\text{logit}_{ij} = V_{ij} \cdot q_j + \text{offset}_{ij}`.

    Fields:
        query: vector :math:`q_j` that votes are compared with, `(batch, parents, features)`.
        offset: added to the logits of every sample, `(groups, parents)`, or None. Consecutive children share a row in
            groups of equal size.
    """

    query: Tensor
    offset: Tensor | None = None

    @classmethod
    def add(cls, agreement: Self | None, parents: Tensor) -> Self:
        """Add the votes' dot products with these parents to the logits, `b_ij += V_ij . v_j`, without storing b."""
        return cls(parents) if agreement is None else cls(agreement.query + parents, agreement.offset)


class UnitDot(NamedTuple):
    r"""Agreement by the direction of a vote: :math:`\text{logit}_{ij} = q_j \cdot V_{ij} / |V_{ij}|`.

    Fields:
        query: vector :math:`q_j`, `(batch, parents, features)`.
    """

    query: Tensor

    @classmethod
    def add(cls, agreement: Self | None, parents: Tensor) -> Self:
        """Add the dot products of the votes' directions with these parents to the logits, as `Dot.add` does."""
        return cls(parents if agreement is None else agreement.query + parents)


class SigmoidDot(NamedTuple):
    r"""Agreement by the logarithm of a probability,
    :math:`\text{logit}_{ij} = \log \text{sigmoid}(\text{slope}_{ij} V_{ij} \cdot q_j + \text{offset}_{ij})`.

    Fields:
        query: vector :math:`q_j`, `(batch, parents, features)`.
        slope, offset: `(groups, parents)` each. Consecutive children share a row in groups of equal size.
    """

    query: Tensor
    slope: Tensor
    offset: Tensor


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

    @classmethod
    def add(cls, agreement: Self | None, mean: Tensor, precision: Tensor, prior: Tensor) -> Self:
        """Add the logits of a Gaussian to those of an agreement: a sum of two squares is again one square."""
        if agreement is None:
            return cls(mean, precision, prior)
        total = agreement.precision + precision
        part = precision / torch.where(total == 0, 1, total)  # without any precision the mean does not count
        off = mean - agreement.mean
        constant = 0.5 * (agreement.precision * part * off.square()).sum(-1)
        return cls(agreement.mean + part * off, total, agreement.prior + prior - constant)


class PoseLogits(NamedTuple):
    r"""Agreement that the children's own poses give, whatever they vote for:
    :math:`\text{logit}_{ij} = \text{pose}_i \cdot \text{weight}_{ij} + \text{offset}_{ij}`.

    Fields:
        weight: `(groups, parents or 1, rows, d)` for poses `(rows, d)`, with as many groups as the votes' weights.
        offset: `(groups, parents or 1)`, or None.
    """

    weight: Tensor
    offset: Tensor | None = None


Agreement = Dot | UnitDot | SigmoidDot | Gaussian | PoseLogits
