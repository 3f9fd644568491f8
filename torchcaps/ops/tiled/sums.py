"""Weighted sums of votes for each parent, forward and backward, block by block."""

import math

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, count_samples
from torchcaps.ops.numerics import accumulator, at_least_float32, nonzero
from torchcaps.ops.tiled.blocks import Block, pose_blocks
from torchcaps.ops.tiled.tiles import Layout, dot_tiles


def weighted_sum(children: Children, query: Tensor, offset: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """Compute the weighted sums, and the logarithms of the denominators of a softmax over the children.

    A softmax over the children sums exponentials relative to the largest logit so far, and rescales when it grows.
    """
    layout, over_children = Layout(children, options), options.softmax == "children"
    query = layout.pack(query)
    sums = torch.zeros_like(query)
    largest = torch.full_like(sums[:, 0], -torch.inf) if over_children else sums.new_empty(0)
    masses = torch.zeros_like(largest)
    for tile in dot_tiles(layout, children, options):
        block = tile.block
        logits = tile.logits(layout.part(query, block.samples))
        if offset is not None:
            logits += block.read_rows(offset).unsqueeze(layout.samples)
        gate = None if children.gates is None else block.read_gates(children.gates).unsqueeze(layout.parents)
        total = layout.part(sums, block.samples)
        if over_children:
            highest, mass = layout.part(largest, block.samples), layout.part(masses, block.samples)
            if gate is not None:
                logits = logits.masked_fill(gate == 0, -torch.inf)
            higher = torch.maximum(highest, logits.amax(0))
            finite = higher.masked_fill(higher == -torch.inf, 0)  # no child is present yet
            weights = (logits - finite).exp_()
            if gate is not None:
                weights *= gate
            rescale = (highest - finite).exp_()
            mass.mul_(rescale).add_(weights.sum(0))
            total *= rescale.unsqueeze(1)
            highest.copy_(higher)
        else:
            weights = layout.over_parents(logits, options.leaky)
            if gate is not None:
                weights = weights * gate
        total += tile.sum(weights)
    if over_children:
        sums /= nonzero(masses).unsqueeze(1)
        # Infinity where the mass counts as 0: all coefficients are 0 in the backward pass.
        masses = layout.unpack(torch.where(masses < 1e-30, torch.inf, largest + masses.log()))
    return layout.unpack(sums), masses


def weighted_sum_backward(
    grads: tuple[Tensor],
    results: tuple[Tensor, Tensor],
    children: Children,
    query: Tensor,
    offset: Tensor | None,
    options: Options,
    into: Gradients,
) -> tuple[Tensor, Tensor | None]:
    """Add the gradients of the children to `into`; return those of query and offset.

    One pass is enough. With a softmax over the parents, each child is independent of the others. With one over the
    children, the mean of the coefficients' gradients is known beforehand: sum_i c_ij (grad_j . V_ij) = grad_j . sum_j.
    """
    layout, over_children = Layout(children, options), options.softmax == "children"
    (grad,), (sums, log_masses) = grads, results
    expected = layout.pack((grad * sums).sum(-1))
    grad, query = layout.pack(grad), layout.pack(query)
    log_masses = layout.pack(log_masses) if over_children else log_masses
    grad_query = torch.zeros_like(query)
    grad_offset = None if offset is None else accumulator(offset)
    for tile in dot_tiles(layout, children, options):
        block = tile.block
        own_query, own_grad = layout.part(query, block.samples), layout.part(grad, block.samples)
        logits, grad_shares = tile.logits(own_query), tile.dot(own_grad)
        if offset is not None:
            logits += block.read_rows(offset).unsqueeze(layout.samples)
        gate = None if children.gates is None else block.read_gates(children.gates).unsqueeze(layout.parents)
        if over_children:
            coefficients = (logits - layout.part(log_masses, block.samples)).exp_()  # without the gates
            if gate is not None:
                coefficients.masked_fill_(gate == 0, 0)
            grad_shares -= layout.part(expected, block.samples)
        else:
            coefficients = layout.over_parents(logits, options.leaky)
        shares = coefficients if gate is None else coefficients * gate
        if into.gates is not None:
            block.add_gates(into.gates, (coefficients * grad_shares).sum(layout.parents))
        grad_logits = shares * grad_shares
        if not over_children:
            grad_logits = layout.over_parents_backward(grad_logits, coefficients)
        if grad_offset is not None:
            block.add_rows(grad_offset, grad_logits.sum(layout.samples))
        layout.part(grad_query, block.samples).add_(tile.grad_query(grad_logits))
        tile.add_child_gradients(shares, own_grad, grad_logits, own_query, into)
    return layout.unpack(grad_query), grad_offset


def vote_sum(children: Children, options: Options) -> tuple[Tensor]:
    """Compute the sum of the votes, as one matrix product of poses and weights: no vote is computed."""
    if options.shared:
        return (_pose_sum(children, options).unsqueeze(1).repeat(1, children.parents, 1),)
    parents, rows, h = children.parents, children.poses.shape[4], children.weight.shape[5]
    sums = accumulator(children.poses, count_samples(children, options), rows, parents, h)
    for block in pose_blocks(children, options):
        poses, matrix = block.read(children.poses), _matrix(block, children.weight)
        gate = None if children.gates is None else block.read_gates(children.gates)
        total = sums[block.samples]
        total += (_group_sums(poses, gate, len(matrix)) @ matrix.flatten(0, 1)).view(total.shape)
        if children.bias is not None:
            masses = poses.new_ones(poses.shape[:2]) if gate is None else gate
            total += torch.einsum("cn,cjrh->nrjh", masses, block.read_rows(children.bias))
    return (sums.transpose(1, 2).flatten(2).contiguous(),)


def vote_sum_backward(
    grads: tuple[Tensor], results: tuple[()], children: Children, options: Options, into: Gradients
) -> tuple[()]:
    """Add the gradients of the children to `into`."""
    if options.shared:
        _pose_sum_backward(at_least_float32(grads[0]).sum(1), children, options, into)
        return ()
    parents, _, h = children.weight.shape[3:]
    grad = at_least_float32(grads[0]).unflatten(2, (-1, h)).transpose(1, 2).contiguous()
    for block in pose_blocks(children, options):
        poses, matrix, part = block.read(children.poses), _matrix(block, children.weight), grad[block.samples]
        (groups, d, _), (count, samples, rows, _) = matrix.shape, poses.shape
        gate = None if children.gates is None else block.read_gates(children.gates)
        flat = part.view(samples * rows, -1)
        if into.poses is not None or into.gates is not None:
            pulled = (flat @ matrix.flatten(0, 1).T).view(samples, rows, groups, 1, d)
            pulled = pulled.permute(2, 3, 0, 1, 4).expand(-1, count // groups, -1, -1, -1).flatten(0, 1)
            if into.poses is not None:
                block.add(into.poses, pulled if gate is None else pulled * gate[..., None, None])
            if into.gates is not None:
                grad_gates = (pulled * poses).sum((2, 3))
                if children.bias is not None:
                    bias = block.read_rows(children.bias).expand(-1, parents, -1, -1)
                    grad_gates += torch.einsum("nrjh,cjrh->cn", part, bias)
                block.add_gates(into.gates, grad_gates)
        if into.weight is not None:
            own = (_group_sums(poses, gate, groups).T @ flat).view(groups, d, parents, h)
            block.add_weight(into.weight, own.transpose(1, 2))
        if into.bias is not None:
            masses = poses.new_ones(count, samples) if gate is None else gate
            block.add_rows(into.bias, torch.einsum("cn,nrjh->cjrh", masses, part))
    return ()


def _pose_sum(children: Children, options: Options) -> Tensor:
    """Compute the sum of the poses, `(samples, features)`."""
    if children.gates is None:
        return at_least_float32(children.poses).sum((1, 2, 3)).flatten(1)
    sums = accumulator(children.poses, count_samples(children, options), 1, math.prod(children.poses.shape[4:]))
    for block in pose_blocks(children, options):
        sums[block.samples].baddbmm_(
            block.read_gates(children.gates).T.unsqueeze(1), block.read_samples(children.poses)
        )
    return sums.squeeze(1)


def _pose_sum_backward(grad: Tensor, children: Children, options: Options, into: Gradients) -> None:
    for block in pose_blocks(children, options):
        own = grad[block.samples].unsqueeze(2)
        if into.poses is not None:
            each = own.transpose(1, 2)
            gates = None if children.gates is None else block.read_gates(children.gates).T.unsqueeze(2)
            block.add_samples(into.poses, each if gates is None else each * gates)
        if into.gates is not None:
            block.add_gates(into.gates, torch.bmm(block.read_samples(children.poses), own).squeeze(2).T)


def _matrix(block: Block, weight: Tensor) -> Tensor:
    """Return the block's weights as matrices, `(groups, d, parents * h)`."""
    return block.read_weight(weight).transpose(1, 2).flatten(2)


def _group_sums(poses: Tensor, gate: Tensor | None, groups: int) -> Tensor:
    """Sum poses over children that share weights: `(children, samples, rows, d)` to `(samples * rows, groups * d)`."""
    poses = poses if gate is None else poses * gate[..., None, None]
    return poses.unflatten(0, (groups, -1)).sum(1).permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
