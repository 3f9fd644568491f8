"""What a layer and a whole network have in common where they are measured."""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.nn import CapsuleConv2d
from torchcaps.nn.pose import matrix_shape
from torchcaps.ops import positions


class Work(NamedTuple):
    """What must be computed and moved at least.

    Floating-point operations, a multiplication and an addition being two, with S samples (in a convolution, windows),
    N children and P parents of each, children that share weights in G groups, poses of r rows of d, votes of k
    features, T iterations:

        product       2 S G P k d      of weights with one tensor per group: the first sum, whose coefficients are
                                       uniform, adds up the children that share weights before it
        votes         2 S N P k d
        agreement     2 S N P k        of votes with a parent
        sum           2 S N P k        of weighted votes
        deviations    4 S N P k        subtract, square, weight, add: for a Gaussian's agreement, for the variances
        forward, dot:       product + (T - 1) min(votes + agreement + sum, 2 product + 4 S N P r d)
        forward, Gaussian:  product + votes + variances + (T - 1) (votes + agreement + sum + variances)
        backward:           twice the forward pass: each product has a gradient for both of its factors

    The second way to iterate makes no votes: it takes the parents through the weights to the poses, and weighted sums
    of poses through the weights to the parents. A Gaussian's squares could be expanded to that end, and would lose all
    digits where votes agree. Votes are counted in each iteration; who keeps them computes fewer and moves more. Votes
    computed again for the backward pass are not counted, nor is what is not per feature (softmax, squash).

    In a network, the passes that reach its output, and the convolutions.

    Bytes: inputs, parameters and outputs once; backward, their gradients once too.
    """

    flops: int
    bytes: int


# Tensors as large as all votes of an iteration that were found in memory at once, forward and backward, per iteration.
DOT, GAUSSIAN = 2.5, 9


@dataclass(frozen=True)
class Case(ABC):
    """A module of ours and its inputs.

    Attributes:
        results: names of what comes out; there may be fewer.
        differentiated: names of the inputs that have gradients, beside the parameters.
        autocast: the precision that PyTorch chooses operators for, or None.
    """

    module: Any
    inputs: dict[str, Tensor]
    autocast: torch.dtype | None = field(default=None, kw_only=True)

    results: ClassVar[tuple[str, ...]]
    differentiated: ClassVar[tuple[str, ...]] = ()

    @property
    def batch(self) -> int:
        return next(iter(self.inputs.values())).shape[0]

    @property
    @abstractmethod
    def children(self) -> int:
        """Of one sample; in a network, of the first capsule layer."""

    @property
    @abstractmethod
    def iterations(self) -> int:
        """Of the routing."""

    @abstractmethod
    def compute(self, module: Any, inputs: dict[str, Tensor], baseline: bool) -> tuple[Tensor, ...]:
        """The results of the module (or of what it was compiled to), or those of the baseline with its parameters."""

    @abstractmethod
    def gradients(self, results: tuple[Tensor, ...], of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of a loss of the results."""

    def start(self) -> tuple[Any, torch.optim.Optimizer | None]:
        """The module, to be run many times, and what takes a step with its gradients, if that is measured too."""
        return self.module, None

    def compile(self, module: Any) -> Any:
        """What Inductor makes of it."""
        return torch.compile(module, dynamic=False)

    @abstractmethod
    def parts(self) -> "Sequence[Case]":
        """Cases that together give what this one gives, each in the memory of one sample's votes: what the samples
        have of their own is to be joined, all else to be added up."""

    @abstractmethod
    def work(self, backward: bool) -> Work:
        """The least work of a pass."""

    @abstractmethod
    def bytes_needed(self, baseline: bool) -> int:
        """About how many the baseline, or our reference, needs at once for the votes, forward and backward."""

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """What the results are computed in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(next(iter(self.inputs.values())).device.type, self.autocast)

    def mixed(self, dtype: torch.dtype) -> Self:
        """Under autocast: inputs as a convolution would have made them, parameters in float32."""
        return replace(
            self.to(next(self.module.parameters()).device, dtype), module=self.module.float(), autocast=dtype
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """All in one precision."""
        module = copy.deepcopy(self.module).to(device, dtype)
        return replace(self, module=module, inputs=tensors_to(self.inputs, device, dtype), autocast=None)


def tensors_to(tensors: dict[str, Tensor], device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Labels keep their type."""
    return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in tensors.items()}


def forward_flops(layer: Any, samples: int, children: int, passes: int, gaussian: bool = False) -> int:
    """Of a capsule layer, as :class:`Work` counts them; samples are windows in a convolution."""
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
    """Of all votes of a pass, which none must store."""
    rows, _ = matrix_shape(layer.in_pose)
    parents, _, h = layer.weight.shape[-3:]
    return samples * children * parents * rows * h * max(4, like.element_size())


def output_grid(layer: Any, grid: tuple[int, ...]) -> tuple[int, ...]:
    """How many windows a convolution has, down and across; other layers have none."""
    if not isinstance(layer, CapsuleConv2d):
        return ()
    sides = zip(grid, layer.kernel_size, layer.stride, layer.dilation, strict=True)
    return tuple(positions(*side) for side in sides)


def perturb(parameters: Iterable[Tensor], scale: float) -> None:
    """As after some training: no zeros, which would hide a parameter that is forgotten."""
    with torch.no_grad():
        for parameter in parameters:
            parameter += torch.randn_like(parameter) * scale
