"""A reduction over votes as the kernels take it: their arguments, and the division of the work among programs."""

import contextlib
import itertools
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.backend import INTERPRETED, too_large
from torchcaps.ops.children import Children, Options, grid_of
from torchcaps.ops.numerics import at_least_float32
from torchcaps.ops.triton.sizes import Layer, Tile, ceil_div, choose_tile, power_of_2

MOST_SPLITS = 2**16 - 1  # limit of CUDA on the second and third side of a grid
MOST_PARTS = 2**22  # most numbers that the splits of a sum write before they are joined


class Problem:
    """The children and the agreement of a reduction.

    Args:
        target: query or a Gaussian's mean, `(samples, parents, features)`, or None.
        precision, prior: other tensors of a Gaussian, `(samples, parents, features)` and `(samples, parents)`, or None.
        offset: offset of the logits, `(groups, kernel, kernel, parents)`, or None.
        betas: betas of the benefit, `(groups, kernel, kernel, parents or 1)`, or None.
        moments: whether to compute mass, mean and variance, and not weighted sums.

    Attributes:
        arguments: the arguments that all kernels over children share, by name; `kernels.py` explains them.
        agreement_tensors: target, precision and prior.
        agreement: "none", "dot", "unit" or "gaussian".
        all_ones: whether all coefficients are 1, as in a plain sum of the votes.
        empty: whether there are no samples.
    """

    def __init__(
        self,
        children: Children,
        options: Options,
        target: Tensor | None = None,
        precision: Tensor | None = None,
        prior: Tensor | None = None,
        offset: Tensor | None = None,
        betas: Tensor | None = None,
        moments: bool = False,
    ):
        for x in (*children, target, precision, prior, offset, betas):
            if x is not None and not x.is_floating_point():
                raise ValueError(f"backend='triton' needs floating-point tensors, got {x.dtype}: use .float()")
        poses, weight = at_least_float32(children.poses), at_least_float32(children.weight)
        bias, gates, *agreement_tensors, self.offset, self.betas = (
            None if x is None else at_least_float32(x)
            for x in (children.bias, children.gates, target, precision, prior, offset, betas)
        )
        self.agreement_tensors, self.options = [contiguous(x) for x in agreement_tensors], options
        self.images, self.types, self.height, self.across, self.rows, self.depth = poses.shape
        self.groups, _, _, self.parents, _, self.width = weight.shape
        reason = too_large(self.rows, self.depth, self.width)
        if reason is not None:
            raise ValueError(f"backend='triton' cannot be used, {reason}: use backend='tiled'")
        self.kernel, self.grid = children.kernel, grid_of(children, options)
        self.features, self.places = self.rows * self.width, math.prod(self.kernel)
        self.samples, self.children = self.images * math.prod(self.grid), self.types * self.places
        self.moments = moments
        self.over_children = options.softmax == "children" and target is not None  # a sum of votes has no softmax
        if target is None:
            self.agreement = "none"
        elif precision is not None:
            self.agreement = "gaussian"
        else:
            self.agreement = "unit" if options.unit else "dot"
        self.all_ones = self.agreement == "none" and not moments
        self.empty = poses.numel() == 0 or self.samples == 0
        self.device = poses.device
        self.dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
        self.shared_bias = bias is not None and bias.shape[3] != self.parents
        self.shared_betas = self.betas is not None and self.betas.shape[3] != self.parents
        self.arguments: dict[str, Any] = {
            "poses": poses.contiguous(),
            "weight": _parents_last(weight),
            "bias": _parents_last(bias),
            "gates": contiguous(gates),
            "betas": _parents_last(self.betas),
            "offset": _parents_last(self.offset),
            "samples": self.samples,
            "children": self.children,
            "map_size": self.height * self.across,
            "place_down": options.dilation[0] * self.across,
            "place_across": options.dilation[1],
            "per_weight": self.types // self.groups,
            "per_bias": self._types_per_row(bias),
            "per_beta": self._types_per_row(self.betas),
            "per_offset": self._types_per_row(self.offset),
            "parents": self.parents,
            "rows": self.rows,
            "depth": self.depth,
            "width": self.width,
            "on_grid": (self.height, self.across) != (1, 1),
            "places": self.places,
            "kernel_across": self.kernel[1],
            "shared_weight": self.types > self.groups,
            "shared_bias": self.shared_bias,
            "shared_betas": self.shared_betas,
            "agreement": "ones" if self.all_ones else self.agreement,
            "moments": moments,
            "over_children": self.over_children,
            "leaky": options.leaky,
            "dtype": self.dtype,
            "block_r": power_of_2(self.rows),
            "block_h": power_of_2(self.width),
        }

    def _types_per_row(self, x: Tensor | None) -> int:
        return 1 if x is None else self.types // x.shape[0]

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def launch(self, kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
        """Start a kernel over children."""
        run(self.device, kernel, grid, **self.arguments, **arguments)

    def launch_pairs(self, kernel: str, **arguments: Any) -> None:
        """Start a kernel over pairs of samples and parents."""
        block_f = power_of_2(self.features)
        count, block = self.samples * self.parents, 4 if INTERPRETED else max(1, 1024 // block_f)
        run(
            self.device, kernel, (ceil_div(count, block),), pairs=count, parents=self.parents,
            features=self.features, dtype=self.dtype, block=block, block_f=block_f, eps=self.options.eps,
            **arguments,
        )  # fmt: skip

    # ------------------------------------------------------------ division of the work

    def tile(self, kernel: str) -> Tile:
        """Return the tile of a kernel."""
        layer = Layer(
            kernel, self.agreement, self.moments, self.over_children, self.parents, self.rows, self.depth, self.width
        )
        return choose_tile(layer)

    def sizes(self, tile: Tile, samples: int) -> dict[str, Any]:
        """Return the arguments of a kernel that follow from its tile."""
        block_n = min(tile.samples, power_of_2(samples))
        most = tile.weights // (self.arguments["block_h"] * tile.per_lane)
        block_d = max(1, min(4, power_of_2(self.depth), tile.loads // block_n, most))
        sizes = {"block_n": block_n, "block_j": tile.parents, "per_lane": tile.per_lane, "block_d": block_d}
        return sizes if INTERPRETED else sizes | {"num_warps": tile.warps}

    def split(self, items: int, programs: int, tile: Tile, part: int = 1) -> tuple[int, int]:
        """Return how many splits fill the device and the items in each, if a split writes `part` numbers."""
        wanted = 8 if INTERPRETED else tile.programs * multiprocessors(self.device)
        most = max(1, min(items, wanted // programs, MOST_PARTS // part, MOST_SPLITS))
        per_split = ceil_div(items, most)
        return ceil_div(items, per_split), per_split

    def windows(self) -> dict[str, int]:
        """Return the arguments by which one launch finds the windows of all samples."""
        (found,) = self._windows((1, 1))
        return found

    def windows_apart(self) -> list[dict[str, int]]:
        """Return these arguments for several launches, in each of which no two windows share a pose."""
        sides = zip(self.kernel, self.options.stride, self.options.dilation, strict=True)
        down, across = (_step_apart(*side) for side in sides)
        return self._windows((down, across))

    def _windows(self, step: tuple[int, int]) -> list[dict[str, int]]:
        """Return the arguments of one launch for every `step` windows down and across."""
        (down, across), stride = self.grid, self.options.stride
        launches = []
        for y, x in itertools.product(range(min(step[0], down)), range(min(step[1], across))):
            windows = ceil_div(down - y, step[0]), ceil_div(across - x, step[1])
            launches.append(
                {
                    "n_samples": self.images * math.prod(windows),
                    "windows_down": windows[0],
                    "windows_across": windows[1],
                    "sample_0": y * across + x,
                    "sample_down": step[0] * across,
                    "sample_across": step[1],
                    "sample_image": down * across,
                    "pose_0": y * stride[0] * self.across + x * stride[1],
                    "pose_down": step[0] * stride[0] * self.across,
                    "pose_across": step[1] * stride[1],
                    "pose_image": self.types * self.height * self.across,
                }
            )
        return launches


def run(device: torch.device, kernel: str, grid: tuple[int, ...], dtype: torch.dtype, **arguments: Any) -> None:
    """Start a kernel by its name."""
    import triton.language as tl

    from torchcaps.ops.triton import kernels, pairs

    function = getattr(kernels, kernel, None) or getattr(pairs, kernel)
    kernel_dtype = tl.float64 if dtype == torch.float64 else tl.float32
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        function[grid](dtype=kernel_dtype, **arguments)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _step_apart(kernel: int, stride: int, dilation: int) -> int:
    """Return the least m such that windows whose positions differ by multiples of m do not overlap."""
    distances = {dilation * k for k in range(1, kernel)}
    return next(
        m
        for m in itertools.count(1)
        if not distances & set(range(m * stride, max(distances, default=0) + 1, m * stride))
    )


def contiguous(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


def view_parents_last(x: Tensor) -> Tensor:
    """Return `(groups, kernel, kernel, parents, ...)` with the parents last."""
    return x.movedim(3, -1)


def _parents_last(x: Tensor | None) -> Any:
    return None if x is None else view_parents_last(x).contiguous()
