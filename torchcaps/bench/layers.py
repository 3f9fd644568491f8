"""The papers' layers that `torchcaps bench` measures: their sizes and their children."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchcaps.bench import baselines
from torchcaps.bench.cases import (
    DOT,
    GAUSSIAN,
    Case,
    Work,
    forward_flops,
    output_grid,
    perturb,
    tensors_to,
    votes_bytes,
)
from torchcaps.capsules import Capsules
from torchcaps.nn import CapsuleConv2d, CapsuleLinear
from torchcaps.nn.pose import Pose, matrix_shape, pose_shape
from torchcaps.routing import DynamicRouting, EMRouting, HeinsenRouting, InvertedAttentionRouting


class Sizes(NamedTuple):
    """Sizes of a layer; without a grid, `types` is the number of children."""

    batch: int
    types: int
    parents: int
    in_pose: Pose
    out_pose: Pose
    grid: tuple[int, int] = (1, 1)

    @property
    def children(self) -> int:
        """Number of children of one sample."""
        return self.types * math.prod(self.grid)


@dataclass(frozen=True)
class Layer:
    """A layer of a paper.

    Attributes:
        make: function that builds the layer from sizes and a number of iterations.
        baseline: function that computes it as most published code does.
        iterations: the paper's number of iterations.
        paper: the paper's sizes.
        smoke: small sizes to try things out.
        scores: whether children and parents have scores and the agreement is Gaussian.
        widen_grid: whether more children are more positions, and not more types.
        copies_weight: whether the baseline copies the weights for each sample.
    """

    make: Callable[[Sizes, int], Any]
    baseline: Callable[..., tuple[Tensor, ...]]
    iterations: int
    paper: Sizes
    smoke: Sizes
    scores: bool = False
    widen_grid: bool = False
    copies_weight: bool = False

    def sizes(self, factor: int, batch: int | None, smoke: bool) -> Sizes:
        """Return the layer's sizes with `factor` times as many children."""
        sizes = self.smoke if smoke else self.paper
        sizes = sizes._replace(batch=batch or sizes.batch)
        if self.widen_grid:
            return sizes._replace(grid=(sizes.grid[0], sizes.grid[1] * factor))
        return sizes._replace(types=sizes.types * factor)

    def build(self, factor: int, batch: int | None, iterations: int | None, smoke: bool) -> "LayerCase":
        """Build the layer with random children; None stands for the paper's value."""
        s = self.sizes(factor, batch, smoke)
        module = self.make(s, iterations or self.iterations)
        # As after some training: votes of size one that agree in part, and coefficients that are not uniform.
        nn.init.normal_(module.weight, std=matrix_shape(s.in_pose)[1] ** -0.5)
        perturb(module.routing.parameters(), min(0.1, 1 / s.children))
        grid = () if s.grid == (1, 1) else s.grid
        inputs = {"poses": 1 + torch.randn(s.batch, s.types, *grid, *pose_shape(s.in_pose))}
        if self.scores:
            inputs["scores"] = torch.randn(s.batch, s.types, *grid)
        places = output_grid(module, s.grid)
        parent_grads = {"poses": torch.randn(s.batch, s.parents, *places, *pose_shape(s.out_pose))}
        if self.scores:
            parent_grads["scores"] = torch.randn(s.batch, s.parents, *places)
        return LayerCase(module, inputs, self, s, parent_grads)


