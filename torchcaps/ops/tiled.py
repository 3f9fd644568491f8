"""The reductions over children, block by block, on any device.

The votes of a block of children for the parents of a block of samples are computed from poses and weights, used, and
forgotten; the backward pass computes them again. Memory grows with poses, weights and parents, never with children x
parents. In a block the parents are innermost, `(children, samples, features, parents)`, so that every step runs along
memory.

What all functions take:
    poses: `(batch, channels, height, width, rows, d)`.
    weight: `(groups, kernel, kernel, parents, d, h)`. A sample is an image and a position of the window on it; it has
        a child per channel and place in the window. Channels share weights in groups of equal size, in order.
        Capsules that are on no grid have height, width and kernel 1.
    bias: `(groups, kernel, kernel, parents or 1, rows, h)`, with groups of its own, or None.
    gates: `(samples, channels, kernel, kernel)`, or None.
    betas: `(groups, kernel, kernel, parents or 1)`, with groups of its own, or None.
    agreement: of each sample, as `(samples, parents, ...)`.
    grad_poses, grad_weight, grad_bias, grad_gates, grad_betas: what the backward functions *add* gradients to, so
        that iterations share them; None where nobody asks.
Sums are computed, and returned, in float32 at least.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.ops.agreement import Gaussian
from torchcaps.ops.numerics import at_least_float32, nonzero

BLOCK = 2**19  # entries of a block's votes: a few such tensors stay close to a core
SAMPLES = 64  # in a block, at most


@dataclass(frozen=True)
class Block:
    """Children and samples that are worked on together: some channels, at one place in the windows at some
    positions of some images."""

    total_channels: int
    channels: slice
    groups: slice  # of weights, which these channels use
    place: tuple[int, int]
    stride: int
    images: slice
    rows: slice  # of the grid of windows; all of its columns
    columns: int
    samples: slice

    def read(self, x: Tensor) -> Tensor:
        """`(children, samples, ...)` of `(batch, channels, height, width, ...)`."""
        return at_least_float32(self._window(x).flatten(1, 3)).contiguous()

    def add(self, x: Tensor, values: Tensor) -> None:
        window = self._window(x)
        window += values.view(window.shape)

    def read_gates(self, x: Tensor) -> Tensor:
        """`(children, samples)` of `(samples, channels, kernel, kernel)`."""
        return at_least_float32(x[self.samples, self.channels, self.place[0], self.place[1]].T).contiguous()

    def add_gates(self, x: Tensor, values: Tensor) -> None:
        own = x[self.samples, self.channels, self.place[0], self.place[1]]
        own += values.T

    def read_rows(self, x: Tensor) -> Tensor:
        """`(children, ...)` of `(groups, kernel, kernel, ...)`."""
        return at_least_float32(x[:, self.place[0], self.place[1]][self._groups_of(x)])

    def add_rows(self, x: Tensor, values: Tensor) -> None:
        if x.shape[3] == 1:  # the parents share them
            values = values.sum(1, keepdim=True)
        x[:, self.place[0], self.place[1]].index_add_(0, self._groups_of(x), values.to(x.dtype))

    def _window(self, x: Tensor) -> Tensor:
        """`(children, images, rows, columns, ...)`: a view, and without overlaps, for at one place in the windows
        each position of the map is seen once."""
        (down, across), s = self.place, self.stride
        rows = slice(down + s * self.rows.start, down + s * (self.rows.stop - 1) + 1, s)
        columns = slice(across, across + s * (self.columns - 1) + 1, s)
        return x[self.images, self.channels, rows, columns].transpose(0, 1)

    def _groups_of(self, x: Tensor) -> Tensor:
        channels = torch.arange(self.channels.start, self.channels.stop, device=x.device)
        return channels // (self.total_channels // x.shape[0])


def vote_blocks(poses: Tensor, weight: Tensor, stride: int) -> Iterator[Block]:
    """Blocks whose votes have BLOCK entries, if one child's for one sample do not have more."""
    parents, h = weight.shape[3], weight.shape[5]
    pairs = max(1, BLOCK // (parents * poses.shape[4] * h))
    return blocks(poses, weight, stride, pairs, min(pairs, SAMPLES))


def pose_blocks(poses: Tensor, weight: Tensor, stride: int) -> Iterator[Block]:
    """Blocks whose poses, and whose weights, have BLOCK entries, for work that makes no votes."""
    parents, d, h = weight.shape[3:]
    samples = min(count_samples(poses, weight, stride), 8 * SAMPLES)
    per_group = poses.shape[1] // weight.shape[0]
    children = min(BLOCK // (samples * poses.shape[4] * d), per_group * (BLOCK // (parents * d * h)))
    return blocks(poses, weight, stride, samples * max(1, children), samples)


def blocks(poses: Tensor, weight: Tensor, stride: int, pairs: int, samples: int) -> Iterator[Block]:
    """Every pair of a child and a sample once, in blocks of about that many pairs and samples."""
    batch, channels, height, width = poses.shape[:4]
    groups, kernel = weight.shape[:2]
    height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    # Whole images if one fits, else some rows of one.
    row_step = min(height, max(1, samples // width))
    image_step = min(batch, max(1, samples // (height * width)))
    # Whole groups if one fits, else some channels of one.
    per_group = channels // groups
    channel_step = max(1, pairs // (image_step * row_step * width))
    if channel_step > per_group:
        channel_step -= channel_step % per_group
        runs = [(0, channels)]
    else:
        runs = [(first, first + per_group) for first in range(0, channels, per_group)]
    places = itertools.product(range(kernel), range(kernel))
    channel_runs = [
        (first, min(end, first + channel_step)) for start, end in runs for first in range(start, end, channel_step)
    ]
    positions = itertools.product(range(0, batch, image_step), range(0, height, row_step))
    for place, (first, last), (image, row) in itertools.product(places, channel_runs, positions):
        images = slice(image, min(batch, image + image_step))
        rows = slice(row, min(height, row + row_step))
        yield Block(
            channels,
            slice(first, last),
            slice(first // per_group, (last - 1) // per_group + 1),
            place,
            stride,
            images,
            rows,
            width,
            slice((image * height + row) * width, ((images.stop - 1) * height + rows.stop) * width),
        )


class Scratch:
    """Memory for the tensors of a block's size, used again by the next block: new pages cost more than the
    arithmetic."""

    def __init__(self, like: Tensor):
        self.like = at_least_float32(like[:0])
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.like.new_empty(size)
        return self.buffers[name][:size].view(shape)


class Tile:
    """A block's poses and weights, and the way to its votes and back.

    Attributes:
        poses: `(children, samples, rows, d)`.
        weight: `(groups, d, h * parents)`.
    """

    def __init__(self, block: Block, poses: Tensor, weight: Tensor):
        self.block, self.parents = block, weight.shape[3]
        self.poses = block.read(poses)
        own = at_least_float32(weight[block.groups, block.place[0], block.place[1]])
        self.weight = own.permute(0, 2, 3, 1).reshape(own.shape[0], own.shape[2], -1)

    def votes(self, bias: Tensor | None, scratch: Scratch) -> Tensor:
        """`(children, samples, features, parents)`, to do with as one likes until the next block."""
        rows = self._pose_rows()
        votes = torch.bmm(rows, self.weight, out=scratch("votes", *rows.shape[:2], self.weight.shape[2]))
        votes = votes.view(*self.poses.shape[:2], -1, self.parents)
        if bias is not None:
            votes += self.block.read_rows(bias).flatten(2).transpose(1, 2).unsqueeze(1)
        return votes

    def add_gradients(
        self, grad: Tensor, grad_poses: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
    ) -> None:
        """Add what follows from the gradient of the votes."""
        rows = grad.view(self.weight.shape[0], -1, self.weight.shape[2])
        if grad_poses is not None:
            self.block.add(grad_poses, torch.bmm(rows, self.weight.transpose(1, 2)))
        if grad_weight is not None:
            self.add_weight_gradient(grad_weight, torch.bmm(self._pose_rows().transpose(1, 2), rows))
        if grad_bias is not None:
            self.block.add_rows(grad_bias, grad.sum(1).transpose(1, 2).unflatten(2, grad_bias.shape[-2:]))

    def add_weight_gradient(self, grad_weight: Tensor, values: Tensor) -> None:
        own = grad_weight[self.block.groups, self.block.place[0], self.block.place[1]]
        groups, parents, d, h = own.shape
        own += values.view(groups, d, h, parents).permute(0, 3, 1, 2)

    def summed_poses(self, gate: Tensor | None) -> Tensor:
        """Poses of children that share weights, summed: `(samples * rows, groups * d)`."""
        poses = self.poses if gate is None else self.poses * gate[..., None, None]
        poses = poses.unflatten(0, (self.weight.shape[0], -1)).sum(1)
        return poses.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)

    def _pose_rows(self) -> Tensor:
        return self.poses.view(self.weight.shape[0], -1, self.poses.shape[3])


def weighted_sum(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    query: Tensor,
    unit: bool,
    over_children: bool,
    leaky: bool,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """Sums of votes with the coefficients of a dot agreement.

    Returns:
        sums: `(samples, parents, features)`.
        log_masses: over children, `(samples, parents)`, the logarithm of each parent's softmax denominator; over
            parents it is empty.
    """
    query = _innermost(query)
    sums = torch.zeros_like(query)
    largest = masses = query.new_empty(0)
    if over_children:
        largest = query.new_full((query.shape[0], query.shape[2]), -torch.inf)
        masses = torch.zeros_like(largest)
    scratch = Scratch(poses)
    for block in vote_blocks(poses, weight, stride):
        votes, n = Tile(block, poses, weight).votes(bias, scratch), block.samples
        logits, _ = _dot(votes, query[n], unit, scratch)
        gate = None if gates is None else block.read_gates(gates).unsqueeze(-1)
        if over_children:
            if gate is not None:
                logits = logits.masked_fill(gate == 0, -torch.inf)
            higher = torch.maximum(largest[n], logits.amax(0))
            finite = higher.masked_fill(higher == -torch.inf, 0)  # nobody is there yet
            weights = (logits - finite).exp_()
            if gate is not None:
                weights *= gate
            rescale = (largest[n] - finite).exp_()
            masses[n] = masses[n] * rescale + weights.sum(0)
            sums[n] *= rescale.unsqueeze(1)
            largest[n] = higher
        else:
            weights = _over_parents(logits, leaky)
            if gate is not None:
                weights *= gate
        sums[n] += votes.mul_(weights.unsqueeze(2)).sum(0)
    if over_children:
        sums /= nonzero(masses).unsqueeze(1)
        # Where there is no child, any finite number: no coefficient is computed with it.
        masses = torch.where(masses > 0, largest + masses.log(), 0)
    return sums.transpose(1, 2).contiguous(), masses


def weighted_sum_backward(
    grad: Tensor,
    sums: Tensor,
    log_masses: Tensor,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    query: Tensor,
    unit: bool,
    over_children: bool,
    leaky: bool,
    stride: int,
    grad_poses: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    grad_gates: Tensor | None,
) -> Tensor:
    """Gradient of the query. Over the parents each child is a problem of its own; over the children
    sum_i c_ij (grad_j . V_ij) = grad_j . sum_j, so that one pass is enough either way."""
    expected = (grad * sums).sum(-1)
    grad, query = _innermost(grad), _innermost(query)
    grad_query = torch.zeros_like(query)
    scratch = Scratch(poses)
    for block in vote_blocks(poses, weight, stride):
        tile, n = Tile(block, poses, weight), block.samples
        votes = tile.votes(bias, scratch)
        logits, lengths = _dot(votes, query[n], unit, scratch)
        benefit, _ = _dot(votes, grad[n], False, scratch)  # how the loss changes with a coefficient
        gate = None if gates is None else block.read_gates(gates).unsqueeze(-1)
        if over_children:
            shares = (logits - log_masses[n]).exp_()
            if gate is not None:
                shares.masked_fill_(gate == 0, 0)
            benefit -= expected[n]
            weights = shares if gate is None else shares * gate
            grad_logits = weights * benefit
            if grad_gates is not None:
                block.add_gates(grad_gates, (shares * benefit).sum(-1))
        else:
            shares = _over_parents(logits, leaky)
            weights = shares if gate is None else shares * gate
            grad_logits = _softmax_backward(weights * benefit, shares)
            if grad_gates is not None:
                block.add_gates(grad_gates, (shares * benefit).sum(-1))
        weights, grad_logits = weights.unsqueeze(2), grad_logits.unsqueeze(2)
        if lengths is not None:
            votes /= lengths.unsqueeze(2)
        grad_query[n] += torch.mul(votes, grad_logits, out=scratch("products", *votes.shape)).sum(0)
        if lengths is None:
            grad_votes = torch.mul(grad_logits, query[n], out=votes)
        else:
            grad_votes = (query[n] - votes * logits.unsqueeze(2)) * (grad_logits / lengths.unsqueeze(2))
        grad_votes.addcmul_(weights, grad[n])
        tile.add_gradients(grad_votes, grad_poses, grad_weight, grad_bias)
    return grad_query.transpose(1, 2).contiguous()


def vote_sum(poses: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor | None, stride: int) -> Tensor:
    """`sum_i gate_i V_ij`, `(samples, parents, features)`: one matrix product of poses and weights, and no votes."""
    parents, features = weight.shape[3], poses.shape[4] * weight.shape[5]
    sums = at_least_float32(poses[:0]).new_zeros(count_samples(poses, weight, stride), features, parents)
    for block in pose_blocks(poses, weight, stride):
        tile, n = Tile(block, poses, weight), block.samples
        gate = None if gates is None else block.read_gates(gates)
        sums[n] += (tile.summed_poses(gate) @ tile.weight.flatten(0, 1)).view(sums[n].shape)
        if bias is not None:
            masses = tile.poses.new_ones(tile.poses.shape[:2]) if gate is None else gate
            sums[n] += torch.einsum("cn,cjk->nkj", masses, block.read_rows(bias).flatten(2))
    return sums.transpose(1, 2).contiguous()


def vote_sum_backward(
    grad: Tensor,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    stride: int,
    grad_poses: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    grad_gates: Tensor | None,
) -> None:
    grad = _innermost(grad)
    for block in pose_blocks(poses, weight, stride):
        tile, part = Tile(block, poses, weight), grad[block.samples]
        (groups, d, _), (children, samples, rows, _) = tile.weight.shape, tile.poses.shape
        flat = part.reshape(samples * rows, -1)
        gate = None if gates is None else block.read_gates(gates)
        if grad_poses is not None or grad_gates is not None:
            pulled = (flat @ tile.weight.flatten(0, 1).T).view(samples, rows, groups, 1, d)
            pulled = pulled.permute(2, 3, 0, 1, 4).expand(-1, children // groups, -1, -1, -1).flatten(0, 1)
            if grad_poses is not None:
                block.add(grad_poses, pulled if gate is None else pulled * gate[..., None, None])
            if grad_gates is not None:
                benefit = (pulled * tile.poses).sum((2, 3))
                if bias is not None:
                    offsets = block.read_rows(bias).flatten(2).expand(-1, tile.parents, -1)
                    benefit += torch.einsum("nkj,cjk->cn", part, offsets)
                block.add_gates(grad_gates, benefit)
        if grad_weight is not None:
            tile.add_weight_gradient(grad_weight, tile.summed_poses(gate).T @ flat)
        if grad_bias is not None:
            masses = tile.poses.new_ones(children, samples) if gate is None else gate
            block.add_rows(grad_bias, torch.einsum("cn,nkj->cjk", masses, part).unflatten(2, grad_bias.shape[-2:]))


def moments(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    mean: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass, mean, variance and benefit (empty without betas) with the coefficients of a Gaussian agreement, or
    uniform ones if there is none.

    A block's own mean is taken off its votes before they are squared, and blocks are joined by the parallel formula
    of Chan, Golub and LeVeque (1979): nothing is lost when the votes agree far from zero.
    """
    agreement = _gaussian(mean, precision, prior)
    count, parents, features = count_samples(poses, weight, stride), weight.shape[3], poses.shape[4] * weight.shape[5]
    mass = at_least_float32(poses[:0]).new_zeros(count, parents)
    centre, scatter = mass.new_zeros(2, count, features, parents)
    benefit = torch.zeros_like(mass if betas is not None else mass[:0])
    scratch = Scratch(poses)
    for block in vote_blocks(poses, weight, stride):
        votes, n = Tile(block, poses, weight).votes(bias, scratch), block.samples
        if agreement is None:
            weights = votes.new_full((votes.shape[0], votes.shape[1], parents), 1 / parents)
        else:
            deviations = torch.sub(votes, agreement.mean[n], out=scratch("products", *votes.shape))
            weights = _gaussian_logits(deviations, agreement, n, out=deviations).softmax(-1)
        if gates is not None:
            weights *= block.read_gates(gates).unsqueeze(-1)
        if betas is not None:
            benefit[n] += (weights * block.read_rows(betas).unsqueeze(1)).sum(0)
        added = weights.sum(0)
        weights = weights.unsqueeze(2)
        own = torch.mul(votes, weights, out=scratch("products", *votes.shape)).sum(0) / nonzero(added).unsqueeze(1)
        votes -= own
        own -= centre[n]  # how far the block's mean is from that of the blocks before
        share = (added / nonzero(mass[n] + added)).unsqueeze(1)
        scatter[n] += votes.square_().mul_(weights).sum(0) + own.square() * share * mass[n].unsqueeze(1)
        centre[n] += own * share
        mass[n] += added
    whole = mass.unsqueeze(1)
    scale = 1 / nonzero(whole + eps)
    result = centre * whole * scale
    # Around the returned mean, which eps pulls towards zero.
    variance = (scatter + whole * (centre - result).square()) * scale
    return mass, result.transpose(1, 2).contiguous(), variance.transpose(1, 2).contiguous(), benefit


def moments_backward(
    grad_mass: Tensor,
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_benefit: Tensor,
    mass: Tensor,
    mean_after: Tensor,
    variance_after: Tensor,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    mean: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
    stride: int,
    grad_poses: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    grad_gates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of mean, precision, prior and betas; empty for what there is not.

    With deviation e = V - mean and weight D = gate c, a vote's own gradient is D (pull + 2 spread e), and that of its
    weight is constant + sum_k (pull + spread e) e.
    """
    agreement = _gaussian(mean, precision, prior)
    scale = 1 / nonzero(mass + eps).unsqueeze(-1)
    spread = scale * grad_variance
    pull = scale * (grad_mean - 2 * eps * scale * mean_after * grad_variance)
    constant = grad_mass - (spread * variance_after).sum(-1)
    spread, pull, after = _innermost(spread), _innermost(pull), _innermost(mean_after)
    results = () if agreement is None else tuple(torch.zeros_like(x) for x in agreement)
    grad_betas = mass.new_empty(0) if betas is None else accumulator(betas)
    scratch = Scratch(poses)
    for block in vote_blocks(poses, weight, stride):
        tile, n = Tile(block, poses, weight), block.samples
        votes = tile.votes(bias, scratch)
        gate = None if gates is None else block.read_gates(gates).unsqueeze(-1)
        if agreement is None:
            shares = votes.new_full((votes.shape[0], votes.shape[1], votes.shape[3]), 1 / votes.shape[3])
        else:
            before = torch.sub(votes, agreement.mean[n], out=scratch("before", *votes.shape))
            buffer = scratch("products", *votes.shape)
            shares = _gaussian_logits(before, agreement, n, out=buffer).softmax(-1)
        weights = shares if gate is None else shares * gate
        deviations = votes.sub_(after[n])
        slope = torch.addcmul(pull[n], spread[n], deviations, out=scratch("slope", *votes.shape))
        benefit = torch.mul(slope, deviations, out=scratch("products", *votes.shape)).sum(2) + constant[n]
        if betas is not None:
            rows = block.read_rows(betas).unsqueeze(1)
            benefit += rows * grad_benefit[n]
            block.add_rows(grad_betas, (weights * grad_benefit[n]).sum(1))
        if grad_gates is not None:
            block.add_gates(grad_gates, (shares * benefit).sum(-1))
        grad_votes = slope.addcmul_(spread[n], deviations).mul_(weights.unsqueeze(2))
        if agreement is not None:
            grad_logits = _softmax_backward(weights * benefit, shares)
            results[2][n] += grad_logits.sum(0)
            torch.mul(before, grad_logits.unsqueeze(2), out=buffer)
            results[0][n] += buffer.sum(0)
            grad_votes.addcmul_(buffer, agreement.precision[n], value=-1)
            results[1][n] += buffer.mul_(before).sum(0)
        tile.add_gradients(grad_votes, grad_poses, grad_weight, grad_bias)
    if agreement is None:
        nothing = mass.new_empty(0)
        return nothing, nothing.clone(), nothing.clone(), grad_betas
    grad_mean_before, squares, grad_prior = results
    grad_mean_before *= agreement.precision
    return (
        grad_mean_before.transpose(1, 2).contiguous(),
        squares.mul_(-0.5).transpose(1, 2).contiguous(),
        grad_prior,
        grad_betas,
    )


def _gaussian(mean: Tensor | None, precision: Tensor | None, prior: Tensor | None) -> Gaussian | None:
    """The agreement with parents innermost."""
    if mean is None or precision is None or prior is None:
        return None
    return Gaussian(_innermost(mean), _innermost(precision), at_least_float32(prior))


def _gaussian_logits(deviations: Tensor, agreement: Gaussian, n: slice, out: Tensor) -> Tensor:
    squares = torch.mul(deviations, deviations, out=out).mul_(agreement.precision[n])
    return agreement.prior[n] - 0.5 * squares.sum(2)


def vote_sum_shapes(poses: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor | None, stride: int) -> Tensor:
    return _like_parents(poses, weight, stride)[1]


def weighted_sum_shapes(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    query: Tensor,
    unit: bool,
    over_children: bool,
    leaky: bool,
    stride: int,
) -> tuple[Tensor, Tensor]:
    masses, sums = _like_parents(poses, weight, stride)
    return sums, masses if over_children else masses.new_empty(0)


def moments_shapes(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    mean: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mass, mean = _like_parents(poses, weight, stride)
    return mass, mean, torch.empty_like(mean), mass.new_empty(0) if betas is None else torch.empty_like(mass)


def vote_sum_backward_shapes(*arguments: object) -> None:
    return None


def weighted_sum_backward_shapes(*arguments: Any) -> Tensor:
    return accumulator(arguments[7])


def moments_backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(arguments[4].new_empty(0) if x is None else accumulator(x) for x in arguments[11:15])


def _like_parents(poses: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """`(samples, parents)` and `(samples, parents, features)`."""
    mass = accumulator(poses, count_samples(poses, weight, stride), weight.shape[3])
    return mass, mass.new_empty(*mass.shape, poses.shape[4] * weight.shape[5])


def accumulator(x: Tensor, *shape: int) -> Tensor:
    """Zeros of x's shape, or another, to sum into: float32 at least."""
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.new_zeros(shape or x.shape, dtype=dtype)


def count_samples(poses: Tensor, weight: Tensor, stride: int) -> int:
    batch, _, height, width = poses.shape[:4]
    kernel = weight.shape[1]
    return batch * ((height - kernel) // stride + 1) * ((width - kernel) // stride + 1)


def _innermost(x: Tensor) -> Tensor:
    """`(samples, features, parents)` of `(samples, parents, features)`."""
    return at_least_float32(x).transpose(1, 2).contiguous()


def _dot(votes: Tensor, query: Tensor, unit: bool, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
    """Logits `(children, samples, parents)`, and the votes' lengths if it took them."""
    logits = torch.mul(votes, query, out=scratch("products", *votes.shape)).sum(2)
    if not unit:
        return logits, None
    lengths = nonzero(vector_norm(votes, dim=2))
    return logits / lengths, lengths


def _over_parents(logits: Tensor, leaky: bool) -> Tensor:
    if leaky:
        logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], dim=-1)
        return logits.softmax(-1)[..., :-1]
    if logits.shape[-1] < 16:  # too few for the vectors of the last dimension's softmax
        return logits.movedim(-1, 0).softmax(0).movedim(0, -1)
    return logits.softmax(-1)


def _softmax_backward(grad_shares: Tensor, shares: Tensor) -> Tensor:
    """Gradient of the logits, given shares times their gradient."""
    return grad_shares - shares * grad_shares.sum(-1, keepdim=True)
