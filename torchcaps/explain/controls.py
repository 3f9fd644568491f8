"""Numbers to hold against the pictures: what would they show if routing, or learning, made no difference?

Shuffled labels are the data randomization test, and fresh weights the model parameter randomization test, of Adebayo et
al., Sanity Checks for Saliency Maps (2018).
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.nn.inputs import check_labels
from torchcaps.routing import Routing
from torchcaps.utils.arguments import checked, shown


@checked
def is_right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return on which inputs a network is right, `(batch,)` bool.

    With one label per input, it is right if no other class has as high a score. With several, as in MultiMNIST, it is
    right if no other class has as high a score as any of the labels. Without a label, or with scores that are
    NaN or infinite (-inf, which rules a class out, is allowed), it is not right.

    Args:
        scores: `(batch, classes)`.
        labels: `(batch,)`, or 1 for each class of an input and 0 for the others, `(batch, classes)`.

    Raises:
        TypeError: labels `(batch,)` are no integers.
        ValueError: labels have another shape, or are out of range.
    """
    if labels.shape not in (scores.shape[:1], scores.shape):
        expected = f"(batch,) = {tuple(scores.shape[:1])} or (batch, classes) = {tuple(scores.shape)}"
        raise ValueError(f"expected labels of shape {expected}, got {shown(labels)}")
    if labels.dim() == 1:
        check_labels(labels, scores.shape[1], scores.device)
        own = torch.zeros_like(scores, dtype=torch.bool).scatter(1, labels.long().unsqueeze(1), True)
    else:
        own = labels > 0
    highest_other = scores.where(~own, -torch.inf).amax(1)
    return (scores.where(own, torch.inf).amin(1) > highest_other) & own.any(1) & scores.amax(1).isfinite()


def balanced_accuracy(right: Tensor, labels: Tensor) -> float:
    """Return the balanced accuracy: the mean, over the classes that have samples, of the share that is right.

    Args:
        right: on which samples a network is right, `(n,)` bool.
        labels: class of each sample, `(n,)`.
    """
    counts = labels.long().bincount()
    return float((labels.long().bincount(right.double(), len(counts)) / counts)[counts > 0].mean())


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
