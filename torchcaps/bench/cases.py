"""Cases: what `torchcaps bench` measures, be it a layer or a whole network, and the least work it takes."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.nn import CapsuleConv2d
from torchcaps.nn.pose import matrix_shape
from torchcaps.ops import positions


class Work(NamedTuple):
    """The least that a pass must compute and move.

    `flops` counts floating-point operations; a multiplication with an addition is two. There are S samples (windows in
    a convolution), N children and P parents of each, G groups of children that share weights, poses of r rows of d,
    votes of k features, and T iterations:

        product       2 S G P k d      weights times one tensor per group: coefficients of the first sum are uniform,
                                       so children that share weights are added up before the product
        votes         2 S N P k d
        agreement     2 S N P k        of votes with a parent
        sum           2 S N P k        of weighted votes
        deviations    4 S N P k        subtract, square, weight, add: for a Gaussian's agreement, and for variances
        forward, dot:       product + (T - 1) min(votes + agreement + sum, 2 product + 4 S N P r d)
        forward, Gaussian:  product + votes + variances + (T - 1) (votes + agreement + sum + variances)
        backward:           twice the forward pass: each product has a gradient for both of its factors

    The second term of the minimum iterates without votes: it takes the parents through the weights to the poses, and
    weighted sums of poses through the weights to the parents. A Gaussian's squares could be expanded for that, but
    would lose all digits where votes agree. Votes are counted in each iteration; an implementation that keeps them
    computes fewer and moves more. Not counted are votes computed again for the backward pass, and operations that are
    not per feature (softmax, squash).

    A network counts the passes that reach its output, and its other products of matrices, convolutions among them.

    `bytes` counts inputs, parameters and outputs once; backward, their gradients once too.
    """

    flops: int
    bytes: int


SLACK = 5  # factor on the allowed errors where operations come in another order
# Tensors of the size of all votes that a forward and backward pass was found to hold at once, per iteration.
DOT, GAUSSIAN = 2.5, 9


@dataclass(frozen=True)
class Case(ABC):
    """One of our modules and its inputs.

    Attributes:
        module: module to measure.
        inputs: its inputs by name.
        results: names of its results; a module may give only the first of them.
        differentiated: names of the inputs that have gradients, beside the parameters.
        slack: factor on the allowed errors of all ways.
    """

    module: Any
    inputs: dict[str, Tensor]

    results: ClassVar[tuple[str, ...]]
    differentiated: ClassVar[tuple[str, ...]] = ()
    slack: ClassVar[float] = 1

    @property
    def batch(self) -> int:
        return next(iter(self.inputs.values())).shape[0]

    @property
    @abstractmethod
    def children(self) -> int:
        """Number of children of one sample; in a network, those of the first capsule layer."""

    @property
    @abstractmethod
    def iterations(self) -> int:
        """Number of routing iterations."""

    @abstractmethod
    def compute(self, module: Any, inputs: dict[str, Tensor], baseline: bool) -> tuple[Tensor, ...]:
        """Compute the results of the module, or of the baseline with its parameters; it may be a compiled module."""

    @abstractmethod
    def gradients(self, results: tuple[Tensor, ...], of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the gradients of a loss of the results."""

    def start(self) -> tuple[Any, torch.optim.Optimizer | None]:
        """Return the module to run many times, and the optimizer if an optimizer step is measured too."""
        return self.module, None

    def is_exact(self, compiled: bool) -> bool:
        """Return whether a right way differs by few roundings; otherwise its values are checked in float64."""
        return True

    def compile(self, module: Any, mode: str | None) -> Any:
        """Compile the module with Inductor, without a graph break."""
        return torch.compile(module, fullgraph=True, dynamic=False, mode=mode)

    @abstractmethod
    def parts(self) -> "Sequence[Case]":
        """Split into cases that need the memory of one sample's votes each.

        Their results together are those of this case: values and gradients that each sample has of its own are joined,
        all others added up.
        """

    @abstractmethod
    def work(self, backward: bool) -> Work:
        """Return the least work of a pass."""

    @abstractmethod
    def bytes_needed(self, baseline: bool) -> int:
        """Estimate the bytes that the baseline, or our reference, needs at once for votes, forward and backward."""

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return the case on a device, all in one precision."""
        module = copy.deepcopy(self.module).to(device, dtype)
        return replace(self, module=module, inputs=tensors_to(self.inputs, device, dtype))


def tensors_to(tensors: dict[str, Tensor], device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors on a device, the floating-point ones in `dtype`; labels keep their type."""
    return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in tensors.items()}


def forward_flops(layer: Any, samples: int, children: int, passes: int, gaussian: bool = False) -> int:
    """Count the operations of a capsule layer as :class:`Work` does; `samples` are windows in a convolution."""
    parents, d, h = layer.weight.shape[-3:]
    rows, _ = matrix_shape(layer.in_pose)
    groups = layer.weight.numel() // (parents * d * h)
    pairs = samples * children * parents  # S N P
    per_vote = pairs * rows * h  # S N P k
    product, votes = 2 * per_vote * d * groups // children, 2 * per_vote * d
    if gaussian:
        return product + votes + 4 * per_vote + (passes - 1) * (votes + (4 + 2 + 4) * per_vote)
    return product + (passes - 1) * min(votes + (2 + 2) * per_vote, 2 * product + 4 * pairs * rows * d)


def votes_bytes(layer: Any, samples: int, children: int, like: Tensor) -> int:
    """Return the bytes of all votes of a pass."""
    rows, _ = matrix_shape(layer.in_pose)
    parents, _, h = layer.weight.shape[-3:]
    return samples * children * parents * rows * h * max(4, like.element_size())


def output_grid(layer: Any, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of windows of a convolution, (down, across); () for other layers."""
    if not isinstance(layer, CapsuleConv2d):
        return ()
    sides = zip(grid, layer.kernel_size, layer.stride, layer.dilation, strict=True)
    return tuple(positions(*side) for side in sides)


def perturb(parameters: Iterable[Tensor], scale: float) -> None:
    """Add noise, as after some training: parameters of zero would hide that a way forgets them."""
    with torch.no_grad():
        for parameter in parameters:
            parameter += torch.randn_like(parameter) * scale
