# mypy: allow-untyped-defs
"""The reductions over votes as Triton kernels, forward and backward.

They compute what `StoredVotes` defines, for votes of poses and weights, and store no vote. A tile holds the votes of
one child, for a block of samples and a block of parents. It lives in registers and is computed again from poses and
weights wherever it is needed, in the backward pass too. Memory grows with poses, weights and parents only. Poses are
read from the map, and their gradients are added there, without a copy of the windows.

A program sums in registers along the axis of its loop, so there are two kinds of loops:

- over the children: sums for a parent, and the gradients of the agreement's tensors. If all parents are in one block,
  each step also has the complete gradients of one child's pose and gate;
- over the samples and the children that share weights: gradients of weights, biases, betas and offsets.

Where a loop would leave the device idle, it is split among programs, and their partial results are summed afterwards.
Results are the same to the last digit each time on one device: in each launch, at most one program adds to a number of
a gradient, and blocks and splits depend on sizes alone.

The kernels share most of their parameters, in groups. `Problem` has the values; `pairs.pack` explains what a backward
kernel knows of the parents.

- the children: tensors, those with parents have them innermost; the numbers of samples and of children of a sample.
- the windows of the launch: how to find sample and first pose from one of its `n_samples` numbers; then the distances
  on the map between types and between places of a window.
- the rows that children share: how many types share a row of weights, biases, betas and offsets.
- the layer: sizes of poses and votes, which tensors are shared, what is reduced, and the precision.
- the tile: rows, columns, depth, samples and parents of a block, and parents in a lane. Weights that are one block deep
  stay in registers from the votes to their gradients.
"""

import triton
import triton.language as tl

from torchcaps.ops.triton.tiles import (
    coefficients_over_children,
    find_child,
    find_tile,
    first_matrix,
    load_features,
    load_gate,
    load_matrix,
    load_parents,
    load_poses,
    load_row,
    load_scores,
    make_logits,
    make_votes,
    next_child,
    no_parents,
    nonzero,
    norm_of,
    number_range,
    over_parents,
    share_gradient,
    softmax_step,
    sum_parents,
    tile_axes,
    vote_gradient,
)

