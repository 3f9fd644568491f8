"""Sums of the votes for each parent, forward and backward: matrix products of poses and weights, block by block."""

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors, count_samples
from torchcaps.ops.numerics import accumulator, at_least_float32
from torchcaps.ops.tiled.blocks import Block, pose_blocks


def vote_sum(children: Children, parents: ParentTensors, options: Options) -> tuple[Tensor]:
    """Compute the sums. No vote is computed."""
    rows, h = children.poses.shape[4], children.weight.shape[5]
    sums = accumulator(children.poses, count_samples(children, options), rows, children.parents, h)
    for block in pose_blocks(children, options):
        poses, matrix = block.read(children.poses), _matrix(block, children.weight)
        gate = None if children.gates is None else block.of_gates(children.gates).contiguous()
        total = sums[block.samples]
        total += (_group_sums(poses, gate, len(matrix)) @ matrix.flatten(0, 1)).view(total.shape)
        if children.bias is not None:
            masses = poses.new_ones(poses.shape[:2]) if gate is None else gate
            total += torch.einsum("cn,cjrh->nrjh", masses, block.read_rows(children.bias))
    return (sums.transpose(1, 2).flatten(2).contiguous(),)


def vote_sum_backward(
    grads: Tensors, results: Tensors, children: Children, parents: ParentTensors, options: Options, into: Gradients
) -> ParentTensors:
    """Add the gradients of the children to `into`."""
    h = children.weight.shape[5]
    grad = at_least_float32(grads[0]).unflatten(2, (-1, h)).transpose(1, 2).contiguous()
    for block in pose_blocks(children, options):
        poses, matrix, part = block.read(children.poses), _matrix(block, children.weight), grad[block.samples]
        (groups, d, _), (count, samples, rows, _) = matrix.shape, poses.shape
        gate = None if children.gates is None else block.of_gates(children.gates).contiguous()
        flat = part.view(samples * rows, -1)
        if into.poses is not None or into.gates is not None:
            pulled = (flat @ matrix.flatten(0, 1).T).view(samples, rows, groups, 1, d)
            pulled = pulled.permute(2, 3, 0, 1, 4).expand(-1, count // groups, -1, -1, -1).flatten(0, 1)
            if into.poses is not None:
                block.add(into.poses, pulled if gate is None else pulled * gate[..., None, None])
            if into.gates is not None:
                grad_gates = (pulled * poses).sum((2, 3))
                if children.bias is not None:
                    bias = block.read_rows(children.bias).expand(-1, children.parents, -1, -1)
                    grad_gates += torch.einsum("nrjh,cjrh->cn", part, bias)
                block.of_gates(into.gates).add_(grad_gates)
        if into.weight is not None:
            grad_weight = (_group_sums(poses, gate, groups).T @ flat).view(groups, d, children.parents, h)
            block.of_weight(into.weight).add_(grad_weight.transpose(1, 2))
        if into.bias is not None:
            masses = poses.new_ones(count, samples) if gate is None else gate
            block.add_rows(into.bias, torch.einsum("cn,nrjh->cjrh", masses, part))
    return ParentTensors()


def _matrix(block: Block, weight: Tensor) -> Tensor:
    """Return the block's weights as matrices, `(groups, d, parents * h)`."""
    return at_least_float32(block.of_weight(weight)).transpose(1, 2).flatten(2)


def _group_sums(poses: Tensor, gate: Tensor | None, groups: int) -> Tensor:
    """Sum poses over children that share weights: `(children, samples, rows, d)` to `(samples * rows, groups * d)`."""
    poses = poses if gate is None else poses * gate[..., None, None]
    return poses.unflatten(0, (groups, -1)).sum(1).permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
