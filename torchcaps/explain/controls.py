"""Numbers to hold against the pictures: what would they show if routing, or learning, made no difference?

Shuffled labels are the data randomization test, and fresh weights the model parameter randomization test, of Adebayo et
al., Sanity Checks for Saliency Maps (2018).
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from torchcaps.routing import Routing
from torchcaps.utils.arguments import checked


@contextmanager
@checked
def uniform_coefficients(network: nn.Module) -> Iterator[None]:
    """Make the coefficients of a network's layers, or of one layer, uniform in this context, on the same weights.

    See :meth:`torchcaps.routing.Routing.uniform`. Compiled code is not used there.

    Raises:
        ValueError: nothing in the network routes.
    """
    routings = [module for module in network.modules() if isinstance(module, Routing)]
    if not routings:
        raise ValueError(f"{type(network).__name__} has no layer that routes: it has no coefficients to make uniform")
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for routing in routings:
            stack.enter_context(routing.uniform())
        yield


@checked
def with_new_weights(network: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy of a network whose parameters are drawn anew, as each of its modules draws its own by itself.

    Statistics of batch normalization start anew too. Networks that draw some weights in a way of their own when they
    are built have them here as PyTorch's modules draw them. Heinsen routing starts with equal scores of all classes.

    Args:
        network: the network, which stays as it is.
        seed: seed of the weights. The state of torch's generators stays as it is.

    Raises:
        ValueError: a module has parameters but no method `reset_parameters`.
    """
    drawn = copy.deepcopy(network)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        for name, module in reversed(list(drawn.named_modules())):  # a module may draw over what its parts drew
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                with torch.no_grad():
                    reset()
            elif next(module.parameters(recurse=False), None) is not None:
                kind = type(module).__name__
                raise ValueError(f"{name or 'the network'}, a {kind}, has no reset_parameters to draw its weights anew")
    return drawn
