# mypy: allow-untyped-defs
"""Building blocks of the Triton kernels: a tile's numbers, votes, logits and gradients.

A tile is `(samples, rows, columns, parents)`: the votes of one child for some samples and all parents. What it reads of
a parent has one row or column less, and what it reads of a weight no samples; they are broadcast. `problem.py` explains
`children`, `parents`, `sizes` and `layer`. A tensor that a reduction does not have is None.
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


# ---------------------------------------------------------------- loads


@triton.jit
def load(here, mask, layer: tl.constexpr):
    """Load numbers of the children in the precision of the sums; they may be stored in half precision."""
    return tl.load(here, mask=mask, other=0.0).to(layer.dtype)


@triton.jit
def zeros(n: tl.constexpr, r: tl.constexpr, h: tl.constexpr, j: tl.constexpr, dtype: tl.constexpr):
    return tl.zeros([n, r, h, j], dtype)


@triton.jit
def make_tile(first_sample, first_parent, sizes, layer: tl.constexpr):
    """Return the samples, rows, columns and parents of a tile, and masks: of samples, of parents, and of all of them
    that exist."""
    n = (first_sample + tl.arange(0, layer.block_n)).to(tl.int64)[:, None, None, None]
    r = tl.arange(0, layer.block_r)[None, :, None, None]
    h = tl.arange(0, layer.block_h)[None, None, :, None]
    j = first_parent + tl.arange(0, layer.block_j)[None, None, None, :]
    present, real = n < sizes.samples, j < layer.parents
    return n, r, h, j, present, real, present & real & (r < layer.rows) & (h < layer.width)


@triton.jit
def load_features(x, tile, layer: tl.constexpr):
    """Load the tile's part of `(samples, parents, features)`; a zero that is not used if there is no such tensor."""
    n, r, h, j, _present, _real, inside = tile
    if x is None:
        part = tl.zeros([1, 1, 1, 1], layer.dtype)
    else:
        here = x + (n * layer.parents + j) * (layer.rows * layer.width) + r * layer.width + h
        part = tl.load(here, mask=inside, other=0.0)
    return part


@triton.jit
def load_scores(x, tile, layer: tl.constexpr):
    """Load the tile's part of `(samples, parents)`; a zero that is not used if there is no such tensor."""
    n, _r, _h, j, present, real, _inside = tile
    if x is None:
        part = tl.zeros([1, 1, 1, 1], layer.dtype)
    else:
        part = tl.load(x + n * layer.parents + j, mask=present & real, other=0.0)
    return part


@triton.jit
def load_parents(parents, tile, layer: tl.constexpr):
    """Load the tile's parts of the tensors of the parents, and compute the gradient of a share from them.

    Return query, precision, prior, center, slope, curve, base, the gradient of the benefit, and the logarithms of the
    masses. With `d = V - center`, the gradient of a share is `slope . d + curve . d^2 + base`; with betas `beta
    grad_benefit` is added.
    """
    center = load_features(parents.center, tile, layer)
    slope = load_features(parents.grad, tile, layer)
    curve, base = tl.zeros([1, 1, 1, 1], layer.dtype), tl.zeros([1, 1, 1, 1], layer.dtype)
    if parents.variance is not None:
        scale = 1 / nonzero(load_scores(parents.mass, tile, layer) + layer.eps)
        curve = scale * load_features(parents.grad_variance, tile, layer)
        slope = scale * (slope - 2 * layer.eps * center * curve)
        base = load_scores(parents.grad_mass, tile, layer)
        base -= sum_features(curve * load_features(parents.variance, tile, layer))
    return (
        load_features(parents.query, tile, layer),
        load_features(parents.precision, tile, layer),
        load_scores(parents.prior, tile, layer),
        center,
        slope,
        curve,
        base,
        load_scores(parents.grad_benefit, tile, layer),
        load_scores(parents.log_masses, tile, layer),
    )


