# mypy: allow-untyped-defs
"""The reductions over votes as Triton kernels, forward and backward.

They compute what `StoredVotes` defines, for votes of poses and weights, and store no vote. A program holds the votes of
one child for a block of samples and all parents in registers, and computes them again wherever they are needed. It sums
in registers along the axis of its loop, so there are two kinds of loops:

- over the children: sums for a parent, and the gradients of a parent's tensors; also those of each child's pose and
  gate;
- over the samples and the children that share a row: gradients of weights, biases, betas and offsets.

Loops are split among programs, whose partial results are summed afterwards. Each number is written by one program, so
results are the same to the last digit each time.
"""

import triton
import triton.language as tl

from torchcaps.ops.triton.tiles import (
    differentiate,
    load,
    load_features,
    load_gate,
    load_parents,
    load_row,
    load_scores,
    load_weight,
    make_logits,
    make_tile,
    make_votes,
    nonzero,
    norm_of,
    number_range,
    pose_offset,
    softmax_over_parents,
    store_row,
    zeros,
)


@triton.jit
def sums(totals, masses, squares, benefits, peaks, centers, per_split, children, parents, sizes, layer: tl.constexpr):
    """Sum over one split of the children.

    Softmax over the children: votes weighted by exp(logit - peak), and these weights. Softmax over the parents: votes
    weighted by shares; or for moments the shares, the mean relative to the votes of the first child, which are written
    too, and the squared deviations from the mean, updated child by child (Welford, 1962). That expands no square and
    sums no large numbers: votes that agree keep their digits.
    """
    tile = make_tile(tl.program_id(0) * layer.block_n, 0, sizes, layer)
    n, r, h, j, present, real, inside = tile
    known = load_parents(parents, tile, layer)
    total = zeros(layer.block_n, layer.block_r, layer.block_h, layer.block_j, layer.dtype)
    square = zeros(layer.block_n, layer.block_r, layer.block_h, layer.block_j, layer.dtype)
    mass = zeros(layer.block_n, 1, 1, layer.block_j, layer.dtype)
    benefit = zeros(layer.block_n, 1, 1, layer.block_j, layer.dtype)
    peak = zeros(layer.block_n, 1, 1, layer.block_j, layer.dtype) + float("-inf")
    first = tl.program_id(1) * per_split
    if squares is not None:
        center = make_votes(children, first * 0, tile, sizes, layer)
    for c in number_range(first, tl.minimum(first + per_split, sizes.children)):
        v = make_votes(children, c, tile, sizes, layer)
        logit = make_logits(v, children, c, parents, known, tile, sizes, layer)
        gate = load_gate(children, c, tile, sizes, layer)
        if layer.over_children:
            logit = tl.where(gate == 0, float("-inf"), logit)
            top = tl.maximum(peak, logit)
            finite = tl.where(top == float("-inf"), 0.0, top)
            before = tl.exp(peak - finite)
            share = gate * tl.exp(logit - finite)
            total = total * before + share * v
            mass = mass * before + share
            peak = top
        else:
            share = gate * softmax_over_parents(logit, tile, layer)[0]
            if squares is None:
                total += share * v
            else:
                before = mass
                mass += share
                part = share / nonzero(mass)
                change = v - center - total
                total += part * change
                square += part * before * change * change
                if children.betas is not None:
                    beta = load_row(children.betas, c, sizes.per_beta, layer.betas_parents, tile, layer)
                    benefit += beta * share

    score = (tl.cast(tl.program_id(1), tl.int64) * sizes.samples + n) * layer.parents + j
    feature = score * (layer.rows * layer.width) + r * layer.width + h
    tl.store(totals + feature, total, mask=inside)
    if squares is not None:
        tl.store(squares + feature, square, mask=inside)
        tl.store(centers + feature, center, mask=inside & (tl.program_id(1) == 0))
    if masses is not None:
        tl.store(masses + score, mass, mask=present & real)
    if benefits is not None:
        tl.store(benefits + score, benefit, mask=present & real)
    if peaks is not None:
        tl.store(peaks + score, peak, mask=present & real)


