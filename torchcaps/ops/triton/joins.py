# mypy: allow-untyped-defs
"""Kernels that join the results of the splits of a loop, `(splits, numbers)`: one launch for each reduction.

A program joins some of the numbers, in blocks of splits.
"""

import triton
import triton.language as tl

from torchcaps.ops.triton.tiles import nonzero, number_range


@triton.jit
def load_parts(parts, block, numbers, at, exists, splits, other, block_s: tl.constexpr):
    """Load a block of the splits' results for the numbers `at`; `other` where there is no such split."""
    s = (block * block_s + tl.arange(0, block_s)).to(tl.int64)[:, None]
    return tl.load(parts + s * numbers + at[None, :], mask=(s < splits) & exists[None, :], other=other)


@triton.jit
def total_of(parts, numbers, at, exists, splits, block_s: tl.constexpr):
    """Return the sum over the splits."""
    total = tl.sum(load_parts(parts, 0, numbers, at, exists, splits, 0.0, block_s), 0)
    for block in number_range(1, tl.cdiv(splits, block_s)):
        total += tl.sum(load_parts(parts, block, numbers, at, exists, splits, 0.0, block_s), 0)
    return total


@triton.jit
def join_sums(totals, parts, counts, splits, adds: tl.constexpr, block_s: tl.constexpr, block_e: tl.constexpr):
    """Sum the parts of some tensors over the splits; where `adds` says so, add them to numbers that are there."""
    at = tl.program_id(0).to(tl.int64) * block_e + tl.arange(0, block_e)
    for i in tl.static_range(len(parts)):
        exists = at < counts[i]
        total = total_of(parts[i], counts[i], at, exists, splits, block_s)
        if adds[i]:
            total += tl.load(totals[i] + at, mask=exists, other=0.0)
        tl.store(totals[i] + at, total, mask=exists)


@triton.jit
def join_over_children(
    sums, log_masses, totals, masses, peaks, scores, features, splits, block_s: tl.constexpr, block_e: tl.constexpr
):
    """Join the sums of a softmax over the children, and write the logarithms of its denominators: infinity where they
    count as 0, because all coefficients are 0 in the backward pass."""
    at = tl.program_id(0).to(tl.int64) * block_e + tl.arange(0, block_e)
    numbers = tl.cast(scores, tl.int64) * features  # it may exceed 2^31
    exists, score = at < numbers, at // features
    lowest = float("-inf")
    peak = tl.max(load_parts(peaks, 0, scores, score, exists, splits, lowest, block_s), 0)
    for block in number_range(1, tl.cdiv(splits, block_s)):
        peak = tl.maximum(peak, tl.max(load_parts(peaks, block, scores, score, exists, splits, lowest, block_s), 0))
    peak = tl.where(peak == lowest, 0.0, peak)
    mass, total = peak * 0.0, peak * 0.0
    for block in number_range(0, tl.cdiv(splits, block_s)):
        scale = tl.exp(load_parts(peaks, block, scores, score, exists, splits, lowest, block_s) - peak[None, :])
        mass += tl.sum(load_parts(masses, block, scores, score, exists, splits, 0.0, block_s) * scale, 0)
        part = load_parts(totals, block, numbers, at, exists, splits, 0.0, block_s)
        total += tl.sum(part * scale, 0)
    tl.store(sums + at, total / nonzero(mass), mask=exists)
    log_mass = tl.where(mass < 1e-30, float("inf"), peak + tl.log(nonzero(mass)))
    tl.store(log_masses + score, log_mass, mask=exists & (at % features == 0))


@triton.jit
def join_moments(
    mass, mean, variance, benefit, totals, masses, squares, benefits, centers, scores, features, splits,
    eps: tl.constexpr, block_s: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    """Join moments by the parallel formula of Chan, Golub and LeVeque (1979), with deviations from the center. So no
    digits are lost when the votes agree far from zero."""
    at = tl.program_id(0).to(tl.int64) * block_e + tl.arange(0, block_e)
    numbers = tl.cast(scores, tl.int64) * features  # it may exceed 2^31
    exists, score = at < numbers, at // features
    whole = total_of(masses, scores, score, exists, splits, block_s)
    distance, square = whole * 0.0, whole * 0.0
    for block in number_range(0, tl.cdiv(splits, block_s)):
        weight = load_parts(masses, block, scores, score, exists, splits, 0.0, block_s)
        distance += tl.sum(weight * load_parts(totals, block, numbers, at, exists, splits, 0.0, block_s), 0)
    distance /= nonzero(whole)
    for block in number_range(0, tl.cdiv(splits, block_s)):
        weight = load_parts(masses, block, scores, score, exists, splits, 0.0, block_s)
        change = load_parts(totals, block, numbers, at, exists, splits, 0.0, block_s) - distance[None, :]
        part = load_parts(squares, block, numbers, at, exists, splits, 0.0, block_s)
        square += tl.sum(part + weight * change * change, 0)
    center = tl.load(centers + at, mask=exists, other=0.0)
    divisor = nonzero(whole + eps)
    pulled = (center + distance) * (whole / divisor)  # by eps, towards zero; the variance is around it
    off = center + distance - pulled
    tl.store(mean + at, pulled, mask=exists)
    tl.store(variance + at, square / divisor + whole / divisor * off * off, mask=exists)
    first = exists & (at % features == 0)
    tl.store(mass + score, whole, mask=first)
    if benefits is not None:
        tl.store(benefit + score, total_of(benefits, scores, score, exists, splits, block_s), mask=first)
