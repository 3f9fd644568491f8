"""What the capsule layers of a network do with an input: seen from outside, and nothing is left behind."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.measures.predicting import Inputs, run_network
from torchcaps.models import CapsuleFC
from torchcaps.nn import RoutingPool2d
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.modes import evaluating
from torchcaps.routing import Iteration
from torchcaps.utils.arguments import checked


class Recording(NamedTuple):
    """What one layer did in one pass of a network.

    Fields:
        name: name of the layer in `network.named_modules()`.
        layer: the layer, a `CapsuleLayer`, a `RoutingPool2d` or a `CapsuleFC`.
        last: last iteration of its routing; None for a `CapsuleFC`, which does not route.
        parents: poses of its parents, or the map that a `RoutingPool2d` returns.
        children: poses of a `CapsuleFC`'s children, or the map that a `RoutingPool2d` pools; None for a `CapsuleLayer`,
            whose `last` has votes.
    """

    name: str
    layer: Any
    last: Iteration | None
    parents: Tensor
    children: Any = None


@checked
def routing_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a network that route, capsule layers and routing pools, by their names in
    `network.named_modules()`."""
    return {
        name: module for name, module in network.named_modules() if isinstance(module, (CapsuleLayer, RoutingPool2d))
    }


@contextmanager
@checked
def watching(network: nn.Module, see: Callable[[str, Iteration], None]) -> Iterator[None]:
    """Call `see(name, iteration)` after every iteration of every layer that routes, within this context.

    The network is in evaluation mode there, and compiled code is not used, because it would not call `see`. Afterwards
    the network is as it was.
    """
    with ExitStack() as stack:
        stack.enter_context(evaluating(network))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, layer in routing_layers(network).items():
            stack.enter_context(layer.routing.watched(partial(see, name)))  # type: ignore[union-attr, operator]
        yield


@checked
def record(network: nn.Module, inputs: Inputs) -> tuple[Any, list[Recording]]:
    """Run a network once and return its output, and what each capsule layer did, in the order in which they ran.

    A layer that runs several times, or iterates in a concurrent stack, is there once, with its last iteration.

    Args:
        network: the network; it is run in evaluation mode and left as it was.
        inputs: its input, or a tuple of the arguments of its `forward`, on any device.
    """
    runs: dict[str, Recording] = {}
    layers = dict(network.named_modules())

    def see(name: str, iteration: Iteration) -> None:
        runs.pop(name, None)  # the order is that of the last iterations
        runs[name] = Recording(name, layers[name], iteration, iteration.parents.poses)

    def hook(name: str) -> Any:
        def keep(layer: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
            result = output[0] if type(output) is tuple else output  # with coefficients
            poses = [x.poses if isinstance(x, Capsules) else x for x in (*args, *named.values(), result)]
            last = runs[name].last if name in runs else None
            runs[name] = Recording(name, layer, last, poses[-1], poses[0])

        return keep

    with ExitStack() as stack:
        for name, layer in layers.items():
            if isinstance(layer, (CapsuleFC, RoutingPool2d)):
                handle = layer.register_forward_hook(hook(name), with_kwargs=True)
                stack.callback(handle.remove)
        stack.enter_context(watching(network, see))
        output = run_network(network, inputs)
    return output, list(runs.values())
