"""Capsules that say nothing, because no input changes them or none makes them present."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, as_logits
from torchcaps.explain.predicting import inputs_for, inputs_of
from torchcaps.explain.recording import Inputs, Run, record
from torchcaps.nn import CapsuleStack, RoutingPool2d
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.utils.arguments import checked

LEAST = 1e-4  # activation below which a capsule is not there
CHANGE = 1e-6  # standard deviation, relative to the root mean square, up to which numbers stay the same


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
    no score) is below 0.0001 on all of them, or if neither its pose nor its activation changes: their standard
    deviations over the inputs are at most a millionth of their root mean squares. On a grid there is a capsule of each
    type at each position.

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
    seen: dict[str, tuple[_Side, _Side]] = {}
    tested = 0
    for batch in batches:
        inputs = inputs_for(network, inputs_of(batch))
        tested += len(inputs[0] if isinstance(inputs, tuple) else inputs)
        for name, both in _capsules_of(network, inputs).items():
            for side, capsules in zip(seen.setdefault(name, (_Side(), _Side())), both, strict=True):
                side.add(capsules)
    if not seen:
        raise ValueError(f"{type(network).__name__} ran no capsule layer: it has no capsules that could be dead")
    if tested < 2:
        raise ValueError("one input changes nothing: give at least two, and better hundreds")
    return {name: DeadCapsules(children.share(), parents.share()) for name, (children, parents) in seen.items()}


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


def _as_lists(run: Run, given: dict[nn.Module, Any]) -> tuple[Capsules | None, Capsules]:
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
        return children._replace(pose_dims=len(getattr(layer, "in_pose", votes.pose))).flatten_grid(), parents
    assert run.children is not None
    assert run.parents is not None
    both = run.children, run.parents
    if isinstance(layer, RoutingPool2d):
        both = tuple(x.unflatten(1, (-1, layer.features)).movedim(2, -1) for x in both)
    return Capsules(both[0].flatten(1, -2)), Capsules(both[1].flatten(1, -2))


class _Side:
    """The children or the parents of a layer over all inputs."""

    def __init__(self) -> None:
        self.poses, self.activations, self.largest = _Spread(), _Spread(), torch.tensor(0.0)
        self.same_capsules = True

    def add(self, capsules: Capsules | None) -> None:
        """Add the capsules of a batch: poses `(batch, capsules, *pose)`."""
        number = self.poses.first.shape[0] if self.poses.count else None
        self.same_capsules &= capsules is not None and number in (None, capsules.poses.shape[1])
        if capsules is None or not self.same_capsules:
            return
        poses = capsules.poses.flatten(2)
        activations = poses.norm(dim=-1) if capsules.scores is None else as_logits(capsules.scores, poses).sigmoid()
        self.poses.add(poses)
        self.activations.add(activations.unsqueeze(-1))
        self.largest = torch.maximum(self.largest, activations.amax(0).cpu())

    def share(self) -> float | None:
        """Return the share of dead capsules."""
        if not self.same_capsules:
            return None
        dead = (self.largest < LEAST) | (self.poses.stays_the_same() & self.activations.stays_the_same())
        return float(dead.double().mean())


class _Spread:
    """Sums over inputs, in float64 and about the first input, so that numbers that stay the same cancel exactly."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self.total = self.squares = self.sizes = torch.empty(0)

    def add(self, values: Tensor) -> None:
        """Add the values `(batch, capsules, features)` of a batch."""
        values = values.cpu().double()
        if not self.count:
            self.first = values[0]
            self.total = self.squares = self.sizes = torch.zeros_like(self.first)
        differences = values - self.first
        self.total = self.total + differences.sum(0)
        self.squares = self.squares + differences.square().sum(0)
        self.sizes = self.sizes + values.square().sum(0)
        self.count += len(values)

    def stays_the_same(self) -> Tensor:
        """Return for each capsule whether its values stay the same, `(capsules,)`."""
        variance = (self.squares / self.count - (self.total / self.count).square()).clamp_min(0).sum(-1)
        return variance.sqrt() <= CHANGE * (self.sizes / self.count).sum(-1).sqrt()
