# mypy: allow-untyped-defs
"""The reductions over votes as Triton kernels, forward and backward.

They compute what `StoredVotes` defines, for votes of poses through weights, and store no vote. A tile of votes, those
of one child in a block of samples for a block of parents, lives in registers and is made anew from poses and weights
wherever it is needed, in the backward pass too. Memory grows with poses, weights and parents only.

A program adds up in registers along the axis it loops over, so each kind of sum has a loop of its own:

- over the children: sums for a parent, and the gradients of what its agreement is made of;
- over the blocks of parents: softmax over the parents, and the gradients of poses and gates. Most layers' parents fit
  one block; then this is part of the loop over the children. Otherwise block follows block, launch by launch;
- over the samples, and the children that share weights: gradients of weights.

A loop that leaves the device idle is split among programs, and torch adds their parts. No two programs add to the
same number, and sizes alone decide about blocks and splits: the same device gives the same digits each time.

A tile is `(samples, rows, columns, parents)`, and parents are innermost in memory, too: neighbouring threads have
neighbouring parents, and as a rule each thread has all features of its votes.
"""

import contextlib
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.ops.numerics import contract, nonzero

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if _INTERPRETED:

    def _range(first, last):
        # The interpreter's numbers are arrays of one element, which NumPy 2.4 no longer takes for an int.
        return range(first.handle.data.item(), last.handle.data.item())

else:
    _range = tl.range


# ---------------------------------------------------------------- tiles


@triton.jit
def _axes(sample, parent, block_n: tl.constexpr, block_r: tl.constexpr, block_h: tl.constexpr, block_j: tl.constexpr):
    n = (sample + tl.arange(0, block_n)).to(tl.int64)[:, None, None, None]
    r = tl.arange(0, block_r)[None, :, None, None]
    h = tl.arange(0, block_h)[None, None, :, None]
    j = (parent + tl.arange(0, block_j))[None, None, None, :]
    # Threads that load four parents at once would each have a part of the features. So no word about alignment.
    return n, r, h, tl.multiple_of(j, [1, 1, 1, 1])


@triton.jit
def _parents(n, r, h, j, batch, parents: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):
    """Where tensors of the parents have the tile's features and scores, and which of them exist."""
    at = n * (rows * width * parents) + (r * width + h) * parents + j
    scores = (n < batch) & (j < parents)
    return at, scores & (r < rows) & (h < width), n * parents + j, scores


@triton.jit
def _load(pointer, offset, inside, dtype: tl.constexpr):
    """Zeros outside; None stays None."""
    if pointer is None:
        x = None
    else:
        x = tl.load(pointer + offset, mask=inside, other=0.0).to(dtype)
    return x


@triton.jit
def _over_features(x):
    return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _nonzero(x):
    return tl.where(tl.abs(x) < 1e-30, 1.0, x)


@triton.jit
def _norm(v):
    return _nonzero(tl.sqrt(_over_features(v * v)))


