# mypy: allow-untyped-defs
"""Kernels of what a routing computes between two reductions, forward and backward: `parents.py` calls them.

A row holds the numbers of one vector, of one parent in one sample. A constant that a function of Triton takes beside a
tensor is rounded to float32; `constant` keeps the precision.
"""

import triton
import triton.language as tl

from torchcaps.ops.triton.tiles import nonzero


@triton.jit
def constant(x, like):
    """Return a number in the precision of a tensor."""
    return tl.full(like.shape, x, like.dtype)


@triton.jit
def scale_by_length(
    out, x, grad, rows, size, inner, unit: tl.constexpr, dtype: tl.constexpr, block_r: tl.constexpr,
    block_f: tl.constexpr,
):  # fmt: skip
    """Squash vectors, or scale them to length 1; with `grad`, that of the result, write the gradient of the vectors.

    The tensors are `(..., size, inner)`: the entries of a vector lie `inner` numbers apart.
    """
    row = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)[:, None]
    f = tl.arange(0, block_f)[None, :]
    at, exists = row // inner * (size * inner) + f * inner + row % inner, (row < rows) & (f < size)
    v = tl.load(x + at, mask=exists, other=0.0).to(dtype)
    square = tl.sum(v * v, 1, keep_dims=True)
    if unit:
        length = nonzero(tl.sqrt(square))
        result, scale, bend = v / length, 1 / length, -1 / length / length
    else:  # in this order no factor overflows
        more, length = 1 + square, tl.sqrt(tl.maximum(square, constant(1e-30, square)))
        scale, bend = square / more / length, (1 - square) / more / more
        result = v * scale
    if grad is not None:
        g = tl.load(grad + at, mask=exists, other=0.0).to(dtype)
        result = g * scale + v * (tl.sum(g * v, 1, keep_dims=True) / length * bend)
    tl.store(out + at, result, mask=exists)


@triton.jit
def load_row(x, at, exists, dtype: tl.constexpr):
    """Load numbers; zeros if there is no such tensor."""
    if x is None:
        part = tl.zeros(at.shape, dtype)
    else:
        part = tl.load(x + at, mask=exists, other=0.0).to(dtype)
    return part


@triton.jit
def make_rows(rows, size, block_r: tl.constexpr, block_f: tl.constexpr):
    """Return the rows of a program, the places of their entries, and masks of both."""
    row = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)[:, None]
    f = tl.arange(0, block_f)[None, :]
    return row, row * size + f, row < rows, (row < rows) & (f < size)


@triton.jit
def make_fit(given, row, at, present, exists, beta_rows, size, factor, floor, eps, dtype: tl.constexpr):
    """Return the variance, half the sum of its logarithms, and the score of each parent."""
    variances, masses, scores, beta_a, beta_u = given
    variance = load_row(variances, at, exists, dtype)
    variance = tl.maximum(variance, constant(floor, variance), tl.PropagateNan.ALL) + eps
    log_sigma = tl.sum(tl.where(exists, 0.5 * tl.log(tl.where(exists, variance, 1.0)), 0.0), 1, keep_dims=True)
    if masses is None:
        score = load_row(scores, row, present, dtype)
    else:
        cost = size * load_row(beta_u, row % beta_rows, present, dtype) + log_sigma
        cost *= load_row(masses, row, present, dtype)
        score = factor * (load_row(beta_a, row % beta_rows, present, dtype) - cost)
    return variance, log_sigma, score


