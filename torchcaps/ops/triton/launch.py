"""How the kernels divide the work, and the reductions that they make."""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.ops.backend import INTERPRETED
from torchcaps.ops.children import Children, Options
from torchcaps.ops.numerics import contract, nonzero
from torchcaps.ops.triton import kernels

NO_GRADS: dict[str, Any] = dict.fromkeys(("slope", "curve", "mean", "base", "grad_benefit"))


class Problem:
    """What the kernels read, and how each of them divides the work.

    Args:
        children: without a grid: poses `(batch, children, rows, d)`, weight `(groups, parents, d, h)`, bias
            `(groups, parents or 1, rows, h)` and gates `(batch, children)`.
        target: `(batch, parents, features)`, a Gaussian's mean or a query, or None.
        precision, prior: `(batch, parents, features)` and `(batch, parents)`, or None.
        offset: `(groups, parents)`, with groups of its own, or None.
        betas: `(groups, parents or 1)`, with groups of their own, or None.
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
    ):
        poses, weight, bias, gates = children
        self.inputs = poses, weight, bias, gates, target, precision, prior, offset, betas
        for x in self.inputs:
            if x is not None and x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(f"the triton backend takes float16, bfloat16, float32 and float64, got {x.dtype}")
        self.batch, self.children, self.rows, self.depth = poses.shape
        self.groups, self.parents, _, self.width = weight.shape
        self.features = self.rows * self.width
        self.over_children = options.softmax == "children"
        self.agreement = "none" if target is None else "gaussian" if precision is not None else "dot"
        if self.agreement == "dot" and options.unit:
            self.agreement = "unit"
        self.empty = poses.numel() == 0
        self.device = poses.device
        self.dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
        block_r, block_h = triton.next_power_of_2(self.rows), triton.next_power_of_2(self.width)
        self.block_features, self.block_d = block_r * block_h, triton.next_power_of_2(self.depth)
        self.shared_bias = bias is not None and bias.shape[1] != self.parents
        self.shared_betas = betas is not None and betas.shape[1] != self.parents
        self.arguments: dict[str, Any] = {
            "poses": poses.contiguous(),
            "weight": _parents_last(weight),
            "bias": _parents_last(bias),
            "gates": None if gates is None else gates.contiguous(),
            "betas": _parents_last(betas),
            "offset": _parents_last(offset),
            "target": _parents_last(target),
            "precision": _parents_last(precision),
            "prior": _parents_last(prior),
            "batch": self.batch,
            "children": self.children,
            "parents": self.parents,
            "per_weight": self.children // self.groups,
            "per_bias": None if bias is None else self.children // bias.shape[0],
            "rows": self.rows,
            "depth": self.depth,
            "width": self.width,
            "per_beta": None if betas is None else self.children // betas.shape[0],
            "per_offset": None if offset is None else self.children // offset.shape[0],
            "shared_bias": self.shared_bias,
            "shared_betas": self.shared_betas,
            "agreement": self.agreement,
            "over_children": self.over_children,
            "leaky": options.leaky,
            "dtype": tl.float64 if self.dtype == torch.float64 else tl.float32,
            "block_r": block_r,
            "block_h": block_h,
            "block_d": self.block_d,
        }

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def blocks(self, registers: int | None = None, most_warps: int = 4) -> dict[str, int]:
        """A tile of so many numbers per thread (a vote, but 16 at least, and 32 at most since a dozen tiles are in
        use), with all parents if they fit into few warps: within a warp, sums over the parents are quick."""
        if INTERPRETED:
            return {"block_n": 2, "block_j": min(triton.next_power_of_2(self.parents), 4)}
        registers = registers or min(max(self.block_features, 16), 32)
        most = max(1, 32 * most_warps * registers // self.block_features)
        block_j = min(triton.next_power_of_2(self.parents), 32 * most_warps, most)
        warps = min(most_warps, max(1, block_j * self.block_features // (32 * registers)))
        block_n = max(1, 32 * warps * registers // (block_j * self.block_features))
        return {"block_n": min(triton.next_power_of_2(self.batch), block_n), "block_j": block_j, "num_warps": warps}

    def split(self, items: int, programs: int) -> tuple[int, int]:
        """How many splits of how many items fill the device."""
        wanted = 8 if INTERPRETED else 32 * torch.cuda.get_device_properties(self.device).multi_processor_count
        per_split = triton.cdiv(items, min(items, max(1, wanted // programs)))
        return triton.cdiv(items, per_split), per_split

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernel[grid](**self.arguments, **arguments)

    def normalize(self, blocks: dict[str, int], grads: dict[str, Any] | None = None) -> tuple[Tensor, Tensor | None]:
        """Peaks and masses of the softmax over the parents, `(2, batch, children)`, and the gates' gradients."""
        n_blocks = triton.cdiv(self.batch, blocks["block_n"])
        splits, per_split = self.split(self.children, n_blocks)
        old_norms = old_grad_gates = None
        for parent in range(0, self.parents, blocks["block_j"]):
            # Not in place: several threads of a program read a number that one of them writes.
            norms = self.new(2, self.batch, self.children)
            grad_gates = None if grads is None else self.new(self.batch, self.children)
            self.launch(
                kernels._normalize, (n_blocks, splits), old_norms=old_norms, norms=norms, old_grad_gates=old_grad_gates,
                grad_gates=grad_gates, parent=parent, per_split=per_split, **(grads or NO_GRADS), **blocks,
            )  # fmt: skip
            old_norms, old_grad_gates = norms, grad_gates
        return norms, grad_gates

    def sums(self, moments: bool = False, origin: Tensor | None = None) -> tuple[Tensor, Any, Any, Any, Any]:
        """For each split of the children: totals, masses, squares, benefits and peaks, or None."""
        blocks = self.blocks()
        one_block = blocks["block_j"] >= self.parents
        norms = None if one_block or self.over_children else self.normalize(blocks)[0]
        n_blocks, j_blocks = triton.cdiv(self.batch, blocks["block_n"]), triton.cdiv(self.parents, blocks["block_j"])
        splits, per_split = self.split(self.children, n_blocks * j_blocks)

        def scores(wanted: bool) -> Tensor | None:
            return self.new(splits, self.batch, self.parents) if wanted else None

        totals = self.new(splits, self.batch, self.features, self.parents)
        squares = torch.empty_like(totals) if moments else None
        masses, peaks = scores(moments or self.over_children), scores(self.over_children)
        benefits = scores(self.arguments["betas"] is not None)
        self.launch(
            kernels._sums, (n_blocks, j_blocks, splits), totals=totals, masses=masses, squares=squares,
            benefits=benefits, peaks=peaks, norms=norms, origin=origin, one_block=one_block, per_split=per_split,
            **blocks,
        )  # fmt: skip
        return totals, masses, squares, benefits, peaks

    def grads(self, lse: Tensor | None, **gradients: Tensor | None) -> list[Tensor | None]:
        """Gradients of poses, weight, bias, gates, target, precision, prior, offset and betas."""
        if self.empty:
            return [None if x is None else self.new(*x.shape).zero_() for x in self.inputs]
        lse = None if lse is None else lse.contiguous()
        grads = NO_GRADS | {name: _parents_last(x) for name, x in gradients.items()}
        blocks = self.blocks()
        one_block = blocks["block_j"] >= self.parents
        n_blocks = triton.cdiv(self.batch, blocks["block_n"])
        splits, per_split = self.split(self.children, n_blocks)
        shape = splits, self.batch, self.features, self.parents
        grad_targets = None if self.agreement == "none" else self.new(*shape)
        grad_precisions = self.new(*shape) if self.agreement == "gaussian" else None
        grad_priors = self.new(splits, self.batch, self.parents) if self.agreement == "gaussian" else None
        norms = grad_gates = grad_poses = None
        if not self.over_children and not one_block:
            norms, grad_gates = self.normalize(blocks, grads)
        elif not self.over_children:
            norms = self.new(2, self.batch, self.children)
        for parent in range(0, self.parents, blocks["block_j"]):
            old_grad_poses, grad_poses = grad_poses, self.new(self.batch, self.children, self.rows, self.depth)
            old_grad_gates = grad_gates
            if self.over_children or one_block:
                grad_gates = self.new(self.batch, self.children)
            self.launch(
                kernels._grads, (n_blocks, splits), old_grad_poses=old_grad_poses, grad_poses=grad_poses,
                old_grad_gates=old_grad_gates, grad_gates=grad_gates, norms=norms, lse=lse, grad_targets=grad_targets,
                grad_precisions=grad_precisions, grad_priors=grad_priors, one_block=one_block, parent=parent,
                per_split=per_split, **grads, **blocks,
            )  # fmt: skip
        shared = self.weight_grads({"norms": norms, "grad_gates": grad_gates, "lse": lse, **grads})
        of_agreement = (_parents_first(_total(x)) for x in (grad_targets, grad_precisions, grad_priors))
        gates = None if self.arguments["gates"] is None else grad_gates
        of_children = grad_poses, shared["grad_weight"], shared["grad_bias"], gates
        return [*of_children, *of_agreement, shared["grad_offset"], shared["grad_betas"]]

    def weight_grads(self, arguments: dict[str, Any]) -> dict[str, Tensor | None]:
        """Gradients of weight, bias, betas and offset, in one launch if these have the same groups of children."""
        # A thread has at most 64 sums. Softmax is done, so the parents may well be in several blocks.
        blocks = self.blocks(max(1, 1024 // max(64, self.block_d * self.arguments["block_h"])), most_warps=1)
        n_blocks, j_blocks = triton.cdiv(self.batch, blocks["block_n"]), triton.cdiv(self.parents, blocks["block_j"])
        bias, offset, betas = self.inputs[2], self.inputs[7], self.inputs[8]
        wanted: dict[str, tuple[int, tuple[int, ...]]] = {
            "grad_weight": (self.groups, (self.depth, self.width, self.parents))
        }
        if bias is not None:
            last = j_blocks if self.shared_bias else self.parents
            wanted["grad_bias"] = bias.shape[0], (self.rows, self.width, last)
        if betas is not None:
            wanted["grad_betas"] = betas.shape[0], (j_blocks if self.shared_betas else self.parents,)
        if offset is not None:
            wanted["grad_offset"] = offset.shape[0], (self.parents,)
        found: dict[str, Any] = dict.fromkeys(("grad_weight", "grad_bias", "grad_betas", "grad_offset"))
        for groups in sorted({groups for groups, _ in wanted.values()}):
            per_group = self.children // groups
            splits, per_split = self.split(per_group * n_blocks, groups * j_blocks)
            parts = {name: self.new(splits, groups, *shape) for name, (of, shape) in wanted.items() if of == groups}
            self.launch(
                kernels._weight_grads, (groups, j_blocks, splits), per_group=per_group, per_split=per_split,
                **(dict.fromkeys(found) | parts), **arguments, **blocks,
            )  # fmt: skip
            found |= {name: _total(x) for name, x in parts.items()}
        for name, shared in (("grad_bias", self.shared_bias), ("grad_betas", self.shared_betas)):
            if shared:
                found[name] = found[name].sum(-1, keepdim=True)
        return {name: _parents_first(x) for name, x in found.items()}


def _parents_last(x: Tensor | None) -> Any:
    return None if x is None else x.movedim(1, -1).contiguous()


def _parents_first(x: Tensor | None) -> Any:
    return None if x is None else x.movedim(-1, 1).contiguous()


def _total(parts: Tensor | None) -> Any:
    """The sum over splits."""
    return parts if parts is None else parts[0] if len(parts) == 1 else parts.sum(0)


def weighted_sum(children: Children, query: Tensor, offset: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    p = Problem(children, options, query, offset=offset)
    if p.empty:
        lse = p.new(p.batch, p.parents).fill_(torch.inf) if p.over_children else p.new(0)
        return p.new(p.batch, p.parents, p.features).zero_(), lse
    totals, masses, _, _, peaks = p.sums()
    if not p.over_children:
        return _parents_first(_total(totals)), p.new(0)
    peak = peaks.amax(0)
    scale = (peaks - peak.masked_fill(peak.isinf(), 0)).exp()
    mass = (masses * scale).sum(0)
    total = (totals * scale.unsqueeze(2)).sum(0) / nonzero(mass).unsqueeze(1)
    return _parents_first(total), torch.where(mass < 1e-30, torch.inf, peak + mass.log())


def weighted_sum_backward(
    grads: tuple[Tensor],
    results: tuple[Tensor, Tensor],
    children: Children,
    query: Tensor,
    offset: Tensor | None,
    options: Options,
) -> tuple[Tensor | None, ...]:
    """Gradients of poses, weight, bias, gates, query and offset.

    The gradient of a share is `e = grad . V`, and that of a logit is the share times what e exceeds its mean under the
    softmax by. Over the parents this mean is the gradient of the child's gate. Over the children it is `grad . sum`.
    """
    (grad,), (sums, lse) = grads, results
    p = Problem(children, options, query, offset=offset)
    base = -(grad * sums).sum(-1) if p.over_children else None
    found = p.grads(lse if p.over_children else None, slope=grad, base=base)
    return *found[:5], found[7]


def moments(
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    p = Problem(children, options, target, precision, prior, offset, betas)
    if p.empty:
        mass, mean = p.new(p.batch, p.parents).zero_(), p.new(p.batch, p.parents, p.features).zero_()
        return mass, mean, mean.clone(), None if betas is None else mass.clone()
    # Offsets are reckoned from a number near the votes: the Gaussian's mean, or the votes of the first child.
    origin = _parents_last(_first_votes(children)) if precision is None else None
    distances, masses, squares, benefits, _ = p.sums(moments=True, origin=origin)
    mass, parts = masses.sum(0), masses.unsqueeze(2)
    distance = (parts * distances).sum(0) / nonzero(mass).unsqueeze(1)
    square = (squares + parts * (distances - distance).square()).sum(0)  # Chan's formula for the splits
    center = (p.arguments["target"] if origin is None else origin) + distance
    divisor = nonzero(mass + options.eps).unsqueeze(1)
    share = mass.unsqueeze(1) / divisor
    # Deviations are from the mean that is returned, which eps draws to 0.
    variance = square / divisor + share * (center * (1 - share)).square()
    return mass, _parents_first(center * share), _parents_first(variance), _total(benefits)


def moments_backward(
    grads: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
) -> tuple[Tensor | None, ...]:
    """Gradients of poses, weight, bias, gates, target, precision, prior, offset and betas.

    With `q = 1 / (mass + eps)` and `d = V - mean`, the gradient of a share is `grad_mass + beta grad_benefit +
    slope . d + curve . (d^2 - variance)`, where `curve = q grad_variance` and
    `slope = q (grad_mean - 2 eps mean curve)`.
    """
    grad_mass, grad_mean, grad_variance, grad_benefit = grads
    mass, mean, variance = results
    p = Problem(children, options, target, precision, prior, offset, betas)
    q = 1 / nonzero(mass + options.eps).unsqueeze(-1)
    curve = q * grad_variance
    slope = q * (grad_mean - 2 * options.eps * mean * curve)
    base = grad_mass - (curve * variance).sum(-1)
    benefit = None if betas is None else grad_benefit
    return tuple(p.grads(None, slope=slope, curve=curve, mean=mean, base=base, grad_benefit=benefit))


def _first_votes(children: Children) -> Tensor:
    poses, weight, bias, _ = children
    dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
    votes = contract("nrd,jdh->njrh", poses[:, 0].to(dtype), weight[0].to(dtype))
    return (votes if bias is None else votes + bias[0].to(dtype)).flatten(2)
