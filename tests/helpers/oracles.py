"""Slow, plain oracles: the routing algorithms as the papers print them, one scalar at a time.

Tests of routings, layers and losses compare the library with these functions. They use only lists of floats and
explicit indices, so that every axis is named where it is used.

Letters: i child, j parent, k entry of a flattened pose, t iteration; for transforms also r row of a pose, d contracted
feature, h produced feature (k = r * H + h). `votes[i][j][k]` is child i's vote for parent j. `gates[i]` in [0, 1] says
how present child i is; a child whose gate is 0 changes nothing.

A routing is written for one sample and decorated by `of_each_sample`, which adds an index b for the sample in front.
Every routing returns `poses[b][j][k]`, `scores[b][j]` or None, `variances[b][j][k]` or None, and
`coefficients[b][i][j]` of the last weighted sum. With a softmax over parents they exclude the gates, and those of each
child sum to one (with a leak, to less). With a softmax over children they include the gates, and those of each parent
sum to one.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from scipy.special import digamma

Vector = list[float]
Matrix = list[list[float]]
Tensor3 = list[list[list[float]]]
Tensor4 = list[list[list[list[float]]]]
Routed = dict[str, Any]


def of_each_sample(routing: Callable[..., Routed]) -> Callable[..., Routed]:
    """Turn the routing of one sample into that of a batch; its first argument and `gates` get an index b."""

    @functools.wraps(routing)
    def of_a_batch(children: list, *rest: Any, gates: Matrix | None = None, **options: Any) -> Routed:
        samples = []
        for b in range(len(children)):
            gate = [1.0] * len(children[b]) if gates is None else gates[b]
            samples.append(routing(children[b], *rest, gates=gate, **options))
        return {
            field: [x[field] for x in samples] if field in samples[0] else None
            for field in ("poses", "scores", "variances", "coefficients")
        }

    return of_a_batch


# Scalars and vectors


def sigmoid(x: float) -> float:
    """Logistic function; exact at both infinities."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else math.exp(x) / (1.0 + math.exp(x))


def log_sigmoid(x: float) -> float:
    """Logarithm of the logistic function; stays finite where the logistic underflows."""
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def dot(x: Vector, y: Vector) -> float:
    """Inner product of two vectors of the same length."""
    return sum(a * b for a, b in zip(x, y, strict=True))


def unit(x: Vector) -> Vector:
    """The vector divided by its norm; the zero vector stays zero (Zhao & Huang, equation 6)."""
    norm = math.hypot(*x)
    return [a / norm if norm > 0.0 else 0.0 for a in x]


def squash(x: Vector) -> Vector:
    """Sabour et al. 2017, equation 1: same direction, length n^2 / (1 + n^2); zero stays zero."""
    n = math.hypot(*x)
    # n^2 / (1 + n^2) / n with one n canceled, so that n = 0 needs no special case
    return [n / (1.0 + n * n) * a for a in x]


def layer_norm(x: Vector, weight: Vector | None = None, bias: Vector | None = None, eps: float = 1e-5) -> Vector:
    """Ba et al. 2016 over one pose: biased variance, eps under the root, optional affine."""
    mean = sum(x) / len(x)
    variance = sum((a - mean) ** 2 for a in x) / len(x)
    out = [(a - mean) / math.sqrt(variance + eps) for a in x]
    if weight is not None and bias is not None:
        out = [out[k] * weight[k] + bias[k] for k in range(len(x))]
    return out


def batch_norm(x: Tensor3, running: tuple[Vector, Vector] | None, eps: float = 1e-5) -> Tensor3:
    """Ioffe & Szegedy 2015 of `x[b][j][k]` with one mean and biased variance for each j: the given ones, or x's own."""
    out: Tensor3 = [[[] for _ in x[0]] for _ in x]
    for j in range(len(x[0])):
        values = [a for sample in x for a in sample[j]]
        mean = sum(values) / len(values) if running is None else running[0][j]
        variance = sum((a - mean) ** 2 for a in values) / len(values) if running is None else running[1][j]
        for b in range(len(x)):
            out[b][j] = [(a - mean) / math.sqrt(variance + eps) for a in x[b][j]]
    return out


