"""Arguments that all backends share: the children, their gradients, and the options of a reduction."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcaps.ops.grid import Pair, positions
from torchcaps.utils.arguments import HALF

Softmax = Literal["parents", "children"]

Tensors = tuple[Tensor, ...]

BLOCK = 2**19  # entries of the votes that are computed at a time: a few tensors of this size fit a CPU's cache
ON_DEVICE = 32  # times as many elsewhere, where it is the number of operators that takes time


class Children(NamedTuple):
    """Poses and gates of the children, and the weights and biases that turn poses into votes.

    A sample is one window of one image. It has one child for each type at each place in the window. A place is inside a
    window; a position is that of a window in the map. `*window` in a shape is the window's height and width. Capsules
    that are not on a grid are maps and windows of height and width 1.

    Fields:
        poses: `(images, types, height, width, rows, d)`.
        weight: `(groups, *window, parents, d, h)`. Consecutive types share weights in groups of equal size.
        bias: `(groups, *window, parents or 1, rows, h)`, or None. Its number of groups may be another.
        gates: `(samples, types, *window)`, or None.
    """

    poses: Tensor
    weight: Tensor
    bias: Tensor | None
    gates: Tensor | None

    @property
    def window(self) -> Pair:
        """Height and width of the window."""
        return self.weight.shape[1], self.weight.shape[2]

    @property
    def parents(self) -> int:
        """Number of parents."""
        return self.weight.shape[3]


class ParentTensors(NamedTuple):
    """What reductions take of the parents. Votes are compared with the query of a dot agreement, or with the mean of a
    Gaussian, which has a precision and a prior too; without either, all coefficients are equal. A weighted sum takes
    query and offset, a sum without coefficients nothing."""

    query: Tensor | None = None  # (samples, parents, features)
    precision: Tensor | None = None  # (samples, parents, features)
    prior: Tensor | None = None  # (samples, parents)
    offset: Tensor | None = None  # (groups, *window, parents)
    betas: Tensor | None = None  # (groups, *window, parents or 1)


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
        poses_are_votes: the votes for all parents are the poses themselves; of the weights only the shape counts,
            (groups, 1, 1, parents, d, d).
    """

    softmax: Softmax = "parents"
    unit: bool = False
    leaky: bool = False
    eps: float = 0.0
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    poses_are_votes: bool = False


def grid_of(children: Children, options: Options) -> Pair:
    """Return the number of window positions down and across the map."""
    height, width = children.poses.shape[2:4]
    (down, across), stride, dilation = children.window, options.stride, options.dilation
    return positions(height, down, stride[0], dilation[0]), positions(width, across, stride[1], dilation[1])


def count_samples(children: Children, options: Options) -> int:
    """Return the number of samples: images times window positions."""
    rows, columns = grid_of(children, options)
    return children.poses.shape[0] * rows * columns


def check_children(children: Children) -> None:
    """Check that weights and biases fit the poses: kernels read memory where the shapes say.

    Raises:
        ValueError: a tensor has a shape that does not fit the others, or is on another device.
        TypeError: a tensor has another precision than the poses, and is not in half precision.
    """
    poses, weight, bias, _ = children
    fits = poses.dim() == weight.dim() == 6 and poses.shape[5] == weight.shape[4]
    if not fits or 0 in (*weight.shape, poses.shape[1], poses.shape[4]) or poses.shape[1] % weight.shape[0]:
        raise ValueError(f"the weights of the votes, {tuple(weight.shape)}, do not fit poses {tuple(poses.shape)}")
    types, rows = poses.shape[1], poses.shape[4]
    _, *window, parents, _, h = weight.shape
    _check_like(poses, "weight", weight)
    if bias is not None:
        _check_rows("bias", bias, types, [(*window, n, rows, h) for n in (parents, 1)])
        _check_like(poses, "bias", bias)


def check_parents(children: Children, tensors: dict[str, Tensor | None], options: Options) -> None:
    """Check the tensors of an agreement and of a net sum against the children, by their names in the operators.

    Raises:
        ValueError, TypeError: as of `check_children`.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    if not given:
        return
    poses, parents, window = children.poses, children.parents, children.window
    samples, types = count_samples(children, options), poses.shape[1]
    features = poses.shape[4] * children.weight.shape[5]
    shapes = {
        "query": (samples, parents, features),
        "precision": (samples, parents, features),
        "prior": (samples, parents),
        "use_weight": (parents, features),
        "ignore_weight": (parents, features),
        "activation_scale": (samples,),
    }
    in_rows: dict[str, list[tuple[int, ...]]] = {
        "betas": [(*window, parents), (*window, 1)],
        "activation_weight": [(*window, features)],
        "activation_bias": [(*window, 1)],
    }
    for name, x in given.items():
        if name not in shapes:  # each group of children has a row
            _check_rows(name, x, types, in_rows.get(name, [(*window, parents)]))
        elif tuple(x.shape) != shapes[name]:
            raise ValueError(f"expected {name} of shape {shapes[name]} in a reduction over votes, got {tuple(x.shape)}")
        _check_like(poses, name, x)


def _check_rows(name: str, x: Tensor, types: int, shapes: list[tuple[int, ...]]) -> None:
    """Check the shape of a tensor with one row for each group of types."""
    if tuple(x.shape[1:]) not in shapes or not x.shape[0] or types % x.shape[0]:
        wanted = ("groups", *shapes[0])
        raise ValueError(f"expected {name} of shape {wanted} in a reduction over votes, got {tuple(x.shape)}")


def check_device(name: str, x: Tensor, others: str, device: torch.device) -> None:
    """Check that a tensor is on the device of others."""
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and the {others} are on {device}: move one of them")


def _check_like(poses: Tensor, name: str, x: Tensor) -> None:
    """Check the device and the precision of a tensor."""
    check_device(name, x, "poses", poses.device)
    sums = torch.float32 if poses.dtype in HALF else poses.dtype
    if x.dtype != sums and not (x.dtype in HALF and sums == torch.float32):
        raise TypeError(f"{name} is {x.dtype} and the poses are {poses.dtype}: convert {name} by .to({sums})")
