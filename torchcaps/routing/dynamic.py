"""Dynamic routing.

Sabour, Frosst, Hinton: Dynamic Routing Between Capsules (2017), Procedure 1.

Three points follow the authors' code where it differs from the paper: the gradient runs through all iterations; a bias
per parent can be added to the weighted sum before the squash; a leak, an extra parent of logit 0 whose coefficients are
dropped, can join the softmax. Li et al. (2018) run the same procedure with the softmax over the children.
"""

import math

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Dot, Softmax, Votes, WeightedVotes
from torchcaps.routing.base import Gradient, Init, Routing, Start
from torchcaps.routing.shape import LayerShape
from torchcaps.routing.squash import squash
from torchcaps.utils.arguments import Count, checked


class DynamicRouting(Routing):
    r"""Route by the agreement between votes and squashed parents.

    The logits start at :math:`b_{ij} = 0`, or as `start` says. Each iteration computes

    .. math::
        c_{ij} = \frac{\exp b_{ij}}{\sum_k \exp b_{ik}}, \quad
        s_j = \sum_i c_{ij} V_{ij} + \text{bias}_j, \quad
        v_j = \frac{|s_j|^2}{1 + |s_j|^2} \frac{s_j}{|s_j|}, \quad
        b_{ij} \leftarrow b_{ij} + V_{ij} \cdot v_j

    A parent's length, in [0, 1), says how present it is.

    Args:
        iterations: number of iterations, at least 1; with 1 the coefficients are the softmax of the first logits.
        softmax: "parents" as published (each child's coefficients sum to one), or "children" (Li et al. 2018: each
            parent's coefficients sum to one).
        learn_bias: learn a bias for each parent, initially 0.1 as in the authors' code.
        leaky: add the leak to the softmax, so that a child need not agree with any parent; only with
            softmax="parents".
        start: initial logits: "zero", "random" (normal, drawn anew at every call) or "learned" (initially zero). There
            is one logit for each set of vote weights and parent, the same for all samples (Li et al. 2018, Table 5).
            Where all logits of a softmax would be one number, "random" and "learned" are refused.
        gradient, init: see :class:`torchcaps.Routing`; init="paper" draws the vote weights as the authors' code does,
            normal with standard deviation 0.1, cut at 0.2.

    Reference:
        Sabour et al. 2017, Procedure 1, equations 1 to 3.
    """

    last_state_contains_first = True

    @checked
    def __init__(
        self,
        iterations: Count = 3,
        softmax: Softmax = "parents",
        learn_bias: bool = False,
        leaky: bool = False,
        gradient: Gradient = "unrolled",
        start: Start = "zero",
        init: Init = "fan_in",
    ):
        super().__init__(iterations, gradient, init)
        if leaky and softmax == "children":
            raise ValueError("leaky=True adds a parent to the softmax: it needs softmax='parents'")
        self.softmax, self.leaky, self.learn_bias, self.start = softmax, leaky, learn_bias, start
        self.gain, self.shared_variance = (1.2, 0.0) if self.averages else (2.2, 0.98)
        self.max_difference = math.inf if self.averages else 0.3

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.softmax == "children"

    def build(self, shape: LayerShape) -> None:
        over = "children" if self.averages else "parents"
        if self.averages:
            all_equal = shape.groups == 1
        else:  # the parents' logits compete with the leak's, if there is one
            all_equal = not self.leaky and shape.parents == 1 and (self.start == "learned" or not shape.any_parents)
        if self.start != "zero" and all_equal:
            raise ValueError(
                f"start={self.start!r} changes nothing: all first logits of a softmax over the {over} are one number; "
                f"use start='zero', or two {over} or more with weights of their own"
            )
        if self.learn_bias:
            self.bias = nn.Parameter(torch.full((shape.parents, shape.features), 0.1))
        if self.start == "learned":
            self.first_logits = nn.Parameter(torch.zeros(shape.groups, shape.parents))

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        nn.init.trunc_normal_(weight, std=0.1, a=-0.2, b=0.2)

    def first_state(self, votes: Votes) -> Dot | None:
        if self.start == "zero":
            return None
        zeros = votes.parents_like()
        if self.start == "learned":
            return Dot(zeros, self.first_logits.to(zeros.dtype).expand(-1, votes.parents))
        groups = votes.children if self.shape is None else self.shape.groups
        return Dot(zeros, torch.randn(groups, votes.parents, device=zeros.device, dtype=zeros.dtype))

    def step(self, votes: WeightedVotes, b: Dot | None, t: int) -> tuple[Capsules, Dot]:
        s = votes.weighted_sum()  # lines 4, 5
        v = squash(s + self.bias if self.learn_bias else s)  # line 6
        return votes.capsules(v), Dot.add(b, v)  # line 7: b_ij = V_ij . (sum of the parents so far)