# Parts of the routing of one sample


def table(children: int, parents: int, entry: Callable[[int, int], float]) -> Matrix:
    """A table of entries [i][j]."""
    return [[entry(i, j) for j in range(parents)] for i in range(children)]


def at(rows: Matrix, i: int, j: int) -> float:
    """rows[i][j], where an axis of length 1 stands for every index."""
    row = rows[0] if len(rows) == 1 else rows[i]
    return row[0] if len(row) == 1 else row[j]


def softmax_over_parents(logits: Matrix, leaky: bool = False) -> Matrix:
    """c[i][j] = exp(l[i][j]) / sum over parents; leaky adds a parent of logit 0 to that sum."""
    coefficients = []
    for row in logits:
        highest = max([*row, 0.0] if leaky else row)
        total = sum(math.exp(x - highest) for x in row) + (math.exp(-highest) if leaky else 0.0)
        coefficients.append([math.exp(x - highest) / total for x in row])
    return coefficients


def softmax_over_children(logits: Matrix, gates: Vector) -> Matrix:
    """c[i][j] = gate[i] exp(l[i][j]) / the same summed over children; all 0 where no child is present."""
    children, parents = len(logits), len(logits[0])
    present = [i for i in range(children) if gates[i] > 0.0]
    coefficients = table(children, parents, lambda i, j: 0.0)
    for j in range(parents):
        # an absent child must not set the maximum: its logit could make all the others underflow
        highest = max((logits[i][j] for i in present), default=0.0)
        total = sum(gates[i] * math.exp(logits[i][j] - highest) for i in present)
        for i in present:
            coefficients[i][j] = gates[i] * math.exp(logits[i][j] - highest) / total
    return coefficients


def times_gates(coefficients: Matrix, gates: Vector) -> Matrix:
    """share[i][j] = gate[i] * c[i][j]."""
    return table(len(gates), len(coefficients[0]), lambda i, j: gates[i] * coefficients[i][j])


def weighted_sum(votes: Tensor3, weights: Matrix, j: int) -> Vector:
    """s[k] = sum over children of weights[i][j] * votes[i][j][k], for one parent j."""
    return [sum(weights[i][j] * votes[i][j][k] for i in range(len(votes))) for k in range(len(votes[0][j]))]


def moments(votes: Tensor3, shares: Matrix, j: int, eps: float = 0.0) -> tuple[float, Vector, Vector]:
    """Mass, mean and variance of the votes for one parent; 0 for a parent without mass."""
    mass = sum(row[j] for row in shares)
    divisor = mass + eps if mass + eps > 0.0 else 1.0
    mean = [x / divisor for x in weighted_sum(votes, shares, j)]
    variance = [
        sum(shares[i][j] * (votes[i][j][k] - mean[k]) ** 2 for i in range(len(votes))) / divisor
        for k in range(len(mean))
    ]
    return mass, mean, variance


def log_density(x: Vector, mean: Vector, variance: Vector) -> float:
    """Logarithm of a normal density, without log 2 pi, which cancels in the softmax: all poses have the same size."""
    return sum(-((x[k] - mean[k]) ** 2) / (2.0 * variance[k]) - 0.5 * math.log(variance[k]) for k in range(len(x)))


# Votes


