"""Net sums of votes that are the poses themselves, forward and backward, block by block.

All work is products of matrices. No tensor has an entry for each child and parent, but those of one block. The backward
pass computes the sums of a block again, and PyTorch differentiates them.
"""

import math
from collections.abc import Callable
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

    query: Tensor | None = None  # (samples, parents, features)
    slope: Tensor | None = None  # (groups, 1, 1, parents), like the rows below
    offset: Tensor | None = None
    use: Tensor | None = None
    use_weight: Tensor | None = None  # (parents, features)
    ignore: Tensor | None = None
    ignore_weight: Tensor | None = None
    activation_weight: Tensor | None = None  # (groups, 1, 1, features)
    activation_bias: Tensor | None = None  # (groups, 1, 1, 1)
    activation_scale: Tensor | None = None  # (samples,)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> "Net":
        """Return the tensors with a function of those that have a row for each group."""
        rows = {name: getattr(self, name) for name in self._fields if name not in (*PER_SAMPLE, *SHARED)}
        return self._replace(**{name: None if x is None else function(x) for name, x in rows.items()})


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
        leaf_grads = iter(torch.autograd.grad([x for x, _ in known], leaves, [y for _, y in known]))
        if into.poses is not None:
            grad_poses = block.of_samples(into.poses)
            grad_poses += next(leaf_grads).unflatten(2, grad_poses.shape[2:])
        if into.gates is not None:
            block.of_gates(into.gates).add_(next(leaf_grads).T)
        for name, total in grad_net._asdict().items():
            if total is None:
                continue
            if name in SHARED:
                total += next(leaf_grads)
            elif name in PER_SAMPLE:
                total[block.samples] += next(leaf_grads)
            else:
                block.add_rows(total, next(leaf_grads))
    return tuple(grad_net)


def _read(block: Block, children: Children, net: Net) -> tuple[Tensor, Tensor | None, Net]:
    """Return a block's poses `(samples, children, features)`, gates `(samples, children)` and part of the net."""
    of_samples = {name: x[block.samples] for name, x in net._asdict().items() if name in PER_SAMPLE and x is not None}
    part = net.map_rows(block.read_rows)._replace(**of_samples)
    part = Net(*(None if x is None else at_least_float32(x).detach() for x in part))
    gates = None if children.gates is None else block.of_gates(children.gates).T.detach()
    return block.of_samples(children.poses).flatten(2).detach(), gates, part


def _sums(poses: Tensor, gates: Tensor | None, net: Net, parents: int) -> tuple[Tensor, Tensor]:
    """Return the net sums of a block and the sums of its factors."""
    phi = net_factors(poses, gates, net, parents)
    return torch.bmm(phi.transpose(1, 2), poses), phi.sum(1)


def net_factors(poses: Tensor, gates: Tensor | None, net: Net, parents: int) -> Tensor:
    """Return the factors phi of some children, `(samples, children, parents)`.

    Args:
        poses, gates: `(samples, children, features)`, and `(samples, children)` or None.
        net: tensors with rows of these children.
    """
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
    return phi.expand(*poses.shape[:2], parents)
