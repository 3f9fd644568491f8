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
        for x, wanted in ((poses, into.poses), (gates, into.gates), *zip(part, grad_net, strict=True)):
            if x is not None:
                x.requires_grad_(wanted is not None)
        with torch.enable_grad():
            sums = _sums(poses, gates, part, children.parents)
        # Without a net and gates the factors are constants, and their sums have no gradients.
        known = [(x, at_least_float32(y)[block.samples]) for x, y in zip(sums, grads, strict=True) if x.requires_grad]
        leaves = [x for x in (poses, gates, *part) if x is not None and x.requires_grad]
        given = iter(torch.autograd.grad([x for x, _ in known], leaves, [y for _, y in known]))
        if into.poses is not None:
            block.add_samples(into.poses, next(given))
        if into.gates is not None:
            block.add_gates(into.gates, next(given).T)
        for name, total in grad_net._asdict().items():
            if total is None:
                continue
            if name in SHARED:
                total += next(given)
            elif name in PER_SAMPLE:
                total[block.samples] += next(given)
            else:
                block.add_rows(_as_rows(total), next(given))
    return tuple(grad_net)


def _read(block: Block, children: Children, net: Net) -> tuple[Tensor, Tensor | None, Net]:
    """Return a block's poses `(samples, children, features)`, gates `(samples, children)` and part of the net."""

    def read(name: str, x: Tensor) -> Tensor:
        if name in SHARED:
            return at_least_float32(x)
        return at_least_float32(x[block.samples]) if name in PER_SAMPLE else block.read_rows(_as_rows(x))

    part = Net(**{name: None if x is None else read(name, x).detach() for name, x in net._asdict().items()})
    gates = None if children.gates is None else block.read_gates(children.gates).T.detach()
    return block.read_samples(children.poses).detach(), gates, part


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