def votes_from_poses(poses: Tensor4, weight: Tensor4, bias: Tensor4 | None = None) -> Tensor4:
    """votes[b][i][j][r*H+h] = sum_d poses[b][i][r][d] * weight[g(i)][j][d][h] + bias[gb(i)][m(j)][r][h].

    `weight` has g groups and n, the number of children, is a multiple of g. Neighboring children share a group:
    g(i) = i // (n // g). `bias` has its own number of groups, and one entry per parent or one for all.
    """
    parents, features = len(weight[0]), len(weight[0][0][0])
    votes: Tensor4 = []
    for b in range(len(poses)):
        votes.append([])
        for i in range(len(poses[b])):
            w = weight[i // (len(poses[b]) // len(weight))]
            offsets = None if bias is None else bias[i // (len(poses[b]) // len(bias))]
            votes[b].append([])
            for j in range(parents):
                vote = []
                for r in range(len(poses[b][i])):
                    for h in range(features):
                        vote.append(dot(poses[b][i][r], [row[h] for row in w[j]]))
                        if offsets is not None:
                            vote[-1] += offsets[0 if len(offsets) == 1 else j][r][h]
                votes[b][i].append(vote)
    return votes


# Losses


def margin_loss(lengths: Matrix, labels: list[int], weights: list[float] | None = None) -> float:
    """Sabour et al. 2017, margin loss (m+ 0.9, m- 0.1, down-weight 0.5): sum of classes, mean of batch."""
    total = 0.0
    for b in range(len(lengths)):
        weight = 1.0 if weights is None else weights[labels[b]]
        for j in range(len(lengths[b])):
            if j == labels[b]:
                total += weight * max(0.0, 0.9 - lengths[b][j]) ** 2
            else:
                total += weight * 0.5 * max(0.0, lengths[b][j] - 0.1) ** 2
    return total / len(lengths)


def spread_loss(activations: Matrix, labels: list[int], margin: float, weights: list[float] | None = None) -> float:
    """Hinton et al. 2018, spread loss: sum over the wrong classes, mean of batch."""
    total = 0.0
    for b in range(len(activations)):
        weight = 1.0 if weights is None else weights[labels[b]]
        for j in range(len(activations[b])):
            if j != labels[b]:
                total += weight * max(0.0, margin - (activations[b][labels[b]] - activations[b][j])) ** 2
    return total / len(activations)


# Routing


@of_each_sample
def dynamic_routing(
    votes: Tensor3,
    iterations: int,
    *,
    gates: Vector,
    softmax: str = "parents",
    bias: Matrix | None = None,
    leaky: bool = False,
    start: Matrix | None = None,
) -> Routed:
    """Sabour et al. 2017, Procedure 1, with the authors' options: `bias[j][k]` and leaky routing.

    `start[i][j]` are the first logits (Li et al. 2018, Table 5). softmax="children" is the variant of Li et al. 2018
    (CapNet), in which the softmax includes the gates.
    """
    children, parents = len(votes), len(votes[0])
    logits = table(children, parents, lambda i, j: 0.0) if start is None else start
    for _ in range(iterations):
        if softmax == "parents":
            coefficients = softmax_over_parents(logits, leaky)
            shares = times_gates(coefficients, gates)
        else:
            shares = coefficients = softmax_over_children(logits, gates)
        sums = [weighted_sum(votes, shares, j) for j in range(parents)]
        if bias is not None:
            sums = [[x + y for x, y in zip(sums[j], bias[j], strict=True)] for j in range(parents)]
        poses = [squash(s) for s in sums]
        # the last of these updates is never read, as in the paper
        logits = [[logits[i][j] + dot(votes[i][j], poses[j]) for j in range(parents)] for i in range(children)]
    return {"poses": poses, "coefficients": coefficients}


@of_each_sample
def vector_norm_routing(
    votes: Tensor3,
    iterations: int,
    sharpness: float,
    *,
    gates: Vector,
    activation: Callable[[Vector], Vector] | None = None,
) -> Routed:
    """Zhao & Huang 2019, Algorithm 1; `sharpness` is their lambda.

    Softmax over children. The agreement is between unit votes and unit parents; every weighted sum is of raw
    votes. After the iterations follows one more sum. Without iterations, it is the mean over the present children.
    """
    children, parents = len(votes), len(votes[0])
    agreement = table(children, parents, lambda i, j: 0.0)
    for t in range(iterations + 1):
        coefficients = softmax_over_children([[sharpness * x for x in row] for row in agreement], gates)
        sums = [weighted_sum(votes, coefficients, j) for j in range(parents)]
        if t < iterations:
            for i in range(children):
                for j in range(parents):
                    agreement[i][j] += dot(unit(votes[i][j]), unit(sums[j]))
    return {"poses": sums if activation is None else [activation(s) for s in sums], "coefficients": coefficients}


@of_each_sample
def inverted_attention_routing(
    votes: Tensor3,
    iterations: int,
    *,
    gates: Vector,
    normalize: Callable[[Vector], Vector],
    start: Matrix | None = None,
    betas: tuple[Vector, Vector] | None = None,
) -> Routed:
    """Tsai et al. 2020, Procedure 1, repeated on one layer, with the authors' scaled agreement.

    `start` are the parents' first poses, in place of zeros. `betas` are EM routing's beta_a and beta_u: with them
    the parents get scores from the votes' weighted variances, as after Hinton et al. 2018's M-step.
    """
    children, parents, size = len(votes), len(votes[0]), len(votes[0][0])
    poses = [[0.0] * size for _ in range(parents)] if start is None else start
    for _ in range(iterations):
        agreement = [[dot(votes[i][j], poses[j]) / math.sqrt(size) for j in range(parents)] for i in range(children)]
        coefficients = softmax_over_parents(agreement)
        shares = times_gates(coefficients, gates)
        poses = [normalize(weighted_sum(votes, shares, j)) for j in range(parents)]
    routed: Routed = {"poses": poses, "coefficients": coefficients}
    if betas is not None:
        routed["scores"] = []
        for j in range(parents):
            mass, _, variance = moments(votes, shares, j)
            cost = sum((betas[1][j] + 0.5 * math.log(max(x, 1e-6))) * mass for x in variance)
            routed["scores"].append(0.01 * (1 - 0.95**iterations) * (betas[0][j] - cost))
    return routed


@of_each_sample
def em_routing(
    votes: Tensor3,
    beta_a: Vector,
    beta_u: Vector,
    iterations: int,
    inverse_temperature: float = 0.01,
    decay: float = 0.95,
    *,
    gates: Vector,
    schedule: str = "saturating",
    cost_range: float | None = None,
) -> Routed:
    """Hinton, Sabour & Frosst 2018, Procedure 1, diagonal Gaussians: M first, E between the M steps.

    Li et al. 2018 have schedule="linear" and rescale the costs of the parents to [-cost_range/2, cost_range/2]. The
    scores are the logits of the parents' activations. A variance is never below 1e-6; a parent without mass has mean 0.
    """
    children, parents = len(votes), len(votes[0])
    means, variances, scores = [], [], []
    coefficients = table(children, parents, lambda i, j: 1.0 / parents)
    for t in range(iterations):
        if t > 0:
            coefficients = softmax_over_parents(gaussian_logits(votes, means, variances, scores))
        shares = times_gates(coefficients, gates)
        means, variances, costs = [], [], []
        for j in range(parents):
            mass, mean, variance = moments(votes, shares, j)
            means.append(mean)
            variances.append([max(x, 1e-6) for x in variance])
            # log sigma is half the log of the variance
            costs.append(sum((beta_u[j] + 0.5 * math.log(x)) * mass for x in variances[j]))
        if cost_range is not None:
            least, most = min(costs), max(costs)
            between = most - least if most > least else 1.0
            costs = [cost_range * (cost - least) / between - cost_range / 2.0 for cost in costs]
        temperature = inverse_temperature * (t + 1 if schedule == "linear" else 1.0 - decay ** (t + 1))
        scores = [temperature * (beta_a[j] - costs[j]) for j in range(parents)]
    return {"poses": means, "scores": scores, "variances": variances, "coefficients": coefficients}


def gaussian_logits(votes: Tensor3, means: Matrix, variances: Matrix, scores: Vector) -> Matrix:
    """Logits of the E step: log sigmoid(score[j]) + log N(votes[i][j]; means[j], variances[j])."""
    return table(
        len(votes),
        len(means),
        lambda i, j: log_sigmoid(scores[j]) + log_density(votes[i][j], means[j], variances[j]),
    )


@of_each_sample
def heinsen_routing(
    votes: Tensor3,
    beta_use: Matrix,
    beta_ignore: Matrix,
    iterations: int,
    *,
    gates: Vector,
    model: str = "gaussian",
    eps: float = 1e-5,
) -> Routed:
    """Heinsen 2019, Algorithm 1 (E, D, M), with the eps of the authors' code.

    The scores are logits. Betas are [i or 1][j or 1].
    model="kmeans" replaces the Gaussian by minus the squared distance; its variances are still returned.
    """
    children, parents = len(votes), len(votes[0])
    means, variances, scores = [], [], []
    coefficients = table(children, parents, lambda i, j: 1.0 / parents)
    for t in range(iterations):
        if t > 0 and model == "gaussian":  # E step
            coefficients = softmax_over_parents(gaussian_logits(votes, means, variances, scores))
        elif t > 0:
            distances = [[math.dist(votes[i][j], means[j]) ** 2 for j in range(parents)] for i in range(children)]
            logits = [[log_sigmoid(scores[j]) - distances[i][j] for j in range(parents)] for i in range(children)]
            coefficients = softmax_over_parents(logits)
        use = times_gates(coefficients, gates)  # D step
        means, variances, scores = [], [], []
        for j in range(parents):  # M step
            net = 0.0
            for i in range(children):
                net += at(beta_use, i, j) * use[i][j] - at(beta_ignore, i, j) * (gates[i] - use[i][j])
            scores.append(net)
            _, mean, variance = moments(votes, use, j, eps)
            means.append(mean)
            variances.append([x + eps for x in variance])
    return {"poses": means, "scores": scores, "variances": variances, "coefficients": coefficients}


@of_each_sample
def efficient_routing(votes: Tensor3, bias: Matrix, *, gates: Vector) -> Routed:
    """Mazzia et al. 2021 with the softmax over parents of the authors' code; `bias[i or 1][j]` is added to the
    coefficients. The coefficients that are returned are without it."""
    children, parents, size = len(votes), len(votes[0]), len(votes[0][0])
    agreement = table(children, parents, lambda i, j: 0.0)
    for j in range(parents):
        for i in range(children):
            for k in range(children):
                agreement[i][j] += gates[k] * dot(votes[i][j], votes[k][j]) / math.sqrt(size)
    coefficients = softmax_over_parents(agreement)
    shares = table(children, parents, lambda i, j: gates[i] * (coefficients[i][j] + at(bias, i, j)))
    poses = []
    for j in range(parents):
        s = weighted_sum(votes, shares, j)
        poses.append([(1.0 - math.exp(-math.hypot(*s))) * x for x in unit(s)])
    return {"poses": poses, "coefficients": coefficients}


@of_each_sample
def self_routing(votes_and_poses: list, weight: Tensor4, bias: Matrix, *, gates: Vector) -> Routed:
    """Hahn et al. 2019. `weight[i][j][r][d]` and `bias[i][j]` turn the children's poses `[i][r][d]` into logits. A
    child comes as a pair of its votes and its pose."""
    votes, poses = [child[0] for child in votes_and_poses], [child[1] for child in votes_and_poses]
    parents = len(votes[0])
    logits = table(len(votes), parents, lambda i, j: bias[i][j] + sum(map(dot, poses[i], weight[i][j])))
    coefficients = softmax_over_parents(logits)
    shares = times_gates(coefficients, gates)
    fits = [moments(votes, shares, j) for j in range(parents)]
    scores = []
    for j in range(parents):
        others = sum(mass for k, (mass, _, _) in enumerate(fits) if k != j)
        scores.append(math.log(max(fits[j][0] / sum(gates), 1e-30)) - math.log(max(others / sum(gates), 1e-30)))
    return {"poses": [mean for _, mean, _ in fits], "scores": scores, "coefficients": coefficients}


def variational_bayes_routing(
    votes: Tensor4,
    iterations: int,
    running: tuple[Vector, Vector, Vector, Vector] | None,
    *,
    gates: Matrix | None = None,
    betas: tuple[Vector, Vector] | None = None,
) -> Routed:
    """De Sousa Ribeiro et al. 2020, Algorithm 1, with diagonal precisions, a prior mean of 0 and a prior scale of 1.

    `running` are the running mean and variance of each parent's pose entries, then those of its score; None takes the
    batch's own. `betas` are beta_a and beta_u of each parent.
    """
    routed = _before_the_batch_norms(votes, iterations, gates=gates, betas=betas)
    as_poses = [[[score] for score in row] for row in routed["scores"]]
    poses = batch_norm(routed["poses"], None if running is None else running[:2])
    scores = [[x[0] for x in row] for row in batch_norm(as_poses, None if running is None else running[2:])]
    return routed | {"poses": poses, "scores": scores}


@of_each_sample
def _before_the_batch_norms(
    votes: Tensor3, iterations: int, *, gates: Vector, betas: tuple[Vector, Vector] | None
) -> Routed:
    """The algorithm up to its batch norms."""
    children, parents, size = len(votes), len(votes[0]), len(votes[0][0])
    beta_a, beta_u = betas or ([0.0] * parents, [0.0] * parents)
    coefficients = table(children, parents, lambda i, j: 1.0 / parents)
    for t in range(iterations):
        shares = times_gates(coefficients, gates)
        fits = [moments(votes, shares, j) for j in range(parents)]
        everything = sum(1.0 + mass for mass, _, _ in fits)
        m, scores, parts = [], [], []
        for j, (mass, mu, variance) in enumerate(fits):
            shrink = mass / (1.0 + mass)
            m.append([shrink * x for x in mu])
            inverse_scale = [1.0 + mass * variance[k] + shrink * mu[k] ** 2 for k in range(size)]
            log_share = digamma(1.0 + mass) - digamma(everything)
            log_det = size * math.log(2.0)
            for h in range(size):
                log_det += digamma((size + 1.0 + mass - h) / 2.0) - math.log(inverse_scale[h])
            parts.append((mass, inverse_scale, log_share, log_det))
            entropy = 0.5 * size * math.log(2.0 * math.pi * math.e) - 0.5 * log_det
            scores.append(beta_a[j] - (math.exp(log_share) * entropy + beta_u[j]))
        if t == iterations - 1:
            break
        logits = table(children, parents, lambda i, j: 0.0)
        for i in range(children):
            for j, (mass, inverse_scale, log_share, log_det) in enumerate(parts):
                distance = size / (1.0 + mass)
                for k in range(size):
                    distance += (size + 1.0 + mass) * (votes[i][j][k] - m[j][k]) ** 2 / inverse_scale[k]
                logits[i][j] = log_share + 0.5 * log_det - 0.5 * distance
        coefficients = softmax_over_parents(logits)
    return {"poses": m, "scores": scores, "coefficients": coefficients}


@of_each_sample
def uniform_routing(
    votes: Tensor3, logits: Matrix | None, activation: Callable[[Vector], Vector] | None, *, gates: Vector
) -> Routed:
    """Parents from uniform coefficients, or from the softmax of `logits[i][j]`, which no vote changes."""
    children, parents = len(votes), len(votes[0])
    coefficients = softmax_over_parents(table(children, parents, lambda i, j: 0.0) if logits is None else logits)
    shares = times_gates(coefficients, gates)
    sums = [weighted_sum(votes, shares, j) for j in range(parents)]
    return {"poses": sums if activation is None else [activation(s) for s in sums], "coefficients": coefficients}


@of_each_sample
def slot_attention(
    poses: Matrix, slots: Matrix, learned: dict[str, Any], iterations: int, eps: float, *, gates: Vector
) -> Routed:
    """Locatello et al. 2020, Algorithm 1. `poses[i][d]` are the inputs, `slots[j][d]` the first slots; `learned` has
    the weights by their names in a state dict."""

    def linear(x: Vector, name: str) -> Vector:
        products = [dot(row, x) for row in learned[f"{name}weight"]]
        bias = learned.get(f"{name}bias", [0.0] * len(products))
        return [x + y for x, y in zip(products, bias, strict=True)]

    def norm(x: Vector, name: str) -> Vector:
        return layer_norm(x, learned[f"norm_{name}.weight"], learned[f"norm_{name}.bias"])

    def gru(u: Vector, s: Vector) -> Vector:
        size = len(s)
        at_input = [dot(row, u) + b for row, b in zip(learned["gru.weight_ih"], learned["gru.bias_ih"], strict=True)]
        at_state = [dot(row, s) + b for row, b in zip(learned["gru.weight_hh"], learned["gru.bias_hh"], strict=True)]
        new = []
        for k in range(size):
            reset, update = sigmoid(at_input[k] + at_state[k]), sigmoid(at_input[size + k] + at_state[size + k])
            candidate = math.tanh(at_input[2 * size + k] + reset * at_state[2 * size + k])
            new.append((1.0 - update) * candidate + update * s[k])
        return new

    inputs, size = [norm(x, "children") for x in poses], len(slots[0])
    keys, values = [linear(x, "key.") for x in inputs], [linear(x, "value.") for x in inputs]
    for _ in range(iterations):
        queries = [linear(norm(s, "slots"), "query.") for s in slots]
        coefficients = softmax_over_parents([[dot(k, q) / math.sqrt(size) for q in queries] for k in keys])
        after = []
        for j in range(len(slots)):
            weights = [gates[i] * (coefficients[i][j] + eps) for i in range(len(keys))]
            update = [dot(weights, [value[k] for value in values]) / sum(weights) for k in range(size)]
            s = gru(update, slots[j])
            hidden = [max(0.0, x) for x in linear(norm(s, "mlp"), "mlp.0.")]
            after.append([x + y for x, y in zip(s, linear(hidden, "mlp.2."), strict=True)])
        slots = after
    return {"poses": slots, "coefficients": coefficients}


@of_each_sample
def heinsen_vector_routing(
    poses: Matrix, learned: dict[str, Any], iterations: int, parents: int, *, gates: Vector
) -> Routed:
    """Heinsen 2022, Algorithm 2. `poses[i][d]` are the inputs. `learned` has the parameters by name, with a row for
    each child (or one row for all) and for each parent; betas are such rows, or linear in the inputs."""
    children, d, h = len(poses), len(poses[0]), len(learned["vote_weight"][0])
    scale = 1.0 / math.sqrt(max(sum(gates), 1e-6))

    def row(name: str, i: int) -> Any:
        return learned[name][i if len(learned[name]) > 1 else 0]

    def beta(name: str, i: int, j: int) -> float:
        if name in learned:
            return at(learned[name], i, j)
        return dot(learned[f"{name}.weight"][j], poses[i]) + learned[f"{name}.bias"][j]

    active, votes = [], []
    for i in range(children):
        x = [scale * value for value in poses[i]]
        active.append(gates[i] * sigmoid(dot(x, row("activation_weight", i)) + row("activation_bias", i)))
        votes.append([])
        for j in range(parents):
            scaled = [x[k] * learned["vote_scale"][j][k] for k in range(d)]
            moved = [dot(scaled, [learned["vote_weight"][k][m] for k in range(d)]) for m in range(h)]
            votes[i].append([moved[m] + learned["vote_bias"][j][m] for m in range(h)])
    outputs: Matrix = []
    shares = table(children, parents, lambda i, j: 1.0 / parents)
    for t in range(iterations):
        if t > 0:
            logits = table(children, parents, lambda i, j: 0.0)
            for j in range(parents):
                normal = layer_norm(outputs[j]) if h > 1 else outputs[j]
                prediction = []
                for k in range(d):
                    moved = dot(normal, [learned["prediction_weight"][m][k] for m in range(h)])
                    prediction.append(moved * learned["prediction_scale"][j][k] + learned["prediction_bias"][j][k])
                for i in range(children):
                    similarity = dot(poses[i], prediction) * row("similarity_weight", i)[j]
                    logits[i][j] = log_sigmoid(similarity + row("similarity_bias", i)[j])
            shares = softmax_over_parents(logits)
        outputs = []
        for j in range(parents):
            phi = []
            for i in range(children):
                used = active[i] * shares[i][j]
                phi.append([beta("beta_use", i, j) * used - beta("beta_ignore", i, j) * (active[i] - used)])
            outputs.append(weighted_sum([[votes[i][j]] for i in range(children)], phi, 0))
    return {"poses": [layer_norm(o) if h > 1 else o for o in outputs], "coefficients": shares}
