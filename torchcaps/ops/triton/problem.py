"""A reduction over votes as the kernels take it: their arguments, the division of the work, and their launches.

All tensors that kernels read or write are contiguous, in one layout each: those of the children are
`(samples, children, ...)`; rows that children share are `(groups, ..., parents)`, with the parents last; those of the
parents are `(samples, parents, ...)`. The kernels know no windows: `LinearVotes` copies those of a map once for all
iterations.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.ops.backend import INTERPRETED
from torchcaps.ops.children import Children, Gradients, Options, ParentTensors
from torchcaps.ops.numerics import at_least_float32, sum_dtype

# About so many programs share the work; those of moments an eighth as many, because their parts were joined by several
# operators when this was measured on an H200 (docs/performance.md). The rules for tiles below were not measured.
PROGRAMS = 16 if INTERPRETED else 8192
MOST_PARTS = 2**22  # most numbers that the splits of a sum write before they are joined
# Numbers of a tile of votes, and of those that a warp computes.
TILE, PER_WARP = (1 if INTERPRETED else 512), 256
# The same for the gradients of weights, which have a number for each of a tile's votes and each column of a pose.
ROW_TILE, ROW_PER_WARP = (16 if INTERPRETED else 4096), 1024
# Most splits that are joined at a time, and numbers of a block of them.
JOINED_SPLITS, JOINED = (2, 16) if INTERPRETED else (64, 2048)


class Tensors(NamedTuple):
    """The tensors of the children, and the rows that groups of them share. Each may be in half precision."""

    poses: Tensor  # (samples, children, rows, depth)
    weight: Tensor  # (groups, depth, width, parents)
    bias: Tensor | None  # (groups, rows, width, parents or 1)
    gates: Tensor | None  # (samples, children)
    offset: Tensor | None  # (groups, parents), added to the logits
    betas: Tensor | None  # (groups, parents or 1)


class Parents(NamedTuple):
    """The tensors of the parents, `(samples, parents, features)` or `(samples, parents)`. Those of an agreement are
    known in both directions, the results of the reduction and their gradients in the backward pass."""

    query: Tensor | None = None  # the query of a dot agreement, or a Gaussian's mean
    precision: Tensor | None = None
    prior: Tensor | None = None
    center: Tensor | None = None  # the mean, or the weighted sum of a softmax over the children
    variance: Tensor | None = None
    mass: Tensor | None = None
    log_masses: Tensor | None = None  # logarithms of the denominators of a softmax over the children
    grad: Tensor | None = None  # gradient of the mean or the weighted sum
    grad_variance: Tensor | None = None
    grad_mass: Tensor | None = None
    grad_benefit: Tensor | None = None


class Sizes(NamedTuple):
    """Numbers that change with the batch and the map."""

    samples: int
    children: int
    per_weight: int  # consecutive children that share a row
    per_bias: int
    per_offset: int
    per_beta: int


class Layer(NamedTuple):
    """What is known when a kernel is compiled.

    Fields:
        rows, depth, width: a pose is `(rows, depth)`, a vote `(rows, width)`.
        bias_parents, betas_parents: number of parents, or 1 if they share a row.
        eps: number added to the mass where moments are divided by it.
        dtype: precision in which numbers are computed and summed, float32 at least.
        block_n, block_r, block_h, block_j, block_d: samples, rows, width, parents and depth of a tile, powers of 2.
        warps: warps of a program.
    """

    parents: int
    rows: int
    depth: int
    width: int
    bias_parents: int
    betas_parents: int
    over_children: bool
    unit: bool
    leaky: bool
    eps: float
    dtype: Any
    block_n: int
    block_r: int
    block_h: int
    block_j: int
    block_d: int
    warps: int


class Problem:
    """The children of a reduction.

    Args:
        offset: offset of the logits, `(groups, *window, parents)`, or None.
        betas: betas of the benefit, `(groups, *window, parents or 1)`, or None.
        moments: whether moments are computed, and not a weighted sum.
    """

    def __init__(
        self,
        children: Children,
        options: Options,
        offset: Tensor | None = None,
        betas: Tensor | None = None,
        moments: bool = False,
    ):
        poses, weight, bias, gates = children
        if poses.shape[2:4] != (1, 1) or children.window != (1, 1):
            raise ValueError(
                f"the kernels take no maps and no windows, got poses {tuple(poses.shape)}: use LinearVotes"
            )
        self.moments = moments
        self.programs = PROGRAMS // 8 if moments and not INTERPRETED else PROGRAMS
        self.samples, self.children, _, _, self.rows, depth = poses.shape
        self.parents, self.width, self.features = weight.shape[3], weight.shape[5], self.rows * weight.shape[5]
        self.over_children = options.softmax == "children"
        self.tensors = Tensors(
            plain(poses.flatten(1, 3)),
            _as_rows(weight),
            None if bias is None else _as_rows(bias),
            None if gates is None else plain(gates.flatten(1)),
            None if offset is None else _as_rows(offset),
            None if betas is None else _as_rows(betas),
        )
        self.row_tensors = weight, bias, offset, betas
        self.per_row = tuple(1 if x is None else self.children // x.shape[0] for x in self.row_tensors)
        self.sizes = Sizes(self.samples, self.children, *self.per_row)
        self.dtype, self.device = sum_dtype(poses.dtype), poses.device
        block_r, block_h, block_j = (power_of_2(x) for x in (self.rows, self.width, self.parents))
        tile = block_r * block_h * block_j
        block_n = 2 if INTERPRETED else max(1, min(power_of_2(self.samples), TILE // tile))
        self.layer = Layer(
            self.parents, self.rows, depth, self.width,
            self.parents if bias is None else bias.shape[3], self.parents if betas is None else betas.shape[3],
            self.over_children, options.unit, options.leaky, options.eps,
            language_dtype(self.dtype),
            block_n, block_r, block_h, block_j, power_of_2(depth), max(1, min(8, block_n * tile // PER_WARP)),
        )  # fmt: skip

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def scores(self, *splits: int) -> Tensor:
        return self.new(*splits, self.samples, self.parents)

    def vectors(self, *splits: int) -> Tensor:
        return self.new(*splits, self.samples, self.parents, self.features)

    def launch(
        self, kernel: str, grid: tuple[int, ...], parents: Parents, *arguments: Any, layer: Layer | None = None
    ) -> None:
        """Start a kernel of the reductions with the arguments that it alone has."""
        layer = layer or self.layer
        arguments = *arguments, self.tensors, parents, self.sizes, layer
        launch(f"kernels.{kernel}", grid, self.device, *arguments, warps=layer.warps)

    def join(self, kernel: str, numbers: int, splits: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel that joins the results of the splits, for some numbers of each."""
        block_s = min(power_of_2(splits), JOINED_SPLITS)
        options |= {"block_s": block_s, "block_e": JOINED // block_s}
        grid = (-(-numbers // options["block_e"]),)
        launch(f"joins.join_{kernel}", grid, self.device, *arguments, splits, **options)

    def of_parents(self) -> tuple[int, int]:
        """Return the number of scores, and of features of each."""
        return self.samples * self.parents, self.features

    def split(self, items: int, programs: int, part: int) -> tuple[int, int]:
        """Return how many splits divide the items, where each split writes `part` numbers, and the items in each."""
        most = max(1, min(items, self.programs // max(1, programs), MOST_PARTS // max(1, part)))
        per_split = max(1, -(-items // most))
        return max(1, -(-items // per_split)), per_split

    def sums(self, parents: Parents) -> tuple[int, tuple[Tensor | None, ...]]:
        """Return the number of splits of the children, and the results of each: totals, masses, squares, benefits,
        peaks, and the centers; see `kernels.sums`. Those that the reduction does not need are None."""
        blocks = -(-self.samples // self.layer.block_n)
        splits, per_split = self.split(self.children, blocks, self.samples * self.parents * self.features)
        results = (
            self.vectors(splits),
            self.scores(splits) if self.moments or self.over_children else None,
            self.vectors(splits) if self.moments else None,
            self.scores(splits) if self.tensors.betas is not None else None,
            self.scores(splits) if self.over_children else None,
            self.vectors() if self.moments else None,
        )
        self.launch("sums", (blocks, splits), _readable(parents), *results, per_split)
        return splits, results

    def backward(self, parents: Parents, into: Gradients) -> ParentTensors:
        """Add the gradients of the children; return those of query, precision, prior, offset and betas."""
        parents = _readable(parents)
        blocks, gaussian = -(-self.samples // self.layer.block_n), parents.precision is not None
        splits, per_split = self.split(self.children, blocks, self.samples * self.parents * self.features)
        # A softmax over the parents needs all of them; the gradients of rows have only some.
        wanted = (
            None if into.weight is None else self.tensors.weight,
            None if into.bias is None else self.tensors.bias,
            self.tensors.offset,
            self.tensors.betas,
        )
        known = not self.over_children and any(x is not None for x in wanted)
        of_all_parents = [self.new(self.samples, self.children) if known else None for _ in range(3)]
        parts = (
            None if parents.query is None else self.vectors(splits),
            self.vectors(splits) if gaussian else None,
            self.scores(splits) if gaussian else None,
        )
        with _contiguous(into.poses) as poses, _contiguous(into.gates) as gates:
            self.launch("grads", (blocks, splits), parents, poses, gates, *of_all_parents, *parts, per_split)
        grad_offset, grad_betas = self._row_grads(parents, into, wanted, *of_all_parents)
        return ParentTensors(*self.joined(parts))._replace(offset=grad_offset, betas=grad_betas)

    def _row_grads(
        self, parents: Parents, into: Gradients, wanted: Sequence[Tensor | None], *of_all_parents: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Add the gradients of weight and bias; return those of offset and betas. Those whose rows the same children
        share are computed by one launch.

        Args:
            parents: the tensors of the parents.
            into: the gradients of the children.
            wanted: weight, bias, offset and betas; None where no gradient is wanted.
            of_all_parents: peaks, masses and gradients of the gates, which `grads` has written.
        """
        totals: list[Tensor | None] = [None] * 4
        for per_row in {count for count, x in zip(self.per_row, wanted, strict=True) if x is not None}:
            rows = self.children // per_row
            chosen = [x if count == per_row else None for count, x in zip(self.per_row, wanted, strict=True)]
            part = sum(x.numel() for x in chosen if x is not None)
            layer = self._row_layer(any(x is not None and x.shape[-1] == 1 for x in chosen))
            blocks, programs = -(-self.samples // layer.block_n), -(-self.parents // layer.block_j)
            splits, per_split = self.split(per_row * blocks, rows * programs, part)
            parts = [None if x is None else self.new(splits, *x.shape) for x in chosen]
            arguments = *parts, *of_all_parents, per_row, per_split
            self.launch("row_grads", (rows, splits, programs), parents, *arguments, layer=layer)
            held = [None if x is None or parts[i] is None else x for i, x in enumerate(into[1:3])]
            with _contiguous(held[0], rows=True) as weight, _contiguous(held[1], rows=True) as bias:
                found = self.joined(parts, (weight, bias, None, None))
            totals = [x if y is None else y for x, y in zip(totals, found, strict=True)]
        grad_offset, grad_betas = (
            None if x is None or like is None else x.unflatten(0, like.shape[:3])
            for x, like in zip(totals[2:], self.row_tensors[2:], strict=True)
        )
        return grad_offset, grad_betas

    def joined(
        self, parts: Sequence[Tensor | None], into: Sequence[Tensor | None] = (None,) * 3
    ) -> list[Tensor | None]:
        """Return the sums over the splits, or add them to the tensors `into` where there is one."""
        totals = [
            None if x is None else y if y is not None else x[0] if len(x) == 1 else self.new(*x.shape[1:])
            for x, y in zip(parts, into, strict=True)
        ]
        chosen = [
            (total, x, x[0].numel(), y is not None)
            for total, x, y in zip(totals, parts, into, strict=True)
            if x is not None and total is not None and (y is not None or len(x) > 1)
        ]
        if chosen:
            results, of_splits, counts, adds = zip(*chosen, strict=True)
            self.join("sums", max(counts), len(of_splits[0]), results, of_splits, counts, adds=adds)
        return totals

    def _row_layer(self, all_parents: bool) -> Layer:
        """Return the layer with the tiles of `row_grads`, which have only some of the parents unless these share a
        row."""
        layer = self.layer
        per_parent = layer.block_r * layer.block_h * layer.block_d
        block_j = layer.block_j if all_parents else max(1, min(layer.block_j, ROW_TILE // per_parent))
        tile = per_parent * block_j
        block_n = max(1, min(layer.block_n, ROW_TILE // tile))
        return layer._replace(block_n=block_n, block_j=block_j, warps=max(1, min(8, block_n * tile // ROW_PER_WARP)))


def launch(
    name: str, grid: tuple[int, ...], device: torch.device, *arguments: Any, warps: int = 4, **options: Any
) -> None:
    """Start a kernel, such as "joins.join_sums"."""
    module, kernel = name.split(".")
    kernels = importlib.import_module(f"torchcaps.ops.triton.{module}")  # Triton may not be installed
    if not INTERPRETED:
        options["num_warps"] = warps
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        getattr(kernels, kernel)[grid](*arguments, **options)


def _readable(parents: Parents) -> Parents:
    """Return the tensors of the parents as kernels read them."""
    return Parents(*(None if x is None else plain(at_least_float32(x)) for x in parents))


def plain(x: Tensor) -> Tensor:
    """Return a tensor as kernels read it: contiguous, and with its signs in memory."""
    return x.contiguous().resolve_neg()


@contextlib.contextmanager
def _contiguous(x: Tensor | None, rows: bool = False) -> Iterator[Tensor | None]:
    """Give a tensor that kernels can add to: x itself, or a copy that is copied back. `rows` are those that groups of
    children share, see `_as_rows`."""
    if x is None:
        yield None
        return
    wanted = x.movedim(3, -1) if rows else x
    given = wanted.contiguous()
    yield given
    if given.data_ptr() != x.data_ptr():
        wanted.copy_(given)


def _as_rows(x: Tensor) -> Tensor:
    """Return `(groups, 1, 1, parents, ...)` as `(groups, ..., parents)`."""
    return plain(x.movedim(3, -1).flatten(0, 2))


def language_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's name of a precision of sums."""
    import triton.language as tl  # it may not be installed

    return tl.float64 if dtype == torch.float64 else tl.float32


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is not less than n."""
    return 1 << max(0, n - 1).bit_length()