@triton.jit
def fit(
    moved, scores, precisions, priors, given, rows, beta_rows, size, factor, rest, floor: tl.constexpr,
    eps: tl.constexpr, dtype: tl.constexpr, block_r: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Fit a Gaussian to each parent, see `parents.fit`."""
    row, at, present, exists = make_rows(rows, size, block_r, block_f)
    factor = tl.full((1, 1), factor, dtype) + tl.full((1, 1), rest, dtype)
    variance, log_sigma, score = make_fit(given, row, at, present, exists, beta_rows, size, factor, floor, eps, dtype)
    log_gate = tl.minimum(score, 0.0) - tl.log(1 + tl.exp(-tl.abs(score)))
    tl.store(moved + at, variance, mask=exists)
    tl.store(precisions + at, 1 / variance, mask=exists)
    tl.store(scores + row, score, mask=present)
    tl.store(priors + row, log_gate - log_sigma, mask=present)


@triton.jit
def fit_grads(
    grad_variance, grad_mass, grad_score, grad_beta_a, grad_beta_u, grads, given, rows, beta_rows, size,
    factor, rest, floor: tl.constexpr, eps: tl.constexpr, dtype: tl.constexpr, block_r: tl.constexpr,
    block_f: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `fit`, those of the betas for each sample."""
    row, at, present, exists = make_rows(rows, size, block_r, block_f)
    factor = tl.full((1, 1), factor, dtype) + tl.full((1, 1), rest, dtype)
    variance, log_sigma, score = make_fit(given, row, at, present, exists, beta_rows, size, factor, floor, eps, dtype)
    of_moved, of_scores, of_precisions, of_priors = grads
    of_prior = load_row(of_priors, row, present, dtype)
    of_score = load_row(of_scores, row, present, dtype) + of_prior / (1 + tl.exp(score))
    of_log_sigma = -of_prior
    variances, masses, _scores, _beta_a, beta_u = given
    if masses is None:
        tl.store(grad_score + row, of_score, mask=present)
    else:
        mass = load_row(masses, row, present, dtype)
        cost = size * load_row(beta_u, row % beta_rows, present, dtype) + log_sigma
        of_score *= factor
        of_log_sigma -= mass * of_score
        tl.store(grad_mass + row, -cost * of_score, mask=present)
        tl.store(grad_beta_a + row, of_score, mask=present)
        tl.store(grad_beta_u + row, -size * mass * of_score, mask=present)
    of_variance = load_row(of_moved, at, exists, dtype)
    of_variance += (0.5 * of_log_sigma - load_row(of_precisions, at, exists, dtype) / variance) / variance
    counts = load_row(variances, at, exists, dtype) >= floor
    tl.store(grad_variance + at, tl.where(counts, of_variance, 0.0), mask=exists)


@triton.jit
def digamma(x):
    """Return the digamma function of numbers of at least 1/2, by its recurrence and its asymptotic series."""
    below = x * 0.0
    for k in tl.static_range(7):
        below += 1 / (x + k)
    y = x + 7
    z = 1 / (y * y)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * (691 / 32760 - z / 12))))))
    return tl.log(y) - 0.5 / y - series - below


@triton.jit
def trigamma(x):
    """Return the derivative of `digamma`."""
    below = x * 0.0
    for k in tl.static_range(7):
        below += 1 / ((x + k) * (x + k))
    y = x + 7
    z = 1 / (y * y)
    series = 1 / 6 - z * (1 / 30 - z * (1 / 42 - z * (1 / 30 - z * (5 / 66 - z * (691 / 2730 - z * 7 / 6)))))
    return 1 / y + 0.5 * z + series * z / y + below


@triton.jit
def make_posterior(given, at, row, exists, present, f, size: tl.constexpr, dtype: tl.constexpr):
    """Return what both directions of `posterior` need, for all parents of some samples."""
    masses, means, variances = given
    mass = load_row(masses, row, present, dtype)
    mean, variance = load_row(means, at, exists, dtype), load_row(variances, at, exists, dtype)
    kappa = 1 + mass
    p = 1 + mass * variance + mass / kappa * mean * mean
    total = tl.sum(tl.where(present, kappa, 0.0), 1, keep_dims=True)
    log_share = digamma(kappa) - digamma(total)
    half = tl.where(f < size, 0.5 * (size + kappa - f), 1.0)
    log_det = tl.sum(tl.where(f < size, digamma(half) + 0.6931471805599453 - tl.log(p), 0.0), 2, keep_dims=True)
    entropy = 0.5 * size * 2.8378770664093455 - 0.5 * log_det  # ln(2 pi e)
    return mass, mean, variance, kappa, p, total, log_share, half, log_det, entropy


@triton.jit
def make_parents(
    samples, parents, size: tl.constexpr, block_n: tl.constexpr, block_j: tl.constexpr, block_f: tl.constexpr
):
    """Return the entries and the parents of some samples: features, places, and masks."""
    n = (tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n))[:, None, None]
    j, f = tl.arange(0, block_j)[None, :, None], tl.arange(0, block_f)[None, None, :]
    row, present = n * parents + j, (n < samples) & (j < parents)
    return f, row * size + f, row, present & (f < size), present


