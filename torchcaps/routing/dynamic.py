"""Dynamic routing.

Sabour, Frosst, Hinton: Dynamic Routing Between Capsules (2017), Procedure 1.

Where the texts differ we follow the authors' code: the gradient runs through all iterations; a bias per
parent may join the weighted sum before the squash; a leak, a parent of logit 0 that is dropped, may join
the softmax. Li et al. (2018) run the same procedure with the softmax over the children.
"""

import math

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Dot, Over, Votes, as_votes, at_least_float32
from torchcaps.routing.base import Routing, Start, check_start, missing_parameters, presence
from torchcaps.routing.loop import Gradient, Step, iterate
from torchcaps.routing.squash import squash


def dynamic_routing(
    votes: Tensor | Votes,
    iterations: int = 3,
    softmax: Over = "parents",
    bias: Tensor | None = None,
    leaky: bool = False,
    scores: Tensor | None = None,
    gradient: Gradient = "unrolled",
    return_coefficients: bool = True,
    start: Tensor | None = None,
) -> Capsules:
    r"""Route by the agreement of votes with squashed parents.

    With :math:`b_{ij} = 0` at first, or as `start` has it, in each iteration

    .. math::
        c_{ij} = \frac{\exp b_{ij}}{\sum_k \exp b_{ik}}, \quad
        s_j = \sum_i c_{ij} V_{ij} + \text{bias}_j, \quad
        v_j = \frac{|s_j|^2}{1 + |s_j|^2} \frac{s_j}{|s_j|}, \quad
        b_{ij} \leftarrow b_{ij} + V_{ij} \cdot v_j

    Args:
        votes: `(batch, children, parents, *pose)`.
        iterations: at least 1; with 1 the coefficients stay uniform.
        softmax: "parents" as published (each child's coefficients sum to one), or "children".
        bias: `(parents, *pose)`, or None.
        leaky: let children agree with nobody. Only with the softmax over parents.
        scores: `(batch, children)` logits; a child counts as much as their sigmoid, at -inf not at all.
        gradient: "unrolled", or "last": through the last iteration only.
        return_coefficients: return those of the last weighted sum, `(batch, children, parents)`.
        start: the first b, `(children, parents or 1)`, the same for all samples; children may share rows in groups of
            equal size.

    Returns:
        Capsules with poses `(batch, parents, *pose)`; a pose's length, in [0, 1), is its presence.

    Reference:
        Sabour et al. 2017, Procedure 1, equations 1 to 3.
    """
    check_softmax(softmax, leaky)
    votes = as_votes(votes).gated(presence(scores))
    if bias is not None and (bias.shape[0] not in (1, votes.parents) or bias[0].numel() != math.prod(votes.pose)):
        expected = (votes.parents, *votes.pose)
        raise ValueError(f"expected a bias of shape (parents, *pose) = {expected}, got {tuple(bias.shape)}")
    first = _first_agreement(votes, start)
    parents, agreement = iterate(_step(votes, softmax, bias, leaky), iterations, gradient, first)
    if not return_coefficients:
        return parents
    return votes.with_coefficients(parents, votes.coefficients(agreement, softmax, leaky))


def _step(votes: Votes, softmax: Over, bias: Tensor | None, leaky: bool) -> Step:
    offset = 0 if bias is None else bias.flatten(1)

    def step(agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        s = votes.weighted_sum(agreement, softmax, leaky) + offset  # lines 4, 5
        v = squash(s)  # line 6
        # Line 7. All b_ij = V_ij . (sum of the parents so far): no logits to keep.
        query = agreement.query + v if isinstance(agreement, Dot) else v
        return votes.capsules(v), Dot(query, offset=agreement.offset if isinstance(agreement, Dot) else None)

    return step


def _first_agreement(votes: Votes, start: Tensor | None) -> Dot | None:
    if start is None:
        return None
    parents = (1, votes.parents)
    if start.dim() != 2 or not len(start) or votes.children % len(start) or start.shape[1] not in parents:
        expected = (votes.children, votes.parents)
        raise ValueError(f"expected start of shape (children, parents) = {expected}, got {tuple(start.shape)}")
    start = at_least_float32(start).expand(-1, votes.parents)
    return Dot(start.new_zeros(votes.batch, votes.parents, math.prod(votes.pose)), offset=start)


def check_softmax(softmax: str, leaky: bool = False) -> None:
    if softmax not in ("parents", "children"):
        raise ValueError(f"softmax must be over 'parents' or 'children', got {softmax!r}")
    if leaky and softmax == "children":
        raise ValueError("leaky routing adds a parent to the softmax: it needs softmax='parents'")


class DynamicRouting(Routing):
    """Dynamic routing (Sabour et al. 2017) as a plug-in for capsule layers.

    Args:
        iterations: at least 1.
        softmax: "parents" as published, or "children" (Li et al. 2018).
        bias: learn a bias per parent, added before the squash; starts at 0.1 as in the authors' code.
        leaky: let children agree with nobody.
        gradient: "unrolled" or "last".
        start: the logits before the first iteration: "zero", "random" (normal, drawn anew at every call) or "learned"
            (from zero on), one per set of vote weights and parent, the same for all samples (Li et al. 2018, Table 5).

    See :func:`torchcaps.functional.dynamic_routing`.
    """

    accumulates = True

    def __init__(
        self,
        iterations: int = 3,
        softmax: Over = "parents",
        bias: bool = False,
        leaky: bool = False,
        gradient: Gradient = "unrolled",
        start: Start = "zero",
    ):
        super().__init__(iterations, gradient)
        check_softmax(softmax, leaky)
        check_start(start)
        self.softmax, self.leaky, self.has_bias, self.start = softmax, leaky, bias, start
        self.groups = 1
        self.register_parameter("bias", None)
        self.register_parameter("first_logits", None)

    def make_parameters(self, children: int, parents: int, features: int) -> None:
        self.groups = children
        if self.has_bias:
            self.bias = nn.Parameter(torch.empty(parents, features))
        if self.start == "learned":
            self.first_logits = nn.Parameter(torch.empty(children, parents))

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1)
        if self.first_logits is not None:
            nn.init.zeros_(self.first_logits)

    def first_agreement(self, votes: Votes) -> Agreement | None:
        if self.start == "random":
            dtype = torch.promote_types(votes.dtype, torch.float32)
            return _first_agreement(votes, torch.randn(self.groups, votes.parents, device=votes.device, dtype=dtype))
        return _first_agreement(votes, self.first_logits)

    def reset_weight(self, weight: Tensor, children: int) -> None:
        nn.init.trunc_normal_(weight, std=0.1, a=-0.2, b=0.2)  # the authors' code

    def step(self, votes: Votes) -> Step:
        if (self.has_bias and self.bias is None) or (self.start == "learned" and self.first_logits is None):
            raise missing_parameters(self)
        return _step(votes, self.softmax, self.bias, self.leaky)

    def coefficients(self, votes: Votes, agreement: Agreement | None) -> Tensor:
        return votes.coefficients(agreement, self.softmax, self.leaky)

    def extra_repr(self) -> str:
        return (
            f"iterations={self.iterations}, softmax={self.softmax!r}, bias={self.has_bias}, "
            f"leaky={self.leaky}, gradient={self.gradient!r}, start={self.start!r}"
        )
