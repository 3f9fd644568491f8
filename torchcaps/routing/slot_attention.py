"""Slot attention.

Locatello et al.: Object-Centric Learning with Slot Attention (2020), Algorithm 1.

The parents are called slots. Keys and values are not computed: the query is multiplied by the key matrix, and the
weighted mean of the children by the value matrix. At an equilibrium this is Chang, Griffiths, Levine: Object
Representations as Fixed Points (2022).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps.arguments import Count, CountOrZero, Positive, checked
from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Dot, Votes, autocast_off, nonzero
from torchcaps.routing.base import Gradient, LayerShape, Routing


class SlotAttention(Routing):
    r"""Route by attention in which the slots compete for each child, and update the slots by a GRU and an MLP.

    With the poses x of the children, their gates a, and slots s of D entries (all of a matrix), each iteration computes

    .. math::
        x_i' = \text{LayerNorm}(x_i), \quad q_j = W_q \, \text{LayerNorm}(s_j), \quad
        c_{ij} = \text{softmax}_j \Big( \frac{W_k x_i' \cdot q_j}{\sqrt{D}} \Big), \\
        u_j = \frac{\sum_i a_i (c_{ij} + \epsilon) W_v x_i'}{\sum_i a_i (c_{ij} + \epsilon)}, \quad
        s_j \leftarrow \text{GRU}(u_j, s_j), \quad s_j \leftarrow s_j + \text{MLP}(\text{LayerNorm}(s_j))

    The learned maps :math:`W_q, W_k, W_v` have no bias, each LayerNorm has a scale and a shift of its own, the GRU is a
    torch.nn.GRUCell, and the MLP has one hidden layer with a ReLU.

    It takes the poses of the children as their votes: use it in a :class:`torchcaps.CapsuleShared`.

    Args:
        iterations: number of iterations, at least 1.
        start: slots before the first iteration: "random" (:math:`\mu + \sigma \cdot` noise, drawn anew at every call,
            with a learned mean and logarithm of the deviation, which all slots share) or "learned" (each slot its own,
            the same for all samples).
        update: "mean" for the weighted mean of the values as above, or "sum" for :math:`\sum_i a_i c_{ij} W_v x_i'`.
        hidden: width of the hidden layer of the MLP; None for twice the size of a slot; 0 for no MLP.
        eps: epsilon.
        gradient: "unrolled" through all iterations, or "last" through the last one only. Then, and at an equilibrium,
            the mean and the deviation of the start get no gradient.

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
        update: Literal["mean", "sum"] = "mean",
        hidden: CountOrZero | None = None,
        eps: Positive = 1e-8,
        gradient: Gradient = "unrolled",
    ):
        super().__init__(iterations, gradient)
        if start == "learned" and gradient == "last" and iterations > 1:
            raise ValueError("start='learned' gets no gradient from the last iteration alone: use gradient='unrolled'")
        self.start, self.update, self.hidden, self.eps = start, update, hidden, eps

    def learned(self, shape: LayerShape) -> dict[str, Tensor | nn.Module]:
        if self.start == "learned" and shape.any_parents:
            raise ValueError("start='learned' needs a number of slots: give the layer out_capsules, or use 'random'")
        d = shape.features
        hidden = 2 * d if self.hidden is None else self.hidden
        names = ("first_slots",) if self.start == "learned" else ("first_mean", "first_log_deviation")
        slots = shape.parents if self.start == "learned" else 1
        first = {name: nn.init.xavier_uniform_(torch.empty(slots, d)) for name in names}
        norms = {f"norm_{name}": nn.LayerNorm(d) for name in ("children", "slots", *(("mlp",) if hidden else ()))}
        maps = {name: nn.Linear(d, d, bias=False) for name in ("query", "key", "value")}
        mlp = {"mlp": nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, d))} if hidden else {}
        return {**first, **norms, **maps, **mlp, "gru": nn.GRUCell(d, d)}

    def prepare(self, votes: Votes) -> Votes:
        own = self.norm_children.weight.dtype
        return votes.with_poses(lambda x: self.norm_children(x.flatten(-2).to(own)).to(x.dtype).view_as(x))

    def first_agreement(self, votes: Votes) -> Dot:
        zeros = votes.parents_like()
        if self.start == "learned":
            slots = zeros + self.first_slots
        else:
            slots = self.first_mean + self.first_log_deviation.exp() * torch.randn_like(zeros)
        return Dot(zeros, parents=slots.to(zeros.dtype))

    def scaled(self, agreement: Agreement | None) -> Agreement | None:
        if not isinstance(agreement, Dot) or agreement.parents is None:
            return agreement
        with autocast_off(agreement.query.device.type):
            slots = self.norm_slots(agreement.parents.to(self.query.weight.dtype))
            query = self.query(slots) @ self.key.weight * slots.shape[-1] ** -0.5
        return agreement._replace(query=query.to(agreement.query.dtype))

    def step(self, votes: Votes, agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        asked = agreement if isinstance(agreement, Dot) else None  # None: uniform coefficients
        before = (self.first_agreement(votes) if asked is None else asked).parents
        assert before is not None
        if self.update == "mean":
            everything, count = votes.weighted_sum(None) * votes.parents, votes.count().unsqueeze(1)
        total, mass = votes.net_sum(asked)
        if self.update == "mean":
            total = (total + self.eps * everything) / nonzero(mass + self.eps * count).unsqueeze(-1)
        with autocast_off(before.device.type):
            own = self.value.weight.dtype
            slots = self.gru(self.value(total.to(own)).flatten(0, 1), before.flatten(0, 1).to(own)).view_as(before)
            slots = slots + self.mlp(self.norm_mlp(slots)) if self.hidden != 0 else slots
        slots = slots.to(before.dtype)
        return votes.capsules(slots), Dot(slots, parents=slots)