@triton.jit
def row_of(c, per_row):
    """Return the row that child c has in a tensor `(groups, ...)`."""
    return tl.cast(c // per_row, tl.int64)


@triton.jit
def load_row(x, c, per_row, row_parents: tl.constexpr, tile, layer: tl.constexpr):
    """Load child c's row of `(groups, parents or 1)`."""
    _n, _r, _h, j, _present, real, _inside = tile
    return load(x + row_of(c, per_row) * row_parents + j % row_parents, real, layer)


@triton.jit
def load_gate(children, c, tile, sizes, layer: tl.constexpr):
    """Load the gates of child c; they are 0 for samples that do not exist."""
    n, _r, _h, _j, present, _real, _inside = tile
    if children.gates is None:
        gate = tl.where(present, 1.0, 0.0).to(layer.dtype)
    else:
        gate = load(children.gates + n * sizes.children + c, present, layer)
    return gate


@triton.jit
def load_weight(children, c, d, tile, sizes, layer: tl.constexpr):
    """Load row d of the weights of child c."""
    _n, _r, h, j, _present, real, _inside = tile
    matrix = row_of(c, sizes.per_weight) * (layer.depth * layer.width * layer.parents)
    here = children.weight + matrix + (d * layer.width + h) * layer.parents + j
    return load(here, real & (h < layer.width), layer)


# ---------------------------------------------------------------- votes and coefficients


@triton.jit
def sum_features(x):
    return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def nonzero(x):
    """Replace 0 by 1, as in `numerics.nonzero`."""
    return tl.where(tl.abs(x) < 1e-30, 1.0, x)


@triton.jit
def norm_of(v):
    """Return the lengths of votes, with 1 in place of 0."""
    return nonzero(tl.sqrt(sum_features(v * v)))


@triton.jit
def pose_offset(c, tile, sizes, layer: tl.constexpr):
    """Return where the rows of the poses of child c begin in `(samples, children, rows, depth)`."""
    n, r, _h, _j, _present, _real, _inside = tile
    return ((n * sizes.children + c) * layer.rows + r) * layer.depth


@triton.jit
def make_votes(children, c, tile, sizes, layer: tl.constexpr):
    """Compute the votes of child c."""
    _n, r, h, j, present, _real, inside = tile
    pose = children.poses + pose_offset(c, tile, sizes, layer)
    v = zeros(layer.block_n, layer.block_r, layer.block_h, layer.block_j, layer.dtype)
    depth: tl.constexpr = layer.depth
    for d in tl.static_range(depth):
        p = load(pose + d, present & (r < layer.rows), layer)
        v += p * load_weight(children, c, d, tile, sizes, layer)
    if children.bias is not None:
        at = (row_of(c, sizes.per_bias) * layer.rows + r) * layer.width + h
        here = children.bias + at * layer.bias_parents + j % layer.bias_parents
        v += load(tl.broadcast_to(here, v.shape), inside, layer)
    return v


@triton.jit
def make_logits(v, children, c, parents, known, tile, sizes, layer: tl.constexpr):
    """Compute the logits of votes. `known` is what `load_parents` has loaded."""
    query, precision, prior, _center, _slope, _curve, _base, _grad_benefit, _log_masses = known
    if parents.query is None:
        logit = sum_features(v) * 0.0
    elif parents.precision is None:
        logit = sum_features(v * query)
        if layer.unit:
            logit = logit / norm_of(v)
    else:
        logit = prior - 0.5 * sum_features(precision * ((v - query) * (v - query)))
    if children.offset is not None:
        logit += load_row(children.offset, c, sizes.per_offset, layer.parents, tile, layer)
    return logit


@triton.jit
def softmax_over_parents(logit, tile, layer: tl.constexpr):
    """Return coefficients, the largest logits, and the denominators relative to these."""
    _n, _r, _h, _j, _present, real, _inside = tile
    logit = tl.where(real, logit, float("-inf"))
    peak = tl.max(logit, 3, keep_dims=True)
    if layer.leaky:
        peak = tl.maximum(peak, 0.0)
    part = tl.exp(logit - peak)
    mass = tl.sum(part, 3, keep_dims=True)
    if layer.leaky:
        mass += tl.exp(-peak)
    return part / mass, peak, mass


# ---------------------------------------------------------------- gradients


@triton.jit
def differentiate(children, c, parents, known, peaks, masses, grad_gates, tile, sizes, layer: tl.constexpr):
    """Compute what follows from the gradients of the sums for child c. A share is gate times coefficient.

    Return the votes, the shares, the peak and the mass of a softmax over the parents, and the gradients of gate, logits
    and votes. `load_parents` explains the gradient of a share; the gradient of a logit is that of the share minus the
    mean under the softmax, which is the gradient of the gate, times the share. With a softmax over the children the
    center is their weighted sum, whose part of a share's gradient is this mean.

    Peak, mass and this mean need all parents. A tile that has only some of them reads them from `peaks`, `masses` and
    `grad_gates`, each `(samples, children)`; otherwise these are None.
    """
    query, precision, _prior, center, slope, curve, base, grad_benefit, log_masses = known
    n, _r, _h, _j, present, real, _inside = tile
    v = make_votes(children, c, tile, sizes, layer)
    logit = make_logits(v, children, c, parents, known, tile, sizes, layer)
    gate = load_gate(children, c, tile, sizes, layer)

    deviation = v - center
    if parents.variance is None:
        grad_share = sum_features(slope * deviation)
    else:
        grad_share = sum_features((slope + curve * deviation) * deviation) + base
    if parents.grad_benefit is not None:
        beta = load_row(children.betas, c, sizes.per_beta, layer.betas_parents, tile, layer)
        grad_share += beta * grad_benefit

    if layer.over_children:  # where a gate is 0 there is no gradient
        coefficient = tl.exp(tl.where(real & (gate != 0), logit - log_masses, float("-inf")))
        grad_gate = tl.sum(coefficient * grad_share, 3, keep_dims=True)
        grad_logit, peak, mass = gate * coefficient * grad_share, gate, gate  # there is no such softmax
    elif peaks is None:
        coefficient, peak, mass = softmax_over_parents(logit, tile, layer)
        grad_gate = tl.sum(coefficient * grad_share, 3, keep_dims=True)
        grad_logit = gate * coefficient * (grad_share - grad_gate)
    else:
        here = n * sizes.children + c
        peak = tl.load(peaks + here, mask=present, other=float("inf"))
        mass = tl.load(masses + here, mask=present, other=1.0)
        coefficient = tl.exp(tl.where(real, logit - peak, float("-inf"))) / mass
        grad_gate = tl.load(grad_gates + here, mask=present, other=0.0)
        grad_logit = gate * coefficient * (grad_share - grad_gate)
    share = gate * coefficient

    if parents.variance is None:
        grad_vote = share * slope
    else:
        grad_vote = share * (slope + 2.0 * curve * deviation)
    if parents.precision is not None:
        grad_vote -= grad_logit * precision * (v - query)
    elif parents.query is not None:
        if layer.unit:
            norm = norm_of(v)
            grad_vote += grad_logit * ((query - v / norm * sum_features(v / norm * query)) / norm)
        else:
            grad_vote += grad_logit * query
    return v, share, peak, mass, grad_gate, grad_logit, grad_vote


@triton.jit
def store_row(x, at, values, row_parents: tl.constexpr, exists, j, real):
    """Store the sum over the samples at numbers `at` of `(..., parents or 1)`: for each parent, or for all of them."""
    values = tl.sum(values, 0, keep_dims=True)
    if row_parents == 1:
        tl.store(x + at, tl.sum(values, 3, keep_dims=True), mask=exists)
    else:
        tl.store(x + at * row_parents + j, values, mask=exists & real)