@dataclass(frozen=True)
class LayerCase(Case):
    """A layer with its children, and the gradients of a loss with respect to its parents."""

    layer: Layer
    sizes: Sizes
    parent_grads: dict[str, Tensor]

    results = ("poses", "scores")
    differentiated = ("poses", "scores")

    @property
    def children(self) -> int:
        return self.sizes.children

    @property
    def iterations(self) -> int:
        return self.module.routing.iterations

    def compute(self, module: Any, inputs: dict[str, Tensor], baseline: bool) -> tuple[Tensor, ...]:
        if baseline:
            return self.layer.baseline(module, inputs["poses"], inputs.get("scores"))
        parents: Capsules = module(Capsules(inputs["poses"], inputs.get("scores")))
        return (parents.poses,) if parents.scores is None else (parents.poses, parents.scores)

    def gradients(self, results: tuple[Tensor, ...], of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, of, tuple(self.parent_grads.values()))

    def parts(self) -> Sequence[Case]:
        return [self._sample(slice(b, b + 1)) for b in range(self.batch)]

    def _sample(self, one: slice) -> Self:
        inputs, parent_grads = ({name: x[one] for name, x in xs.items()} for xs in (self.inputs, self.parent_grads))
        return replace(self, inputs=inputs, parent_grads=parent_grads)

    def work(self, backward: bool) -> Work:
        flops = forward_flops(self.module, *self._samples_and_children(), self.iterations, self.layer.scores)
        tensors = [
            *self.inputs.values(),
            *self.module.parameters(),
            *self.parent_grads.values(),
        ]  # gradients as large as the parents
        moved = sum(x.numel() * x.element_size() for x in tensors)
        return Work(3 * flops, 2 * moved) if backward else Work(flops, moved)

    def bytes_needed(self, baseline: bool) -> int:
        votes = votes_bytes(self.module, *self._samples_and_children(), self.inputs["poses"])
        needed = int((GAUSSIAN if self.layer.scores else DOT) * self.iterations * votes)
        if baseline and self.layer.copies_weight:
            needed += 2 * self.batch * sum(p.numel() * p.element_size() for p in self.module.parameters())
        return needed

    def _samples_and_children(self) -> tuple[int, int]:
        """Number of samples (windows in a convolution), and of the children of each."""
        places = output_grid(self.module, self.sizes.grid)
        return self.batch * math.prod(places), self.module.layer_shape.children if places else self.children

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        return replace(super().to(device, dtype), parent_grads=tensors_to(self.parent_grads, device, dtype))


def _inverted_attention_conv(s: Sizes, iterations: int) -> Any:
    routing = InvertedAttentionRouting(iterations, init="paper")
    return CapsuleConv2d(s.types, s.parents, s.in_pose, s.out_pose, kernel_size=3, stride=2, routing=routing)


def _heinsen(s: Sizes, iterations: int) -> Any:
    return CapsuleLinear(None, s.parents, s.in_pose, s.out_pose, HeinsenRouting(iterations, init="paper"))


def _capnet_dynamic(s: Sizes, iterations: int) -> Any:
    routing = DynamicRouting(iterations, softmax="children", init="paper")
    return CapsuleLinear(s.types, s.parents, s.in_pose, s.out_pose, routing, share_positions=True)


def _digit_capsules(s: Sizes, iterations: int) -> Any:
    return CapsuleLinear(s.types, s.parents, s.in_pose, s.out_pose, DynamicRouting(iterations, init="paper"))


def _em_conv(s: Sizes, iterations: int) -> Any:
    routing = EMRouting(iterations, init="paper")
    return CapsuleConv2d(s.types, s.parents, s.in_pose, s.out_pose, kernel_size=3, stride=2, routing=routing)


LAYERS = {
    "inverted-attention-conv": Layer(
        _inverted_attention_conv,
        baselines.inverted_attention_conv,
        2,
        Sizes(32, 32, 32, (4, 4), (4, 4), (16, 16)),
        Sizes(2, 2, 3, (2, 3), (2, 2), (6, 5)),
    ),
    "heinsen": Layer(
        _heinsen, baselines.heinsen, 3, Sizes(4, 5184, 64, (4, 4), (4, 4)), Sizes(2, 20, 3, (2, 3), (2, 2)), scores=True
    ),
    "capnet-dynamic": Layer(
        _capnet_dynamic,
        baselines.capnet_dynamic,
        3,
        Sizes(4, 32, 512, 8, 16, (8, 8)),
        Sizes(2, 3, 4, 4, 5, (2, 3)),
        widen_grid=True,
    ),
    "digit-capsules": Layer(
        _digit_capsules,
        baselines.digit_capsules,
        3,
        Sizes(128, 1152, 10, 8, 16),
        Sizes(3, 12, 4, 4, 6),
        copies_weight=True,
    ),
    "em-conv": Layer(
        _em_conv,
        baselines.em_conv,
        3,
        Sizes(8, 16, 16, (4, 4), (4, 4), (14, 14)),
        Sizes(2, 2, 3, (2, 3), (2, 2), (6, 5)),
        scores=True,
    ),
}
