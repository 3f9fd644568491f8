"""Net sums of votes that are the poses themselves, forward and backward, block by block.

All work is products of matrices. No tensor has an entry for each child and parent, but those of one block.
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
    """Tensors of the parents that a net sum takes; see `PoseVotes.net_sum`."""

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

    def activations(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return weight, bias and scale of the activations, or None if there are none."""
        weight, bias, scale = self.activation_weight, self.activation_bias, self.activation_scale
        return None if weight is None or bias is None or scale is None else (weight, bias, scale)


class NetTile:
    """Everything that a block computes from its poses, in tensors `(samples, children, parents)`."""

    def __init__(self, block: Block, children: Children, net: Net):
        self.block, self.net = block, net
        self.poses = block.read_samples(children.poses)
        self.parents = children.parents
        gates = None if children.gates is None else block.read_gates(children.gates).T
        self.present = self.poses.new_ones(self.poses.shape[:2]) if gates is None else gates
        self.activation, self.products = self._activation()
        self.gates = self.present if self.activation is None else self.present * self.activation
        self.dots, self.inner, self.coefficients = self._coefficients()
        self.use = self._rows(net.use, net.use_weight)
        self.ignore = self._rows(net.ignore, net.ignore_weight)
        self.rates = self.coefficients  # phi without the gates
        if self.use is not None and self.ignore is not None:
            self.rates = (self.use + self.ignore) * self.coefficients - self.ignore

    def _activation(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the activations of the children, and the products that they follow from, `(samples, children)`."""
        given = self.net.activations()
        if given is None:
            return None, None
        weight, bias, scale = given
        rows = self.block.read_rows(_as_rows(weight))
        products = torch.einsum("scd,cd->sc", self.poses, rows)
        scale = at_least_float32(scale)[self.block.samples].unsqueeze(1)
        return (products * scale + self.block.read_rows(_as_rows(bias)).squeeze(1)).sigmoid(), products

    def _coefficients(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return the dot products, the logits before the link, and the coefficients."""
        query, slope, offset = self.net.query, self.net.slope, self.net.offset
        if query is None:
            return None, None, self.poses.new_full((1, 1, 1), 1 / self.parents)
        dots = inner = torch.bmm(self.poses, at_least_float32(query[self.block.samples]).transpose(1, 2))
        if slope is not None:
            inner = inner * self.block.read_rows(slope)
        if offset is not None:
            inner = inner + self.block.read_rows(offset)
        return dots, inner, (inner if slope is None else F.logsigmoid(inner)).softmax(2)

    def _rows(self, rows: Tensor | None, weight: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        values = self.block.read_rows(rows)
        return values if weight is None else values + self.poses @ at_least_float32(weight).T

    def sums(self) -> tuple[Tensor, Tensor]:
        phi = self.gates.unsqueeze(2) * self.rates
        if self.net.query is None and phi.shape[2] == 1:  # the same for all parents
            phi = phi.expand(-1, -1, self.parents)
        return torch.bmm(phi.transpose(1, 2), self.poses), phi.sum(1)


def net_sum(children: Children, net: Net, options: Options) -> tuple[Tensor, Tensor]:
    """Compute the net sums of the votes, and the sums of their factors; see `PoseVotes.net_sum`."""
    samples = count_samples(children, options)
    sums = accumulator(children.poses, samples, children.parents, math.prod(children.poses.shape[4:]))
    masses = accumulator(children.poses, samples, children.parents)
    for block in pose_blocks(children, options):
        total, mass = NetTile(block, children, net).sums()
        sums[block.samples] += total
        masses[block.samples] += mass
    return sums, masses


def net_sum_backward(
    grads: tuple[Tensor, Tensor], results: tuple[()], children: Children, net: Net, options: Options, into: Gradients
) -> tuple[Tensor | None, ...]:
    """Add the gradients of the children to `into`; return those of the tensors of `Net`."""
    grad_net = Net(*(None if x is None else accumulator(x) for x in net))
    for block in pose_blocks(children, options):
        tile = NetTile(block, children, net)
        grad_sums, grad_masses = (at_least_float32(x)[block.samples] for x in grads)
        _add_gradients(tile, grad_sums, grad_masses, grad_net, into)
    return tuple(grad_net)


def _add_gradients(tile: NetTile, grad_sums: Tensor, grad_masses: Tensor, grad_net: Net, into: Gradients) -> None:
    block, net, poses = tile.block, tile.net, tile.poses
    parents_shape = (*poses.shape[:2], tile.parents)
    gates, rates = tile.gates.unsqueeze(2), tile.rates.expand(parents_shape)
    grad_phi = torch.bmm(poses, grad_sums.transpose(1, 2)) + grad_masses.unsqueeze(1)
    grad_poses = torch.bmm(gates * rates, grad_sums)
    grad_gates = (grad_phi * rates).sum(2)
    grad_rates = grad_phi * gates
    grad_coefficients = grad_rates
    if tile.use is not None and tile.ignore is not None:
        for rows, weight, grad in (
            (grad_net.use, "use_weight", grad_rates * tile.coefficients),
            (grad_net.ignore, "ignore_weight", grad_rates * (tile.coefficients - 1)),
        ):
            assert rows is not None
            block.add_rows(rows, grad.sum(0))
            net_weight, grad_weight = getattr(net, weight), getattr(grad_net, weight)
            if net_weight is not None:
                grad_weight += grad.flatten(0, 1).T @ poses.flatten(0, 1)
                grad_poses += grad @ at_least_float32(net_weight)
        grad_coefficients = grad_rates * (tile.use + tile.ignore)
    if net.query is not None:
        assert tile.dots is not None
        assert tile.inner is not None
        products = tile.coefficients * grad_coefficients
        grad_logits = products - tile.coefficients * products.sum(2, keepdim=True)
        if net.slope is not None:
            grad_logits = grad_logits * (-tile.inner).sigmoid()
        if grad_net.offset is not None:
            block.add_rows(grad_net.offset, grad_logits.sum(0))
        if net.slope is not None and grad_net.slope is not None:
            block.add_rows(grad_net.slope, (grad_logits * tile.dots).sum(0))
            grad_logits = grad_logits * block.read_rows(net.slope)
        assert grad_net.query is not None
        grad_net.query[block.samples].add_(torch.bmm(grad_logits.transpose(1, 2), poses))
        grad_poses.baddbmm_(grad_logits, at_least_float32(net.query[block.samples]))
    if tile.activation is not None:
        _add_activation_gradients(tile, grad_gates * tile.present, grad_poses, grad_net)
        grad_gates = grad_gates * tile.activation
    if into.gates is not None:
        block.add_gates(into.gates, grad_gates.T)
    if into.poses is not None:
        block.add_samples(into.poses, grad_poses)


def _add_activation_gradients(tile: NetTile, grad: Tensor, grad_poses: Tensor, grad_net: Net) -> None:
    """Add what follows from the gradients of the activations, `(samples, children)`."""
    block, given, into = tile.block, tile.net.activations(), grad_net.activations()
    assert given is not None
    assert into is not None
    assert tile.activation is not None
    assert tile.products is not None
    grad = grad * tile.activation * (1 - tile.activation)
    into[2][block.samples] += (grad * tile.products).sum(1)
    block.add_rows(_as_rows(into[1]), grad.sum(0).unsqueeze(1))
    grad = grad * at_least_float32(given[2])[block.samples].unsqueeze(1)
    block.add_rows(_as_rows(into[0]), torch.einsum("sc,scd->cd", grad, tile.poses))
    grad_poses.addcmul_(grad.unsqueeze(2), block.read_rows(_as_rows(given[0])).unsqueeze(0))


def _as_rows(x: Tensor) -> Tensor:
    """Return a view of `(groups,)` or `(groups, features)` with the dimensions of rows, `(groups, 1, 1, n)`."""
    return x.view(len(x), 1, 1, -1)
