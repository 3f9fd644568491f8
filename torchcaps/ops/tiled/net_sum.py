"""Net sums of votes that are the poses themselves, forward and backward, block by block.

All work is products of matrices. No tensor has an entry for each child and parent, but those of one block. The backward
pass computes the sums of a block again, and PyTorch differentiates them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, count_samples
from torchcaps.ops.numerics import accumulator, at_least_float32
from torchcaps.ops.tiled.blocks import Block, pose_blocks


class Net(NamedTuple):
    """Tensors of the parents that a net sum takes; see `PoseVotes.net_sum`. The part of a block has the rows of its
    children, `(children or 1, ...)`, in place of those of the groups."""

    query: Tensor | None  # (samples, parents, features)
    slope: Tensor | None  # (groups, 1, 1, parents), like the rows below
    offset: Tensor | None
    use: Tensor | None
    use_weight: Tensor | None  # (parents, features)
    ignore: Tensor | None
    ignore_weight: Tensor | None
    activation_weight: Tensor | None  # (groups, features)
    activation_bias: Tensor | None  # (groups,)
    activation_scale: Tensor | None  # (samples,)


PER_SAMPLE, SHARED = ("query", "activation_scale"), ("use_weight", "ignore_weight")  # the other tensors have rows


def net_sum(children: Children, net: Net, options: Options) -> tuple[Tensor, Tensor]:
    """Compute the net sums of the votes, and the sums of their factors; see `PoseVotes.net_sum`."""
    samples = count_samples(children, options)
    sums = accumulator(children.poses, samples, children.parents, math.prod(children.poses.shape[4:]))
    masses = accumulator(children.poses, samples, children.parents)
    for block in pose_blocks(children, options):
        total, mass = _sums(*_read(block, children, net), children.parents)
        sums[block.samples] += total
        masses[block.samples] += mass
    return sums, masses


def net_sum_backward(
    grads: tuple[Tensor, Tensor], results: tuple[()], children: Children, net: Net, options: Options, into: Gradients
) -> tuple[Tensor | None, ...]:
    """Add the gradients of the children to `into`; return those of the tensors of `Net`."""
    grad_net = Net(*(None if x is None else accumulator(x) for x in net))
    for block in pose_blocks(children, options):
        poses, gates, part = _read(block, children, net)
        wanted = (into.poses, into.gates, *grad_net)
        leaves = [
            None if x is None else x.detach().requires_grad_(into_x is not None)
            for x, into_x in zip((poses, gates, *part), wanted, strict=True)
        ]
        with torch.enable_grad():
            sums = _sums(leaves[0], leaves[1], Net(*leaves[2:]), children.parents)
        of_sums = [at_least_float32(x)[block.samples] for x in grads]
        given = iter(torch.autograd.grad(sums, [x for x in leaves if x is not None and x.requires_grad], of_sums))
        grad_poses, grad_gates, *part_grads = (None if x is None else next(given) for x in wanted)
        if into.poses is not None:
            block.add_samples(into.poses, grad_poses)
        if into.gates is not None:
            block.add_gates(into.gates, grad_gates.T)
        for name, x, grad in zip(Net._fields, grad_net, part_grads, strict=True):
            if x is None:
                continue
            if name in SHARED:
                x += grad
            elif name in PER_SAMPLE:
                x[block.samples] += grad
            else:
                block.add_rows(_as_rows(x), grad)
    return tuple(grad_net)


def _read(block: Block, children: Children, net: Net) -> tuple[Tensor, Tensor | None, Net]:
    """Return a block's poses `(samples, children, features)`, gates `(samples, children)` and part of the net."""
    part: dict[str, Tensor | None] = {}
    for name, x in net._asdict().items():
        if x is None or name in SHARED:
            part[name] = None if x is None else at_least_float32(x)
        elif name in PER_SAMPLE:
            part[name] = at_least_float32(x[block.samples])
        else:
            part[name] = block.read_rows(_as_rows(x))
    gates = None if children.gates is None else block.read_gates(children.gates).T
    return block.read_samples(children.poses), gates, Net(**part)


def _sums(poses: Tensor, gates: Tensor | None, net: Net, parents: int) -> tuple[Tensor, Tensor]:
    """Return the net sums of a block and the sums of its factors phi, `(samples, children, parents)`."""
    phi = poses.new_full((1, 1, 1), 1 / parents)
    if net.query is not None:
        logits = torch.bmm(poses, net.query.transpose(1, 2))
        logits = logits if net.slope is None else logits * net.slope
        logits = logits if net.offset is None else logits + net.offset
        phi = (logits if net.slope is None else F.logsigmoid(logits)).softmax(2)
    if net.use is not None and net.ignore is not None:
        use = net.use if net.use_weight is None else net.use + poses @ net.use_weight.T
        ignore = net.ignore if net.ignore_weight is None else net.ignore + poses @ net.ignore_weight.T
        phi = (use + ignore) * phi - ignore
    weight, bias, scale = net.activation_weight, net.activation_bias, net.activation_scale
    if weight is not None and bias is not None and scale is not None:
        products = torch.einsum("scd,cd->sc", poses, weight)
        activations = (products * scale.unsqueeze(1) + bias.squeeze(1)).sigmoid()
        gates = activations if gates is None else gates * activations
    if gates is not None:
        phi = gates.unsqueeze(2) * phi
    phi = phi.expand(*poses.shape[:2], parents)
    return torch.bmm(phi.transpose(1, 2), poses), phi.sum(1)


def _as_rows(x: Tensor) -> Tensor:
    """Return a view of `(groups, ..., n)` or `(groups,)` with the dimensions of rows, `(groups, 1, 1, n)`."""
    return x.view(len(x), 1, 1, -1)
