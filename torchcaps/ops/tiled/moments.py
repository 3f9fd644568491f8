"""Mass, mean and variance of votes for each parent, forward and backward, block by block."""

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, count_samples
from torchcaps.ops.numerics import accumulator, nonzero
from torchcaps.ops.tiled.blocks import Block, vote_blocks
from torchcaps.ops.tiled.tiles import Layout, vote_tile


def moments(
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute mass, mean, variance and benefit.

    The mean of a block is subtracted from its votes before they are squared, and blocks are joined by the parallel
    formula of Chan, Golub and LeVeque (1979). So no digits are lost when the votes agree far from zero.
    """
    layout = Layout(children, options)
    agreement = [layout.pack(x) for x in (target, precision, prior) if x is not None]
    count, features = count_samples(children, options), layout.rows * layout.h
    mass = layout.pack(accumulator(children.poses, count, layout.count))
    center = layout.pack(accumulator(children.poses, count, layout.count, features))
    scatter = torch.zeros_like(center)
    benefit = torch.zeros_like(mass if betas is not None else mass[:0, :0])
    for block in vote_blocks(children, options):
        votes = vote_tile(block, layout, children, options).votes()
        own_mass, own_center, own_scatter = (layout.part(x, block.samples) for x in (mass, center, scatter))
        own = [layout.part(x, block.samples) for x in agreement]
        compared = _compared(votes, own)
        shares = _coefficients(compared, own, offset, block, layout, scratch=compared)
        if children.gates is not None:
            shares = shares * block.read_gates(children.gates).unsqueeze(layout.parents)
        if betas is not None:
            rows = block.read_rows(betas).unsqueeze(layout.samples)
            layout.part(benefit, block.samples).add_((shares * rows).sum(0))
        added = shares.sum(0)
        shares = shares.unsqueeze(2)
        step = (votes * shares).sum(0) / nonzero(added).unsqueeze(1)
        votes -= step
        step -= own_center  # distance from the mean of the blocks before to that of this block
        portion = (added / nonzero(own_mass + added)).unsqueeze(1)
        own_scatter += votes.square_().mul_(shares).sum(0) + step.square() * portion * own_mass.unsqueeze(1)
        own_center += step.mul_(portion)
        own_mass += added
    whole = mass.unsqueeze(1)
    scale = 1 / nonzero(whole + options.eps)
    mean = center * whole * scale
    # The variance is around the returned mean, which eps pulls towards zero.
    variance = (scatter + whole * (center - mean).square()) * scale
    return (
        layout.unpack(mass),
        layout.unpack(mean),
        layout.unpack(variance),
        layout.unpack(benefit).flatten(int(betas is not None)),
    )


def moments_backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    children: Children,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    offset: Tensor | None,
    betas: Tensor | None,
    options: Options,
    into: Gradients,
) -> tuple[Tensor | None, ...]:
    """Add the gradients of the children to `into`; return those of target, precision, prior, offset and betas.

    With deviation e = V - mean and share D = gate c, the gradient of the share is constant + sum_k (pull + spread e) e.
    The gradient of the vote is D (pull + 2 spread e), and what comes through its logit is added to it.
    """
    layout = Layout(children, options)
    grad_mass, grad_mean, grad_variance, grad_benefit = grads
    mass, mean, variance = results
    agreement = [layout.pack(x) for x in (target, precision, prior) if x is not None]
    scale = 1 / nonzero(mass + options.eps).unsqueeze(-1)
    spread = scale * grad_variance
    pull = scale * (grad_mean - 2 * options.eps * scale * mean * grad_variance)
    constant = layout.pack(grad_mass - (spread * variance).sum(-1))
    spread, pull, mean = layout.pack(spread), layout.pack(pull), layout.pack(mean)
    grad_benefit = layout.pack(grad_benefit) if betas is not None else grad_benefit
    grad_offset, grad_betas = (None if x is None else accumulator(x) for x in (offset, betas))
    found = [torch.zeros_like(x) for x in agreement]
    for block in vote_blocks(children, options):
        tile = vote_tile(block, layout, children, options)
        votes = tile.votes()
        gate = None if children.gates is None else block.read_gates(children.gates).unsqueeze(layout.parents)
        own, own_found = ([layout.part(x, block.samples) for x in of] for of in (agreement, found))
        compared, buffer = _compared(votes, own), torch.empty_like(votes)
        coefficients = _coefficients(compared, own, offset, block, layout, scratch=buffer)
        shares = coefficients if gate is None else coefficients * gate
        # In place, unless the votes are still needed for the gradient of a query.
        deviations = torch.sub(votes, layout.part(mean, block.samples), out=buffer if len(own) == 1 else votes)
        own_spread = layout.part(spread, block.samples)
        slope = torch.addcmul(layout.part(pull, block.samples), own_spread, deviations)
        grad_shares = (slope * deviations).sum(2) + layout.part(constant, block.samples)
        if betas is not None and grad_betas is not None:
            own_benefit = layout.part(grad_benefit, block.samples)
            grad_shares += block.read_rows(betas).unsqueeze(layout.samples) * own_benefit
            block.add_rows(grad_betas, (shares * own_benefit).sum(layout.samples))
        if into.gates is not None:
            block.add_gates(into.gates, (coefficients * grad_shares).sum(layout.parents))
        grad_votes = slope.addcmul_(own_spread, deviations).mul_(shares.unsqueeze(2))
        if own:
            grad_logits = layout.over_parents_backward(shares * grad_shares, coefficients)
            if grad_offset is not None:
                block.add_rows(grad_offset, grad_logits.sum(layout.samples))
            torch.mul(compared, grad_logits.unsqueeze(2), out=buffer)
            own_found[0] += buffer.sum(0)
            if len(own) == 1:
                grad_votes.addcmul_(own[0], grad_logits.unsqueeze(2))
            else:
                grad_votes.addcmul_(buffer, own[1], value=-1)
                own_found[1] += buffer.mul_(compared).sum(0)
                own_found[2] += grad_logits.sum(0)
        tile.add_gradients(grad_votes, into)
    if precision is not None:
        found[0] *= agreement[1]
        found[1] *= -0.5
    agreement_grads = [layout.unpack(x) for x in found] + [None] * (3 - len(found))
    return *agreement_grads, grad_offset, grad_betas


def _compared(votes: Tensor, agreement: list[Tensor]) -> Tensor:
    """Return what logits are computed from: deviations from a Gaussian's mean, or the votes."""
    return votes - agreement[0] if len(agreement) == 3 else votes


def _coefficients(
    compared: Tensor, agreement: list[Tensor], offset: Tensor | None, block: Block, layout: Layout, scratch: Tensor
) -> Tensor:
    """Return the coefficients of a block. With a Gaussian agreement `scratch` is overwritten."""
    if not agreement:
        return torch.full_like(compared[:, :, 0], 1 / layout.count)
    if len(agreement) == 1:
        logits = (compared * agreement[0]).sum(2)
        if offset is not None:
            logits += block.read_rows(offset).unsqueeze(layout.samples)
    else:
        _, precision, prior = agreement
        logits = prior - 0.5 * torch.mul(compared, compared, out=scratch).mul_(precision).sum(2)
    return layout.over_parents(logits)
