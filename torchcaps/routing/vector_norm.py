"""Vector-normed dynamic routing, which can also be used as pooling.

Zhao, Huang: Exploring Dynamic Routing As A Pooling Layer (2019), Algorithm 1.

Line 3 of the algorithm prints a softmax over parents. Here the coefficients are uniform over the children at b = 0, as
section 3.1 describes them, and all later softmaxes run over the children too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchcaps.arguments import CountOrZero, NotNegative, apply, checked
from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Dot, Softmax, Votes, normalize
from torchcaps.routing.base import Gradient, Init, LayerShape, Routing
from torchcaps.routing.pool import pool_by_agreement


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
            identity.
        gradient: "unrolled" through all weighted sums, or "last" through the last one only.
        learn_sharpness: learn lambda, one number for the layer, initially `sharpness`. Nothing keeps it above 0.
        init: initial vote weights, see :meth:`Routing.reset_weight`; "paper" draws them normal with standard deviation
            1 / in_features.

    Reference:
        Zhao & Huang 2019, Algorithm 1, equations 3 to 6.
    """

    softmax: Softmax = "children"
    averages = True
    comes_to_rest = False

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
        super().__init__(iterations, gradient, init, least=0)
        if learn_sharpness and iterations == 0:
            raise ValueError("learn_sharpness=True needs at least one iteration, got iterations=0")
        self.sharpness, self.activation, self.learn_sharpness = sharpness, activation, learn_sharpness
        self.measures_presence = activation is not None
        self.gain = 0.35 if activation is None else 1.0  # assumes that an activation squashes

    @property
    def steps(self) -> int:
        return self.iterations + 1

    def learned(self, shape: LayerShape) -> dict[str, Tensor]:
        return {"learned_sharpness": torch.tensor(float(self.sharpness))} if self.learn_sharpness else {}

    def scale(self, features: int) -> float | Tensor:
        return self.learned_sharpness if self.learn_sharpness else self.sharpness  # line 7's lambda

    def step(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        s = votes.weighted_sum(agreement, "children")  # line 5 (and 10)
        after = Dot.add(agreement, normalize(s), unit=True)  # lines 6, 8
        return votes.capsules(apply("activation", self.activation, s)), after  # line 11

    def pool(self, poses: Tensor, present: Tensor | None = None, backend: str = "tiled") -> Tensor:
        """Route children to one parent with their own poses as votes: `forward` as one autograd function.

        Args:
            poses: poses of the children, `(n, features, children)` or `(batch, groups, features, children)`, where n is
                batch * groups.
            present: whether each child takes part, `(n, children)` bool with at least one child in each row; None for
                all.
            backend: "native" runs the C++ kernel where it takes the poses; others run PyTorch's operators.

        Returns:
            The parent's pose `(n, features)`.
        """
        total = pool_by_agreement(poses, self.iterations, self.scale(1), present, backend)
        return apply("activation", self.activation, total.unsqueeze(1)).squeeze(1)
