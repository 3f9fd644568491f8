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
    query: what votes are compared with, `(samples, parents, features)`.
    target, precision, prior: mean, precision and prior of a Gaussian agreement, the query of a dot agreement and
        None twice, or None three times; features as `(samples, parents, features)`, prior as `(samples, parents)`.
    grad_poses, grad_weight, grad_bias, grad_gates, grad_betas: what the backward functions *add* gradients to, so
        that iterations share them; None where nobody asks.
Sums are computed, and returned, in float32 at least.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.ops.numerics import at_least_float32, nonzero

BLOCK = 2**19  # entries of a block's votes: a few such tensors stay close to a core
SAMPLES = 64  # in a block, at most
LANES = 16  # what is innermost should be no shorter, if it can


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
        window += values.unflatten(1, window.shape[1:4])

    def read_weight(self, x: Tensor) -> Tensor:
        """`(groups, parents, d, h)` of `(groups, kernel, kernel, parents, d, h)`."""
        return at_least_float32(x[self.groups, self.place[0], self.place[1]])

    def add_weight(self, x: Tensor, values: Tensor) -> None:
        own = x[self.groups, self.place[0], self.place[1]]
        own += values

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
        # Children that share a row are added up first: one by one, as index_add_ does it, loses digits of many.
        per_group = self.total_channels // x.shape[0]
        first, last = self.channels.start // per_group, (self.channels.stop - 1) // per_group
        own = x[:, self.place[0], self.place[1]]
        if first == last:
            own[first] += values.sum(0)
        elif self.channels.start % per_group == self.channels.stop % per_group == 0:
            own[first : last + 1] += values.unflatten(0, (-1, per_group)).sum(1)
        else:
            own.index_add_(0, self._groups_of(x), values.to(x.dtype))

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
    samples = max(1, min(count_samples(poses, weight, stride), 8 * SAMPLES))
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
    image_step = max(1, min(batch, samples // (height * width)))
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


class Layout:
    """How the tensors of a block lie in memory: `(children, samples, features, parents)` or, where parents are too few
    to be innermost, `(children, parents, features, samples)`.

    Attributes:
        parents, samples: their dimensions in `(children, ., .)`.
    """

    def __init__(self, poses: Tensor, weight: Tensor, stride: int):
        self.rows, self.count, self.h = poses.shape[4], weight.shape[3], weight.shape[5]
        self.parents_last = self.count >= min(LANES, count_samples(poses, weight, stride))
        self.parents, self.samples = (2, 1) if self.parents_last else (1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """`(samples, parents)` or `(samples, parents, features)` in this layout."""
        x = at_least_float32(x)
        if x.dim() == 2:
            return x if self.parents_last else x.T.contiguous()
        if self.parents_last:
            return x.transpose(1, 2).contiguous()
        return x.unflatten(2, (self.rows, self.h)).permute(1, 3, 2, 0).flatten(1, 2).contiguous()

    def unpack(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x if self.parents_last else x.T.contiguous()
        if self.parents_last:
            return x.transpose(1, 2).contiguous()
        return x.unflatten(1, (self.h, self.rows)).permute(3, 0, 2, 1).flatten(2).contiguous()

    def part(self, x: Tensor, samples: slice) -> Tensor:
        """A view of some samples."""
        return x[samples] if self.parents_last else x[..., samples]


class Tile:
    """A block's poses and weights, and the way to its votes and back.

    Attributes:
        poses: `(children, samples, rows, d)`.
        weight: `(groups, parents, d, h)`.
    """

    def __init__(self, block: Block, layout: Layout, poses: Tensor, weight: Tensor):
        self.block, self.layout = block, layout
        self.poses = block.read(poses)
        self.weight = block.read_weight(weight)
        groups, children = self.weight.shape[0], self.poses.shape[0]
        # The two sides of the product whose result is the votes, d in the middle.
        if layout.parents_last:
            self.left = self.poses.view(groups, -1, self.poses.shape[3])
            self.right = self.weight.permute(0, 2, 3, 1).flatten(2)
        else:
            weight = self.weight.transpose(2, 3).flatten(1, 2)
            self.left = weight.repeat_interleave(children // groups, 0) if children > groups else weight
            self.right = self.poses.permute(0, 3, 2, 1).flatten(2)

    def votes(self, bias: Tensor | None) -> Tensor:
        """The votes, to do with as one likes."""
        votes = torch.bmm(self.left, self.right)
        children, samples = self.poses.shape[:2]
        if self.layout.parents_last:
            votes = votes.view(children, samples, -1, self.layout.count)
            if bias is not None:
                votes += self.block.read_rows(bias).flatten(2).transpose(1, 2).unsqueeze(1)
        else:
            votes = votes.view(children, self.layout.count, -1, samples)
            if bias is not None:
                votes += self.block.read_rows(bias).transpose(2, 3).flatten(2).unsqueeze(3)
        return votes

    def add_gradients(
        self, grad: Tensor, grad_poses: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
    ) -> None:
        """Add what follows from the gradient of the votes."""
        children, samples, rows, d = self.poses.shape
        groups, parents, _, h = self.weight.shape
        product = grad.view(self.left.shape[0], self.left.shape[1], -1)
        if self.layout.parents_last:
            if grad_poses is not None:
                self.block.add(grad_poses, torch.bmm(product, self.right.transpose(1, 2)).view(self.poses.shape))
            if grad_weight is not None:
                own = torch.bmm(self.left.transpose(1, 2), product).view(groups, d, h, parents)
                self.block.add_weight(grad_weight, own.permute(0, 3, 1, 2))
            if grad_bias is not None:
                self.block.add_rows(grad_bias, grad.sum(1).transpose(1, 2).unflatten(2, (rows, h)))
        else:
            if grad_poses is not None:
                own = torch.bmm(self.left.transpose(1, 2), product).view(children, d, rows, samples)
                self.block.add(grad_poses, own.permute(0, 3, 2, 1))
            if grad_weight is not None:
                own = torch.bmm(product, self.right.transpose(1, 2)).view(groups, -1, parents, h, d).sum(1)
                self.block.add_weight(grad_weight, own.transpose(2, 3))
            if grad_bias is not None:
                self.block.add_rows(grad_bias, grad.sum(3).unflatten(2, (h, rows)).transpose(2, 3))


class DotTile(Tile):
    """The votes of a block and their products with vectors of the parents."""

    def __init__(
        self, block: Block, layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None, unit: bool = False
    ):
        super().__init__(block, layout, poses, weight)
        self.block_votes = self.votes(bias)
        self.lengths = nonzero(vector_norm(self.block_votes, dim=2)) if unit else None

    def dot(self, vectors: Tensor) -> Tensor:
        """`V_ij . vector_j`."""
        return (self.block_votes * vectors).sum(2)

    def logits(self, query: Tensor) -> Tensor:
        return self.dot(query) if self.lengths is None else self.dot(query) / self.lengths

    def sum(self, weights: Tensor) -> Tensor:
        """`sum_i weight_ij V_ij`."""
        return (self.block_votes * weights.unsqueeze(2)).sum(0)

    def grad_query(self, grad_logits: Tensor) -> Tensor:
        return self.sum(grad_logits if self.lengths is None else grad_logits / self.lengths)

    def add_child_gradients(
        self,
        weights: Tensor,
        grad: Tensor,
        grad_logits: Tensor,
        query: Tensor,
        grad_poses: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
    ) -> None:
        """Of `V_ij`: `weight_ij grad_j + grad_logit_ij d logit_ij / d V_ij`."""
        if self.lengths is None:
            grad_votes = torch.mul(query, grad_logits.unsqueeze(2), out=self.block_votes)
        else:
            logits = self.logits(query)
            grad_logits = grad_logits / self.lengths
            grad_votes = self.block_votes.mul_(-(grad_logits * logits / self.lengths).unsqueeze(2))
            grad_votes.addcmul_(query, grad_logits.unsqueeze(2))
        self.add_gradients(grad_votes.addcmul_(grad, weights.unsqueeze(2)), grad_poses, grad_weight, grad_bias)


class PulledTile:
    """What `DotTile` gives, where children share weights, without a vote: `(pose W) . q = pose . (W q)`, and W q is
    needed once for all of them."""

    def __init__(self, block: Block, layout: Layout, poses: Tensor, weight: Tensor):
        self.block, self.layout = block, layout
        weight = block.read_weight(weight)
        self.groups, _, self.d, self.h = weight.shape
        self.weight = weight.transpose(0, 1).flatten(1, 2)  # (parents, groups * d, h)
        poses = block.read(poses)
        self.samples, self.rows = poses.shape[1:3]
        # (groups, samples, children of a group, rows * d)
        self.poses = poses.view(self.groups, -1, self.samples, self.rows * self.d).transpose(1, 2)

    def dot(self, vectors: Tensor) -> Tensor:
        return self._from_groups(self.poses @ self._pull(vectors))

    logits = dot

    def sum(self, weights: Tensor) -> Tensor:
        sums = torch.bmm(self._parents_first(self._push(weights)).transpose(1, 2), self.weight)
        sums = sums.view(-1, self.samples, self.rows * self.h).transpose(0, 1)  # (samples, parents, features)
        return self.layout.pack(sums)

    grad_query = sum

    def add_child_gradients(
        self,
        weights: Tensor,
        grad: Tensor,
        grad_logits: Tensor,
        query: Tensor,
        grad_poses: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
    ) -> None:
        for factors, vectors in ((weights, grad), (grad_logits, query)):
            if grad_poses is not None:
                own = self._to_groups(factors) @ self._pull(vectors).transpose(2, 3)
                own = own.transpose(1, 2).flatten(0, 1).unflatten(2, (self.rows, self.d))
                self.block.add(grad_poses, own)
            if grad_weight is not None:
                product = torch.bmm(self._parents_first(self._push(factors)), self._rows(vectors))
                self.block.add_weight(grad_weight, product.unflatten(1, (self.groups, self.d)).transpose(0, 1))

    def _rows(self, vectors: Tensor) -> Tensor:
        """`(parents, samples * rows, h)` of the parents' vectors."""
        vectors = self.layout.unpack(vectors).unflatten(2, (self.rows, self.h))
        return vectors.transpose(0, 1).flatten(1, 2)

    def _pull(self, vectors: Tensor) -> Tensor:
        """`W q`, `(groups, samples, rows * d, parents)`."""
        pulled = torch.bmm(self.weight, self._rows(vectors).transpose(1, 2))
        pulled = pulled.view(-1, self.groups, self.d, self.samples, self.rows)
        return pulled.permute(1, 3, 4, 2, 0).flatten(2, 3)

    def _push(self, weights: Tensor) -> Tensor:
        """Sums over the children of a group, `(groups, samples, rows * d, parents)`."""
        return self.poses.transpose(2, 3) @ self._to_groups(weights)

    def _parents_first(self, pushed: Tensor) -> Tensor:
        """`(parents, groups * d, samples * rows)`."""
        pushed = pushed.unflatten(2, (self.rows, self.d)).permute(4, 0, 3, 1, 2)
        return pushed.flatten(3).flatten(1, 2)

    def _from_groups(self, x: Tensor) -> Tensor:
        """From `(groups, samples, children of a group, parents)` to the layout."""
        order = (0, 2, 1, 3) if self.layout.parents_last else (0, 2, 3, 1)
        return x.permute(order).flatten(0, 1)

    def _to_groups(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (self.groups, -1))
        return x.permute((0, 2, 1, 3) if self.layout.parents_last else (0, 3, 1, 2))


def _dot_tiles(
    layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None, unit: bool, stride: int
) -> Iterator[DotTile | PulledTile]:
    shared = poses.shape[1] > weight.shape[0]
    if not shared or unit or bias is not None:
        for block in vote_blocks(poses, weight, stride):
            yield DotTile(block, layout, poses, weight, bias, unit)
        return
    # Logits are the largest now, or what is pulled through the weights of a group.
    parents, per_group = weight.shape[3], poses.shape[1] // weight.shape[0]
    pairs = BLOCK // (parents * max(1, -(-poses.shape[4] * poses.shape[5] // per_group)))
    for block in blocks(poses, weight, stride, max(1, pairs), min(max(1, pairs), SAMPLES)):
        yield PulledTile(block, layout, poses, weight)


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
    layout = Layout(poses, weight, stride)
    query = layout.pack(query)
    sums = torch.zeros_like(query)
    largest = torch.full_like(sums[:, 0], -torch.inf) if over_children else sums.new_empty(0)
    masses = torch.zeros_like(largest)
    for tile in _dot_tiles(layout, poses, weight, bias, unit, stride):
        block = tile.block
        logits = tile.logits(layout.part(query, block.samples))
        gate = None if gates is None else block.read_gates(gates).unsqueeze(layout.parents)
        total = layout.part(sums, block.samples)
        if over_children:
            highest, mass = layout.part(largest, block.samples), layout.part(masses, block.samples)
            if gate is not None:
                logits = logits.masked_fill(gate == 0, -torch.inf)
            higher = torch.maximum(highest, logits.amax(0))
            finite = higher.masked_fill(higher == -torch.inf, 0)  # nobody is there yet
            weights = (logits - finite).exp_()
            if gate is not None:
                weights *= gate
            rescale = (highest - finite).exp_()
            mass.mul_(rescale).add_(weights.sum(0))
            total *= rescale.unsqueeze(1)
            highest.copy_(higher)
        else:
            weights = _over_parents(logits, layout, leaky)
            if gate is not None:
                weights = weights * gate
        total += tile.sum(weights)
    if over_children:
        sums /= nonzero(masses).unsqueeze(1)
        masses = layout.unpack(largest + masses.log())
    return layout.unpack(sums), masses


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
    layout = Layout(poses, weight, stride)
    expected = layout.pack((grad * sums).sum(-1))
    grad, query = layout.pack(grad), layout.pack(query)
    log_masses = layout.pack(log_masses) if over_children else log_masses
    grad_query = torch.zeros_like(query)
    for tile in _dot_tiles(layout, poses, weight, bias, unit, stride):
        block = tile.block
        own_query, own_grad = layout.part(query, block.samples), layout.part(grad, block.samples)
        logits, benefit = tile.logits(own_query), tile.dot(own_grad)  # benefit: how the loss changes with a coefficient
        gate = None if gates is None else block.read_gates(gates).unsqueeze(layout.parents)
        if over_children:
            shares = (logits - layout.part(log_masses, block.samples)).exp_()
            if gate is not None:
                shares.masked_fill_(gate == 0, 0)
            benefit -= layout.part(expected, block.samples)
        else:
            shares = _over_parents(logits, layout, leaky)
        weights = shares if gate is None else shares * gate
        if grad_gates is not None:
            block.add_gates(grad_gates, (shares * benefit).sum(layout.parents))
        grad_logits = weights * benefit
        if not over_children:
            grad_logits = _softmax_backward(grad_logits, shares, layout)
        layout.part(grad_query, block.samples).add_(tile.grad_query(grad_logits))
        tile.add_child_gradients(weights, own_grad, grad_logits, own_query, grad_poses, grad_weight, grad_bias)
    return layout.unpack(grad_query)


def vote_sum(poses: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor | None, stride: int) -> Tensor:
    """`sum_i gate_i V_ij`, `(samples, parents, features)`: one matrix product of poses and weights, and no votes."""
    parents, rows, h = weight.shape[3], poses.shape[4], weight.shape[5]
    sums = accumulator(poses, count_samples(poses, weight, stride), rows, parents, h)
    for block in pose_blocks(poses, weight, stride):
        children, matrix = block.read(poses), _matrix(block, weight)
        gate = None if gates is None else block.read_gates(gates)
        total = sums[block.samples]
        total += (_group_sums(children, gate, len(matrix)) @ matrix.flatten(0, 1)).view(total.shape)
        if bias is not None:
            masses = children.new_ones(children.shape[:2]) if gate is None else gate
            total += torch.einsum("cn,cjrh->nrjh", masses, block.read_rows(bias))
    return sums.transpose(1, 2).flatten(2)


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
    parents, _, h = weight.shape[3:]
    grad = at_least_float32(grad).unflatten(2, (-1, h)).transpose(1, 2).contiguous()
    for block in pose_blocks(poses, weight, stride):
        children, matrix, part = block.read(poses), _matrix(block, weight), grad[block.samples]
        (groups, d, _), (count, samples, rows, _) = matrix.shape, children.shape
        gate = None if gates is None else block.read_gates(gates)
        flat = part.view(samples * rows, -1)
        if grad_poses is not None or grad_gates is not None:
            pulled = (flat @ matrix.flatten(0, 1).T).view(samples, rows, groups, 1, d)
            pulled = pulled.permute(2, 3, 0, 1, 4).expand(-1, count // groups, -1, -1, -1).flatten(0, 1)
            if grad_poses is not None:
                block.add(grad_poses, pulled if gate is None else pulled * gate[..., None, None])
            if grad_gates is not None:
                benefit = (pulled * children).sum((2, 3))
                if bias is not None:
                    offsets = block.read_rows(bias).expand(-1, parents, -1, -1)
                    benefit += torch.einsum("nrjh,cjrh->cn", part, offsets)
                block.add_gates(grad_gates, benefit)
        if grad_weight is not None:
            own = (_group_sums(children, gate, groups).T @ flat).view(groups, d, parents, h)
            block.add_weight(grad_weight, own.transpose(1, 2))
        if grad_bias is not None:
            masses = children.new_ones(count, samples) if gate is None else gate
            block.add_rows(grad_bias, torch.einsum("cn,nrjh->cjrh", masses, part))


def _matrix(block: Block, weight: Tensor) -> Tensor:
    """`(groups, d, parents * h)`."""
    return block.read_weight(weight).transpose(1, 2).flatten(2)


def _group_sums(poses: Tensor, gate: Tensor | None, groups: int) -> Tensor:
    """Sums over children that share weights of `(children, samples, rows, d)`: `(samples * rows, groups * d)`."""
    poses = poses if gate is None else poses * gate[..., None, None]
    return poses.unflatten(0, (groups, -1)).sum(1).permute(1, 2, 0, 3).flatten(2).flatten(0, 1)


def moments(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass, mean, variance and benefit (empty without betas) with the coefficients of a Gaussian or a dot
    agreement, or uniform ones if there is none.

    A block's own mean is taken off its votes before they are squared, and blocks are joined by the parallel formula
    of Chan, Golub and LeVeque (1979): nothing is lost when the votes agree far from zero.
    """
    layout = Layout(poses, weight, stride)
    agreement = [layout.pack(x) for x in (target, precision, prior) if x is not None]
    count, features = count_samples(poses, weight, stride), layout.rows * layout.h
    mass = layout.pack(accumulator(poses, count, layout.count))
    centre = layout.pack(accumulator(poses, count, layout.count, features))
    scatter = torch.zeros_like(centre)
    benefit = torch.zeros_like(mass if betas is not None else mass[:0, :0])
    for block in vote_blocks(poses, weight, stride):
        votes = Tile(block, layout, poses, weight).votes(bias)
        own_mass, own_centre, own_scatter = (layout.part(x, block.samples) for x in (mass, centre, scatter))
        own = [layout.part(x, block.samples) for x in agreement]
        compared = _compared(votes, own)
        weights = _shares(compared, own, layout, scratch=compared)
        if gates is not None:
            weights = weights * block.read_gates(gates).unsqueeze(layout.parents)
        if betas is not None:
            rows = block.read_rows(betas).unsqueeze(layout.samples)
            layout.part(benefit, block.samples).add_((weights * rows).sum(0))
        added = weights.sum(0)
        weights = weights.unsqueeze(2)
        step = (votes * weights).sum(0) / nonzero(added).unsqueeze(1)
        votes -= step
        step -= own_centre  # how far this block's mean is from that of the blocks before
        share = (added / nonzero(own_mass + added)).unsqueeze(1)
        own_scatter += votes.square_().mul_(weights).sum(0) + step.square() * share * own_mass.unsqueeze(1)
        own_centre += step.mul_(share)
        own_mass += added
    whole = mass.unsqueeze(1)
    scale = 1 / nonzero(whole + eps)
    result = centre * whole * scale
    # Around the returned mean, which eps pulls towards zero.
    variance = (scatter + whole * (centre - result).square()) * scale
    return (
        layout.unpack(mass),
        layout.unpack(result),
        layout.unpack(variance),
        layout.unpack(benefit).flatten(int(betas is not None)),
    )


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
    target: Tensor | None,
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
    """Gradients of target, precision, prior and betas; empty for what there is not.

    With deviation e = V - mean and weight D = gate c, a vote's own gradient is D (pull + 2 spread e), and that of its
    weight is constant + sum_k (pull + spread e) e.
    """
    layout = Layout(poses, weight, stride)
    agreement = [layout.pack(x) for x in (target, precision, prior) if x is not None]
    scale = 1 / nonzero(mass + eps).unsqueeze(-1)
    spread = scale * grad_variance
    pull = scale * (grad_mean - 2 * eps * scale * mean_after * grad_variance)
    constant = layout.pack(grad_mass - (spread * variance_after).sum(-1))
    spread, pull, after = layout.pack(spread), layout.pack(pull), layout.pack(mean_after)
    if betas is None:
        grad_betas = mass.new_empty(0)
    else:
        grad_betas, grad_benefit = accumulator(betas), layout.pack(grad_benefit)
    found = [torch.zeros_like(x) for x in agreement]
    for block in vote_blocks(poses, weight, stride):
        tile = Tile(block, layout, poses, weight)
        votes = tile.votes(bias)
        gate = None if gates is None else block.read_gates(gates).unsqueeze(layout.parents)
        own, own_found = ([layout.part(x, block.samples) for x in of] for of in (agreement, found))
        compared, buffer = _compared(votes, own), torch.empty_like(votes)
        shares = _shares(compared, own, layout, scratch=buffer)
        weights = shares if gate is None else shares * gate
        # In place, unless the votes themselves are still to be compared with a query.
        deviations = torch.sub(votes, layout.part(after, block.samples), out=buffer if len(own) == 1 else votes)
        own_spread = layout.part(spread, block.samples)
        slope = torch.addcmul(layout.part(pull, block.samples), own_spread, deviations)
        benefit = (slope * deviations).sum(2) + layout.part(constant, block.samples)
        if betas is not None:
            own_benefit = layout.part(grad_benefit, block.samples)
            benefit += block.read_rows(betas).unsqueeze(layout.samples) * own_benefit
            block.add_rows(grad_betas, (weights * own_benefit).sum(layout.samples))
        if grad_gates is not None:
            block.add_gates(grad_gates, (shares * benefit).sum(layout.parents))
        grad_votes = slope.addcmul_(own_spread, deviations).mul_(weights.unsqueeze(2))
        if own:
            grad_logits = _softmax_backward(weights * benefit, shares, layout)
            torch.mul(compared, grad_logits.unsqueeze(2), out=buffer)
            own_found[0] += buffer.sum(0)
            if len(own) == 1:
                grad_votes.addcmul_(own[0], grad_logits.unsqueeze(2))
            else:
                grad_votes.addcmul_(buffer, own[1], value=-1)
                own_found[1] += buffer.mul_(compared).sum(0)
                own_found[2] += grad_logits.sum(0)
        tile.add_gradients(grad_votes, grad_poses, grad_weight, grad_bias)
    if precision is not None:
        found[0] *= agreement[1]
        found[1] *= -0.5
    grad_target, grad_precision, grad_prior = [
        *(layout.unpack(x) for x in found),
        *(mass.new_empty(0) for _ in range(3 - len(found))),
    ]
    return grad_target, grad_precision, grad_prior, grad_betas


def _compared(votes: Tensor, agreement: list[Tensor]) -> Tensor:
    """What logits follow from: deviations from a Gaussian's mean, or the votes as they are."""
    return votes - agreement[0] if len(agreement) == 3 else votes


def _shares(compared: Tensor, agreement: list[Tensor], layout: Layout, scratch: Tensor) -> Tensor:
    """Coefficients of a block. A Gaussian's squares are written to `scratch`, nothing else is."""
    if not agreement:
        return torch.full_like(compared[:, :, 0], 1 / layout.count)
    if len(agreement) == 1:
        return _over_parents((compared * agreement[0]).sum(2), layout)
    _, precision, prior = agreement
    squares = torch.mul(compared, compared, out=scratch).mul_(precision)
    return _over_parents(prior - 0.5 * squares.sum(2), layout)


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
    target: Tensor | None,
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


def _over_parents(logits: Tensor, layout: Layout, leaky: bool = False) -> Tensor:
    if not leaky:
        return logits.softmax(layout.parents)
    indifferent = torch.zeros_like(logits.narrow(layout.parents, 0, 1))
    shares = torch.cat([logits, indifferent], dim=layout.parents).softmax(layout.parents)
    return shares.narrow(layout.parents, 0, layout.count)


def _softmax_backward(grad_shares: Tensor, shares: Tensor, layout: Layout) -> Tensor:
    """Gradient of the logits, given the shares and their product with their gradient."""
    return grad_shares - shares * grad_shares.sum(layout.parents, keepdim=True)
