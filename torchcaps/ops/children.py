"""Arguments that all backends share: the children, their gradients, and the options of a reduction."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchcaps.arguments import HALF

Softmax = Literal["parents", "children"]
SOFTMAXES: tuple[Softmax, ...] = get_args(Softmax)
Pair = tuple[int, int]

BLOCK = 2**19  # entries of the votes that are computed at a time: a few tensors of this size fit the cache


class Children(NamedTuple):
    """Poses and gates of the children, and the weights and biases that turn poses into votes.

    A sample is one position of the window in one image. It has one child for each type at each place in the window: a
    place is in a window, a position is that of a window.
    Capsules that are not on a grid are maps and windows of height and width 1.

    Fields:
        poses: `(images, types, height, width, rows, d)`.
        weight: `(groups, kernel, kernel, parents, d, h)`. Consecutive types share weights in groups of equal size.
        bias: `(groups, kernel, kernel, parents or 1, rows, h)`, or None. Its number of groups may be another.
        gates: `(samples, types, kernel, kernel)`, or None.
    """

    poses: Tensor
    weight: Tensor
    bias: Tensor | None
    gates: Tensor | None

    @property
    def kernel(self) -> Pair:
        """Height and width of the window."""
        return self.weight.shape[1], self.weight.shape[2]

    @property
    def parents(self) -> int:
        """Number of parents."""
        return self.weight.shape[3]


class Gradients(NamedTuple):
    """Tensors to which backward functions add the gradients of the children, shared by all iterations of a routing.
    A field is None if that gradient is not needed."""

    poses: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gates: Tensor | None


class Options(NamedTuple):
    """How votes are reduced.

    Fields:
        softmax: axis over which the coefficients sum to one.
        unit: compare the votes' directions with the query, not the votes.
        leaky: add a parent of logit 0 to the softmax, and drop its coefficient.
        eps: number added to the mass where moments are divided by it.
        stride, dilation: stride and dilation of the windows, down and across.
        shared: the votes for all parents are the poses themselves; of the weights only the shape counts, (groups, 1, 1,
            parents, d, d).
    """

    softmax: Softmax = "parents"
    unit: bool = False
    leaky: bool = False
    eps: float = 0.0
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    shared: bool = False


def positions(size: int, kernel: int, stride: int, dilation: int) -> int:
    """Return how many windows fit along one side of a map."""
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def grid_of(children: Children, options: Options) -> Pair:
    """Return the number of window positions down and across the map."""
    height, width = children.poses.shape[2:4]
    (down, across), stride, dilation = children.kernel, options.stride, options.dilation
    return positions(height, down, stride[0], dilation[0]), positions(width, across, stride[1], dilation[1])


def count_samples(children: Children, options: Options) -> int:
    """Return the number of samples: images times window positions."""
    rows, columns = grid_of(children, options)
    return children.poses.shape[0] * rows * columns


# Tensors of a reduction whose first size is a number of groups.
IN_GROUPS = ("bias", "offset", "betas", "slope", "use", "ignore", "activation_weight", "activation_bias")


def check_tensors(children: Children, named: Iterable[tuple[str, Tensor | None]], options: Options) -> None:
    """Check the shapes and the types of all tensors of a reduction: kernels read memory where the shapes say.

    Args:
        named: tensors of the parents by their names: query, target, precision, prior, offset and betas.

    Raises:
        ValueError: a tensor has a shape that does not fit the others, or is on another device.
        TypeError: a tensor has another precision than the poses, and is not in half precision.
    """
    poses, weight, bias, gates = children
    _, types, *_, rows, d = poses.shape
    groups, down, across, parents, depth, h = weight.shape
    if depth != d or types % groups:
        raise ValueError(f"the weights of the votes, {tuple(weight.shape)}, do not fit poses {tuple(poses.shape)}")
    samples, features = count_samples(children, options), rows * h
    window = (down, across)
    expected: dict[str, tuple[tuple[int, ...], ...]] = {
        "gates": ((samples, types, *window),),
        "query": ((samples, parents, features),),
        "target": ((samples, parents, features),),
        "precision": ((samples, parents, features),),
        "prior": ((samples, parents),),
        "bias": tuple((*window, n, rows, h) for n in (parents, 1)),
        "offset": ((*window, parents),),
        "betas": tuple((*window, n) for n in (parents, 1)),
        "slope": ((*window, parents),),
        "use": ((*window, parents),),
        "ignore": ((*window, parents),),
        "use_weight": ((parents, features),),
        "ignore_weight": ((parents, features),),
        "activation_weight": ((features,),),
        "activation_bias": ((),),
        "activation_scale": ((samples,),),
    }
    for name, x in (("weight", weight), ("bias", bias), ("gates", gates), *named):
        if x is None:
            continue
        if name != "weight":
            in_groups = name in IN_GROUPS
            shape = tuple(x.shape)
            fits = (shape[1:] if in_groups else shape) in expected[name]
            if not fits or (in_groups and (not shape[0] or types % shape[0])):
                wanted = ("groups", *expected[name][0]) if in_groups else expected[name][0]
                raise ValueError(f"expected {name} of shape {wanted} in a reduction over votes, got {shape}")
        if x.device != poses.device:
            raise ValueError(f"{name} is on {x.device} and the poses are on {poses.device}: move one of them")
        if x.dtype != poses.dtype and not (x.dtype in HALF and poses.dtype == torch.float32):
            raise TypeError(f"{name} is {x.dtype} and the poses are {poses.dtype}: convert one of them")
