"""Slot attention.

Locatello et al.: Object-Centric Learning with Slot Attention (2020), Algorithm 1.

The parents are called slots. Keys and values are not computed: the query is multiplied by the key matrix, and the
weighted mean of the children by the value matrix. With gradient="last" this is Chang, Griffiths, Levine: Object
Representations as Fixed Points (2022), with the first term of their series.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Beta, Dot, Votes, WeightedVotes, autocast_off, nonzero
from torchcaps.routing.base import Gradient, Routing
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import Count, Positive, checked


class SlotAttention(Routing):
    r"""Route by attention in which the slots compete for each child, and update the slots by a GRU and an MLP.

    With the poses x of the children, their gates a, and slots s of D entries (all of a matrix), each iteration computes

    .. math::
        x_i' = \text{LayerNorm}(x_i), \quad q_j = W_q \, \text{LayerNorm}(s_j), \quad
        c_{ij} = \text{softmax}_j \Big( \frac{W_k x_i' \cdot q_j}{\sqrt{D}} \Big), \\
        u_j = \frac{\sum_i a_i (c_{ij} + \epsilon) W_v x_i'}{\sum_i a_i (c_{ij} + \epsilon)}, \quad
        s_j \leftarrow \text{GRU}(u_j, s_j), \quad s_j \leftarrow s_j + \text{MLP}(\text{LayerNorm}(s_j))

    The learned maps :math:`W_q, W_k, W_v` have no bias, each LayerNorm has a scale and a shift of its own, the GRU is a
    torch.nn.GRUCell, and the MLP has one hidden layer of 2 D entries with a ReLU. It takes the poses of the children as
    their votes: use it in a :class:`torchcaps.CapsuleShared`.

    Args:
        iterations: number of iterations, at least 1.
        start: first slots: "random" (normal, drawn anew at every call, with a mean and a logarithm of the deviation
            that are learned, the same for all slots) or "learned" (each slot its own, the same for all samples).
        eps: epsilon.
        gradient: see :class:`torchcaps.Routing`. With "last", mean and deviation of a random start get no
            gradient; start="learned" is refused there.

    Reference:
        Locatello et al. 2020, Algorithm 1.
    """

    measures_presence = False
    needs_poses = True

    @checked
    def __init__(
        self,
        iterations: Count = 3,
        start: Literal["random", "learned"] = "random",
        eps: Positive = 1e-8,
        gradient: Gradient = "unrolled",
    ):
        super().__init__(iterations, gradient)
        self.start, self.eps = start, eps

    def build(self, shape: LayerShape) -> None:
        learned = self.start == "learned"
        if learned and shape.any_parents:
            raise ValueError("start='learned' needs a number of slots: give the layer out_capsules, or use 'random'")
        d, slots = shape.features, shape.parents if learned else 1
        for name in ("first_slots",) if learned else ("first_mean", "first_log_deviation"):
            setattr(self, name, nn.Parameter(nn.init.xavier_uniform_(torch.empty(slots, d))))
        self.norm_children, self.norm_slots, self.norm_mlp = (nn.LayerNorm(d) for _ in range(3))
        self.query, self.key, self.value = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.gru = nn.GRUCell(d, d)

    def prepare(self, votes: Votes) -> Votes:  # line 2
        dtype = self.norm_children.weight.dtype
        return votes.with_poses(lambda x: self.norm_children(x.flatten(-2).to(dtype)).to(x.dtype).view_as(x))

    def first_state(self, votes: Votes) -> Tensor:  # line 1
        zeros = votes.parents_like()
        if self.start == "learned":
            return self.first_slots.to(zeros.dtype).expand_as(zeros)
        return (self.first_mean + self.first_log_deviation.exp() * torch.randn_like(zeros)).to(zeros.dtype)

    def agreement(self, slots: Tensor) -> Dot:  # lines 5, 6: k(x) . q(s) / sqrt(D) = x . (W_k^T q(s)) / sqrt(D)
        with autocast_off(slots.device.type):
            query = self.query(self.norm_slots(slots.to(self.query.weight.dtype))) @ self.key.weight
            return Dot((query * query.shape[-1] ** -0.5).to(slots.dtype))

    def step(self, votes: WeightedVotes, slots: Tensor, t: int) -> tuple[Capsules, Tensor]:
        eps = slots.new_full((1, 1), self.eps)
        total, mass = votes.net_sum((Beta(1 + eps), Beta(-eps)))  # sum_i a_i (c_ij + eps) x_i
        dtype = self.value.weight.dtype
        with autocast_off(slots.device.type):
            update = self.value((total / nonzero(mass).unsqueeze(-1)).to(dtype))  # line 7
            after = self.gru(update.flatten(0, 1), slots.to(dtype).flatten(0, 1)).view_as(slots)  # line 8
            after = (after + self.mlp(self.norm_mlp(after))).to(slots.dtype)  # line 9
        return votes.capsules(after), after
