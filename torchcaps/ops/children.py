"""Arguments that all backends share: the children, their gradients, and the options of a reduction."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

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
    """

    softmax: Softmax = "parents"
    unit: bool = False
    leaky: bool = False
    eps: float = 0.0
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)


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
