"""Dynamic routing.

Sabour, Frosst, Hinton: Dynamic Routing Between Capsules (2017), Procedure 1.

Where the texts differ we follow the authors' code: the gradient runs through all iterations; a bias per parent may join
the weighted sum before the squash; a leak, a parent of logit 0 that is dropped, may join the softmax. Li et al. (2018)
run the same procedure with the softmax over the children.
"""

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Dot, Softmax, Votes
from torchcaps.routing.base import Gradient, Init, LayerShape, Routing, Start, check_choice
from torchcaps.routing.squash import squash


class DynamicRouting(Routing):
    r"""Routing by the agreement of votes with squashed parents.

    With :math:`b_{ij} = 0` at first, or as `start` has it, in each iteration

    .. math::
        c_{ij} = \frac{\exp b_{ij}}{\sum_k \exp b_{ik}}, \quad
        s_j = \sum_i c_{ij} V_{ij} + \text{bias}_j, \quad
        v_j = \frac{|s_j|^2}{1 + |s_j|^2} \frac{s_j}{|s_j|}, \quad
        b_{ij} \leftarrow b_{ij} + V_{ij} \cdot v_j

    Args:
        iterations: at least 1; with 1 the coefficients stay uniform.
        softmax: "parents" as published (each child's coefficients sum to one), or "children" (Li et al. 2018).
        learn_bias: learn a bias for each parent, from 0.1 on as in the authors' code.
        leaky: let children agree with nobody. Only with the softmax over parents.
        gradient: "unrolled", or "last": through the last iteration only.
        start: the first b: "zero", "random" (normal, drawn anew at every call) or "learned" (from zero on); one for
            each set of vote weights and parent, the same for all samples (Li et al. 2018, Table 5).
        init: of the vote weights; "paper" draws them as the authors' code, normal with deviation 0.1, cut at 0.2.

    A parent's length, in [0, 1), is its presence.

    Reference:
        Sabour et al. 2017, Procedure 1, equations 1 to 3.
    """

    comes_to_rest = False

    def __init__(
        self,
        iterations: int = 3,
        softmax: Softmax = "parents",
        learn_bias: bool = False,
        leaky: bool = False,
        gradient: Gradient = "unrolled",
        start: Start = "zero",
        init: Init = "fan_in",
    ):
        super().__init__(iterations, gradient, init)
        check_choice("softmax", softmax, ("parents", "children"))
        check_choice("start", start, ("zero", "random", "learned"))
        if leaky and softmax == "children":
            raise ValueError("leaky=True adds a parent to the softmax: it needs softmax='parents'")
        self.softmax, self.leaky, self.learn_bias, self.start = softmax, leaky, learn_bias, start
        self.averages = softmax == "children"
        self.gain, self.alike = (1.2, 0.0) if self.averages else (2.2, 0.98)

    def learned(self, shape: LayerShape) -> dict[str, Tensor]:
        values = {"bias": torch.full((shape.parents, shape.features), 0.1)} if self.learn_bias else {}
        return values | ({"first_logits": torch.zeros(shape.groups, shape.parents)} if self.start == "learned" else {})

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        nn.init.trunc_normal_(weight, std=0.1, a=-0.2, b=0.2)

    def first_agreement(self, votes: Votes) -> Agreement | None:
        if self.start == "zero":
            return None
        zeros = votes.parents_like()
        if self.start == "learned":
            return Dot(zeros, offset=self.first_logits.to(zeros.dtype).expand(-1, votes.parents))
        groups = 1 if self.shape is None else self.shape.groups
        return Dot(zeros, offset=torch.randn(groups, votes.parents, device=zeros.device, dtype=zeros.dtype))

    def step(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        s = votes.weighted_sum(agreement, self.softmax, self.leaky)  # lines 4, 5
        v = squash(s + self.bias if self.learn_bias else s)  # line 6
        return votes.capsules(v), Dot.add(agreement, v)  # line 7: b_ij = V_ij . (sum of the parents so far)