# Arguments without specialization: a kernel is compiled once for a layer, and not again for each batch or map size.
SIZES = [
    "samples", "children", "per_split", "per_group", "n_samples", "windows_down", "windows_across",
    "sample_0", "sample_down", "sample_across", "sample_image", "pose_0", "pose_down", "pose_across", "pose_image",
    "map_size", "place_down", "place_across", "per_weight", "per_bias", "per_beta", "per_offset",
]  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["norms"])
def sums(
    totals, masses, squares, benefits, peaks, origins, norms, target, precision, prior,
    one_block: tl.constexpr, per_split,
    # the children
    poses, weight, bias, gates, betas, offset, samples, children,
    # the windows
    n_samples, windows_down, windows_across, sample_0, sample_down, sample_across, sample_image,
    pose_0, pose_down, pose_across, pose_image, map_size, place_down, place_across,
    # the rows that children share
    per_weight, per_bias, per_beta, per_offset,
    # the layer
    parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    on_grid: tl.constexpr, places: tl.constexpr, kernel_across: tl.constexpr,
    shared_weight: tl.constexpr, shared_bias: tl.constexpr, shared_betas: tl.constexpr, agreement: tl.constexpr,
    moments: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    # the tile
    block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr,
    block_n: tl.constexpr, block_j: tl.constexpr, per_lane: tl.constexpr,
):  # fmt: skip
    """Sum over one split of the children. Softmax over the children: votes weighted by exp(logit - peak), and these
    weights. Softmax over the parents: votes weighted by shares; or for moments the shares, the mean relative to an
    origin (a Gaussian's mean, or the votes of the first child) and the squared deviations from the mean, updated child
    by child (Welford, 1962). That expands no square and sums no large numbers: votes that agree keep their digits."""
    sample, corner, r, h, j, present, real = find_tile(
        tl.program_id(0) * block_n, tl.program_id(1) * block_j, n_samples, windows_down, windows_across,
        sample_0, sample_down, sample_across, sample_image, pose_0, pose_down, pose_across, pose_image, on_grid,
        rows * depth, parents, block_r, block_h, block_n, block_j, per_lane,
    )  # fmt: skip
    target_ = load_features(target, sample, r, h, j, rows * width, rows, width, parents, dtype)
    precision_ = load_features(precision, sample, r, h, j, rows * width, rows, width, parents, dtype)
    prior_ = load_scores(prior, sample, j, parents, dtype)
    if agreement == "gaussian":
        origin_ = target_
    elif moments:
        origin_matrix = load_matrix(weight, 0, 0, h, sample, j, parents, depth, width, block_d, dtype)
        origin_ = make_votes(
            poses, weight, bias, origin_matrix, corner, 0, 0, sample, r, h, j,
            parents, rows, depth, width, shared_bias, block_d, dtype,
        )  # fmt: skip

    total = tl.zeros([block_n, 1, block_r, block_h, block_j], dtype)
    square = tl.zeros([block_n, 1, block_r, block_h, block_j], dtype)
    mass = tl.zeros([block_n, 1, 1, 1, block_j], dtype)
    benefit = tl.zeros([block_n, 1, 1, 1, block_j], dtype)
    peak = tl.full([block_n, 1, 1, 1, block_j], float("-inf"), dtype)
    first = tl.program_id(2) * per_split
    last = tl.minimum(first + per_split, children)
    matrix = first_matrix(
        weight, first, per_weight, h, sample, j, parents, depth, width, shared_weight, block_d, dtype
    )  # fmt: skip
    for c in number_range(first, last):
        kind, place, i, _group, _pose, matrix, v, logit = next_child(
            c, matrix, poses, weight, bias, offset, target_, precision_, prior_, corner, sample, r, h, j,
            per_weight, per_bias, per_offset, map_size, place_down, place_across, parents, rows, depth, width,
            places, kernel_across, shared_weight, shared_bias, agreement, block_d, dtype,
        )  # fmt: skip
        gate = load_gate(gates, sample, i, children, present, dtype)
        if agreement == "ones":
            total += gate * v
        elif over_children:
            logit = tl.where(gate == 0, float("-inf"), logit)
            top = tl.maximum(peak, logit)
            zero = tl.where(top == float("-inf"), 0.0, top)
            kept = tl.exp(peak - zero)
            share = gate * tl.exp(logit - zero)
            total = total * kept + share * v
            mass = mass * kept + share
            peak = top
        else:
            coefficient, _, _ = over_parents(
                logit, norms, i, sample, real, samples, children, leaky, one_block, dtype
            )  # fmt: skip
            share = gate * coefficient
            if moments:
                mass += share
                deviation = v - origin_
                change = deviation - total
                total += share / nonzero(mass) * change
                square += share * change * (deviation - total)
                if betas is not None:
                    beta = load_row(betas, kind // per_beta * places + place, sample, j, parents, shared_betas, dtype)
                    benefit += beta * share
            else:
                total += share * v

    score = (tl.program_id(2).to(tl.int64) * samples + sample) * parents + j
    at, inside = score * (rows * width) + r * width + h, present & real & (r < rows) & (h < width)
    tl.store(totals + at, total, mask=inside)
    if squares is not None:
        tl.store(squares + at, square, mask=inside)
    if masses is not None:
        tl.store(masses + score, mass, mask=present & real)
    if benefits is not None:
        tl.store(benefits + score, benefit, mask=present & real)
    if peaks is not None:
        tl.store(peaks + score, peak, mask=present & real)
    if origins is not None:  # noqa: SIM102 (None is known when compiled, the program's number is not)
        if tl.program_id(2) == 0:
            tl.store(origins + at, origin_, mask=inside)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["norms"])