@triton.jit
def grads(
    into_poses, into_gates, peaks, masses, grad_gates, grad_query, grad_precision, grad_prior, per_split, children,
    parents, sizes, layer: tl.constexpr,
):  # fmt: skip
    """Add the gradients of poses and gates for one split of the children to `into_poses` and `into_gates`. Write the
    gradients of the gates, peak and mass of a softmax over the parents, and what these children add to the gradients of
    query, precision and prior."""
    tile = make_tile(tl.program_id(0) * layer.block_n, 0, sizes, layer)
    n, r, h, j, present, real, inside = tile
    known = load_parents(parents, tile, layer)
    query = load_features(parents.query, tile, layer)
    of_query = zeros(layer.block_n, layer.block_r, layer.block_h, layer.block_j, layer.dtype)
    of_precision = zeros(layer.block_n, layer.block_r, layer.block_h, layer.block_j, layer.dtype)
    of_prior = zeros(layer.block_n, 1, 1, layer.block_j, layer.dtype)
    first = tl.program_id(1) * per_split
    for c in number_range(first, tl.minimum(first + per_split, sizes.children)):
        v, _share, peak, mass, grad_gate, grad_logit, grad_vote = differentiate(
            children, c, parents, known, None, None, None, tile, sizes, layer
        )
        if grad_precision is not None:
            of_query += grad_logit * (v - query)
            of_precision += grad_logit * ((v - query) * (v - query))
            of_prior += grad_logit
        elif grad_query is not None:
            if layer.unit:
                of_query += grad_logit * (v / norm_of(v))
            else:
                of_query += grad_logit * v
        if into_gates is not None:
            here = into_gates + n * sizes.children + c
            tl.store(here, tl.load(here, mask=present, other=0.0) + grad_gate, mask=present)
        if peaks is not None:
            tl.store(grad_gates + n * sizes.children + c, grad_gate, mask=present)
            tl.store(peaks + n * sizes.children + c, peak, mask=present)
            tl.store(masses + n * sizes.children + c, mass, mask=present)
        if into_poses is not None:
            poses = into_poses + pose_offset(c, tile, sizes, layer)
            exists = present & (r < layer.rows)
            depth: tl.constexpr = layer.depth
            for d in number_range(0, depth):  # unrolled, a depth of 64 would take a minute to compile
                product = grad_vote * load_weight(children, c, d, tile, sizes, layer)
                grad_pose = tl.sum(tl.sum(product, 3, keep_dims=True), 2, keep_dims=True)
                tl.store(poses + d, tl.load(poses + d, mask=exists, other=0.0) + grad_pose, mask=exists)

    score = (tl.cast(tl.program_id(1), tl.int64) * sizes.samples + n) * layer.parents + j
    feature = score * (layer.rows * layer.width) + r * layer.width + h
    if grad_precision is not None:
        of_query *= load_features(parents.precision, tile, layer)
        tl.store(grad_precision + feature, -0.5 * of_precision, mask=inside)
        tl.store(grad_prior + score, of_prior, mask=present & real)
    if grad_query is not None:
        tl.store(grad_query + feature, of_query, mask=inside)


@triton.jit
def row_grads(
    grad_weight, grad_bias, grad_offset, grad_betas, peaks, masses, grad_gates, per_row, per_split, children, parents,
    sizes, layer: tl.constexpr,
):  # fmt: skip
    """Write what one split of the samples and of the children that share a row adds to the gradients of this row of
    weight, bias, offset and betas, for some of the parents. `grads` has written peaks, masses and `grad_gates`."""
    row, first_parent = tl.program_id(0), tl.program_id(2) * layer.block_j
    weights = zeros(layer.block_n, layer.block_d, layer.block_h, layer.block_j, layer.dtype)
    biases = zeros(layer.block_n, layer.block_r, layer.block_h, layer.block_j, layer.dtype)
    offsets = zeros(layer.block_n, 1, 1, layer.block_j, layer.dtype)
    betas = zeros(layer.block_n, 1, 1, layer.block_j, layer.dtype)
    first = tl.cast(tl.program_id(1), tl.int64) * per_split
    items = tl.cast(tl.cdiv(sizes.samples, layer.block_n), tl.int64) * per_row  # blocks of samples of a child
    for item in number_range(first, tl.minimum(first + per_split, items)):
        tile = make_tile(item // per_row * layer.block_n, first_parent, sizes, layer)
        n, _r, _h, _j, present, _real, _inside = tile
        known = load_parents(parents, tile, layer)
        c = row * per_row + item % per_row
        _v, share, _peak, _mass, _grad_gate, grad_logit, grad_vote = differentiate(
            children, c, parents, known, peaks, masses, grad_gates, tile, sizes, layer
        )
        if grad_weight is not None:
            d = tl.arange(0, layer.block_d)[None, :, None, None, None]
            r = tl.arange(0, layer.block_r)[None, None, :, None, None]
            here = ((tl.expand_dims(n, 1) * sizes.children + c) * layer.rows + r) * layer.depth + d
            exists = tl.expand_dims(present, 1) & (r < layer.rows) & (d < layer.depth)
            p = load(children.poses + here, exists, layer)
            weights += tl.sum(p * tl.expand_dims(grad_vote, 1), 2)
        if grad_bias is not None:
            biases += grad_vote
        if grad_offset is not None:
            offsets += grad_logit
        if grad_betas is not None:
            betas += share * load_scores(parents.grad_benefit, tile, layer)

    part = tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + row + tl.zeros([1, 1, 1, 1], tl.int64)
    d = tl.arange(0, layer.block_d)[None, :, None, None]
    _n, r, h, j, _present, real, _inside = make_tile(0, first_parent, sizes, layer)
    if grad_weight is not None:
        at = (part * layer.depth + d) * layer.width + h
        store_row(grad_weight, at, weights, layer.parents, (d < layer.depth) & (h < layer.width), j, real)
    if grad_bias is not None:
        at = (part * layer.rows + r) * layer.width + h
        store_row(grad_bias, at, biases, layer.bias_parents, (r < layer.rows) & (h < layer.width), j, real)
    if grad_offset is not None:
        store_row(grad_offset, part, offsets, layer.parents, part >= 0, j, real)
    if grad_betas is not None:
        store_row(grad_betas, part, betas, layer.betas_parents, part >= 0, j, real)
