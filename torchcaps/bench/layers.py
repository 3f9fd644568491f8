"""The papers' layers that are measured: their sizes, their children, and what they must compute at least."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchcaps.bench import baselines
from torchcaps.nn import CapsuleConv2d, CapsuleLinear
from torchcaps.nn.pose import Pose, matrix_shape, pose_shape
from torchcaps.routing import DynamicRouting, EMRouting, HeinsenRouting, InvertedAttentionRouting


class Sizes(NamedTuple):
    batch: int
    types: int  # of children; where there is no grid, the children
    parents: int
    in_pose: Pose
    out_pose: Pose
    grid: tuple[int, int] = (1, 1)

    @property
    def children(self) -> int:
        """Of one sample."""
        return self.types * math.prod(self.grid)


@dataclass(frozen=True)
class Layer:
    """A layer of a paper in the paper's sizes, and in sizes to try things out (`smoke`)."""

    make: Callable[[Sizes], Any]
    baseline: Callable[..., tuple[Tensor, ...]]
    paper: Sizes
    smoke: Sizes
    scores: bool = False  # children and parents have them
    widen_grid: bool = False  # more children are more positions, and not more types
    copies_weight: bool = False  # the baseline does, for each sample


def _inverted_attention_conv(s: Sizes) -> Any:
    routing = InvertedAttentionRouting(iterations=2)
    return CapsuleConv2d(s.types, s.parents, s.in_pose, s.out_pose, kernel_size=3, stride=2, routing=routing)


def _heinsen(s: Sizes) -> Any:
    return CapsuleLinear(None, s.parents, s.in_pose, s.out_pose, HeinsenRouting(iterations=3))


def _capnet_dynamic(s: Sizes) -> Any:
    routing = DynamicRouting(iterations=3, softmax="children")
    return CapsuleLinear(s.types, s.parents, s.in_pose, s.out_pose, routing, share_positions=True)


def _digit_capsules(s: Sizes) -> Any:
    return CapsuleLinear(s.types, s.parents, s.in_pose, s.out_pose, DynamicRouting(iterations=3))


def _em_conv(s: Sizes) -> Any:
    routing = EMRouting(iterations=3)
    return CapsuleConv2d(s.types, s.parents, s.in_pose, s.out_pose, kernel_size=3, stride=2, routing=routing)


LAYERS = {
    "inverted-attention-conv": Layer(
        _inverted_attention_conv,
        baselines.inverted_attention_conv,
        Sizes(32, 32, 32, (4, 4), (4, 4), (16, 16)),
        Sizes(2, 2, 3, (2, 3), (2, 2), (6, 5)),
    ),
    "heinsen": Layer(
        _heinsen, baselines.heinsen, Sizes(4, 5184, 64, (4, 4), (4, 4)), Sizes(2, 20, 3, (2, 3), (2, 2)), scores=True
    ),
    "capnet-dynamic": Layer(
        _capnet_dynamic,
        baselines.capnet_dynamic,
        Sizes(4, 32, 512, 8, 16, (8, 8)),
        Sizes(2, 3, 4, 4, 5, (2, 3)),
        widen_grid=True,
    ),
    "digit-capsules": Layer(
        _digit_capsules,
        baselines.digit_capsules,
        Sizes(128, 1152, 10, 8, 16),
        Sizes(3, 12, 4, 4, 6),
        copies_weight=True,
    ),
    "em-conv": Layer(
        _em_conv,
        baselines.em_conv,
        Sizes(8, 16, 16, (4, 4), (4, 4), (14, 14)),
        Sizes(2, 2, 3, (2, 3), (2, 2), (6, 5)),
        scores=True,
    ),
}


