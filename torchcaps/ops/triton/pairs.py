# mypy: allow-untyped-defs
"""Triton kernels over pairs of samples and parents: `pack` prepares the backward pass, `merge` joins partial sums."""

import triton
import triton.language as tl

from torchcaps.ops.triton.tiles import nonzero, number_range


@triton.jit
def _pairs(pairs, parents, width, block, block_f):
    """Return the pairs of a program and their features: numbers, addresses, and masks of those that exist."""
    pair = (tl.program_id(0).to(tl.int64) * block + tl.arange(0, block))[:, None]
    f = tl.arange(0, block_f)[None, :]
    return pair, f, pair * width + f, pair < pairs, (pair < pairs) & (f < width)


@triton.jit
def _optional(pointer, at, inside, dtype):
    if pointer is None:
        x = None
    else:
        x = tl.load(pointer + at, mask=inside, other=0.0).to(dtype)
    return x


@triton.jit(do_not_specialize=["pairs"])
def pack(
    packed, target, precision, prior, grad, grad_mass, grad_variance, grad_benefit, sums, lse, mass, variance,
    eps: tl.constexpr, pairs,
    size: tl.constexpr,
    parents: tl.constexpr, features: tl.constexpr, dtype: tl.constexpr, block: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Write what the backward kernels need about each parent as `(samples, size, parents)`, so that neighboring lanes
    read neighboring numbers. The parts are target, precision, slope, curve, center, prior, gradient of the benefit,
    lse and base, in this order; `tiles.load_parents` reads them. `sums` are the weighted sums or the means, `grad` is
    their gradient.

    For a weighted sum the gradient of a share is `e = grad . V`, and that of a logit is `share (e - mean of e)`, where
    the mean is under the softmax. Over the parents this mean is the gradient of the child's gate; over the children it
    is `grad . sum`, and base is its negative.

    For moments, with `q = 1 / (mass + eps)` and `d = V - mean`, the gradient of a share is `grad_mass + beta
    grad_benefit + slope . d + curve . (d^2 - variance)`, where `curve = q grad_variance` and `slope = q (grad_mean -
    2 eps mean curve)`; base is the part without d and beta. With a Gaussian agreement d is the deviation from
    the Gaussian's mean, and slope and base are changed so that the values stay the same: the kernels then need one
    deviation and not two."""
    pair, f, at, is_pair, inside = _pairs(pairs, parents, features, block, block_f)
    moments: tl.constexpr = grad_variance is not None
    # The first row of each part; a part that is not there takes none.
    k_precision: tl.constexpr = 0 if target is None else features
    k_slope: tl.constexpr = k_precision + (0 if precision is None else features)
    k_curve: tl.constexpr = k_slope + (0 if grad is None else features)
    k_center: tl.constexpr = k_curve + (features if moments else 0)
    k_prior: tl.constexpr = k_center + (features if moments and precision is None else 0)
    k_benefit: tl.constexpr = k_prior + (0 if prior is None else 1)
    k_lse: tl.constexpr = k_benefit + (0 if grad_benefit is None else 1)
    k_base: tl.constexpr = k_lse + (0 if lse is None else 1)
    to = pair // parents * (size * parents) + pair % parents
    to_feature = to + f * parents
    if target is not None:
        tl.store(packed + to_feature, _optional(target, at, inside, dtype), mask=inside)
    if precision is not None:
        tl.store(packed + k_precision * parents + to_feature, _optional(precision, at, inside, dtype), mask=inside)
    if prior is not None:
        tl.store(packed + k_prior * parents + to, _optional(prior, pair, is_pair, dtype), mask=is_pair)
    if lse is not None:
        tl.store(packed + k_lse * parents + to, _optional(lse, pair, is_pair, dtype), mask=is_pair)
    if grad_benefit is not None:
        tl.store(packed + k_benefit * parents + to, _optional(grad_benefit, pair, is_pair, dtype), mask=is_pair)
    if grad is not None:
        slope = _optional(grad, at, inside, dtype)
        if moments:
            mean = _optional(sums, at, inside, dtype)
            q = 1.0 / nonzero(_optional(mass, pair, is_pair, dtype) + eps)
            curve = q * _optional(grad_variance, at, inside, dtype)
            slope = q * (slope - 2.0 * eps * mean * curve)
            variance_term = tl.sum(curve * _optional(variance, at, inside, dtype), 1, keep_dims=True)
            base = _optional(grad_mass, pair, is_pair, dtype) - variance_term
            if precision is not None:  # a Gaussian: deviations from its mean
                off = mean - _optional(target, at, inside, dtype)
                base += tl.sum((curve * off - slope) * off, 1, keep_dims=True)
                slope -= 2.0 * curve * off
            else:
                tl.store(packed + k_center * parents + to_feature, mean, mask=inside)
            tl.store(packed + k_curve * parents + to_feature, curve, mask=inside)
            tl.store(packed + k_base * parents + to, base, mask=is_pair)
        elif lse is not None:
            base = -tl.sum(slope * _optional(sums, at, inside, dtype), 1, keep_dims=True)
            tl.store(packed + k_base * parents + to, base, mask=is_pair)
        tl.store(packed + k_slope * parents + to_feature, slope, mask=inside)


@triton.jit(do_not_specialize=["splits", "pairs"])
def merge(
    result, variance, mass, benefit, lse, totals, squares, masses, benefits, peaks, center,
    eps: tl.constexpr, splits, pairs,
    parents: tl.constexpr, features: tl.constexpr, dtype: tl.constexpr, block: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Join the partial results of `kernels.sums`. Weighted sums, softmax over the children: the sums and the logarithms
    of the denominators. Moments: mass, mean, variance and benefit, joined by the formula of Chan, Golub and LeVeque
    (1979). The variance is around the returned mean, which eps pulls towards zero."""
    pair, _, at, is_pair, inside = _pairs(pairs, parents, features, block, block_f)
    total = tl.zeros([block, block_f], dtype)
    total_mass = tl.zeros([block, 1], dtype)
    if peaks is not None:
        peak = tl.full([block, 1], float("-inf"), dtype)
        for split in number_range(0, splits):
            peak = tl.maximum(peak, _part(peaks, split, pairs, 1, pair, is_pair, float("-inf"), dtype))
        zero = tl.where(peak == float("-inf"), 0.0, peak)
        for split in number_range(0, splits):
            scale = tl.exp(_part(peaks, split, pairs, 1, pair, is_pair, float("-inf"), dtype) - zero)
            total_mass += scale * _part(masses, split, pairs, 1, pair, is_pair, 0.0, dtype)
            total += scale * _part(totals, split, pairs, features, at, inside, 0.0, dtype)
        tl.store(result + at, total / nonzero(total_mass), mask=inside)
        no_mass = total_mass < 1e-30
        log_mass = tl.where(no_mass, float("inf"), zero + tl.log(tl.where(no_mass, 1.0, total_mass)))
        tl.store(lse + pair, log_mass, mask=is_pair)
    elif squares is not None:
        for split in number_range(0, splits):
            own = _part(masses, split, pairs, 1, pair, is_pair, 0.0, dtype)
            total_mass += own
            total += own * _part(totals, split, pairs, features, at, inside, 0.0, dtype)
        distance = total / nonzero(total_mass)
        square = tl.zeros([block, block_f], dtype)
        for split in number_range(0, splits):
            own = _part(masses, split, pairs, 1, pair, is_pair, 0.0, dtype)
            off = _part(totals, split, pairs, features, at, inside, 0.0, dtype) - distance
            square += _part(squares, split, pairs, features, at, inside, 0.0, dtype) + own * off * off
        divisor = nonzero(total_mass + eps)
        share = total_mass / divisor
        from_origin = _optional(center, at, inside, dtype) + distance
        shift = from_origin * (1.0 - share)
        tl.store(mass + pair, total_mass, mask=is_pair)
        tl.store(result + at, from_origin * share, mask=inside)
        tl.store(variance + at, square / divisor + share * shift * shift, mask=inside)
        if benefits is not None:
            total_benefit = tl.zeros([block, 1], dtype)
            for split in number_range(0, splits):
                total_benefit += _part(benefits, split, pairs, 1, pair, is_pair, 0.0, dtype)
            tl.store(benefit + pair, total_benefit, mask=is_pair)
    else:
        for split in number_range(0, splits):
            total += _part(totals, split, pairs, features, at, inside, 0.0, dtype)
        tl.store(result + at, total, mask=inside)


@triton.jit
def _part(parts, split, pairs, width, at, inside, other, dtype):
    # The distance between two parts may need 64 bits.
    return tl.load(parts + tl.cast(split, tl.int64) * pairs * width + at, mask=inside, other=other).to(dtype)