@triton.jit
def posterior(
    mean_of, precisions, priors, scores, given, samples, parents, size: tl.constexpr, dtype: tl.constexpr,
    block_n: tl.constexpr, block_j: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Compute the posterior of a mixture, see `parents.posterior`."""
    f, at, row, exists, present = make_parents(samples, parents, size, block_n, block_j, block_f)
    mass, mean, _variance, kappa, p, _total, log_share, _half, log_det, entropy = make_posterior(
        given, at, row, exists, present, f, size, dtype
    )
    tl.store(mean_of + at, mass / kappa * mean, mask=exists)
    tl.store(precisions + at, (size + kappa) / p, mask=exists)
    tl.store(priors + row, log_share + 0.5 * (log_det - size / kappa), mask=present)
    tl.store(scores + row, -tl.exp(log_share) * entropy, mask=present)


@triton.jit
def posterior_grads(
    grad_mass, grad_mean, grad_variance, grads, given, samples, parents, size: tl.constexpr, dtype: tl.constexpr,
    block_n: tl.constexpr, block_j: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `posterior`."""
    f, at, row, exists, present = make_parents(samples, parents, size, block_n, block_j, block_f)
    mass, mean, variance, kappa, p, total, log_share, half, _log_det, entropy = make_posterior(
        given, at, row, exists, present, f, size, dtype
    )
    of_means, of_precisions, of_priors, of_scores = grads
    of_m, of_precision = load_row(of_means, at, exists, dtype), load_row(of_precisions, at, exists, dtype)
    of_prior, of_score = load_row(of_priors, row, present, dtype), load_row(of_scores, row, present, dtype)
    share = tl.exp(log_share)
    of_log_share = tl.where(present, of_prior - of_score * share * entropy, 0.0)
    of_log_det = 0.5 * (of_prior + of_score * share)
    of_p = tl.where(exists, -(of_precision * (size + kappa) / p + of_log_det) / p, 0.0)
    of_ratio = tl.sum(of_m * mean + of_p * mean * mean, 2, keep_dims=True)
    of_mass = of_ratio / (kappa * kappa) + 0.5 * size * of_prior / (kappa * kappa)
    curve = tl.where(f < size, 0.5 * trigamma(half), 0.0)
    of_mass += tl.sum(of_p * variance + of_precision / p, 2, keep_dims=True)
    of_mass += of_log_det * tl.sum(curve, 2, keep_dims=True)
    of_mass += of_log_share * trigamma(kappa) - trigamma(total) * tl.sum(of_log_share, 1, keep_dims=True)
    tl.store(grad_mass + row, of_mass, mask=present)
    tl.store(grad_mean + at, mass / kappa * (of_m + 2 * of_p * mean), mask=exists)
    tl.store(grad_variance + at, of_p * mass, mask=exists)


@triton.jit
def make_shares(masses, samples, parents, dtype: tl.constexpr, block_n: tl.constexpr, block_j: tl.constexpr):
    """Return places, a mask, the shares of the mass of a sample that its parents have, the sums of the shares of the
    other parents (1 without any child), whether there is one, and the mass."""
    n = (tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n))[:, None]
    j = tl.arange(0, block_j)[None, :]
    at, present = n * parents + j, (n < samples) & (j < parents)
    mass = load_row(masses, at, present, dtype)
    whole = nonzero(tl.sum(mass, 1, keep_dims=True))
    share = mass / whole
    total = tl.sum(share, 1, keep_dims=True)
    most = share > 0.5 * total  # at most one; its sum of the others keeps all digits
    others = tl.where(most, tl.sum(tl.where(most, 0.0, share), 1, keep_dims=True), total - share)
    some = share + others > 0
    return at, present, share, tl.where(some, others, 1.0), some, whole


@triton.jit
def share_logits(scores, masses, samples, parents, dtype: tl.constexpr, block_n: tl.constexpr, block_j: tl.constexpr):
    """Write the logits of the shares of the mass."""
    at, present, share, others, _some, _whole = make_shares(masses, samples, parents, dtype, block_n, block_j)
    least = constant(1e-30, share)
    share, others = tl.maximum(share, least, tl.PropagateNan.ALL), tl.maximum(others, least, tl.PropagateNan.ALL)
    tl.store(scores + at, tl.log(share) - tl.log(others), mask=present)


@triton.jit
def share_logits_grads(
    grad_masses, grads, masses, samples, parents, dtype: tl.constexpr, block_n: tl.constexpr, block_j: tl.constexpr
):
    """Write the gradients of `share_logits`."""
    at, present, share, others, some, whole = make_shares(masses, samples, parents, dtype, block_n, block_j)
    grad = load_row(grads, at, present, dtype)
    of_share = tl.where(share >= 1e-30, grad / nonzero(share), 0.0)
    of_others = tl.where((others >= 1e-30) & some & present, -grad / nonzero(others), 0.0)
    of_share += tl.sum(of_others, 1, keep_dims=True) - of_others
    mean = tl.sum(tl.where(present, of_share * share, 0.0), 1, keep_dims=True)
    tl.store(grad_masses + at, (of_share - mean) / whole, mask=present)
