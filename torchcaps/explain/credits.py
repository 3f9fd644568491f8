"""Credit: the share of each capsule in each class, composed through all capsule layers of a network."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.explain.recording import Recording, record
from torchcaps.explain.shares import Shares, shares_of
from torchcaps.measures.predicting import Inputs, as_prediction
from torchcaps.utils.arguments import Count, CountOrZero, checked


class NoCapsules(ValueError):
    """A network ran no capsule layer."""


class LayerCredit(NamedTuple):
    """Shares of a layer's children in the classes.

    Fields:
        name: name of the layer in `network.named_modules()`.
        shares: `(batch, classes, *children)`, where children are `(children,)` or on a grid `(types, height, width)`;
            they sum to one over the children.
        even: what the shares would be if in every layer all children contributed alike to a parent. They are not all
            equal: a child in the middle of a grid lies in more windows than one at its edge.
        own: shares of the children in the layer's own parents.
    """

    name: str
    shares: Tensor
    even: Tensor
    own: Shares


class Credit(NamedTuple):
    """Credit of all capsule layers for a batch of inputs.

    Fields:
        layers: from the layer next to the input to the one next to the classes.
        top: shares of the last layer's parents in the classes, `(batch, classes, *parents)`.
        prediction: the network's output.
    """

    layers: tuple[LayerCredit, ...]
    top: Tensor
    prediction: Prediction


class Strand(NamedTuple):
    """A part in a parse tree: a capsule, or several at one place, with the strongest parts that it is made of.

    Fields:
        layer: index in `Credit.layers` of the layer that it is a child of; `len(layers)` for a parent of the last
            layer, and one more for a class that stands above these parents.
        place: its place among them: `(row, column)` on a grid, where all types are one part; `(position,)` on a line;
            `(index,)` otherwise.
        share: its share in the class, along this strand of the tree.
        rest: share of the parts that are left out.
        parts: its strongest parts.
    """

    layer: int
    place: tuple[int, ...]
    share: float
    rest: float
    parts: tuple["Strand", ...]


@checked
def credit(network: nn.Module, inputs: Inputs) -> Credit:
    r"""Compute the share of each capsule in each class, for every capsule layer of a network.

    Let :math:`S^l_{ij}` be the share of child i in parent j of layer l (:class:`torchcaps.explain.Shares` has its
    formula), and :math:`T_{kj}` that of the last layer's parent j in class k. Then the share of child i in class k is

    .. math:: C^L_{ki} = \sum_j T_{kj} S^L_{ij}, \quad C^l_{ki} = \sum_j C^{l+1}_{kj} S^l_{ij}

    These rows sum to one in every layer, for every routing: the parts of a class are handed on, and none is lost. Where
    the last parents are the classes, T is the identity. Where other layers follow, such as the linear layer behind a
    routing pool, T are the absolute values of gradient times pose,
    :math:`|\sum_f \partial \text{score}_k / \partial v_{jf} \, v_{jf}|`, divided by their sum.

    Layers that do not hand their parents on as the next layer's children, such as routing pools with convolutions
    between them, are left out with all that is below them: nothing says how their parents share in these children.

    Args:
        network: classifier that returns a `Prediction`, class capsules or scores `(batch, classes)`; it is run in
            evaluation mode and left as it was.
        inputs: its input, or a tuple of the arguments of its `forward`.

    Raises:
        NoCapsules: the network ran no capsule layer. It is a ValueError.
        TypeError: the network returns something else.
        ValueError: the shares are not finite.
    """
    with torch.enable_grad():
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        attached = tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in given)
        output, runs = record(network, attached)  # also gradients of networks whose parameters need none
    prediction = as_prediction(network, output)
    if not runs:
        raise NoCapsules(
            f"{type(network).__name__} ran no capsule layer on this input: no capsule has a share in its classes"
        )
    chain = connected(runs)
    with torch.enable_grad():
        top = _top(*chain[-1], prediction)
    layers: list[LayerCredit] = []
    shares = even = top
    for run, own in reversed(chain):
        shares = own.down(shares.reshape(*shares.shape[:2], *own.parents))
        even = own.evenly().down(even.reshape(*even.shape[:2], *own.parents))
        layers.append(LayerCredit(run.name, shares, even, own))
    if not layers[-1].shares.isfinite().all():
        raise ValueError("the shares are not finite: the inputs or the weights are nan or infinite")
    return Credit(tuple(reversed(layers)), top, prediction.detach())


def connected(runs: Sequence[Recording]) -> list[tuple[Recording, Shares]]:
    """Return the last layers that are connected, child to parent, and the shares in each. The poses of the children
    must be those of the parents below, in the same order, though they may be laid out otherwise."""
    chain = [(runs[-1], shares_of(runs[-1]))]
    for run in reversed(runs[:-1]):
        above, own = chain[0][1], shares_of(run)
        if above.groups or own.groups or math.prod(own.parents) != math.prod(above.children):
            break
        upper = chain[0][0]
        parents, children = run.parents.flatten(1), children_of(upper, above).flatten(1)
        if parents.shape != children.shape:
            break
        if upper.last is not None and upper.layer.routing.needs_poses:
            parents = _as_prepared(parents, upper)
        if not torch.equal(parents, children.to(parents.dtype)):
            break
        if len(own.parents) > len(above.children):  # they were flattened in between
            chain[0] = chain[0][0], above._replace(children=own.parents)
        chain.insert(0, (run, own))
    return chain


@torch.no_grad()
def _as_prepared(poses: Tensor, run: Recording) -> Tensor:
    """Return poses `(batch, n)` as the routing of a layer would prepare them, such as by a LayerNorm."""
    assert run.last is not None
    votes: Any = run.last.votes.votes
    return run.layer.routing.prepare(votes.with_poses(lambda x: poses.view_as(x).to(x))).poses.flatten(1)


def children_of(run: Recording, own: Shares) -> Tensor:
    """Return the poses of a layer's children, or the map that a pool takes."""
    if run.last is None or own.groups:
        return run.children
    votes: Any = run.last.votes.votes
    if own.windows is None:
        return votes.poses
    down, across = own.windows[2]  # without the padding
    rows, columns = own.children[-2:] if len(own.children) == 3 else (1, own.children[-1])
    return votes.poses[:, :, down : down + rows, across : across + columns]


