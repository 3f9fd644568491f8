"""Checks of tensors that are given to a routing in place of learned parameters."""

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcaps.ops import Votes
from torchcaps.ops.children import check_device
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import shown_with_type

if TYPE_CHECKING:
    from torchcaps.routing.base import Routing


def check_values(routing: "Routing", votes: Votes) -> None:
    """Check the tensors of `with_values` against the parameters of a layer with votes of these sizes.

    Raises:
        RuntimeError: a parameter has no value.
        ValueError: a value has another name, shape or device.
        TypeError: a value is no tensor, or has another precision than the votes.
    """
    name, features = type(routing).__name__, math.prod(votes.pose)
    shape = LayerShape(votes.children, votes.children, votes.parents, 1, features, features)
    # On the meta device nothing is drawn, which would change the random numbers of what comes after.
    without = copy.copy(routing)
    without.given_values = {}
    for key in routing.given_values:
        del without.__dict__[key]
    built = without.for_layer(shape, "meta")
    names = [*built._parameters, *built._buffers, *built._modules]
    missing = [x for x in names if not hasattr(routing, x)]
    if missing:
        raise RuntimeError(
            f"{name} has no {', '.join(missing)} yet: give it to a capsule layer, or set values by with_values"
        )
    for key, x in routing.given_values.items():
        if key not in names:
            raise ValueError(f"{name} with these options learns no {key!r}, but {', '.join(names) or 'nothing'}")
        _check(key, x, tuple(getattr(built, key).shape), votes)


def _check(name: str, x: Any, expected: tuple[int, ...], votes: Votes) -> None:
    """Check a tensor that takes the place of a parameter of the expected shape. Sizes of 1 are broadcast."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a tensor of floating-point numbers, got {shown_with_type(x)}")
    check_device(name, x, "votes", votes.device)
    if torch.promote_types(x.dtype, votes.dtype) not in (votes.dtype, torch.float32):
        raise TypeError(f"{name} is {x.dtype} and the votes are {votes.dtype}: convert one of them")
    sizes = tuple(x.shape)
    if len(sizes) != len(expected) or any(n not in (1, m) for n, m in zip(sizes, expected, strict=True)):
        raise ValueError(f"expected {name} of shape {expected}, got {sizes}")
