# mypy: allow-untyped-defs
"""Building blocks of the Triton kernels: addresses of a tile's numbers, its votes, softmax, and gradients.

A tile is `(samples, depth, rows, columns, parents)`. Triton distributes the parents over the lanes of a warp first,
`per_lane` neighbors to each lane, and then the samples. So a lane has all features of its votes: sums over features
stay in a thread, and sums over the parents take few steps between lanes.

What is known when a kernel is compiled stays known in the functions that it calls, without an annotation there.
`kernels.py` explains the names.
"""

import triton
import triton.language as tl

from torchcaps.ops.backend import INTERPRETED

if INTERPRETED:

    def number_range(first, last):
        # The interpreter's numbers are arrays of one element, which NumPy 2.4 no longer accepts as an int.
        return range(*(x.handle.data.item() if isinstance(x, tl.tensor) else x for x in (first, last)))

else:
    number_range = tl.range


# ---------------------------------------------------------------- addresses and loads


@triton.jit
def tile_axes(sample, parent, samples, parents, block_r, block_h, block_n, block_j, per_lane):
    """Return the tile's samples, rows, columns and parents, and masks of the samples and parents that exist. Those that
    do not are replaced by the last ones that do, so that loads are always valid and need no mask."""
    n = (sample + tl.arange(0, block_n)).to(tl.int64)[:, None, None, None, None]
    r = tl.arange(0, block_r)[None, None, :, None, None]
    h = tl.arange(0, block_h)[None, None, None, :, None]
    j = (parent + tl.arange(0, block_j))[None, None, None, None, :]
    present, real = n < samples, j < parents
    # Triton gives a lane neighboring parents only if it is told that they are contiguous and aligned.
    if per_lane > 1:
        j = tl.minimum(j // per_lane, parents // per_lane - 1) * per_lane + j % per_lane
        j = tl.max_contiguous(tl.multiple_of(j, [1, 1, 1, 1, per_lane]), [1, 1, 1, 1, per_lane])
    else:
        j = tl.minimum(j, parents - 1)
    if per_lane == 1 and block_j > 1:  # for one parent the compiler accepts no hint
        j = tl.max_contiguous(tl.multiple_of(j, [1, 1, 1, 1, 1]), [1, 1, 1, 1, block_j])
    return tl.minimum(n, samples - 1), r, h, j, present, real


@triton.jit
def find_tile(
    first_sample, first_parent, n_samples, windows_down, windows_across, sample_0, sample_down, sample_across,
    sample_image, pose_0, pose_down, pose_across, pose_image, on_grid, pose_size, parents,
    block_r, block_h, block_n, block_j, per_lane,
):  # fmt: skip
    """Return the axes of the tile that begins at a number of the launch's samples and at a parent, with the samples'
    numbers in the whole batch, and the addresses of the first poses of their windows."""
    n, r, h, j, present, real = tile_axes(
        first_sample, first_parent, n_samples, parents, block_r, block_h, block_n, block_j, per_lane
    )  # fmt: skip
    if on_grid:
        n = n.to(tl.uint32)  # 64-bit and signed divisions are far slower
        image = n // (windows_down * windows_across).to(tl.uint32)
        position = n - image * (windows_down * windows_across).to(tl.uint32)
        down = position // windows_across.to(tl.uint32)
        across = (position - down * windows_across.to(tl.uint32)).to(tl.int32)
        image, down = image.to(tl.int64), down.to(tl.int32)
        sample = image * sample_image + (sample_0 + down * sample_down + across * sample_across)
        corner = image * pose_image + (pose_0 + down * pose_down + across * pose_across)
    else:
        sample, corner = n, n * pose_image
    return sample, corner * pose_size, r, h, j, present, real


@triton.jit
def find_child(c, per_row, shared, places, kernel_across, map_size, place_down, place_across, pose_size):
    """Find child c of a loop in which children that share a row (of weights, for example) follow each other. Return its
    type, its place, its number in the order of types and places, its row, and the address of its pose relative to the
    first pose of the window."""
    if shared:
        row = c // per_row
        kind = row // places * per_row + c % per_row
    else:
        row = c
        kind = c // places
    place = row % places
    pose = kind * map_size
    if places > 1:
        pose += place // kernel_across * place_down + place % kernel_across * place_across
    return kind, place, kind * places + place, row, pose.to(tl.int64) * pose_size


@triton.jit
def load_features(pointer, sample, r, h, j, features, rows, width, parents, dtype):
    """Load the tile of `(samples, parents, features)`, with zeros for padded features. None stays None."""
    if pointer is None:
        x = None
    else:
        at = (sample * parents + j) * features + r * width + h
        x = read(pointer + at, (r < rows) & (h < width), r.shape[2] != rows or h.shape[3] != width, dtype)
    return x


@triton.jit
def load_scores(pointer, sample, j, parents, dtype):
    """Load the tile of `(samples, parents)`. None stays None."""
    if pointer is None:
        x = None
    else:
        x = tl.load(pointer + sample * parents + j).to(dtype)
    return x


@triton.jit
def load_packed_features(pack, there, k, size, sample, r, h, j, rows, width, parents, dtype):
    """Load the features from row k on of `(samples, size, parents)`, or return a zero, which is not used."""
    if there:
        at = (sample * size + k + r * width + h) * parents + j
        x = read(pack + at, (r < rows) & (h < width), r.shape[2] != rows or h.shape[3] != width, dtype)
    else:
        x = tl.zeros([1, 1, 1, 1, 1], dtype)
    return x


@triton.jit
def load_packed_scores(pack, there, k, size, sample, j, parents, dtype):
    """Load row k of `(samples, size, parents)`, or return a zero, which is not used."""
    if there:
        x = tl.load(pack + (sample * size + k) * parents + j).to(dtype)
    else:
        x = tl.zeros([1, 1, 1, 1, 1], dtype)
    return x


@triton.jit
def load_parents(
    pack, sample, r, h, j, rows, width, parents, agreement, moments, over_children, with_betas, with_grads, dtype
):
    """Load what `pairs.pack` has written about the tile's parents, forward or `with_grads`."""
    features: tl.constexpr = rows * width
    # Which parts there are, and their first rows, in the order of `pairs.pack`.
    has_target: tl.constexpr = agreement != "ones" and agreement != "none"
    gaussian: tl.constexpr = agreement == "gaussian"
    has_curve: tl.constexpr = moments and with_grads
    has_center: tl.constexpr = has_curve and not gaussian
    has_benefit: tl.constexpr = with_betas and with_grads
    has_lse: tl.constexpr = over_children and with_grads
    has_base: tl.constexpr = has_curve or has_lse
    k_precision: tl.constexpr = features if has_target else 0
    k_slope: tl.constexpr = k_precision + (features if gaussian else 0)
    k_curve: tl.constexpr = k_slope + (features if with_grads else 0)
    k_center: tl.constexpr = k_curve + (features if has_curve else 0)
    k_prior: tl.constexpr = k_center + (features if has_center else 0)
    k_benefit: tl.constexpr = k_prior + (1 if gaussian else 0)
    k_lse: tl.constexpr = k_benefit + (1 if has_benefit else 0)
    k_base: tl.constexpr = k_lse + (1 if has_lse else 0)
    size: tl.constexpr = k_base + (1 if has_base else 0)
    target = load_packed_features(pack, has_target, 0, size, sample, r, h, j, rows, width, parents, dtype)
    precision = load_packed_features(pack, gaussian, k_precision, size, sample, r, h, j, rows, width, parents, dtype)
    slope = load_packed_features(pack, with_grads, k_slope, size, sample, r, h, j, rows, width, parents, dtype)
    curve = load_packed_features(pack, has_curve, k_curve, size, sample, r, h, j, rows, width, parents, dtype)
    if gaussian:
        center = target
    else:
        center = load_packed_features(pack, has_center, k_center, size, sample, r, h, j, rows, width, parents, dtype)
    prior = load_packed_scores(pack, gaussian, k_prior, size, sample, j, parents, dtype)
    base = load_packed_scores(pack, has_base, k_base, size, sample, j, parents, dtype)
    grad_benefit = load_packed_scores(pack, has_benefit, k_benefit, size, sample, j, parents, dtype)
    lse = load_packed_scores(pack, has_lse, k_lse, size, sample, j, parents, dtype)
    return target, precision, prior, slope, curve, center, base, grad_benefit, lse


@triton.jit
def read(pointer, inside, padded, dtype):
    """Load numbers, with a mask only if there is padding."""
    if padded:
        x = tl.load(pointer, mask=inside, other=0.0).to(dtype)
    else:
        x = tl.load(pointer).to(dtype)
    return x


# ---------------------------------------------------------------- votes and logits


@triton.jit
def sum_features(x):
    return tl.sum(tl.sum(x, 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def sum_parents(x):
    return tl.sum(x, 4, keep_dims=True)


@triton.jit
def nonzero(x):
    """Replace 0 by 1, as in `numerics.nonzero`."""
    return tl.where(tl.abs(x) < 1e-30, 1.0, x)


@triton.jit
def norm_of(v):
    """Return the lengths of votes, with 1 in place of 0."""
    return nonzero(tl.sqrt(sum_features(v * v)))


@triton.jit
def load_poses(poses, pose, first, r, rows, depth, block_d, by_row, dtype):
    """Load `block_d` numbers of each row of poses, row by row or column by column. In loads that are smaller
    than a warp each lane reads what it needs; Triton would distribute larger ones among the lanes and exchange them."""
    d = tl.arange(0, block_d)[None, :, None, None, None]
    here = poses + pose + first
    p = tl.zeros([pose.shape[0], block_d, r.shape[2], 1, 1], dtype)
    if by_row:
        for row in tl.static_range(rows):
            own = read(here + row * depth + d, first + d < depth, first + block_d > depth, dtype)
            p = tl.where(r == row, own, p)
    else:
        for column in tl.static_range(block_d):
            if first + column < depth:
                own = read(here + r * depth + column, r < rows, r.shape[2] != rows, dtype)
                p = tl.where(d == column, own, p)
    return p


@triton.jit
def load_matrix(weight, group, first, h, sample, j, parents, depth, width, block_d, dtype):
    """Load `block_d` rows of a group's weights. They are the same for all samples, but every lane loads its own copy,
    so that lanes need not exchange them."""
    d = first + tl.arange(0, block_d)[None, :, None, None, None]
    here = weight + tl.cast(group, tl.int64) * (depth * width * parents) + (d * width + h) * parents + j
    here = tl.broadcast_to(here, [sample.shape[0], block_d, 1, h.shape[3], j.shape[4]])
    padded: tl.constexpr = h.shape[3] != width or first + block_d > depth
    return read(here, (h < width) & (d < depth), padded, dtype)


@triton.jit
def load_row(rows, row, sample, j, parents, shared, dtype):
    """Load a child's row of `(rows, parents)`, or of `(rows, 1)` if the parents share it. None stays None."""
    if rows is None:
        x = None
    else:
        row = tl.cast(row, tl.int64)
        here = rows + (row if shared else row * parents + j)
        x = tl.load(tl.broadcast_to(here, [sample.shape[0], 1, 1, 1, j.shape[4]])).to(dtype)
    return x


@triton.jit
def make_votes(
    poses, weight, bias, matrix, pose, group, bias_row, sample, r, h, j, parents, rows, depth, width, shared_bias,
    block_d, dtype,
):  # fmt: skip
    """Compute the votes of the child at `pose`. If its weights are one block deep, `matrix` has them already: they stay
    in registers from the votes to their gradients."""
    for first in tl.static_range(0, depth, block_d):
        p = load_poses(poses, pose, first, r, rows, depth, block_d, True, dtype)
        if depth <= block_d:
            w = matrix
        else:
            w = load_matrix(weight, group, first, h, sample, j, parents, depth, width, block_d, dtype)
        if first == 0:
            v = tl.sum(p * w, 1, keep_dims=True)
        else:
            v += tl.sum(p * w, 1, keep_dims=True)
    if bias is not None:
        at = (tl.cast(bias_row, tl.int64) * rows + r) * width + h
        here = tl.broadcast_to(bias + (at if shared_bias else at * parents + j), v.shape)
        v += read(here, (r < rows) & (h < width), r.shape[2] != rows or h.shape[3] != width, dtype)
    return v


@triton.jit
def make_logits(v, target, precision, prior, offset, agreement):
    """Compute the logits of votes. `target` is the query of a dot agreement or the mean of a Gaussian."""
    if agreement == "dot":
        logit = sum_features(v * target)
    elif agreement == "unit":
        logit = sum_features(v * target) / norm_of(v)
    elif agreement == "gaussian":
        logit = prior - 0.5 * sum_features(precision * ((v - target) * (v - target)))
    else:
        logit = sum_features(v) * 0.0
    if offset is not None:
        logit += offset
    return logit


@triton.jit
def first_matrix(weight, first, per_weight, h, sample, j, parents, depth, width, shared_weight, block_d, dtype):
    """Return the weights with which a loop over the children begins: those of the first child, which may not be the
    first of its group; or zeros if each child loads its own, or loads them block by block."""
    if depth <= block_d and shared_weight:
        matrix = load_matrix(weight, first // per_weight, 0, h, sample, j, parents, depth, width, block_d, dtype)
    elif depth <= block_d:
        matrix = tl.zeros([sample.shape[0], block_d, 1, h.shape[3], j.shape[4]], dtype)
    else:
        matrix = tl.zeros([1, 1, 1, 1, 1], dtype)
    return matrix


@triton.jit
def next_child(
    c, matrix, poses, weight, bias, offset, target, precision, prior, corner, sample, r, h, j, per_weight, per_bias,
    per_offset, map_size, place_down, place_across, parents, rows, depth, width, places, kernel_across, shared_weight,
    shared_bias, agreement, block_d, dtype,
):  # fmt: skip
    """Return child c of a loop (see `find_child`), its weights, its votes and their logits. Children that share weights
    load them once: `matrix` holds those of the child before."""
    kind, place, i, group, pose = find_child(
        c, per_weight, shared_weight, places, kernel_across, map_size, place_down, place_across, rows * depth
    )  # fmt: skip
    if depth <= block_d and shared_weight:
        if c % per_weight == 0:
            matrix = load_matrix(weight, group, 0, h, sample, j, parents, depth, width, block_d, dtype)
    elif depth <= block_d:
        matrix = load_matrix(weight, group, 0, h, sample, j, parents, depth, width, block_d, dtype)
    v = make_votes(
        poses, weight, bias, matrix, corner + pose, group, kind // per_bias * places + place, sample, r, h, j,
        parents, rows, depth, width, shared_bias, block_d, dtype,
    )  # fmt: skip
    offset_ = load_row(offset, kind // per_offset * places + place, sample, j, parents, False, dtype)
    return kind, place, i, group, pose, matrix, v, make_logits(v, target, precision, prior, offset_, agreement)


@triton.jit
def load_gate(gates, sample, i, children, present, dtype):
    """Load the gate of child i; it is 0 for samples that do not exist."""
    if gates is None:
        gate = tl.where(present, 1.0, 0.0).to(dtype)
    else:
        gate = tl.where(present, tl.load(gates + sample * children + i).to(dtype), 0.0)
    return gate


# ---------------------------------------------------------------- softmax and gradients


@triton.jit
def no_parents(sample, leaky, dtype):
    """Return peak (largest logit) and mass (sum relative to the peak) of a softmax over no parents but the leak."""
    peak = tl.full([sample.shape[0], 1, 1, 1, 1], 0.0 if leaky else float("-inf"), dtype)
    mass = tl.full([sample.shape[0], 1, 1, 1, 1], 1.0 if leaky else 0.0, dtype)
    return peak, mass


@triton.jit
def softmax_step(logit, real, peak, mass):
    """Add a block of parents to a softmax over the parents. Return the exponentials of the block, the mass of the
    parents before relative to the new peak, the new peak and the new mass."""
    logit = tl.where(real, logit, float("-inf"))
    top = tl.maximum(peak, tl.max(logit, 4, keep_dims=True))
    origin = tl.where(top == float("-inf"), 0.0, top)
    part = tl.exp(logit - origin)
    before = mass * tl.exp(peak - origin)
    return part, before, top, before + sum_parents(part)


@triton.jit
def over_parents(logit, norms, i, sample, real, samples, children, leaky, one_block, dtype):
    """Return coefficients, peak and mass of the softmax over the parents: from the tile, or from `norms`."""
    if one_block:
        peak, mass = no_parents(sample, leaky, dtype)
        part, _, peak, mass = softmax_step(logit, real, peak, mass)
    else:
        peak = tl.load(norms + sample * children + i)
        mass = tl.load(norms + (samples + sample) * children + i)
        logit = tl.where(real, logit, float("-inf"))
        part = tl.exp(logit - tl.where(peak == float("-inf"), 0.0, peak))
    return part / nonzero(mass), peak, mass


@triton.jit
def coefficients_over_children(logit, gate, lse, real):
    """Return coefficients of the softmax over the children without the factor of the gates. Where a gate is 0 they are
    0 and have no gradient."""
    return tl.exp(tl.where(real & (gate != 0), logit - lse, float("-inf")))


@triton.jit
def share_gradient(v, slope, curve, center, base, beta, grad_benefit, moments, over_children):
    """Return the gradient of a share, which is gate times coefficient; see `pairs.pack`."""
    if moments:
        grad = sum_features((slope + curve * (v - center)) * (v - center))
    else:
        grad = sum_features(slope * v)
    if moments or over_children:
        grad += base
    if beta is not None:
        grad += beta * grad_benefit
    return grad


@triton.jit
def vote_gradient(v, share, grad_logit, slope, curve, center, target, precision, moments, agreement):
    """Return the gradient of a vote: as a term of the sums, and through its logit."""
    if moments:
        grad = share * (slope + 2.0 * curve * (v - center))
    else:
        grad = share * slope
    if agreement == "dot":
        grad += grad_logit * target
    elif agreement == "unit":
        norm = norm_of(v)
        grad += grad_logit * ((target - v / norm * sum_features(v / norm * target)) / norm)
    elif agreement == "gaussian":
        grad -= grad_logit * precision * (v - target)
    return grad