@dataclass(frozen=True)
class Request:
    """Which layer, in which size, where. Its fields are JSON."""

    layer: str
    factor: int = 1  # of children
    batch: int | None = None  # instead of the paper's
    smoke: bool = False
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def sizes(self) -> Sizes:
        layer = LAYERS[self.layer]
        sizes = layer.smoke if self.smoke else layer.paper
        sizes = sizes._replace(batch=self.batch or sizes.batch)
        if layer.widen_grid:
            return sizes._replace(grid=(sizes.grid[0], sizes.grid[1] * self.factor))
        return sizes._replace(types=sizes.types * self.factor)

    def build(self) -> "Case":
        """The layer and its children: the same numbers at each call."""
        layer, s = LAYERS[self.layer], self.sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = layer.make(s)
            # As after some training: votes of size one that have something in common, coefficients that are not
            # uniform, and no zeros, which would hide a parameter that is forgotten.
            nn.init.normal_(module.weight, std=matrix_shape(s.in_pose)[1] ** -0.5)
            with torch.no_grad():
                for parameter in module.routing.parameters():
                    parameter += torch.randn_like(parameter) * min(0.1, 1 / s.children)
            grid = () if s.grid == (1, 1) else s.grid
            poses = 1 + torch.randn(s.batch, s.types, *grid, *pose_shape(s.in_pose))
            scores = torch.randn(s.batch, s.types, *grid) if layer.scores else None
            places = _windows(module, s)
            gradients = [torch.randn(s.batch, s.parents, *places, *pose_shape(s.out_pose))]
            if layer.scores:
                gradients.append(torch.randn(s.batch, s.parents, *places))
        case = Case(self, module, poses, scores, tuple(gradients))
        return case.to(self.device, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Case:
    """A layer with its children, and the gradients of a loss with respect to its parents."""

    request: Request
    layer: Any
    poses: Tensor
    scores: Tensor | None
    gradients: tuple[Tensor, ...]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        return replace(
            self,
            layer=copy.deepcopy(self.layer).to(device, dtype),
            poses=self.poses.to(device, dtype),
            scores=None if self.scores is None else self.scores.to(device, dtype),
            gradients=tuple(g.to(device, dtype) for g in self.gradients),
        )

    def sample(self, b: int) -> Self:
        """The layer with one sample of the batch."""
        one = slice(b, b + 1)
        scores = None if self.scores is None else self.scores[one]
        return replace(self, poses=self.poses[one], scores=scores, gradients=tuple(g[one] for g in self.gradients))


class Work(NamedTuple):
    """What a layer must compute and move at least.

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

    Bytes: children, parameters and parents once; backward, their gradients once too.
    """

    flops: int
    bytes: int
    votes: int  # bytes of all votes, which none must store


def work(case: Case, backward: bool) -> Work:
    s, layer = case.request.sizes, case.layer
    windows = _windows(layer, s)
    (rows, d), (_, h) = matrix_shape(s.in_pose), matrix_shape(s.out_pose)
    groups = layer.weight.numel() // (s.parents * d * h)
    children = groups if windows else s.children
    pairs = s.batch * math.prod(windows) * children * s.parents  # S N P
    per_vote = pairs * rows * h  # S N P k
    product, votes = 2 * per_vote * d * groups // children, 2 * per_vote * d
    further = layer.routing.iterations - 1
    if LAYERS[case.request.layer].scores:  # a Gaussian
        flops = product + votes + 4 * per_vote + further * (votes + (4 + 2 + 4) * per_vote)
    else:
        flops = product + further * min(votes + (2 + 2) * per_vote, 2 * product + 4 * pairs * rows * d)
    tensors = [case.poses, case.scores, *case.layer.parameters(), *case.gradients]  # gradients: as large as parents
    moved = sum(x.numel() * x.element_size() for x in tensors if x is not None)
    if backward:
        flops, moved = 3 * flops, 2 * moved
    return Work(flops, moved, per_vote * max(4, case.poses.element_size()))


def _windows(layer: Any, s: Sizes) -> tuple[int, ...]:
    """How many windows a convolution has, down and across."""
    if not isinstance(layer, CapsuleConv2d):
        return ()
    return tuple((size - layer.kernel_size) // layer.stride + 1 for size in s.grid)
