"""Weighted sums of votes for each parent, forward and backward, block by block."""

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors
from torchcaps.ops.numerics import accumulator, nonzero
from torchcaps.ops.tiled.tiles import Layout, dot_tiles


def weighted_sum(children: Children, parents: ParentTensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute the weighted sums, and the logarithms of the denominators of a softmax over the children.

    A softmax over the children sums exponentials relative to the largest logit so far, and rescales when it grows.
    """
    assert parents.query is not None
    layout, over_children = Layout(children, options), options.softmax == "children"
    query, offset = layout.pack(parents.query), parents.offset
    sums = torch.zeros_like(query)
    largest = torch.full_like(sums[:, 0], -torch.inf) if over_children else sums.new_empty(0)
    masses = torch.zeros_like(largest)
    for tile in dot_tiles(layout, children, options):
        block = tile.block
        logits = tile.logits(layout.part(query, block.samples))
        if offset is not None:
            logits += block.read_rows(offset).unsqueeze(layout.samples)
        gate = None if children.gates is None else block.of_gates(children.gates).contiguous().unsqueeze(layout.parents)
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
    grads: Tensors, results: Tensors, children: Children, parents: ParentTensors, options: Options, into: Gradients
) -> ParentTensors:
    """Add the gradients of the children to `into`; return those of query and offset.

    One pass is enough. With a softmax over the parents, each child is independent of the others. With one over the
    children, the mean of the coefficients' gradients is known beforehand: sum_i c_ij (grad_j . V_ij) = grad_j . sum_j.
    """
    assert parents.query is not None
    layout, over_children = Layout(children, options), options.softmax == "children"
    (grad,), (sums, log_masses) = grads, results
    expected = layout.pack((grad * sums).sum(-1))
    grad, query, offset = layout.pack(grad), layout.pack(parents.query), parents.offset
    log_masses = layout.pack(log_masses) if over_children else log_masses
    grad_query = torch.zeros_like(query)
    grad_offset = None if offset is None else accumulator(offset)
    for tile in dot_tiles(layout, children, options):
        block = tile.block
        query_part, grad_part = layout.part(query, block.samples), layout.part(grad, block.samples)
        logits, grad_shares = tile.logits(query_part), tile.dot(grad_part)
        if offset is not None:
            logits += block.read_rows(offset).unsqueeze(layout.samples)
        gate = None if children.gates is None else block.of_gates(children.gates).contiguous().unsqueeze(layout.parents)
        if over_children:
            coefficients = (logits - layout.part(log_masses, block.samples)).exp_()  # without the gates
            if gate is not None:
                coefficients.masked_fill_(gate == 0, 0)
            grad_shares -= layout.part(expected, block.samples)
        else:
            coefficients = layout.over_parents(logits, options.leaky)
        shares = coefficients if gate is None else coefficients * gate
        if into.gates is not None:
            block.of_gates(into.gates).add_((coefficients * grad_shares).sum(layout.parents))
        grad_logits = shares * grad_shares
        if not over_children:
            grad_logits = layout.over_parents_backward(grad_logits, coefficients)
        if grad_offset is not None:
            block.add_rows(grad_offset, grad_logits.sum(layout.samples))
        layout.part(grad_query, block.samples).add_(tile.grad_query(grad_logits))
        tile.add_child_gradients(shares, grad_part, grad_logits, query_part, into)
    return ParentTensors(layout.unpack(grad_query), offset=grad_offset)
