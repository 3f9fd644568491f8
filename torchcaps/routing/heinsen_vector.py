"""Heinsen vector routing: by the net benefit of using a vector and the net cost of ignoring it.

Heinsen: An Algorithm for Routing Vectors in Sequences (2022), Algorithm 2, the efficient form.

Three points differ from the author's code. The number n of children does not count padding. A sample of padding alone
has no NaN. With any number of parents, these share their parameters, and a learned offset tells them apart.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Activation, Beta, SigmoidDot, WeightedVotes, at_least_float32, autocast_off, evenly_spaced
from torchcaps.routing.base import Gradient, Routing
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import Count, checked


class HeinsenVectorRouting(Routing):
    r"""Route vectors by how well each parent predicts each child, with votes that are never stored.

    Children x have d entries (all of a matrix) and gates a, and parents o have h. With :math:`n = \sum_i a_i`, at least
    1e-6, N a LayerNorm without parameters (the identity if h is 1), and R = 1/parents at first, each iteration computes

    .. math::
        f_i = a_i \, \text{sigmoid} \Big( \frac{x_i \cdot W^A_i}{\sqrt{n}} + b^A_i \Big), \quad
        \phi_{ij} = f_i \big( \beta^\text{use}_{ij} R_{ij} - \beta^\text{ign}_{ij} (1 - R_{ij}) \big), \\
        o_j = \sum_i \phi_{ij} V_{ij}
            = \Big( \frac{F^1_j}{\sqrt{n}} \circ \sum_i \phi_{ij} x_i \Big) F^2 + B_j \sum_i \phi_{ij}, \\
        p_j = G^2_j \circ (N(o_j) \, G^1) + b^G_j, \quad
        R_{ij} \leftarrow \text{softmax}_j \, \log \text{sigmoid} ( W^S_{ij} \, x_i \cdot p_j + b^S_{ij} )

    and the parents are :math:`N(o_j)`. In a layer for any number of children these share one row of :math:`W^A`,
    :math:`b^A`, :math:`W^S` and :math:`b^S`, and the betas are linear in :math:`x_i`. In a layer for any number of
    parents these share :math:`F^1`, :math:`G^2` and :math:`b^G`, and :math:`B_j = B + l_j \, b`, where the numbers
    :math:`l_j` go from -1 to 1 in equal steps (one parent has -1) and :math:`b` is learned.

    The learned parameters are activation_weight and activation_bias, :math:`W^A` and :math:`b^A`; vote_scale,
    vote_weight and vote_bias, :math:`F^1`, :math:`F^2` and :math:`B`; prediction_weight, prediction_scale and
    prediction_bias, :math:`G^1`, :math:`G^2` and :math:`b^G`; similarity_weight and similarity_bias, :math:`W^S` and
    :math:`b^S`; beta_use and beta_ignore; and symmetry_breaking, :math:`b`.
    It takes the poses of the children as their votes: use it in a :class:`torchcaps.CapsuleShared`.

    Args:
        iterations, gradient: see :class:`torchcaps.Routing`.

    Reference:
        Heinsen 2022, sections 2 and 3.
    """

    measures_presence = False
    needs_poses = True
    transforms = True

    @checked
    def __init__(self, iterations: Count = 2, gradient: Gradient = "unrolled"):
        super().__init__(iterations, gradient)

    def build(self, shape: LayerShape) -> None:
        groups, parents, d, h = shape.groups, shape.parents, shape.rows * shape.in_features, shape.features

        def normal(*sizes: int, std: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(sizes) * std if std else torch.zeros(sizes))

        self.activation_weight, self.activation_bias = normal(groups, d, std=2 * d**-0.5), normal(groups, std=0)
        self.vote_scale, self.vote_weight = normal(parents, d), normal(d, h, std=2 * d**-0.5)
        self.vote_bias, self.prediction_weight = normal(parents, h, std=0), normal(h, d, std=h**-0.5)
        self.prediction_scale, self.prediction_bias = normal(parents, d), normal(parents, d, std=0)
        self.similarity_weight, self.similarity_bias = (
            normal(groups, parents, std=d**-0.5),
            normal(groups, parents, std=0),
        )
        for name in ("beta_use", "beta_ignore"):
            setattr(self, name, nn.Linear(d, parents) if shape.children is None else normal(groups, parents))
        if shape.any_parents:
            self.symmetry_breaking = normal(h)

    def agreement(self, o: Tensor) -> SigmoidDot:
        with autocast_off(o.device.type):
            p = (o @ self.prediction_weight.to(o.dtype)) * self.prediction_scale + self.prediction_bias
        rows = self.similarity_weight, self.similarity_bias
        return SigmoidDot(p.to(o.dtype), *(at_least_float32(x).expand(-1, o.shape[1]) for x in rows))

    def step(self, votes: WeightedVotes, o: Tensor | None, t: int) -> tuple[Capsules, Tensor]:
        scale = votes.count().clamp_min(1e-6).rsqrt()  # 1 / sqrt(n)
        active = Activation(self.activation_weight, self.activation_bias, scale)  # f without the gates
        betas = self.beta_use, self.beta_ignore
        use, ignore = (Beta(x) if isinstance(x, Tensor) else Beta(x.bias[None], x.weight) for x in betas)
        total, mass = votes.net_sum((use, ignore), active)
        with autocast_off(total.device.type):
            moved = (total * scale[:, None, None] * self.vote_scale) @ self.vote_weight.to(total.dtype)
        bias: Tensor = self.vote_bias  # B
        if self.shape is not None and self.shape.any_parents:
            bias = bias + evenly_spaced(votes.parents, at_least_float32(bias))[:, None] * self.symmetry_breaking
        o = moved + mass.unsqueeze(-1) * bias
        o = F.layer_norm(o, o.shape[-1:]) if o.shape[-1] > 1 else o
        return votes.capsules(o), o