@triton.jit
def _matrix(weight, i, n, h, j, per_weight, parents: tl.constexpr, depth: tl.constexpr, width: tl.constexpr):
    """Where the weights of child i begin. The samples have the same, but each loads its own: so all threads hold a
    tile's numbers alike, and none has to be handed from thread to thread."""
    x = weight + tl.cast(i // per_weight, tl.int64) * (depth * width * parents) + h * parents + j
    return tl.broadcast_to(x, [n.shape[0], 1, h.shape[2], j.shape[3]])


@triton.jit
def _child(
    poses, weight, bias, gates, target, precision, prior, i, n, r, h, j,
    batch, children, parents: tl.constexpr, per_weight, per_bias,
    rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    shared_bias: tl.constexpr, agreement: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Votes of child i, their logits, and the child's gates. `target` is what votes are compared with: the query of a
    dot product, the mean of a Gaussian."""
    inside = (n < batch) & (j < parents)
    v = tl.zeros([n.shape[0], r.shape[1], h.shape[2], j.shape[3]], dtype)
    if bias is not None:
        k = (tl.cast(i // per_bias, tl.int64) * rows + r) * width + h
        here = tl.broadcast_to(bias + (k if shared_bias else k * parents + j), v.shape)
        v += tl.load(here, mask=inside & (r < rows) & (h < width), other=0.0).to(dtype)
    pose = poses + ((n * children + i) * rows + r) * depth
    matrix = _matrix(weight, i, n, h, j, per_weight, parents, depth, width)
    for d in tl.static_range(depth):
        p = tl.load(pose + d, mask=(n < batch) & (r < rows), other=0.0).to(dtype)
        w = tl.load(matrix + d * (width * parents), mask=inside & (h < width), other=0.0).to(dtype)
        v += p * w

    if agreement == "dot":
        logit = _over_features(v * target)
    elif agreement == "unit":
        logit = _over_features(v / _norm(v) * target)
    elif agreement == "gaussian":
        logit = prior - 0.5 * _over_features(precision * ((v - target) * (v - target)))
    else:
        logit = tl.zeros([n.shape[0], 1, 1, j.shape[3]], dtype)

    if gates is None:
        gate = tl.where(n < batch, 1.0, 0.0).to(dtype)
    else:
        gate = tl.load(gates + n * children + i, mask=n < batch, other=0.0).to(dtype)
    return v, logit, gate


@triton.jit
def _beta(
    betas, i, n, j, parents: tl.constexpr, per_beta, shared_betas: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """None if there are no betas."""
    if betas is None:
        beta = None
    else:
        group = tl.cast(i // per_beta, tl.int64)
        here = tl.broadcast_to(betas + (group if shared_betas else group * parents + j), [n.shape[0], 1, 1, j.shape[3]])
        beta = tl.load(here, mask=j < parents, other=0.0).to(dtype)
    return beta


@triton.jit
def _no_parents(n, leaky: tl.constexpr, dtype: tl.constexpr):
    """The peak (largest logit) and mass (sum relative to the peak) of a softmax that has no parent but the leak."""
    peak = tl.full([n.shape[0], 1, 1, 1], 0.0 if leaky else float("-inf"), dtype)
    mass = tl.full([n.shape[0], 1, 1, 1], 1.0 if leaky else 0.0, dtype)
    return peak, mass


@triton.jit
def _softmax(logit, j, peak, mass, parents: tl.constexpr):
    """Takes a block of parents into a softmax over the parents: their parts in the mass, that of the parents before,
    the new peak and mass."""
    logit = tl.where(j < parents, logit, float("-inf"))
    top = tl.maximum(peak, tl.max(logit, 3, keep_dims=True))
    origin = tl.where(top == float("-inf"), 0.0, top)
    part = tl.exp(logit - origin)
    before = mass * tl.exp(peak - origin)
    return part, before, top, before + tl.sum(part, 3, keep_dims=True)


@triton.jit
def _over_parents(
    logit, norms, i, n, j, batch, children, parents: tl.constexpr,
    leaky: tl.constexpr, one_block: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Coefficients, peak and mass of the softmax over the parents, which are all in the tile or in `norms`."""
    if one_block:
        peak, mass = _no_parents(n, leaky, dtype)
        part, _, peak, mass = _softmax(logit, j, peak, mass, parents)
    else:
        peak = tl.load(norms + n * children + i, mask=n < batch, other=0.0)
        mass = tl.load(norms + (batch + n) * children + i, mask=n < batch, other=1.0)
        logit = tl.where(j < parents, logit, float("-inf"))
        part = tl.exp(logit - tl.where(peak == float("-inf"), 0.0, peak))
    return part / _nonzero(mass), peak, mass


@triton.jit
def _over_children(logit, gate, lse, scores):
    """Coefficients of the softmax over the children, before the gates. Where a gate is 0, so are they, and have no
    gradient."""
    return tl.exp(tl.where(scores & (gate != 0), logit - lse, float("-inf")))


@triton.jit
def _share_grad(v, slope, curve, mean, base, beta, grad_benefit):
    """The gradient of a share, which is gate times coefficient, from all that it weighs."""
    if curve is None:
        grad = _over_features(slope * v)
    else:
        grad = _over_features((slope + curve * (v - mean)) * (v - mean))
    if base is not None:
        grad += base
    if beta is not None:
        grad += beta * grad_benefit
    return grad


@triton.jit
def _vote_grad(v, logit, share, grad_logit, slope, curve, mean, target, precision, agreement: tl.constexpr):
    if curve is None:
        grad = share * slope
    else:
        grad = share * (slope + 2.0 * curve * (v - mean))
    if agreement == "dot":
        grad += grad_logit * target
    elif agreement == "unit":
        norm = _norm(v)
        grad += grad_logit * ((target - v / norm * logit) / norm)
    elif agreement == "gaussian":
        grad -= grad_logit * precision * (v - target)
    return grad


# ---------------------------------------------------------------- kernels (x_ is the tile of what x points to)


@triton.jit(do_not_specialize=["batch", "children", "per_split"])
def _sums(
    totals, masses, squares, benefits, peaks, norms, origin, one_block: tl.constexpr, per_split,
    poses, weight, bias, gates, betas, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
    agreement: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    block_n: tl.constexpr, block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, block_j: tl.constexpr,
):  # fmt: skip
    """Sums over one split of the children. Softmax over the children: votes weighted by exp(logit - peak), and these
    weights. Over the parents: votes weighted by shares; or with `squares` the shares, the mean's offset from `origin`
    (a Gaussian's mean, if None) and the squared deviations from the mean, child by child as Welford has it. That
    expands no square and adds up no large number, so the digits of votes that agree survive."""
    n, r, h, j = _axes(tl.program_id(0) * block_n, tl.program_id(1) * block_j, block_n, block_r, block_h, block_j)
    at, inside, at_score, scores = _parents(n, r, h, j, batch, parents, rows, width)
    target_ = _load(target, at, inside, dtype)
    precision_ = _load(precision, at, inside, dtype)
    prior_ = _load(prior, at_score, scores, dtype)
    origin_ = target_ if origin is None else _load(origin, at, inside, dtype)

    total = tl.zeros([block_n, block_r, block_h, block_j], dtype)
    square = tl.zeros([block_n, block_r, block_h, block_j], dtype)
    mass = tl.zeros([block_n, 1, 1, block_j], dtype)
    benefit = tl.zeros([block_n, 1, 1, block_j], dtype)
    peak = tl.full([block_n, 1, 1, block_j], float("-inf"), dtype)
    first = tl.program_id(2) * per_split
    for i in _range(first, tl.minimum(first + per_split, children)):
        v, logit, gate = _child(
            poses, weight, bias, gates, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, rows, depth, width, shared_bias, agreement, dtype,
        )  # fmt: skip
        if over_children:
            logit = tl.where(gate == 0, float("-inf"), logit)
            top = tl.maximum(peak, logit)
            origin = tl.where(top == float("-inf"), 0.0, top)
            kept = tl.exp(peak - origin)
            share = gate * tl.exp(logit - origin)
            total = total * kept + share * v
            mass = mass * kept + share
            peak = top
        else:
            c, _, _ = _over_parents(logit, norms, i, n, j, batch, children, parents, leaky, one_block, dtype)
            share = gate * c
            if squares is None:
                total += share * v
            else:
                mass += share
                deviation = v - origin_
                change = deviation - total
                total += share / _nonzero(mass) * change
                square += share * change * (deviation - total)
                if betas is not None:
                    benefit += _beta(betas, i, n, j, parents, per_beta, shared_betas, dtype) * share

    split = tl.program_id(2).to(tl.int64) * batch
    at += split * (rows * width * parents)
    at_score += split * parents
    tl.store(totals + at, total, mask=inside)
    if squares is not None:
        tl.store(squares + at, square, mask=inside)
    if masses is not None:
        tl.store(masses + at_score, mass, mask=scores)
    if benefits is not None:
        tl.store(benefits + at_score, benefit, mask=scores)
    if peaks is not None:
        tl.store(peaks + at_score, peak, mask=scores)


@triton.jit(do_not_specialize=["batch", "children", "per_split", "parent"])
def _normalize(
    old_norms, norms, old_grad_gates, grad_gates,
    slope, curve, mean, base, grad_benefit, parent, per_split,
    poses, weight, bias, gates, betas, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
    agreement: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    block_n: tl.constexpr, block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, block_j: tl.constexpr,
):  # fmt: skip
    """Takes the block of parents from `parent` on into each child's softmax over the parents and, in the backward
    pass, into the mean of the shares' gradients under it, which is the gradient of the child's gate."""
    n, r, h, j = _axes(tl.program_id(0) * block_n, parent, block_n, block_r, block_h, block_j)
    at, inside, at_score, scores = _parents(n, r, h, j, batch, parents, rows, width)
    target_ = _load(target, at, inside, dtype)
    precision_ = _load(precision, at, inside, dtype)
    prior_ = _load(prior, at_score, scores, dtype)
    slope_ = _load(slope, at, inside, dtype)
    curve_ = _load(curve, at, inside, dtype)
    mean_ = _load(mean, at, inside, dtype)
    base_ = _load(base, at_score, scores, dtype)
    grad_benefit_ = _load(grad_benefit, at_score, scores, dtype)

    first = tl.program_id(1) * per_split
    for i in _range(first, tl.minimum(first + per_split, children)):
        v, logit, _ = _child(
            poses, weight, bias, gates, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, rows, depth, width, shared_bias, agreement, dtype,
        )  # fmt: skip
        at_child, at_mass, present = n * children + i, (batch + n) * children + i, n < batch
        if old_norms is None:
            peak, mass = _no_parents(n, leaky, dtype)
        else:
            peak = tl.load(old_norms + at_child, mask=present, other=0.0)
            mass = tl.load(old_norms + at_mass, mask=present, other=1.0)
        part, before, peak, mass = _softmax(logit, j, peak, mass, parents)
        tl.store(norms + at_child, peak, mask=present)
        tl.store(norms + at_mass, mass, mask=present)
        if grad_gates is not None:
            beta = _beta(betas, i, n, j, parents, per_beta, shared_betas, dtype)
            grad_share = _share_grad(v, slope_, curve_, mean_, base_, beta, grad_benefit_)
            grad_gate = tl.sum(part * grad_share, 3, keep_dims=True)
            if old_grad_gates is not None:
                grad_gate += before * tl.load(old_grad_gates + at_child, mask=present, other=0.0)
            tl.store(grad_gates + at_child, grad_gate / _nonzero(mass), mask=present)


@triton.jit(do_not_specialize=["batch", "children", "per_split", "parent"])
def _grads(
    old_grad_poses, grad_poses, old_grad_gates, grad_gates, norms, lse, grad_targets, grad_precisions, grad_priors,
    slope, curve, mean, base, grad_benefit, one_block: tl.constexpr, parent, per_split,
    poses, weight, bias, gates, betas, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
    agreement: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    block_n: tl.constexpr, block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, block_j: tl.constexpr,
):  # fmt: skip
    """Gradients of poses and gates, to which the block of parents from `parent` on adds, and over one split of the
    children those of what this block's agreement is made of."""
    n, r, h, j = _axes(tl.program_id(0) * block_n, parent, block_n, block_r, block_h, block_j)
    at, inside, at_score, scores = _parents(n, r, h, j, batch, parents, rows, width)
    target_ = _load(target, at, inside, dtype)
    precision_ = _load(precision, at, inside, dtype)
    prior_ = _load(prior, at_score, scores, dtype)
    slope_ = _load(slope, at, inside, dtype)
    curve_ = _load(curve, at, inside, dtype)
    mean_ = _load(mean, at, inside, dtype)
    base_ = _load(base, at_score, scores, dtype)
    grad_benefit_ = _load(grad_benefit, at_score, scores, dtype)
    lse_ = _load(lse, at_score, scores, dtype)

    grad_target = tl.zeros([block_n, block_r, block_h, block_j], dtype)
    grad_precision = tl.zeros([block_n, block_r, block_h, block_j], dtype)
    grad_prior = tl.zeros([block_n, 1, 1, block_j], dtype)
    column = tl.arange(0, block_d)[None, None, :, None]
    first = tl.program_id(1) * per_split
    for i in _range(first, tl.minimum(first + per_split, children)):
        v, logit, gate = _child(
            poses, weight, bias, gates, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, rows, depth, width, shared_bias, agreement, dtype,
        )  # fmt: skip
        beta = _beta(betas, i, n, j, parents, per_beta, shared_betas, dtype)
        grad_share = _share_grad(v, slope_, curve_, mean_, base_, beta, grad_benefit_)
        at_child, present = n * children + i, n < batch
        if over_children:
            c = _over_children(logit, gate, lse_, scores)
            grad_gate = tl.sum(c * grad_share, 3, keep_dims=True)
            if old_grad_gates is not None:
                grad_gate += tl.load(old_grad_gates + at_child, mask=present, other=0.0)
            tl.store(grad_gates + at_child, grad_gate, mask=present)
        else:
            c, peak, mass = _over_parents(logit, norms, i, n, j, batch, children, parents, leaky, one_block, dtype)
            if one_block:
                grad_gate = tl.sum(c * grad_share, 3, keep_dims=True)
                tl.store(grad_gates + at_child, grad_gate, mask=present)
                tl.store(norms + at_child, peak, mask=present)
                tl.store(norms + (batch + n) * children + i, mass, mask=present)
            else:
                grad_gate = tl.load(grad_gates + at_child, mask=present, other=0.0)
            grad_share -= grad_gate
        share = gate * c
        grad_logit = share * grad_share
        grad_vote = _vote_grad(
            v, logit, share, grad_logit, slope_, curve_, mean_, target_, precision_, agreement
        )  # fmt: skip

        if agreement == "dot":
            grad_target += grad_logit * v
        elif agreement == "unit":
            grad_target += grad_logit * (v / _norm(v))
        elif agreement == "gaussian":
            grad_target += grad_logit * (v - target_)
            grad_precision += grad_logit * ((v - target_) * (v - target_))
            grad_prior += grad_logit

        grad_pose = tl.zeros([block_n, block_r, block_d, block_j], dtype)
        matrix = _matrix(weight, i, n, h, j, per_weight, parents, depth, width)
        for d in tl.static_range(depth):
            w = tl.load(matrix + d * (width * parents), mask=scores & (h < width), other=0.0).to(dtype)
            grad_pose += tl.where(column == d, tl.sum(grad_vote * w, 2, keep_dims=True), 0.0)
        grad_pose = tl.sum(grad_pose, 3, keep_dims=True)
        at_pose = (at_child * rows + r) * depth + column
        in_pose = present & (r < rows) & (column < depth)
        if old_grad_poses is not None:
            grad_pose += tl.load(old_grad_poses + at_pose, mask=in_pose, other=0.0)
        tl.store(grad_poses + at_pose, grad_pose, mask=in_pose)

    split = tl.program_id(1).to(tl.int64) * batch
    at += split * (rows * width * parents)
    if agreement == "gaussian":
        grad_target *= precision_
        tl.store(grad_precisions + at, -0.5 * grad_precision, mask=inside)
        tl.store(grad_priors + at_score + split * parents, grad_prior, mask=scores)
    if grad_targets is not None:
        tl.store(grad_targets + at, grad_target, mask=inside)


@triton.jit(do_not_specialize=["batch", "children", "per_split"])
def _weight_grads(
    grad_weight, grad_bias, grad_betas, grad_gates, norms, lse,
    slope, curve, mean, base, grad_benefit, per_group, per_split,
    poses, weight, bias, gates, betas, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
    agreement: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    block_n: tl.constexpr, block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, block_j: tl.constexpr,
):  # fmt: skip
    """Gradients of what the children of a group share, over one split of these children and the samples."""
    group, block = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, block_d)[None, :, None, None]
    weights = tl.zeros([block_n, block_d, block_h, block_j], dtype)
    biases = tl.zeros([block_n, block_r, block_h, block_j], dtype)
    shares = tl.zeros([block_n, 1, 1, block_j], dtype)
    first = tl.program_id(2) * per_split
    for t in _range(first, tl.minimum(first + per_split, per_group * tl.cdiv(batch, block_n))):
        # Child after child for the same samples, whose parents then stay in the cache.
        i = group * per_group + t % per_group
        n, r, h, j = _axes(t // per_group * block_n, block * block_j, block_n, block_r, block_h, block_j)
        at, inside, at_score, scores = _parents(n, r, h, j, batch, parents, rows, width)
        target_ = _load(target, at, inside, dtype)
        precision_ = _load(precision, at, inside, dtype)
        prior_ = _load(prior, at_score, scores, dtype)
        slope_ = _load(slope, at, inside, dtype)
        curve_ = _load(curve, at, inside, dtype)
        mean_ = _load(mean, at, inside, dtype)
        base_ = _load(base, at_score, scores, dtype)
        grad_benefit_ = _load(grad_benefit, at_score, scores, dtype)

        v, logit, gate = _child(
            poses, weight, bias, gates, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, rows, depth, width, shared_bias, agreement, dtype,
        )  # fmt: skip
        beta = _beta(betas, i, n, j, parents, per_beta, shared_betas, dtype)
        grad_share = _share_grad(v, slope_, curve_, mean_, base_, beta, grad_benefit_)
        if over_children:
            c = _over_children(logit, gate, _load(lse, at_score, scores, dtype), scores)
        else:
            c, _, _ = _over_parents(logit, norms, i, n, j, batch, children, parents, False, False, dtype)
            grad_share -= tl.load(grad_gates + n * children + i, mask=n < batch, other=0.0)
        share = gate * c
        grad_vote = _vote_grad(
            v, logit, share, share * grad_share, slope_, curve_, mean_, target_, precision_, agreement
        )  # fmt: skip

        if grad_weight is not None:
            pose = poses + ((n * children + i) * rows + r) * depth
            for d in tl.static_range(depth):
                p = tl.load(pose + d, mask=(n < batch) & (r < rows), other=0.0).to(dtype)
                weights += tl.where(column == d, tl.sum(p * grad_vote, 1, keep_dims=True), 0.0)
        if grad_bias is not None:
            biases += grad_vote
        if grad_betas is not None:
            shares += grad_benefit_ * share

    _, r, h, j = _axes(0, block * block_j, block_n, block_r, block_h, block_j)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + group
    inside = (h < width) & (j < parents)
    if grad_weight is not None:
        at = ((part * depth + column) * width + h) * parents + j
        tl.store(grad_weight + at, tl.sum(weights, 0, keep_dims=True), mask=inside & (column < depth))
    if grad_bias is not None:
        biases = tl.sum(biases, 0, keep_dims=True)
        at = (part * rows + r) * width + h
        if shared_bias:
            at = at * tl.num_programs(1) + block
            tl.store(grad_bias + at, tl.sum(biases, 3, keep_dims=True), mask=(r < rows) & (h < width))
        else:
            tl.store(grad_bias + at * parents + j, biases, mask=(r < rows) & inside)
    if grad_betas is not None:
        if shared_betas:
            tl.store(grad_betas + part * tl.num_programs(1) + block, tl.sum(shares))
        else:
            shares = tl.sum(shares, 0, keep_dims=True)
            tl.store(grad_betas + part * parents + j, shares, mask=j < parents)


# ---------------------------------------------------------------- launches


_NO_GRADS: dict[str, Any] = dict.fromkeys(("slope", "curve", "mean", "base", "grad_benefit"))


class _Problem:
    """What the kernels read, and how each of them divides the work."""

    def __init__(
        self,
        poses: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gates: Tensor | None,
        agreement: str,
        target: Tensor | None,
        precision: Tensor | None = None,
        prior: Tensor | None = None,
        betas: Tensor | None = None,
        over_children: bool = False,
        leaky: bool = False,
    ):
        self.inputs = poses, weight, bias, gates, target, precision, prior, betas
        for x in self.inputs:
            if x is not None and x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(f"the triton backend takes float16, bfloat16, float32 and float64, got {x.dtype}")
        self.batch, self.children, self.rows, self.depth = poses.shape
        self.groups, self.parents, _, self.width = weight.shape
        self.features = self.rows * self.width
        self.agreement, self.over_children = agreement, over_children
        self.empty = poses.numel() == 0
        self.device = poses.device
        self.dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
        block_r, block_h = triton.next_power_of_2(self.rows), triton.next_power_of_2(self.width)
        self.block_features, self.block_d = block_r * block_h, triton.next_power_of_2(self.depth)
        self.shared_bias = bias is not None and bias.shape[1] != self.parents
        self.shared_betas = betas is not None and betas.shape[1] != self.parents
        self.arguments: dict[str, Any] = {
            "poses": poses.contiguous(),
            "weight": _parents_last(weight),
            "bias": _parents_last(bias),
            "gates": None if gates is None else gates.contiguous(),
            "betas": _parents_last(betas),
            "target": _parents_last(target),
            "precision": _parents_last(precision),
            "prior": _parents_last(prior),
            "batch": self.batch,
            "children": self.children,
            "parents": self.parents,
            "per_weight": self.children // self.groups,
            "per_bias": None if bias is None else self.children // bias.shape[0],
            "rows": self.rows,
            "depth": self.depth,
            "width": self.width,
            "per_beta": None if betas is None else self.children // betas.shape[0],
            "shared_bias": self.shared_bias,
            "shared_betas": self.shared_betas,
            "agreement": agreement,
            "over_children": over_children,
            "leaky": leaky,
            "dtype": tl.float64 if self.dtype == torch.float64 else tl.float32,
            "block_r": block_r,
            "block_h": block_h,
            "block_d": self.block_d,
        }

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def blocks(self, registers: int | None = None, most_warps: int = 4) -> dict[str, int]:
        """A tile of so many numbers per thread (a vote, but 16 at least, and 32 at most since a dozen tiles are in
        use), with all parents if they fit into few warps: within a warp, sums over the parents are quick."""
        if _INTERPRETED:
            return {"block_n": 2, "block_j": min(triton.next_power_of_2(self.parents), 4)}
        registers = registers or min(max(self.block_features, 16), 32)
        most = max(1, 32 * most_warps * registers // self.block_features)
        block_j = min(triton.next_power_of_2(self.parents), 32 * most_warps, most)
        warps = min(most_warps, max(1, block_j * self.block_features // (32 * registers)))
        block_n = max(1, 32 * warps * registers // (block_j * self.block_features))
        return {"block_n": min(triton.next_power_of_2(self.batch), block_n), "block_j": block_j, "num_warps": warps}

    def split(self, items: int, programs: int) -> tuple[int, int]:
        """How many splits of how many items fill the device."""
        wanted = 8 if _INTERPRETED else 32 * torch.cuda.get_device_properties(self.device).multi_processor_count
        per_split = triton.cdiv(items, min(items, max(1, wanted // programs)))
        return triton.cdiv(items, per_split), per_split

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernel[grid](**self.arguments, **arguments)

    def normalize(self, blocks: dict[str, int], grads: dict[str, Any] | None = None) -> tuple[Tensor, Tensor | None]:
        """Peaks and masses of the softmax over the parents, `(2, batch, children)`, and the gates' gradients."""
        n_blocks = triton.cdiv(self.batch, blocks["block_n"])
        splits, per_split = self.split(self.children, n_blocks)
        old_norms = old_grad_gates = None
        for parent in range(0, self.parents, blocks["block_j"]):
            # Not in place: several threads of a program read a number that one of them writes.
            norms = self.new(2, self.batch, self.children)
            grad_gates = None if grads is None else self.new(self.batch, self.children)
            self.launch(
                _normalize, (n_blocks, splits), old_norms=old_norms, norms=norms, old_grad_gates=old_grad_gates,
                grad_gates=grad_gates, parent=parent, per_split=per_split, **(grads or _NO_GRADS), **blocks,
            )  # fmt: skip
            old_norms, old_grad_gates = norms, grad_gates
        return norms, grad_gates

    def sums(self, moments: bool = False, origin: Tensor | None = None) -> tuple[Tensor, Any, Any, Any, Any]:
        """For each split of the children: totals, masses, squares, benefits and peaks, or None."""
        blocks = self.blocks()
        one_block = blocks["block_j"] >= self.parents
        norms = None if one_block or self.over_children else self.normalize(blocks)[0]
        n_blocks, j_blocks = triton.cdiv(self.batch, blocks["block_n"]), triton.cdiv(self.parents, blocks["block_j"])
        splits, per_split = self.split(self.children, n_blocks * j_blocks)

        def scores(wanted: bool) -> Tensor | None:
            return self.new(splits, self.batch, self.parents) if wanted else None

        totals = self.new(splits, self.batch, self.features, self.parents)
        squares = torch.empty_like(totals) if moments else None
        masses, peaks = scores(moments or self.over_children), scores(self.over_children)
        benefits = scores(self.arguments["betas"] is not None)
        self.launch(
            _sums, (n_blocks, j_blocks, splits), totals=totals, masses=masses, squares=squares, benefits=benefits,
            peaks=peaks, norms=norms, origin=origin, one_block=one_block, per_split=per_split, **blocks,
        )  # fmt: skip
        return totals, masses, squares, benefits, peaks

    def grads(self, lse: Tensor | None, **gradients: Tensor | None) -> list[Tensor | None]:
        """Gradients of poses, weight, bias, gates, target, precision, prior and betas."""
        if self.empty:
            return [None if x is None else self.new(*x.shape).zero_() for x in self.inputs]
        lse = None if lse is None else lse.contiguous()
        grads = _NO_GRADS | {name: _parents_last(x) for name, x in gradients.items()}
        blocks = self.blocks()
        one_block = blocks["block_j"] >= self.parents
        n_blocks = triton.cdiv(self.batch, blocks["block_n"])
        splits, per_split = self.split(self.children, n_blocks)
        shape = splits, self.batch, self.features, self.parents
        grad_targets = None if self.agreement == "none" else self.new(*shape)
        grad_precisions = self.new(*shape) if self.agreement == "gaussian" else None
        grad_priors = self.new(splits, self.batch, self.parents) if self.agreement == "gaussian" else None
        norms = grad_gates = grad_poses = None
        if not self.over_children and not one_block:
            norms, grad_gates = self.normalize(blocks, grads)
        elif not self.over_children:
            norms = self.new(2, self.batch, self.children)
        for parent in range(0, self.parents, blocks["block_j"]):
            old_grad_poses, grad_poses = grad_poses, self.new(self.batch, self.children, self.rows, self.depth)
            old_grad_gates = grad_gates
            if self.over_children or one_block:
                grad_gates = self.new(self.batch, self.children)
            self.launch(
                _grads, (n_blocks, splits), old_grad_poses=old_grad_poses, grad_poses=grad_poses,
                old_grad_gates=old_grad_gates, grad_gates=grad_gates, norms=norms, lse=lse, grad_targets=grad_targets,
                grad_precisions=grad_precisions, grad_priors=grad_priors, one_block=one_block, parent=parent,
                per_split=per_split, **grads, **blocks,
            )  # fmt: skip
        shared = self.weight_grads({"norms": norms, "grad_gates": grad_gates, "lse": lse, **grads})
        of_agreement = (_parents_first(_total(x)) for x in (grad_targets, grad_precisions, grad_priors))
        gates = None if self.arguments["gates"] is None else grad_gates
        return [grad_poses, shared["grad_weight"], shared["grad_bias"], gates, *of_agreement, shared["grad_betas"]]

    def weight_grads(self, arguments: dict[str, Any]) -> dict[str, Tensor | None]:
        """Gradients of weight, bias and betas, in one launch if these have the same groups of children."""
        # A thread has at most 64 sums. Softmax is done, so the parents may well be in several blocks.
        blocks = self.blocks(max(1, 1024 // max(64, self.block_d * self.arguments["block_h"])), most_warps=1)
        n_blocks, j_blocks = triton.cdiv(self.batch, blocks["block_n"]), triton.cdiv(self.parents, blocks["block_j"])
        _, _, bias, _, _, _, _, betas = self.inputs
        wanted: dict[str, tuple[int, tuple[int, ...]]] = {
            "grad_weight": (self.groups, (self.depth, self.width, self.parents))
        }
        if bias is not None:
            last = j_blocks if self.shared_bias else self.parents
            wanted["grad_bias"] = bias.shape[0], (self.rows, self.width, last)
        if betas is not None:
            wanted["grad_betas"] = betas.shape[0], (j_blocks if self.shared_betas else self.parents,)
        found: dict[str, Any] = dict.fromkeys(("grad_weight", "grad_bias", "grad_betas"))
        for groups in sorted({groups for groups, _ in wanted.values()}):
            per_group = self.children // groups
            splits, per_split = self.split(per_group * n_blocks, groups * j_blocks)
            parts = {name: self.new(splits, groups, *shape) for name, (of, shape) in wanted.items() if of == groups}
            self.launch(
                _weight_grads, (groups, j_blocks, splits), per_group=per_group, per_split=per_split,
                **(dict.fromkeys(found) | parts), **arguments, **blocks,
            )  # fmt: skip
            found |= {name: _total(x) for name, x in parts.items()}
        for name, shared in (("grad_bias", self.shared_bias), ("grad_betas", self.shared_betas)):
            if shared:
                found[name] = found[name].sum(-1, keepdim=True)
        return {name: _parents_first(x) for name, x in found.items()}


def _parents_last(x: Tensor | None) -> Any:
    return None if x is None else x.movedim(1, -1).contiguous()


def _parents_first(x: Tensor | None) -> Any:
    return None if x is None else x.movedim(-1, 1).contiguous()


def _total(parts: Tensor | None) -> Any:
    """The sum over splits."""
    return parts if parts is None else parts[0] if len(parts) == 1 else parts.sum(0)


# ---------------------------------------------------------------- reductions


def weighted_sum(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    query: Tensor | None,
    unit: bool,
    over_children: bool,
    leaky: bool,
) -> tuple[Tensor, Tensor]:
    """Weighted sums of votes, with the coefficients of a dot agreement or, without a query, uniform ones.

    Args:
        poses: `(batch, children, rows, d)`.
        weight: `(groups, parents, d, h)`; children share weights in groups of equal size, in order.
        bias: `(groups, parents or 1, rows, h)`, with groups of its own, or None.
        gates: `(batch, children)`, or None.
        query: `(batch, parents, features)`, or None.
        unit: compare unit votes with the query.
        over_children: softmax over the children.
        leaky: a parent of logit 0 joins the softmax over the parents.

    Returns:
        The sums, `(batch, parents, features)`, and for the softmax over the children its normaliser
        `log sum_k gate_k exp(logit_kj)`, `(batch, parents)`: inf where no child is present.
    """
    p = _Problem(poses, weight, bias, gates, _kind(query, unit=unit), query, over_children=over_children, leaky=leaky)
    if p.empty:
        lse = p.new(p.batch, p.parents).fill_(torch.inf) if over_children else p.new(0)
        return p.new(p.batch, p.parents, p.features).zero_(), lse
    totals, masses, _, _, peaks = p.sums()
    if not over_children:
        return _parents_first(_total(totals)), p.new(0)
    peak = peaks.amax(0)
    scale = (peaks - peak.masked_fill(peak.isinf(), 0)).exp()
    mass = (masses * scale).sum(0)
    total = (totals * scale.unsqueeze(2)).sum(0) / nonzero(mass).unsqueeze(1)
    return _parents_first(total), torch.where(mass < 1e-30, torch.inf, peak + mass.log())


def weighted_sum_backward(
    grad_total: Tensor,
    total: Tensor,
    lse: Tensor,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    query: Tensor | None,
    unit: bool,
    over_children: bool,
    leaky: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of poses, weight, bias, gates and query.

    The gradient of a share is `e = grad_total . V`, and that of a logit is the share times what e exceeds its mean
    under the softmax by. Over the parents this mean is the gradient of the child's gate. Over the children it is
    `grad_total . total`.
    """
    p = _Problem(poses, weight, bias, gates, _kind(query, unit=unit), query, over_children=over_children, leaky=leaky)
    base = -(grad_total * total).sum(-1) if over_children else None
    return tuple(p.grads(lse if over_children else None, slope=grad_total, base=base)[:5])


def moments(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Mass, mean and variance of the votes and, given betas, the sum of beta-weighted shares, with the coefficients
    of a Gaussian agreement, of a dot agreement if there is only its query, or uniform ones; softmax over the parents.

    Args:
        poses, weight, bias, gates: as in `weighted_sum`.
        target: `(batch, parents, features)`, a Gaussian's mean or a query, or None.
        precision, prior: `(batch, parents, features)` and `(batch, parents)`, or None.
        betas: `(groups, parents or 1)`, with groups of their own, or None.
        eps: added to the mass in divisors.
    """
    p = _Problem(poses, weight, bias, gates, _kind(target, precision), target, precision, prior, betas)
    if p.empty:
        mass, mean = p.new(p.batch, p.parents).zero_(), p.new(p.batch, p.parents, p.features).zero_()
        return mass, mean, mean.clone(), None if betas is None else mass.clone()
    # Offsets are reckoned from a number near the votes: the Gaussian's mean, or the votes of the first child.
    origin = _parents_last(_first_votes(poses, weight, bias)) if precision is None else None
    offsets, masses, squares, benefits, _ = p.sums(moments=True, origin=origin)
    mass, parts = masses.sum(0), masses.unsqueeze(2)
    offset = (parts * offsets).sum(0) / nonzero(mass).unsqueeze(1)
    square = (squares + parts * (offsets - offset).square()).sum(0)  # Chan's formula for the splits
    center = (p.arguments["target"] if origin is None else origin) + offset
    divisor = nonzero(mass + eps).unsqueeze(1)
    share = mass.unsqueeze(1) / divisor
    # Deviations are from the mean that is returned, which eps draws to 0.
    variance = square / divisor + share * (center * (1 - share)).square()
    return mass, _parents_first(center * share), _parents_first(variance), _total(benefits)


def moments_backward(
    grad_mass: Tensor | None,
    grad_mean: Tensor | None,
    grad_variance: Tensor | None,
    grad_benefit: Tensor | None,
    mass: Tensor,
    m: Tensor,
    variance: Tensor,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of poses, weight, bias, gates, target, precision, prior and betas.

    With `q = 1 / (mass + eps)` and `d = V - m`, the gradient of a share is `grad_mass + beta grad_benefit +
    slope . d + curve . (d^2 - variance)`, where `curve = q grad_variance` and `slope = q (grad_mean - 2 eps m curve)`.
    """
    used = None if grad_benefit is None else betas
    p = _Problem(poses, weight, bias, gates, _kind(target, precision), target, precision, prior, used)
    q = 1 / nonzero(mass + eps).unsqueeze(-1)
    curve = torch.zeros_like(m) if grad_variance is None else q * grad_variance
    slope = -2 * q * eps * m * curve
    if grad_mean is not None:
        slope = slope + q * grad_mean
    base = -(curve * variance).sum(-1)
    if grad_mass is not None:
        base = base + grad_mass
    benefit = None if used is None else grad_benefit
    grads = p.grads(None, slope=slope, curve=curve, mean=m, base=base, grad_benefit=benefit)
    if betas is not None and used is None:
        grads[-1] = p.new(*betas.shape).zero_()
    return tuple(grads)


def _kind(target: Tensor | None, precision: Tensor | None = None, unit: bool = False) -> str:
    """Of agreement, by what there is of it."""
    if target is None:
        return "none"
    return "gaussian" if precision is not None else "unit" if unit else "dot"


def _first_votes(poses: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
    votes = contract("nrd,jdh->njrh", poses[:, 0].to(dtype), weight[0].to(dtype))
    return (votes if bias is None else votes + bias[0].to(dtype)).flatten(2)
