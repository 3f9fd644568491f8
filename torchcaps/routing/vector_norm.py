"""Vector-normed dynamic routing, which turns routing into pooling.

Zhao, Huang: Exploring Dynamic Routing As A Pooling Layer (2019), Algorithm 1.

Line 3 of the algorithm prints a softmax over parents; at b = 0 section 3.1 means uniform coefficients over
the children, as everywhere after it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Dot, Over, Votes, as_votes, normalize, pool_by_agreement
from torchcaps.routing.base import Routing, missing_parameters, presence
from torchcaps.routing.loop import Gradient, Step, check_iterations, iterate


def vector_norm_routing(
    votes: Tensor | Votes,
    iterations: int = 3,
    sharpness: float | Tensor = 1.0,
    activation: Callable[[Tensor], Tensor] | None = None,
    scores: Tensor | None = None,
    gradient: Gradient = "unrolled",
    return_coefficients: bool = True,
) -> Capsules:
    r"""Route by the cosine between votes and parents, children competing for each parent.

    With :math:`b_{ij} = 0` at first, in each iteration

    .. math::
        c_{ij} = \frac{\exp \lambda b_{ij}}{\sum_k \exp \lambda b_{kj}}, \quad
        v_j = \frac{\sum_i c_{ij} V_{ij}}{|\sum_i c_{ij} V_{ij}|}, \quad
        b_{ij} \leftarrow b_{ij} + \frac{V_{ij}}{|V_{ij}|} \cdot v_j

    and at last :math:`v_j = \text{activation}(\sum_i c_{ij} V_{ij})`. Sharpness 0 is average pooling; the larger,
    the closer to selecting one child.

    Args:
        votes: `(batch, children, parents, *pose)`.
        iterations: agreements before the last weighted sum; with 0 the result is the average.
        sharpness: the paper's lambda.
        activation: applied at last to poses flattened to `(batch, parents, features)`; None is the identity.
        scores: `(batch, children)` logits; a child counts as much as their sigmoid, at -inf not at all.
        gradient: "unrolled", or "last": through the last weighted sum only.
        return_coefficients: return those of the last weighted sum, `(batch, children, parents)`.

    Reference:
        Zhao & Huang 2019, Algorithm 1, equations 3 to 6.
    """
    check_iterations(iterations, gradient, least=0)
    votes = as_votes(votes).gated(presence(scores))
    parents, agreement = iterate(_step(votes, sharpness, activation), iterations + 1, gradient)
    if not return_coefficients:
        return parents
    return votes.with_coefficients(parents, votes.coefficients(agreement, "children"))


def _step(votes: Votes, sharpness: float | Tensor, activation: Callable[[Tensor], Tensor] | None) -> Step:
    def step(agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        s = votes.weighted_sum(agreement, "children")  # line 5 (and 10)
        v = normalize(s)  # line 6
        # Lines 7, 8. All lambda b_ij = V_ij / |V_ij| . (lambda times the sum of the parents so far).
        earlier = agreement.query if isinstance(agreement, Dot) else 0
        parents = votes.capsules(s if activation is None else activation(s))  # line 11
        return parents, Dot(earlier + sharpness * v, unit=True)

    return step


class VectorNormRouting(Routing):
    """Vector-normed routing (Zhao & Huang 2019) as a plug-in for capsule layers.

    Args:
        iterations: agreements before the last weighted sum, at least 0.
        sharpness: the paper's lambda, at least 0; 0 averages, a large one selects.
        activation: applied to the parents at last, e.g. `squash`; None is the identity.
        gradient: "unrolled" or "last".
        learn_sharpness: learn lambda, one number per layer, from `sharpness` on.

    See :func:`torchcaps.functional.vector_norm_routing`.
    """

    softmax: Over = "children"
    accumulates = True

    def __init__(
        self,
        iterations: int = 3,
        sharpness: float = 1.0,
        activation: Callable[[Tensor], Tensor] | None = None,
        gradient: Gradient = "unrolled",
        learn_sharpness: bool = False,
    ):
        super().__init__(iterations, gradient, least=0)
        if not 0 <= sharpness < math.inf:
            raise ValueError(f"sharpness must be at least 0 and finite, got {sharpness}")
        if learn_sharpness and (iterations == 0 or gradient == "last"):
            raise ValueError(
                "learn_sharpness=True needs at least one iteration and gradient='unrolled': no other way leads to it"
            )
        self.sharpness, self.activation, self.learn_sharpness = sharpness, activation, learn_sharpness
        self.learned_sharpness: nn.Parameter | None = None
        self.measures_presence = activation is not None

    @property
    def steps(self) -> int:
        return self.iterations + 1

    def make_parameters(self, children: int, parents: int, features: int) -> None:
        if self.learn_sharpness:
            self.learned_sharpness = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        if self.learned_sharpness is not None:
            nn.init.constant_(self.learned_sharpness, self.sharpness)

    def step(self, votes: Votes) -> Step:
        return _step(votes, self._sharpness(), self.activation)

    def pool(self, poses: Tensor, present: Tensor | None = None) -> Tensor:
        """Route children with their own poses as votes to one parent: the same as `forward`, without storing them.

        Args:
            poses: `(n, features, children)`.
            present: `(n, children)` bool, at least one in each row, or None: all are.

        Returns:
            The parent's pose `(n, features)`.
        """
        total = pool_by_agreement(poses, self.iterations, self._sharpness(), present)
        return total if self.activation is None else self.activation(total.unsqueeze(1)).squeeze(1)

    def _sharpness(self) -> float | Tensor:
        if self.learn_sharpness and self.learned_sharpness is None:
            raise missing_parameters(self)
        return self.sharpness if self.learned_sharpness is None else self.learned_sharpness

    def extra_repr(self) -> str:
        learned = ", learn_sharpness=True" if self.learn_sharpness else ""
        return f"iterations={self.iterations}, sharpness={self.sharpness}, gradient={self.gradient!r}{learned}"
