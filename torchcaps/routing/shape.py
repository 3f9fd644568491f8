"""Shape of a capsule layer as its routing sees it, and the first vote weights of a layer."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.ops import Votes

CHILDREN = 16  # assumed when the vote weights of a layer for any number of children are drawn


class LayerShape(NamedTuple):
    """Shape of a capsule layer, as its routing sees it.

    Fields:
        groups: number of sets of vote weights; the children form as many groups of equal size, one set for each.
        children: number of children per parent, in the layer or in one window; for a layer that takes any number: the
            expected number, or None.
        parents: number of parents; 1 if the layer takes any number.
        rows: number of rows of a pose; a vector has one.
        in_features, out_features: number of features in a row of a child's pose, and of a parent's pose.
        shared: whether the poses of the children are their votes. The layer then has no vote weights; groups says how
            many sets of other parameters the children have.
        any_children, any_parents: whether the layer takes any number of children, or of parents.
        window: number of places in a window of a convolution; 1 in all other layers.
    """

    groups: int
    children: int | None
    parents: int
    rows: int
    in_features: int
    out_features: int
    shared: bool = False
    any_children: bool = False
    any_parents: bool = False
    window: int = 1

    @property
    def features(self) -> int:
        """Number of entries in a parent's pose."""
        return self.rows * self.out_features

    def check_sizes(self, votes: Votes) -> None:
        """Check that votes have as many children and parents as the layer."""
        each_its_own = self.groups == self.children and not self.any_children
        fits = votes.children == self.groups if each_its_own else votes.children % self.groups == 0
        if not (fits and (self.any_parents or votes.parents == self.parents)):
            children = f"{'' if each_its_own else 'a multiple of '}{self.groups} children"
            parents = f"{'any number of' if self.any_parents else self.parents} parents"
            raise ValueError(
                f"this routing belongs to a layer with {children} and {parents}, got votes of {votes.children} "
                f"children for {votes.parents} parents"
            )


def fan_in_(
    weight: Tensor, shape: LayerShape, averages: bool, gain: float, shared_variance: float, max_difference: float
) -> None:
    r"""Draw vote weights `(..., parents, d, h)` that keep capsules alive through any number of layers, in place.

    The weights are normal. Their standard deviation is chosen so that, with uniform coefficients c, a parent
    :math:`s_j = c \sum_i V_{ij}` is `gain` times as long as a child if the children point in random directions:

    .. math:: \sigma = \frac{\text{gain}}{c \sqrt{\text{children} \cdot \text{out\_features}}}

    Args:
        weight: the weights.
        shape: shape of the layer.
        averages: whether a parent is the mean of its votes; otherwise it is their sum.
        gain: above 1 where a squash shortens the parents, below 1 where the coefficients favor some votes, whose mean
            is longer than the mean of all.
        shared_variance: fraction of the variance that all parents share. Their first logits are then nearly equal, and
            the first coefficients are soft although the votes are long.
        max_difference: bound of the part of a vote that the parents do not share, as a multiple of the child's length.
            Votes become longer with the number of parents, and without a bound, so would the differences of their
            logits. With `shared_variance` 0 this bound shortens the votes themselves, which suits routings that
            normalize their parents.
    """
    children = shape.children or CHILDREN
    coefficient = 1 / children if averages else 1 / shape.parents
    std = gain / (coefficient * math.sqrt(children * shape.out_features))
    std_of_difference = min(std * math.sqrt(1 - shared_variance), max_difference / math.sqrt(shape.out_features))
    nn.init.normal_(weight, std=std_of_difference)
    if shared_variance:
        same = torch.empty_like(weight[..., :1, :, :])
        weight += nn.init.normal_(same, std=math.sqrt(std**2 - std_of_difference**2))
