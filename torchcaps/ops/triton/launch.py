"""Launches of the Triton kernels: how they divide the work, and the reductions made from them."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.ops.backend import INTERPRETED, too_large
from torchcaps.ops.children import Children, Gradients, Options, grid_of
from torchcaps.ops.numerics import at_least_float32
from torchcaps.ops.triton import kernels, pairs
from torchcaps.ops.triton.sizes import Layer, Tile, choose_tile

MOST_SPLITS = 2**16 - 1  # limit of CUDA on the second and third side of a grid
MOST_PARTS = 2**22  # most numbers that the splits of a sum write before they are joined
NO_PACK = dict.fromkeys(
    ("k_target", "k_precision", "k_prior", "k_slope", "k_curve", "k_center", "k_base", "k_benefit", "k_lse"), -1
)


class Problem:
    """One reduction over votes: the arguments of its kernels, and their launches forward and backward.

    Args:
        target: query or a Gaussian's mean, `(samples, parents, features)`, or None.
        precision, prior: other tensors of a Gaussian, `(samples, parents, features)` and `(samples, parents)`, or None.
        offset: offset of the logits, `(groups, kernel, kernel, parents)`, or None.
        betas: betas of the benefit, `(groups, kernel, kernel, parents or 1)`, or None.
        moments: whether to compute mass, mean and variance, and not weighted sums.
    """

    def __init__(
        self,
        children: Children,
        options: Options,
        target: Tensor | None,
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
        self.options, self.agreement_tensors = options, agreement_tensors
        target, precision, _ = agreement_tensors
        offset, betas = self.offset, self.betas
        self.images, self.types, self.height, self.across, self.rows, self.depth = poses.shape
        self.groups, _, _, self.parents, _, self.width = weight.shape
        self.features = self.rows * self.width
        reason = too_large(self.rows, self.depth, self.width)
        if reason is not None:
            raise ValueError(f"backend='triton' cannot be used, {reason}: use backend='tiled'")
        self.kernel, self.grid = children.kernel, grid_of(children, options)
        self.places = math.prod(self.kernel)
        self.samples, self.children = self.images * math.prod(self.grid), self.types * self.places
        self.moments, self.over_children = moments, options.softmax == "children"
        self.agreement = "none" if target is None else "gaussian" if precision is not None else "dot"
        if self.agreement == "dot" and options.unit:
            self.agreement = "unit"
        self.uniform = self.agreement == "none" and not moments  # all coefficients are 1
        self.empty = poses.numel() == 0 or self.samples == 0
        self.device = poses.device
        self.dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
        self.shared_bias = bias is not None and bias.shape[3] != self.parents
        self.shared_betas = betas is not None and betas.shape[3] != self.parents
        self.arguments: dict[str, Any] = {
            "poses": poses.contiguous(),
            "weight": _parents_last(weight),
            "bias": _parents_last(bias),
            "gates": _contiguous(gates),
            "betas": _parents_last(betas),
            "offset": _parents_last(offset),
            "samples": self.samples,
            "children": self.children,
            "map_size": self.height * self.across,
            "place_down": options.dilation[0] * self.across,
            "place_across": options.dilation[1],
            "per_weight": self.types // self.groups,
            "per_bias": self._types_per_row(bias),
            "per_beta": self._types_per_row(betas),
            "per_offset": self._types_per_row(offset),
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
            "agreement": "uniform" if self.uniform else self.agreement,
            "over_children": self.over_children,
            "leaky": options.leaky,
            "dtype": self.kernel_dtype,
            "block_r": triton.next_power_of_2(self.rows),
            "block_h": triton.next_power_of_2(self.width),
        }

    @property
    def kernel_dtype(self) -> Any:
        return tl.float64 if self.dtype == torch.float64 else tl.float32

    def _types_per_row(self, x: Tensor | None) -> int:
        return 1 if x is None else self.types // x.shape[0]

    # ------------------------------------------------------------ division of the work

    def tile(self, kernel: str) -> Tile:
        """Return the tile of a kernel."""
        layer = Layer(
            kernel, self.agreement, self.moments, self.over_children, self.parents, self.rows, self.depth, self.width
        )
        return choose_tile(layer, architecture(self.device))

    def sizes(self, tile: Tile, samples: int) -> dict[str, Any]:
        """Return the arguments of a kernel that follow from its tile."""
        block_n = min(tile.samples, triton.next_power_of_2(samples))
        most = tile.weights // (self.arguments["block_h"] * tile.per_lane)
        block_d = max(1, min(4, triton.next_power_of_2(self.depth), tile.loads // block_n, most))
        held = self.depth <= block_d  # a child's weights stay in registers from its votes to their gradients
        sizes = {"block_n": block_n, "block_j": tile.parents, "per_lane": tile.per_lane, "block_d": block_d}
        return sizes | {"held": held} | ({} if INTERPRETED else {"num_warps": tile.warps})

    def split(self, items: int, programs: int, tile: Tile, part: int = 1) -> tuple[int, int]:
        """Return how many splits fill the device and the items in each, if a split writes `part` numbers."""
        wanted = 8 if INTERPRETED else tile.programs * multiprocessors(self.device)
        most = max(1, min(items, wanted // programs, MOST_PARTS // part, MOST_SPLITS))
        per_split = triton.cdiv(items, most)
        return triton.cdiv(items, per_split), per_split

    def windows(self, apart: bool) -> list[dict[str, int]]:
        """Return the samples of one launch; or, `apart`, of several launches, in each of which no two windows
        share a pose."""
        down, across = self.grid
        steps = [
            _step_apart(*side) if apart else 1
            for side in zip(self.kernel, self.options.stride, self.options.dilation, strict=True)
        ]
        stride = self.options.stride
        launches = []
        for y, x in itertools.product(range(min(steps[0], down)), range(min(steps[1], across))):
            windows = triton.cdiv(down - y, steps[0]), triton.cdiv(across - x, steps[1])
            launches.append(
                {
                    "n_samples": self.images * math.prod(windows),
                    "windows_down": windows[0],
                    "windows_across": windows[1],
                    "sample_0": y * across + x,
                    "sample_down": steps[0] * across,
                    "sample_across": steps[1],
                    "sample_image": down * across,
                    "pose_0": y * stride[0] * self.across + x * stride[1],
                    "pose_down": steps[0] * stride[0] * self.across,
                    "pose_across": steps[1] * stride[1],
                    "pose_image": self.types * self.height * self.across,
                }
            )
        return launches

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        run(self.device, kernel, grid, **self.arguments, **arguments)

    def launch_pairs(self, kernel: Any, **arguments: Any) -> None:
        """Launch a kernel over pairs of samples and parents."""
        block_f = triton.next_power_of_2(self.features)
        count, block = self.samples * self.parents, 4 if INTERPRETED else max(1, 1024 // block_f)
        run(
            self.device, kernel, (triton.cdiv(count, block),), pairs=count, parents=self.parents,
            features=self.features, dtype=self.kernel_dtype, block=block, block_f=block_f, eps=self.options.eps,
            **arguments,
        )  # fmt: skip

    # ------------------------------------------------------------ forward

    def sums(self) -> dict[str, Tensor | None]:
        """Return the results of `kernels.sums`: totals, masses, squares, benefits and peaks of each split of the
        children, and the origins of the means. Those that are not needed are None."""
        (windows,), tile = self.windows(apart=False), self.tile("sums")
        target, precision, prior = (_contiguous(x) for x in self.agreement_tensors)
        one_block = tile.parents >= self.parents
        norms = None
        if not one_block and not self.over_children and not self.uniform:
            norms = self.normalize(self.pack(target=target, precision=precision, prior=prior), with_grads=False)
        sizes = self.sizes(tile, self.samples)
        blocks = triton.cdiv(self.samples, sizes["block_n"]), triton.cdiv(self.parents, tile.parents)
        part = self.samples * self.parents * self.features * (1 + self.moments)
        splits, per_split = self.split(self.children, math.prod(blocks), tile, part)

        def features(wanted: bool, splits: int = splits) -> Tensor | None:
            return self.new(splits, self.samples, self.parents, self.features) if wanted else None

        def scores(wanted: bool) -> Tensor | None:
            return self.new(splits, self.samples, self.parents) if wanted else None

        found = {
            "totals": features(True),
            "masses": scores(self.moments or self.over_children),
            "squares": features(self.moments),
            "benefits": scores(self.betas is not None),
            "peaks": scores(self.over_children),
            "origins": features(self.moments and precision is None, 1),
        }
        self.launch(
            kernels.sums, (*blocks, splits), norms=norms, target=target, precision=precision, prior=prior,
            one_block=one_block, per_split=per_split, **found, **windows, **sizes,
        )  # fmt: skip
        return found

    def weighted_sum(self) -> tuple[Tensor, Tensor]:
        """Return the sums, and the logarithms of the denominators of a softmax over the children."""
        sums = self.new(self.samples, self.parents, self.features)
        lse = self.new(self.samples, self.parents) if self.over_children else self.new(0)
        if self.empty:
            return sums.zero_(), lse.fill_(torch.inf)
        parts = self.sums()
        totals = parts["totals"]
        if self.over_children:
            self.merge(parts, result=sums, lse=lse)
        elif totals is not None and len(totals) == 1:
            return totals[0], lse
        else:
            self.merge(parts, result=sums)
        return sums, lse

    def merge(self, parts: dict[str, Tensor | None], center: Tensor | None = None, **results: Tensor | None) -> None:
        """Join the results of the splits."""
        nothing = dict.fromkeys(("result", "variance", "mass", "benefit", "lse"))
        parts = {name: parts[name] for name in ("totals", "squares", "masses", "benefits", "peaks")}
        totals = parts["totals"]
        assert totals is not None
        self.launch_pairs(pairs.merge, splits=len(totals), center=center, **parts, **(nothing | results))

    # ------------------------------------------------------------ backward

    def pack(
        self,
        target: Tensor | None = None,
        precision: Tensor | None = None,
        prior: Tensor | None = None,
        lse: Tensor | None = None,
        grad: Tensor | None = None,
        grad_mass: Tensor | None = None,
        grad_variance: Tensor | None = None,
        grad_benefit: Tensor | None = None,
        **results: Tensor | None,
    ) -> dict[str, Any]:
        """Return what a kernel must know of each parent: one tensor `(samples, size, parents)`, and the rows in it."""
        wide = {
            "k_target": target, "k_precision": precision, "k_slope": grad, "k_curve": grad_variance,
            "k_center": grad_variance if precision is None else None,
        }  # fmt: skip
        narrow = {
            "k_prior": prior, "k_benefit": grad_benefit, "k_lse": lse,
            "k_base": grad if self.over_children or self.moments else None,
        }  # fmt: skip
        places, size = dict(NO_PACK), 0
        for names, width in ((wide, self.features), (narrow, 1)):
            for name, x in names.items():
                if x is not None:
                    places[name], size = size, size + width
        pack = self.new(self.samples, size, self.parents)
        inputs = {
            "target": target, "precision": precision, "prior": prior, "lse": lse, "grad": grad,
            "grad_mass": grad_mass, "grad_variance": grad_variance, "grad_benefit": grad_benefit,
            "sums": None, "mass": None, "variance": None,
        } | results  # fmt: skip
        inputs = {name: _contiguous(x) for name, x in inputs.items()}
        self.launch_pairs(pairs.pack, packed=pack, size=size, **places, **inputs)
        return {"pack": pack, "size": size, **places}

    def normalize(self, pack: dict[str, Any], with_grads: bool) -> Tensor:
        """Return peak, mass and gate gradient of each child's softmax over the parents, `(3, samples, children)`."""
        (windows,), tile = self.windows(apart=False), self.tile("normalize")
        sizes = self.sizes(tile, self.samples)
        blocks = triton.cdiv(self.samples, sizes["block_n"])
        splits, per_split = self.split(self.children, blocks, tile)
        norms = self.new(2, 3, self.samples, self.children)
        self.launch(
            kernels.normalize, (blocks, splits), norms=norms, with_grads=with_grads, per_split=per_split,
            **pack, **windows, **sizes,
        )  # fmt: skip
        return norms[(triton.cdiv(self.parents, tile.parents) - 1) % 2]

    def grads(self, into: Gradients, **packed: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add the gradients of the children; return those of target, precision, prior, offset and betas."""
        if self.empty:
            return tuple(
                None if x is None else torch.zeros_like(x) for x in (*self.agreement_tensors, self.offset, self.betas)
            )
        target, precision, prior = self.agreement_tensors
        pack = self.pack(target, precision, prior, **packed)
        tile = self.tile("grads")
        one_block = tile.parents >= self.parents
        launches = self.windows(apart=True)
        sizes = self.sizes(tile, launches[0]["n_samples"])
        part = sum(x.numel() for x in self.agreement_tensors if x is not None)
        blocks = triton.cdiv(launches[0]["n_samples"], sizes["block_n"])
        splits, per_split = self.split(self.children, blocks, tile, max(1, part))
        parts = self.new(splits, part) if part else None
        norms = None
        if not self.over_children and not self.uniform:
            norms = self.new(3, self.samples, self.children) if one_block else self.normalize(pack, with_grads=True)
        with _in_place(into.poses) as grad_poses, _in_place(into.gates) as grad_gates:
            wanted = any(x is not None for x in (grad_poses, grad_gates, norms, parts))
            for windows in launches if wanted else ():
                self.launch(
                    kernels.grads, (triton.cdiv(windows["n_samples"], sizes["block_n"]), splits),
                    grad_poses=grad_poses, grad_gates=grad_gates, norms=norms, parts=parts, one_block=one_block,
                    per_split=per_split, **pack, **windows, **sizes,
                )  # fmt: skip
        row_grads = self.weight_grads(into, norms, pack)
        return *self._parent_grads(parts), *row_grads

    def _parent_grads(self, parts: Tensor | None) -> Iterator[Tensor | None]:
        """Yield the gradients of target, precision and prior."""
        whole, first = None if parts is None else _total(parts), 0
        for x in self.agreement_tensors:
            if x is None or whole is None:
                yield None
            else:
                own = whole[first : first + x.numel()].view(x.shape)
                yield own.clone() if first else own  # results of an operator must not share memory, and must be aligned
                first += x.numel()

    def weight_grads(self, into: Gradients, norms: Tensor | None, pack: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """Add the gradients of weight and bias; return those of offset and betas. One launch per number of groups."""
        (windows,), tile = self.windows(apart=False), self.tile("weight_grads")
        sizes = self.sizes(tile, self.samples)
        n_blocks, j_blocks = triton.cdiv(self.samples, sizes["block_n"]), triton.cdiv(self.parents, tile.parents)
        whole_d = triton.next_power_of_2(self.depth)
        # Views with the parents last, the order in which the kernel writes.
        into_views = {
            name: None if x is None else _view_parents_last(x)
            for name, x in (("grad_weight", into.weight), ("grad_bias", into.bias))
        }
        given = {"grad_betas": self.betas, "grad_offset": self.offset}
        wanted = into_views | {name: None if x is None else _view_parents_last(x) for name, x in given.items()}
        shared = {"grad_bias": self.shared_bias, "grad_betas": self.shared_betas}
        found: dict[str, Tensor] = {}
        for groups in sorted({x.shape[0] for x in wanted.values() if x is not None}):
            own = {name: x for name, x in wanted.items() if x is not None and x.shape[0] == groups}
            rows, per_group = groups * self.places, self.types // groups
            part = sum(x.numel() for x in own.values())
            splits, per_split = self.split(per_group * n_blocks, rows * j_blocks, tile, part)
            # The kernel adds in place where one program alone adds to each number.
            in_place = {
                name
                for name, x in own.items()
                if splits == 1 and name in into_views and x.is_contiguous() and not (shared.get(name) and j_blocks > 1)
            }
            add = all(name in in_place for name in own if name in into_views)
            parts = {
                name: x
                if add and name in into_views
                else self.new(splits, *x.shape[:-1], j_blocks if shared.get(name) else x.shape[-1])
                for name, x in own.items()
            }
            self.launch(
                kernels.weight_grads, (rows, j_blocks, splits), add=add, norms=norms, whole_d=whole_d,
                by_row=whole_d * sizes["block_n"] <= tile.loads, own_weight=groups == self.groups,
                one_child=per_group == 1, per_group=per_group, per_split=per_split,
                **(dict.fromkeys(wanted) | parts), **pack, **windows, **sizes,
            )  # fmt: skip
            for name, x in own.items():
                if parts[name] is not x:
                    total = _total(parts[name])
                    found[name] = total.sum(-1, keepdim=True) if shared.get(name) else total
        for name, view in into_views.items():
            if view is not None and name in found:
                view.add_(found[name])
        return tuple(
            None if x is None else found[name].movedim(-1, 3).contiguous()
            for name, x in (("grad_offset", self.offset), ("grad_betas", self.betas))
        )


def run(device: torch.device, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Start a kernel. Tests replace this function to see what would be started."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](**arguments)


@cache
def architecture(device: torch.device) -> str:
    """Return the architecture by its name in the table of tiles, such as "sm_90"."""
    if device.type != "cuda":
        return "interpreter"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


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


def _contiguous(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


def _view_parents_last(x: Tensor) -> Tensor:
    """Return `(groups, kernel, kernel, parents, ...)` with the parents last."""
    return x.movedim(3, -1)


def _parents_last(x: Tensor | None) -> Any:
    return None if x is None else _view_parents_last(x).contiguous()


@contextlib.contextmanager
def _in_place(x: Tensor | None) -> Iterator[Tensor | None]:
    """Return a contiguous tensor for a kernel to add to: x, or a buffer that is added to x afterwards."""
    if x is None or x.is_contiguous():
        yield x
    else:
        buffer = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        yield buffer
        x += buffer


def _total(parts: Tensor) -> Tensor:
    """Return the sum over the splits."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def weighted_sum(children: Children, query: Tensor, offset: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    return Problem(children, options, query, offset=offset).weighted_sum()


def weighted_sum_backward(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    children: Children,
    query: Tensor,
    offset: Tensor | None,
    options: Options,
    into: Gradients,
) -> tuple[Tensor | None, ...]:
    """Add the gradients of the children to `into`; return those of query and offset."""
    (grad,), (sums, lse) = grads, results
    p = Problem(children, options, query, offset=offset)
    found = p.grads(into, grad=grad, sums=sums, lse=lse if p.over_children else None)
    return found[0], found[3]


def moments(
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = Problem(children, options, target, precision, prior, offset, betas, moments=True)
    mass, mean = p.new(p.samples, p.parents), p.new(p.samples, p.parents, p.features)
    variance, benefit = torch.empty_like(mean), p.new(0) if betas is None else torch.empty_like(mass)
    if p.empty:
        return mass.zero_(), mean.zero_(), variance.zero_(), benefit.zero_()
    parts = p.sums()
    center = parts["origins"] if precision is None else _contiguous(p.agreement_tensors[0])
    p.merge(parts, center, result=mean, variance=variance, mass=mass, benefit=benefit)
    return mass, mean, variance, benefit


def moments_backward(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
    into: Gradients,
) -> tuple[Tensor | None, ...]:
    """Adds the gradients of the children; those of target, precision, prior, offset and betas."""
    grad_mass, grad_mean, grad_variance, grad_benefit = grads
    mass, mean, variance = results
    p = Problem(children, options, target, precision, prior, offset, betas, moments=True)
    return p.grads(
        into, grad=grad_mean, grad_mass=grad_mass, grad_variance=grad_variance,
        grad_benefit=None if betas is None else grad_benefit, mass=mass, sums=mean, variance=variance,
    )  # fmt: skip
