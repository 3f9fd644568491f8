"""Vector-normed dynamic routing, which can also be used as pooling.

Zhao, Huang: Exploring Dynamic Routing As A Pooling Layer (2019), Algorithm 1.

Line 3 of the algorithm prints a softmax over parents. Here the coefficients are uniform over the children at b = 0, as
section 3.1 describes them, and all later softmaxes run over the children too.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Softmax, UnitDot, WeightedVotes, normalize
from torchcaps.ops.pool import pool_by_agreement
from torchcaps.ops.triton import parents
from torchcaps.routing.base import Gradient, Init, Routing
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import CountOrZero, NotNegative, apply, checked


class VectorNormRouting(Routing):
    r"""Route by the cosine between votes and parents, with a softmax in which the children compete for each parent.

    The logits start at :math:`b_{ij} = 0`. Each iteration computes

    .. math::
        c_{ij} = \frac{\exp \lambda b_{ij}}{\sum_k \exp \lambda b_{kj}}, \quad
        v_j = \frac{\sum_i c_{ij} V_{ij}}{|\sum_i c_{ij} V_{ij}|}, \quad
        b_{ij} \leftarrow b_{ij} + \frac{V_{ij}}{|V_{ij}|} \cdot v_j

    and the result is :math:`v_j = \text{activation}(\sum_i c_{ij} V_{ij})` with the last coefficients. Sharpness 0 is
    average pooling; the larger the sharpness, the closer the routing comes to selecting one child.

    Args:
        iterations: number of agreements before the last weighted sum; with 0 the result is the average.
        sharpness: the paper's lambda, at least 0.
        activation: function of the last sums, flattened to `(batch, parents, features)`, e.g. `squash`; None for the
            identity. It is applied in every iteration, although only its last values count: it must have no state, as
            a batch normalization or dropout has.
        learn_sharpness: learn lambda, one number for the layer, initially `sharpness`. Nothing keeps it above 0.
        gradient, init: see :class:`torchcaps.Routing`.

    Reference:
        Zhao & Huang 2019, Algorithm 1, equations 3 to 6.
    """

    softmax: Softmax = "children"
    averages = True

    @checked
    def __init__(
        self,
        iterations: CountOrZero = 3,
        sharpness: NotNegative = 1.0,
        activation: Callable[[Tensor], Tensor] | None = None,
        gradient: Gradient = "unrolled",
        learn_sharpness: bool = False,
        init: Init = "fan_in",
    ):
        super().__init__(iterations, gradient, init)
        if learn_sharpness and iterations == 0:
            raise ValueError("learn_sharpness=True needs at least one iteration, got iterations=0")
        self.sharpness, self.activation, self.learn_sharpness = sharpness, activation, learn_sharpness
        self.gain = 0.35 if activation is None else 1.0  # assumes that an activation squashes

    @property
    def measures_presence(self) -> bool:  # type: ignore[override]
        return self.activation is not None

    @property
    def steps(self) -> int:
        return self.iterations + 1

    def build(self, shape: LayerShape) -> None:
        if self.learn_sharpness:
            self.learned_sharpness = nn.Parameter(torch.tensor(float(self.sharpness)))

    def agreement(self, total: Tensor) -> UnitDot:
        return UnitDot(total * self._lambda())  # line 7

    def step(self, votes: WeightedVotes, total: Tensor | None, t: int) -> tuple[Capsules, Tensor]:
        s = votes.weighted_sum()  # line 5 (and 10)
        takes = votes.has_kernels and parents.takes(s.shape[-1], s)
        v = parents.unit(s) if takes else normalize(s)  # line 6
        total = v if total is None else total + v  # line 8: b_ij = V_ij / |V_ij| . (sum of the parents so far)
        return votes.capsules(apply("activation", self.activation, s)), total  # line 11

    def _lambda(self) -> float | Tensor:
        return self.learned_sharpness if self.learn_sharpness else self.sharpness

    def pool(self, poses: Tensor, present: Tensor | None = None, backend: str = "tiled") -> Tensor:
        """Route children to one parent with their own poses as votes: `forward` as one autograd function.

        `poses`, `present` and `backend` are those of `pool_by_agreement`. Returns the parent's pose, `(n, features)`.
        """
        total = pool_by_agreement(poses, self.iterations, self._lambda(), present, backend)
        return apply("activation", self.activation, total.unsqueeze(1)).squeeze(1)
