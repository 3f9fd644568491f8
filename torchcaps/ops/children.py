"""What a backend is told: the children, and how their votes are to be reduced."""

from typing import Literal, NamedTuple

from torch import Tensor

Softmax = Literal["parents", "children"]
Pair = tuple[int, int]


class Children(NamedTuple):
    """Poses and what turns them into votes.

    A sample is an image and a position of the window on it. It has one child for each type and each place in the
    window. Capsules that are on no grid are maps and windows of height and width 1.

    Fields:
        poses: `(images, types, height, width, rows, d)`.
        weight: `(groups, kernel, kernel, parents, d, h)`. Types share weights in groups of equal size, in order.
        bias: `(groups, kernel, kernel, parents or 1, rows, h)`, with groups of its own, or None.
        gates: `(samples, types, kernel, kernel)`, or None.
    """

    poses: Tensor
    weight: Tensor
    bias: Tensor | None
    gates: Tensor | None

    @property
    def kernel(self) -> Pair:
        return self.weight.shape[1], self.weight.shape[2]

    @property
    def parents(self) -> int:
        return self.weight.shape[3]


class Gradients(NamedTuple):
    """What a backward function adds the gradients of the children to, so that iterations share them; None where nobody
    asks."""

    poses: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gates: Tensor | None


class Options(NamedTuple):
    """How votes are reduced.

    Fields:
        softmax: what the coefficients sum to one over.
        unit: compare the votes' directions with the parents, not the votes.
        leaky: a parent of logit 0 joins the softmax and is dropped.
        eps: added to the mass of moments where it divides.
        stride, dilation: of the windows.
    """

    softmax: Softmax = "parents"
    unit: bool = False
    leaky: bool = False
    eps: float = 0.0
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)


def positions(size: int, kernel: int, stride: int, dilation: int) -> int:
    """How many windows fit along one side of a map."""
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def grid_of(children: Children, options: Options) -> Pair:
    """Rows and columns of the windows' positions."""
    height, width = children.poses.shape[2:4]
    (down, across), stride, dilation = children.kernel, options.stride, options.dilation
    return positions(height, down, stride[0], dilation[0]), positions(width, across, stride[1], dilation[1])


def count_samples(children: Children, options: Options) -> int:
    rows, columns = grid_of(children, options)
    return children.poses.shape[0] * rows * columns
