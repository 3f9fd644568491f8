"""Mass, mean and variance of votes for each parent, forward and backward, block by block."""

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors, Tensors, count_samples
from torchcaps.ops.numerics import accumulator, nonzero
from torchcaps.ops.tiled.blocks import Block, vote_blocks
from torchcaps.ops.tiled.tiles import Layout, vote_tile


def moments(children: Children, parents: ParentTensors, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute mass, mean, variance and benefit.

    The mean of a block is subtracted from its votes before they are squared, and blocks are joined by the parallel
    formula of Chan, Golub and LeVeque (1979). So no digits are lost when the votes agree far from zero.
    """
    layout = Layout(children, options)
    agreement, offset, betas = _packed(parents, layout), parents.offset, parents.betas
    count, features = count_samples(children, options), layout.rows * layout.h
    mass = layout.pack(accumulator(children.poses, count, layout.count))
    center = layout.pack(accumulator(children.poses, count, layout.count, features))
    scatter = torch.zeros_like(center)
    benefit = torch.zeros_like(mass if betas is not None else mass[:0, :0])
    for block in vote_blocks(children, options):
        votes = vote_tile(block, layout, children, options).votes()
        mass_so_far, center_so_far, scatter_so_far = (layout.part(x, block.samples) for x in (mass, center, scatter))
        part = [layout.part(x, block.samples) for x in agreement]
        compared = _compared(votes, part)
        shares = _coefficients(compared, part, offset, block, layout, scratch=compared)
        if children.gates is not None:
            shares = shares * block.of_gates(children.gates).contiguous().unsqueeze(layout.parents)
        if betas is not None:
            rows = block.read_rows(betas).unsqueeze(layout.samples)
            layout.part(benefit, block.samples).add_((shares * rows).sum(0))
        added = shares.sum(0)
        shares = shares.unsqueeze(2)
        step = (votes * shares).sum(0) / nonzero(added).unsqueeze(1)
        votes -= step
        step -= center_so_far  # distance from the mean of the blocks before to that of this block
        portion = (added / nonzero(mass_so_far + added)).unsqueeze(1)
        scatter_so_far += votes.square_().mul_(shares).sum(0) + step.square() * portion * mass_so_far.unsqueeze(1)
        center_so_far += step.mul_(portion)
        mass_so_far += added
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
    grads: Tensors, results: Tensors, children: Children, parents: ParentTensors, options: Options, into: Gradients
) -> ParentTensors:
    """Add the gradients of the children to `into`; return those of query, precision, prior, offset and betas.

    With deviation e = V - mean and share D = gate c, the gradient of the share is constant + sum_k (pull + spread e) e.
    The gradient of the vote is D (pull + 2 spread e), and what comes through its logit is added to it.
    """
    layout = Layout(children, options)
    grad_mass, grad_mean, grad_variance, grad_benefit = grads
    mass, mean, variance = results
    agreement, offset, betas = _packed(parents, layout), parents.offset, parents.betas
    scale = 1 / nonzero(mass + options.eps).unsqueeze(-1)
    spread = scale * grad_variance
    pull = scale * (grad_mean - 2 * options.eps * scale * mean * grad_variance)
    constant = layout.pack(grad_mass - (spread * variance).sum(-1))
    spread, pull, mean = layout.pack(spread), layout.pack(pull), layout.pack(mean)
    grad_benefit = layout.pack(grad_benefit) if betas is not None else grad_benefit
    grad_offset, grad_betas = (None if x is None else accumulator(x) for x in (offset, betas))
    grad_agreement = [torch.zeros_like(x) for x in agreement]
    for block in vote_blocks(children, options):
        tile = vote_tile(block, layout, children, options)
        votes = tile.votes()
        gate = None if children.gates is None else block.of_gates(children.gates).contiguous().unsqueeze(layout.parents)
        part, grad_part = ([layout.part(x, block.samples) for x in of] for of in (agreement, grad_agreement))
        compared, buffer = _compared(votes, part), torch.empty_like(votes)
        coefficients = _coefficients(compared, part, offset, block, layout, scratch=buffer)
        shares = coefficients if gate is None else coefficients * gate
        # In place, unless the votes are still needed for the gradient of a query.
        deviations = torch.sub(votes, layout.part(mean, block.samples), out=buffer if len(part) == 1 else votes)
        block_spread = layout.part(spread, block.samples)
        slope = torch.addcmul(layout.part(pull, block.samples), block_spread, deviations)
        grad_shares = (slope * deviations).sum(2) + layout.part(constant, block.samples)
        if betas is not None and grad_betas is not None:
            block_benefit = layout.part(grad_benefit, block.samples)
            grad_shares += block.read_rows(betas).unsqueeze(layout.samples) * block_benefit
            block.add_rows(grad_betas, (shares * block_benefit).sum(layout.samples))
        if into.gates is not None:
            block.of_gates(into.gates).add_((coefficients * grad_shares).sum(layout.parents))
        grad_votes = slope.addcmul_(block_spread, deviations).mul_(shares.unsqueeze(2))
        if part:
            grad_logits = layout.over_parents_backward(shares * grad_shares, coefficients)
            if grad_offset is not None:
                block.add_rows(grad_offset, grad_logits.sum(layout.samples))
            torch.mul(compared, grad_logits.unsqueeze(2), out=buffer)
            grad_part[0] += buffer.sum(0)
            if len(part) == 1:
                grad_votes.addcmul_(part[0], grad_logits.unsqueeze(2))
            else:
                grad_votes.addcmul_(buffer, part[1], value=-1)
                grad_part[1] += buffer.mul_(compared).sum(0)
                grad_part[2] += grad_logits.sum(0)
        tile.add_gradients(grad_votes, into)
    if parents.precision is not None:
        grad_agreement[0] *= agreement[1]
        grad_agreement[1] *= -0.5
    return ParentTensors(*map(layout.unpack, grad_agreement))._replace(offset=grad_offset, betas=grad_betas)


def _packed(parents: ParentTensors, layout: Layout) -> list[Tensor]:
    """Return the mean, precision and prior of a Gaussian, or a query, or nothing."""
    return [layout.pack(x) for x in parents[:3] if x is not None]


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
