"""Capsules that say nothing, because no input changes them or none makes them present."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, as_logits
from torchcaps.explain.recording import Recording, record
from torchcaps.measures.predicting import Inputs, inputs_of
from torchcaps.nn import CapsuleStack, RoutingPool2d
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.utils.arguments import checked

ABSENT_BELOW = 1e-4  # activation below which a capsule is not there
CHANGE = 1e-6  # range, as a part of the largest number, up to which numbers stay the same


class DeadCapsules(NamedTuple):
    """Shares of a layer's capsules that are dead, in [0, 1].

    Fields:
        children, parents: shares of the layer's children and of its parents. None if these are not the same capsules
            for every input: children of a layer for any number of them share their weights, and padding changes how
            many there are.
    """

    children: float | None
    parents: float | None


@torch.no_grad()
@checked
def dead_capsules(network: nn.Module, batches: Iterable[Any]) -> dict[str, DeadCapsules]:
    """Compute the share of dead capsules in each capsule layer of a network.

    A capsule is dead on these inputs if its activation (the sigmoid of its score, or the length of its pose if it has
    no score) is below 0.0001 on all of them, or if neither its pose nor its activation changes: over the inputs none of
    their numbers varies by more than a millionth of the largest. On a grid there is a capsule of each type at each
    position.

    Args:
        network: network with capsule layers; it is run in evaluation mode and left as it was.
        batches: batches of inputs, or tuples that begin with inputs, as from a `DataLoader`. Inputs are a tensor, or
            the arguments of the network in a tuple. Hundreds of inputs are enough; at least two are needed.

    Returns:
        The shares of each capsule layer, routing pool and `CapsuleFC`, by its name in `network.named_modules()`, in the
        order in which they ran.

    Raises:
        TypeError: a batch is something else.
        ValueError: no capsule layer ran, or there are fewer than two inputs.
    """
    seen: dict[str, list[Tensor | None]] = {}  # ranges of the children and of the parents of each layer
    tested = 0
    for batch in batches:
        inputs = inputs_of(batch)
        tested += len(inputs[0] if isinstance(inputs, tuple) else inputs)
        for name, both in _capsules_of(network, inputs).items():
            ranges = [_range(capsules) for capsules in both]
            seen[name] = list(map(_joined, seen.get(name, ranges), ranges))
    if not seen:
        raise ValueError(f"{type(network).__name__} ran no capsule layer: it has no capsules that could be dead")
    if tested < 2:
        raise ValueError("one input changes nothing: give at least two, and better hundreds")
    return {name: DeadCapsules(*map(_share, ranges)) for name, ranges in seen.items()}


def _capsules_of(network: nn.Module, inputs: Inputs) -> dict[str, tuple[Capsules | None, Capsules]]:
    """Children and parents of each layer, as lists of capsules; None for children that are any number."""
    given: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given[module] = args[0] if args else named["capsules"]

    with ExitStack() as stack:
        for module in network.modules():
            if isinstance(module, (CapsuleLayer, CapsuleStack)):
                stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        _, runs = record(network, inputs)
    parents = {run.layer: run.last.parents for run in runs if run.last is not None}
    for module in network.modules():
        if isinstance(module, CapsuleStack) and module in given:
            below = given[module]
            for layer in module.layers:
                given.setdefault(layer, below)  # a stack that is not sequential does not call its layers
                below = parents[layer]
    return {run.name: _as_lists(run, given) for run in runs}


def _as_lists(run: Recording, given: dict[nn.Module, Any]) -> tuple[Capsules | None, Capsules]:
    layer = run.layer
    if isinstance(layer, CapsuleLayer):
        assert run.last is not None
        votes, any_number = run.last.votes.votes, layer.layer_shape.children is None and layer.layer_shape.groups == 1
        parents = run.last.parents._replace(pose_dims=len(votes.pose)).flatten_grid()
        if any_number:
            return None, parents
        if layer not in given:  # a network that calls the votes and the routing itself
            votes_of: Any = votes
            return Capsules(votes_of.poses.flatten(1, -3), pose_dims=2), parents
        children = given[layer] if isinstance(given[layer], Capsules) else Capsules(given[layer])
        pose = getattr(layer, "in_pose", votes.pose)  # a CapsuleMap has a number, because poses are vectors
        return children._replace(pose_dims=1 if isinstance(pose, int) else len(pose)).flatten_grid(), parents
    both = run.children, run.parents
    if isinstance(layer, RoutingPool2d):
        both = tuple(x.unflatten(1, (-1, layer.features)).movedim(2, -1) for x in both)
    return Capsules(both[0].flatten(1, -2)), Capsules(both[1].flatten(1, -2))


def _range(capsules: Capsules | None) -> Tensor | None:
    """Return the smallest and the largest value over a batch of each entry of each capsule's pose and of its
    activation, which comes last, `(2, capsules, features + 1)`; None for children that are any number."""
    if capsules is None:
        return None
    poses = capsules.poses.flatten(2)
    activations = poses.norm(dim=-1) if capsules.scores is None else as_logits(capsules.scores, poses).sigmoid()
    return torch.stack(torch.cat([poses, activations.unsqueeze(-1)], -1).aminmax(dim=0)).cpu()


def _joined(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the range over the inputs of two ranges; None if they are of other capsules."""
    if a is None or b is None or a.shape != b.shape:
        return None
    return torch.stack([torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])])


def _share(range_: Tensor | None) -> float | None:
    """Return the share of dead capsules."""
    if range_ is None:
        return None
    changes, sizes = range_[1] - range_[0], range_.abs().amax(0)
    pose, activation = slice(-1), slice(-1, None)
    same_pose, same_activation = (changes[:, x].amax(-1) <= CHANGE * sizes[:, x].amax(-1) for x in (pose, activation))
    dead = (range_[1, :, -1] < ABSENT_BELOW) | (same_pose & same_activation)
    return float(dead.double().mean())
