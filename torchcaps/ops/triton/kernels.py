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

import triton
import triton.language as tl

from torchcaps.ops.backend import INTERPRETED

if INTERPRETED:

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
def _row(rows, i, n, j, parents: tl.constexpr, per_row, shared: tl.constexpr, dtype: tl.constexpr):
    """What the parents have for child i in `(groups, parents)`, or `(groups, 1)` if they share it; None stays None."""
    if rows is None:
        row = None
    else:
        group = tl.cast(i // per_row, tl.int64)
        here = tl.broadcast_to(rows + (group if shared else group * parents + j), [n.shape[0], 1, 1, j.shape[3]])
        row = tl.load(here, mask=j < parents, other=0.0).to(dtype)
    return row


@triton.jit
def _child(
    poses, weight, bias, gates, offset, target, precision, prior, i, n, r, h, j,
    batch, children, parents: tl.constexpr, per_weight, per_bias, per_offset,
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
    if offset is not None:
        logit += _row(offset, i, n, j, parents, per_offset, False, dtype)

    if gates is None:
        gate = tl.where(n < batch, 1.0, 0.0).to(dtype)
    else:
        gate = tl.load(gates + n * children + i, mask=n < batch, other=0.0).to(dtype)
    return v, logit, gate


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
def _vote_grad(v, share, grad_logit, slope, curve, mean, target, precision, agreement: tl.constexpr):
    if curve is None:
        grad = share * slope
    else:
        grad = share * (slope + 2.0 * curve * (v - mean))
    if agreement == "dot":
        grad += grad_logit * target
    elif agreement == "unit":
        norm = _norm(v)
        grad += grad_logit * ((target - v / norm * _over_features(v / norm * target)) / norm)
    elif agreement == "gaussian":
        grad -= grad_logit * precision * (v - target)
    return grad


# ---------------------------------------------------------------- kernels (x_ is the tile of what x points to)


@triton.jit(do_not_specialize=["batch", "children", "per_split"])
def _sums(
    totals, masses, squares, benefits, peaks, norms, origin, one_block: tl.constexpr, per_split,
    poses, weight, bias, gates, betas, offset, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, per_offset, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
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
            poses, weight, bias, gates, offset, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, per_offset, rows, depth, width,
            shared_bias, agreement, dtype,
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
                    benefit += _row(betas, i, n, j, parents, per_beta, shared_betas, dtype) * share

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
    poses, weight, bias, gates, betas, offset, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, per_offset, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
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
            poses, weight, bias, gates, offset, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, per_offset, rows, depth, width,
            shared_bias, agreement, dtype,
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
            beta = _row(betas, i, n, j, parents, per_beta, shared_betas, dtype)
            grad_share = _share_grad(v, slope_, curve_, mean_, base_, beta, grad_benefit_)
            grad_gate = tl.sum(part * grad_share, 3, keep_dims=True)
            if old_grad_gates is not None:
                grad_gate += before * tl.load(old_grad_gates + at_child, mask=present, other=0.0)
            tl.store(grad_gates + at_child, grad_gate / _nonzero(mass), mask=present)


@triton.jit(do_not_specialize=["batch", "children", "per_split", "parent"])
def _grads(
    old_grad_poses, grad_poses, old_grad_gates, grad_gates, norms, lse, grad_targets, grad_precisions, grad_priors,
    slope, curve, mean, base, grad_benefit, one_block: tl.constexpr, parent, per_split,
    poses, weight, bias, gates, betas, offset, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, per_offset, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
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
            poses, weight, bias, gates, offset, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, per_offset, rows, depth, width,
            shared_bias, agreement, dtype,
        )  # fmt: skip
        beta = _row(betas, i, n, j, parents, per_beta, shared_betas, dtype)
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
            v, share, grad_logit, slope_, curve_, mean_, target_, precision_, agreement
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
    grad_weight, grad_bias, grad_betas, grad_offset, grad_gates, norms, lse,
    slope, curve, mean, base, grad_benefit, per_group, per_split,
    poses, weight, bias, gates, betas, offset, target, precision, prior,
    batch, children, parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    per_weight, per_bias, per_beta, per_offset, shared_bias: tl.constexpr, shared_betas: tl.constexpr,
    agreement: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    block_n: tl.constexpr, block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, block_j: tl.constexpr,
):  # fmt: skip
    """Gradients of what the children of a group share, over one split of these children and the samples."""
    group, block = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, block_d)[None, :, None, None]
    weights = tl.zeros([block_n, block_d, block_h, block_j], dtype)
    biases = tl.zeros([block_n, block_r, block_h, block_j], dtype)
    shares = tl.zeros([block_n, 1, 1, block_j], dtype)
    logits = tl.zeros([block_n, 1, 1, block_j], dtype)
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
            poses, weight, bias, gates, offset, target_, precision_, prior_, i, n, r, h, j,
            batch, children, parents, per_weight, per_bias, per_offset, rows, depth, width,
            shared_bias, agreement, dtype,
        )  # fmt: skip
        beta = _row(betas, i, n, j, parents, per_beta, shared_betas, dtype)
        grad_share = _share_grad(v, slope_, curve_, mean_, base_, beta, grad_benefit_)
        if over_children:
            c = _over_children(logit, gate, _load(lse, at_score, scores, dtype), scores)
        else:
            c, _, _ = _over_parents(logit, norms, i, n, j, batch, children, parents, False, False, dtype)
            grad_share -= tl.load(grad_gates + n * children + i, mask=n < batch, other=0.0)
        share = gate * c
        grad_vote = _vote_grad(
            v, share, share * grad_share, slope_, curve_, mean_, target_, precision_, agreement
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
        if grad_offset is not None:
            logits += share * grad_share

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
    if grad_offset is not None:
        tl.store(grad_offset + part * parents + j, tl.sum(logits, 0, keep_dims=True), mask=j < parents)