def normalize(
    norms, with_grads: tl.constexpr, pack, per_split,
    # the children
    poses, weight, bias, gates, betas, offset, samples, children,
    # the windows
    n_samples, windows_down, windows_across, sample_0, sample_down, sample_across, sample_image,
    pose_0, pose_down, pose_across, pose_image, map_size, place_down, place_across,
    # the rows that children share
    per_weight, per_bias, per_beta, per_offset,
    # the layer
    parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    on_grid: tl.constexpr, places: tl.constexpr, kernel_across: tl.constexpr,
    shared_weight: tl.constexpr, shared_bias: tl.constexpr, shared_betas: tl.constexpr, agreement: tl.constexpr,
    moments: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    # the tile
    block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr,
    block_n: tl.constexpr, block_j: tl.constexpr, per_lane: tl.constexpr,
):  # fmt: skip
    """Compute peak and mass of each child's softmax over the parents, for one split of the children, looping over
    blocks of parents. In the backward pass also compute the gradient of the child's gate: the mean of the gradients of
    its shares under this softmax. `norms` holds two copies of these three. Several threads read a number that one of
    them writes, so each block reads the copy that the block before wrote, and writes the other."""
    first = tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, children)
    stride = samples.to(tl.int64) * children
    for parent in range(0, parents, block_j):
        sample, corner, r, h, j, present, real = find_tile(
            tl.program_id(0) * block_n, parent, n_samples, windows_down, windows_across,
            sample_0, sample_down, sample_across, sample_image, pose_0, pose_down, pose_across, pose_image, on_grid,
            rows * depth, parents, block_r, block_h, block_n, block_j, per_lane,
        )  # fmt: skip
        target_, precision_, prior_, slope_, curve_, center_, base_, grad_benefit_, _lse = load_parents(
            pack, sample, r, h, j, rows, width, parents, agreement, moments, over_children, betas is not None,
            with_grads, dtype,
        )  # fmt: skip
        own = norms + parent // block_j % 2 * 3 * stride
        other = norms + (parent // block_j + 1) % 2 * 3 * stride
        matrix = first_matrix(
            weight, first, per_weight, h, sample, j, parents, depth, width, shared_weight, block_d, dtype
        )  # fmt: skip
        for c in number_range(first, last):
            kind, place, i, _group, _pose, matrix, v, logit = next_child(
                c, matrix, poses, weight, bias, offset, target_, precision_, prior_, corner, sample, r, h, j,
                per_weight, per_bias, per_offset, map_size, place_down, place_across, parents, rows, depth, width,
                places, kernel_across, shared_weight, shared_bias, agreement, block_d, dtype,
            )  # fmt: skip
            at = sample * children + i
            before = (sample >= 0) & (parent > 0)
            no_peak, no_mass = no_parents(sample, leaky, dtype)
            peak = tl.load(other + at, mask=before, other=no_peak)
            mass = tl.load(other + stride + at, mask=before, other=no_mass)
            part, kept, peak, mass = softmax_step(logit, real, peak, mass)
            tl.store(own + at, peak, mask=present)
            tl.store(own + stride + at, mass, mask=present)
            if with_grads:
                beta = load_row(betas, kind // per_beta * places + place, sample, j, parents, shared_betas, dtype)
                grad_share = share_gradient(
                    v, slope_, curve_, center_, base_, beta, grad_benefit_, moments, over_children
                )  # fmt: skip
                grad_gate = sum_parents(part * grad_share)
                grad_gate += kept * tl.load(other + 2 * stride + at, mask=before, other=0.0)
                tl.store(own + 2 * stride + at, grad_gate / nonzero(mass), mask=present)
        tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["norms"])
def grads(
    grad_poses, grad_gates, norms, parts, pack, one_block: tl.constexpr, per_split,
    # the children
    poses, weight, bias, gates, betas, offset, samples, children,
    # the windows
    n_samples, windows_down, windows_across, sample_0, sample_down, sample_across, sample_image,
    pose_0, pose_down, pose_across, pose_image, map_size, place_down, place_across,
    # the rows that children share
    per_weight, per_bias, per_beta, per_offset,
    # the layer
    parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    on_grid: tl.constexpr, places: tl.constexpr, kernel_across: tl.constexpr,
    shared_weight: tl.constexpr, shared_bias: tl.constexpr, shared_betas: tl.constexpr, agreement: tl.constexpr,
    moments: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    # the tile
    block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr,
    block_n: tl.constexpr, block_j: tl.constexpr, per_lane: tl.constexpr,
):  # fmt: skip
    """Add the gradients of poses and gates for one split of the children, and write the gradients of the agreement's
    tensors as `parts`, `(splits, target and precision and prior)`. No two windows of one launch may share a pose.
    `norms` (peak, mass and gate gradient of each child) is read if the parents are in several blocks, else written for
    `weight_grads`."""
    first = tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, children)
    stride = samples.to(tl.int64) * children
    for parent in range(0, parents, block_j):
        sample, corner, r, h, j, present, real = find_tile(
            tl.program_id(0) * block_n, parent, n_samples, windows_down, windows_across,
            sample_0, sample_down, sample_across, sample_image, pose_0, pose_down, pose_across, pose_image, on_grid,
            rows * depth, parents, block_r, block_h, block_n, block_j, per_lane,
        )  # fmt: skip
        target_, precision_, prior_, slope_, curve_, center_, base_, grad_benefit_, lse_ = load_parents(
            pack, sample, r, h, j, rows, width, parents, agreement, moments, over_children, betas is not None,
            True, dtype,
        )  # fmt: skip
        grad_target = tl.zeros([block_n, 1, block_r, block_h, block_j], dtype)
        grad_precision = tl.zeros([block_n, 1, block_r, block_h, block_j], dtype)
        grad_prior = tl.zeros([block_n, 1, 1, 1, block_j], dtype)
        matrix = first_matrix(
            weight, first, per_weight, h, sample, j, parents, depth, width, shared_weight, block_d, dtype
        )  # fmt: skip
        for c in number_range(first, last):
            kind, place, i, group, pose, matrix, v, logit = next_child(
                c, matrix, poses, weight, bias, offset, target_, precision_, prior_, corner, sample, r, h, j,
                per_weight, per_bias, per_offset, map_size, place_down, place_across, parents, rows, depth, width,
                places, kernel_across, shared_weight, shared_bias, agreement, block_d, dtype,
            )  # fmt: skip
            gate = load_gate(gates, sample, i, children, present, dtype)
            beta = load_row(betas, kind // per_beta * places + place, sample, j, parents, shared_betas, dtype)
            grad_share = share_gradient(
                v, slope_, curve_, center_, base_, beta, grad_benefit_, moments, over_children
            )  # fmt: skip
            at = sample * children + i
            if agreement == "ones" or over_children:
                if agreement == "ones":
                    coefficient = tl.where(real, 1.0, 0.0).to(dtype)
                else:
                    coefficient = coefficients_over_children(logit, gate, lse_, real)
                if grad_gates is not None:
                    tl.atomic_add(
                        grad_gates + at, sum_parents(coefficient * grad_share), mask=present, sem="relaxed"
                    )  # fmt: skip
            else:
                coefficient, peak, mass = over_parents(
                    logit, norms, i, sample, real, samples, children, leaky, one_block, dtype
                )  # fmt: skip
                if one_block:
                    grad_gate = sum_parents(coefficient * grad_share)
                    tl.store(norms + at, peak, mask=present)
                    tl.store(norms + stride + at, mass, mask=present)
                    tl.store(norms + 2 * stride + at, grad_gate, mask=present)
                else:
                    grad_gate = tl.load(norms + 2 * stride + at)
                if grad_gates is not None:  # noqa: SIM102
                    if parent == 0:
                        tl.atomic_add(grad_gates + at, grad_gate, mask=present, sem="relaxed")
                grad_share -= grad_gate
            share = gate * coefficient
            grad_logit = share * grad_share
            grad_vote = vote_gradient(
                v, share, grad_logit, slope_, curve_, center_, target_, precision_, moments, agreement
            )  # fmt: skip

            if agreement == "dot":
                grad_target += grad_logit * v
            elif agreement == "unit":
                grad_target += grad_logit * (v / norm_of(v))
            elif agreement == "gaussian":
                grad_target += grad_logit * (v - target_)
                grad_precision += grad_logit * ((v - target_) * (v - target_))
                grad_prior += grad_logit

            if grad_poses is not None:
                for first_d in tl.static_range(0, depth, block_d):
                    if depth <= block_d:
                        w = matrix
                    else:
                        w = load_matrix(weight, group, first_d, h, sample, j, parents, depth, width, block_d, dtype)
                    d = first_d + tl.arange(0, block_d)[None, :, None, None, None]
                    tl.atomic_add(
                        grad_poses + corner + pose + r * depth + d,
                        sum_parents(tl.sum(grad_vote * w, 3, keep_dims=True)),
                        mask=present & (r < rows) & (d < depth), sem="relaxed",
                    )  # fmt: skip

        if parts is not None:
            part = samples.to(tl.int64) * parents * (rows * width)
            all_parts = 2 * part + samples.to(tl.int64) * parents if agreement == "gaussian" else part
            score = sample * parents + j
            at = tl.program_id(1) * all_parts + score * (rows * width) + r * width + h
            inside = present & real & (r < rows) & (h < width)
            if agreement == "gaussian":
                grad_target *= precision_
                tl.store(parts + part + at, -0.5 * grad_precision, mask=inside)
                here = parts + 2 * part + tl.program_id(1) * all_parts + score
                tl.store(here, grad_prior, mask=present & real)
            tl.store(parts + at, grad_target, mask=inside)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["norms"])
