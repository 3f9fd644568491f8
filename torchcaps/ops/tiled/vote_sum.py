"""Sums of the votes for each parent, forward and backward: matrix products of poses and weights, block by block."""

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, NoTensors, Options, count_samples
from torchcaps.ops.numerics import accumulator, at_least_float32
from torchcaps.ops.tiled.blocks import pose_blocks
from torchcaps.ops.tiled.part import Part


def vote_sum(children: Children, parents: NoTensors, options: Options) -> tuple[Tensor]:
    """Compute the sums. No vote is computed."""
    features = children.poses.shape[4] * children.weight.shape[5]
    sums = accumulator(children.poses, count_samples(children, options), children.parents, features)
    for block in pose_blocks(children, options):
        sums[block.samples] += _sum(Part(block, children))
    return (sums,)


def vote_sum_backward(
    grads: tuple[Tensor], results: tuple[()], children: Children, parents: NoTensors, options: Options, into: Gradients
) -> tuple[()]:
    """Add the gradients of the children to `into`."""
    for block in pose_blocks(children, options):
        part = Part(block, children, into)
        with torch.enable_grad():
            total = _sum(part)
        part.add_gradients([total], [at_least_float32(grads[0])[block.samples]])
    return ()


def _sum(part: Part) -> Tensor:
    """Return the sum of a block, `(samples, parents, features)`: poses are summed over children that share weights."""
    poses, gates = part.poses, part.gates
    gated = poses if gates is None else poses * gates[..., None, None]
    group_sums = gated.unflatten(0, (len(part.weight), -1)).sum(1)
    total = torch.einsum("gnrd,gjdh->njrh", group_sums, part.weight)
    if part.bias is not None:
        masses = poses.new_ones(poses.shape[:2]) if gates is None else gates
        total = total + torch.einsum("cn,cjrh->njrh", masses, part.bias)
    return total.flatten(2)