def _top(run: Recording, own: Shares, prediction: Prediction) -> Tensor:
    """Return the shares of the last layer's parents in the classes, `(batch, classes, *parents)`."""
    scores, parents = prediction.evidence, run.parents
    batch, classes = scores.shape
    identity = torch.eye(classes, device=scores.device).expand(batch, -1, -1)
    may_be_classes = own.parents == (classes,) and not own.groups
    if may_be_classes and prediction.capsules is not None and prediction.capsules.poses.shape == parents.shape:
        return identity
    options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    gradients = [torch.autograd.grad(scores[:, k].sum(), parents, **options)[0] for k in range(classes)]
    products = torch.stack(gradients, 1) * parents.unsqueeze(1)
    if own.groups:  # channels of a map: features of each group
        products = products.unflatten(2, (own.parents[0], -1)).sum(3)
        amounts = products.abs().reshape(batch, classes, *own.parents)
    else:
        amounts = products.flatten(2 + len(own.parents)).sum(-1).abs()
    flat = amounts.flatten(2).detach()
    if may_be_classes and not (flat * (1 - identity)).any():  # each score depends on one parent alone
        return identity
    total = flat.sum(-1, keepdim=True)
    return torch.where(total > 0, flat / total.clamp_min(1e-30), 1 / flat.shape[-1]).view_as(amounts)


@checked
def parse_tree(
    credits: Credit,
    sample: CountOrZero,
    class_: CountOrZero,
    widest: Count = 4,
    groups: Sequence[Sequence[int]] | None = None,
) -> Strand:
    """Follow a class down to its strongest parts: the parse tree of one sample.

    The capsules at one position of a grid, one of each type, are one part.

    Args:
        credits: result of :func:`credit`.
        sample: index of the sample in the batch.
        class_: the class.
        widest: largest number of parts that a part has in the tree.
        groups: children of the layer next to the input that are one part each, such as the tokens of a word; None if
            these children lie on a grid, or if each is a part of its own.
    """
    samples, classes = credits.top.shape[:2]
    for name, value, count in (("sample", sample, samples), ("class_", class_, classes)):
        if value >= count:
            raise ValueError(f"{name} must be from 0 to {count - 1}, got {value}")
    own = [_of_sample(layer.own, sample) for layer in credits.layers]

    def strand(level: int, place: tuple[int, ...], shares: Tensor) -> Strand:
        """Return a part with its strongest parts. `shares` are those of its capsules in the class, zero for those of
        other parts, in the layout of their layer; `level` is the number of layers below it."""
        if level == 0:
            return Strand(0, place, float(shares.sum()), 0.0, ())
        parts, rest = strongest(level - 1, own[level - 1].down(shares[None, None])[0, 0])
        return Strand(level, place, float(shares.sum()), rest, parts)

    def strongest(level: int, shares: Tensor) -> tuple[tuple[Strand, ...], float]:
        """Return the strongest parts among capsules with these shares in the class, and the share of all others."""
        grouped = groups if level == 0 else None
        if grouped is not None:
            by_part = torch.stack([shares.flatten()[list(group)].sum() for group in grouped])
        else:
            by_part = shares.sum(0) if shares.dim() > 1 else shares  # over the types at a position
        strands = []
        for index in by_part.flatten().argsort(descending=True, stable=True)[:widest]:
            place: tuple[int, ...] = tuple(int(i) for i in torch.unravel_index(index, by_part.shape))
            mask = torch.zeros_like(shares)
            if grouped is not None:
                mask.view(-1)[list(grouped[place[0]])] = 1
            else:
                at: Any = (slice(None), *place) if shares.dim() > 1 else place
                mask[at] = 1
            strands.append(strand(level, place, shares * mask))
        return tuple(strands), max(0.0, float(shares.sum()) - sum(strand.share for strand in strands))

    top = credits.top[sample, class_]
    if tuple(top.shape) == (classes,) and credits.top[sample].equal(torch.eye(classes).to(top)):  # parents are classes
        return strand(len(own), (class_,), top)
    strands, rest = strongest(len(own), top)
    return Strand(len(own) + 1, (class_,), 1.0, rest, strands)


def _of_sample(own: Shares, sample: int) -> Shares:
    each = own.groups or 1
    return own._replace(table=own.table[sample * each : (sample + 1) * each])
