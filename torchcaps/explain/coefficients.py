"""How coefficients sharpen from iteration to iteration."""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.explain.recording import routing_layers, watching
from torchcaps.measures.predicting import Inputs, run_network
from torchcaps.ops import WeightedVotes
from torchcaps.routing import Iteration
from torchcaps.utils.arguments import checked


class Sharpening(NamedTuple):
    """How a layer's coefficients change over its iterations.

    Fields:
        effective: number of capsules that the coefficients are spread over, the mean of :math:`exp(H)` with the entropy
            H in nats, `(iterations,)`; 1 if one takes all.
        entropy: mean of H, `(iterations,)`.
        uniform: `effective` of uniform coefficients. It is `size`, unless there is a leak or children are missing.
        even: `entropy` of uniform coefficients.
        over: axis of the softmax: a child's coefficients are spread over "parents", or a parent's over "children".
        size: number of capsules on this axis.
    """

    effective: Tensor
    entropy: Tensor
    uniform: float
    even: float
    over: Literal["parents", "children"]
    size: int


@torch.no_grad()
@checked
def sharpening(network: nn.Module, batches: Iterable[Inputs]) -> dict[str, Sharpening]:
    """Compute how sharp the coefficients of each routing layer are after each iteration, as means over all inputs.

    With a softmax over parents, the means are over the children that are present; over children, over the parents. In a
    convolution every window counts.

    Args:
        network: the network; it is run in evaluation mode and left as it was.
        batches: inputs of the network, each a tensor or a tuple of the arguments of its `forward`.

    Returns:
        Results by the layers' names, for the layers that ran.
    """
    layers: dict[str, Any] = routing_layers(network)
    sums: dict[str, list[Tensor]] = {}  # per iteration: number, and sums of the columns below
    counts: dict[str, int] = {}
    place: dict[str, int] = {}  # of the iteration in this batch

    def see(name: str, iteration: Iteration) -> None:
        votes = iteration.votes
        coefficients = votes.coefficients().float()
        if votes.softmax == "children":
            coefficients = coefficients.transpose(1, 2)
        counts[name] = coefficients.shape[-1]
        entropy = torch.special.entr(coefficients).sum(-1)
        spread = entropy.exp()
        kept = torch.ones_like(entropy, dtype=torch.bool)
        if votes.gates is not None and votes.softmax == "parents":
            kept = votes.gates > 0
        even = _even(votes, entropy)
        columns = spread[kept], entropy[kept], even.exp()[kept], even[kept]
        batch_sums = torch.stack([kept.sum().double(), *(column.double().sum() for column in columns)]).cpu()
        index = 0 if iteration.t == 0 else place.get(name, 0)  # a network may run a layer several times
        place[name] = index + 1
        so_far = sums.setdefault(name, [])
        if index == len(so_far):
            so_far.append(torch.zeros(5, dtype=torch.float64))
        so_far[index] += batch_sums

    with watching(network, see):
        for inputs in batches:
            place.clear()
            run_network(network, inputs)
    result = {}
    for name, rows in sums.items():
        numbers, *sums_of = torch.stack(rows, 1)
        spread, entropy, uniform, even = (total / numbers.clamp_min(1) for total in sums_of)
        over = layers[name].routing.softmax
        result[name] = Sharpening(spread, entropy, float(uniform[0]), float(even[0]), over, counts[name])
    return result


def _even(votes: WeightedVotes, like: Tensor) -> Tensor:
    """Return the entropy of uniform coefficients, in the shape of `like`."""
    if votes.softmax == "parents":
        each = 1 / (votes.parents + int(votes.leaky))
        return torch.full_like(like, -votes.parents * each * math.log(each))
    gates = like.new_ones(len(like), votes.children) if votes.gates is None else votes.gates.to(like)
    shares = gates / gates.sum(1, keepdim=True).clamp_min(1e-12)
    return torch.special.entr(shares).sum(1, keepdim=True).expand_as(like)