def weight_grads(
    grad_weight, grad_bias, grad_betas, grad_offset, add: tl.constexpr, norms, pack,
    whole_d: tl.constexpr, by_row: tl.constexpr, own_weight: tl.constexpr, one_child: tl.constexpr,
    per_group, per_split,
    # the children
    poses, weight, bias, gates, betas, offset, samples, children,
    # the windows
    n_samples, windows_down, windows_across, sample_0, sample_down, sample_across, sample_image,
    pose_0, pose_down, pose_across, pose_image, map_size, place_down, place_across,
    # the rows that children share
    per_weight, per_bias, per_beta, per_offset,
    # the layer
    parents: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    on_grid: tl.constexpr, places: tl.constexpr, kernel_across: tl.constexpr,
    shared_weight: tl.constexpr, shared_bias: tl.constexpr, shared_betas: tl.constexpr, agreement: tl.constexpr,
    moments: tl.constexpr, over_children: tl.constexpr, leaky: tl.constexpr, dtype: tl.constexpr,
    # the tile
    block_r: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr,
    block_n: tl.constexpr, block_j: tl.constexpr, per_lane: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of weight, bias, betas and offset for a group, over one split of its children and the
    samples. With `add` those of weight and bias are added in place."""
    row, block = tl.program_id(0), tl.program_id(1)
    weights = tl.zeros([block_n, whole_d, 1, block_h, block_j], dtype)
    biases = tl.zeros([block_n, 1, block_r, block_h, block_j], dtype)
    shares = tl.zeros([block_n, 1, 1, 1, block_j], dtype)
    logits = tl.zeros([block_n, 1, 1, 1, block_j], dtype)
    stride = samples.to(tl.int64) * children
    # The loop over children is inside that over samples, so that the parents of a block of samples are read once.
    first = tl.program_id(2).to(tl.int64) * per_split
    last = tl.minimum(first + per_split, per_group.to(tl.int64) * tl.cdiv(n_samples, block_n))
    for block_of_samples in number_range(
        (first if one_child else first // per_group).to(tl.int32),
        (last if one_child else tl.cdiv(last, per_group)).to(tl.int32),
    ):
        sample, corner, r, h, j, present, real = find_tile(
            block_of_samples * block_n, block * block_j, n_samples, windows_down, windows_across,
            sample_0, sample_down, sample_across, sample_image, pose_0, pose_down, pose_across, pose_image, on_grid,
            rows * depth, parents, block_r, block_h, block_n, block_j, per_lane,
        )  # fmt: skip
        target_, precision_, prior_, slope_, curve_, center_, base_, grad_benefit_, lse_ = load_parents(
            pack, sample, r, h, j, rows, width, parents, agreement, moments, over_children, betas is not None,
            True, dtype,
        )  # fmt: skip
        block_start = block_of_samples * per_group.to(tl.int64)
        for m in number_range(
            0 if one_child else tl.maximum(first - block_start, 0).to(tl.int32),
            1 if one_child else tl.minimum(last - block_start, per_group).to(tl.int32),
        ):
            kind, place, i, _, pose = find_child(
                row * per_group + m, per_group, not one_child, places, kernel_across, map_size,
                place_down, place_across, rows * depth,
            )  # fmt: skip
            group = row if own_weight else kind // per_weight * places + place
            matrix = None
            if depth <= block_d:
                matrix = load_matrix(weight, group, 0, h, sample, j, parents, depth, width, block_d, dtype)
            v = make_votes(
                poses, weight, bias, matrix, corner + pose, group, kind // per_bias * places + place, sample, r, h, j,
                parents, rows, depth, width, shared_bias, block_d, dtype,
            )  # fmt: skip
            offset_ = load_row(offset, kind // per_offset * places + place, sample, j, parents, False, dtype)
            logit = make_logits(v, target_, precision_, prior_, offset_, agreement)
            gate = load_gate(gates, sample, i, children, present, dtype)
            beta = load_row(betas, kind // per_beta * places + place, sample, j, parents, shared_betas, dtype)
            grad_share = share_gradient(
                v, slope_, curve_, center_, base_, beta, grad_benefit_, moments, over_children
            )  # fmt: skip
            if agreement == "ones":
                coefficient = tl.where(real, 1.0, 0.0).to(dtype)
            elif over_children:
                coefficient = coefficients_over_children(logit, gate, lse_, real)
            else:
                coefficient, _, _ = over_parents(
                    logit, norms, i, sample, real, samples, children, leaky, False, dtype
                )  # fmt: skip
                grad_share -= tl.load(norms + 2 * stride + sample * children + i)
            share = gate * coefficient
            grad_vote = vote_gradient(
                v, share, share * grad_share, slope_, curve_, center_, target_, precision_, moments, agreement
            )  # fmt: skip

            if grad_weight is not None:
                p = load_poses(poses, corner + pose, 0, r, rows, depth, whole_d, by_row, dtype)
                weights += tl.sum(p * grad_vote, 2, keep_dims=True)
            if grad_bias is not None:
                biases += grad_vote
            if grad_betas is not None:
                shares += grad_benefit_ * share
            if grad_offset is not None:
                logits += share * grad_share

    _, r, h, j, _, real = tile_axes(
        0, block * block_j, n_samples, parents, block_r, block_h, block_n, block_j, per_lane
    )  # fmt: skip
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + row
    inside = real & (h < width)
    if grad_weight is not None:
        d = tl.arange(0, weights.shape[1])[None, :, None, None, None]
        here = grad_weight + ((part * depth + d) * width + h) * parents + j
        _give(here, tl.sum(weights, 0, keep_dims=True), inside & (d < depth), add)
    if grad_bias is not None:
        biases = tl.sum(biases, 0, keep_dims=True)
        at = (part * rows + r) * width + h
        if shared_bias:
            here = grad_bias + at * tl.num_programs(1) + block
            _give(here, sum_parents(biases), (r < rows) & (h < width), add)
        else:
            _give(grad_bias + at * parents + j, biases, inside & (r < rows), add)
    if grad_betas is not None:
        shares = tl.sum(shares, 0, keep_dims=True)
        if shared_betas:
            at = part * tl.num_programs(1) + block + tl.zeros([1, 1, 1, 1, 1], tl.int32)
            tl.store(grad_betas + at, sum_parents(shares), mask=at >= 0)
        else:
            tl.store(grad_betas + part * parents + j, shares, mask=real)
    if grad_offset is not None:
        tl.store(grad_offset + part * parents + j, tl.sum(logits, 0, keep_dims=True), mask=real)


@triton.jit
def _give(here, x, inside, add):
    """Store numbers, or add them to memory; no other program writes there."""
    if add:
        tl.atomic_add(here, x, mask=inside, sem="relaxed")
    else:
        tl.store(here, x, mask=inside)
