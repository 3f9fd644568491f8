"""Slow, plain oracles: the routing algorithms as the papers print them, one scalar at a time.

Tests of routings, layers and losses compare the library with these functions. They use only lists of floats and
explicit indices, so that every axis is named where it is used.

Letters: b batch, i child, j parent, k entry of a flattened pose, t iteration; for transforms also r row of a pose,
d contracted feature, h produced feature (k = r * H + h). `votes[b][i][j][k]` is child i's vote for parent j.
`gates[b][i]` in [0, 1] says how present child i is (None if all are present); a child whose gate is 0 changes nothing.

Every routing returns `poses[b][j][k]`, `scores[b][j]` or None, `variances[b][j][k]` or None, and
`coefficients[b][i][j]` of the last weighted sum. With a softmax over parents they exclude the gates, and those of each
child sum to one (with a leak, to less). With a softmax over children they include the gates, and those of each parent
sum to one.
"""

import math
from collections.abc import Callable
from typing import Any

Vector = list[float]
Matrix = list[list[float]]
Tensor3 = list[list[list[float]]]
Tensor4 = list[list[list[list[float]]]]
Routed = dict[str, Any]


# Scalars and vectors


def sigmoid(x: float) -> float:
    """Logistic function; exact at both infinities."""
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


def logit(p: float) -> float:
    """Inverse of the logistic function, with both infinities."""
    if p <= 0.0 or p >= 1.0:
        return -math.inf if p <= 0.0 else math.inf
    return math.log(p / (1.0 - p))


def log_sigmoid(x: float) -> float:
    """Logarithm of the logistic function; stays finite where the logistic underflows."""
    if x >= 0.0:
        return -math.log1p(math.exp(-x))
    return x - math.log1p(math.exp(x))


def dot(x: Vector, y: Vector) -> float:
    """Inner product of two vectors of the same length."""
    assert len(x) == len(y)
    total = 0.0
    for k in range(len(x)):
        total += x[k] * y[k]
    return total


def length(x: Vector) -> float:
    """Euclidean norm."""
    return math.hypot(*x)


def unit(x: Vector) -> Vector:
    """The vector divided by its norm; the zero vector stays zero (Zhao & Huang, equation 6)."""
    norm = length(x)
    if norm == 0.0:
        return [0.0 for _ in range(len(x))]
    return [x[k] / norm for k in range(len(x))]


def squash(vector: Vector) -> Vector:
    """Sabour et al. 2017, equation 1: same direction, length n^2 / (1 + n^2); zero stays zero."""
    n = length(vector)
    # n^2 / (1 + n^2) / n with one n canceled, so that n = 0 needs no special case
    factor = n / (1.0 + n * n)
    return [factor * vector[k] for k in range(len(vector))]


def layer_norm(x: Vector, weight: Vector | None, bias: Vector | None, eps: float) -> Vector:
    """Ba et al. 2016 over one pose: biased variance, eps under the root, optional affine."""
    size = len(x)
    mean = 0.0
    for k in range(size):
        mean += x[k] / size
    variance = 0.0
    for k in range(size):
        variance += (x[k] - mean) ** 2 / size
    out = [0.0 for _ in range(size)]
    for k in range(size):
        out[k] = (x[k] - mean) / math.sqrt(variance + eps)
        if weight is not None:
            assert len(weight) == size
            out[k] *= weight[k]
        if bias is not None:
            assert len(bias) == size
            out[k] += bias[k]
    return out


def digamma(x: float) -> float:
    """Derivative of log gamma at x > 0: the recurrence psi(x) = psi(x + 1) - 1/x, then the asymptotic series."""
    total = 0.0
    while x < 12.0:
        total -= 1.0 / x
        x += 1.0
    series = 1 / 12 - (1 / 120 - (1 / 252 - (1 / 240 - (1 / 132 - 691 / 32760 / x**2) / x**2) / x**2) / x**2) / x**2
    return total + math.log(x) - 0.5 / x - series / x**2


def batch_norm(x: Tensor3, running: tuple[Vector, Vector] | None, eps: float = 1e-5) -> Tensor3:
    """Ioffe & Szegedy 2015 of `x[b][j][k]` with one mean and biased variance for each j: the given ones, or x's own."""
    out = [zeros(len(x[b]), len(x[b][0])) for b in range(len(x))]
    for j in range(len(x[0])):
        values = [x[b][j][k] for b in range(len(x)) for k in range(len(x[b][j]))]
        mean = sum(values) / len(values) if running is None else running[0][j]
        variance = sum((v - mean) ** 2 for v in values) / len(values) if running is None else running[1][j]
        for b in range(len(x)):
            for k in range(len(x[b][j])):
                out[b][j][k] = (x[b][j][k] - mean) / math.sqrt(variance + eps)
    return out


# Parts of the routing of one sample, without a batch index


def softmax_over_parents(logits: Matrix, leaky: bool = False) -> Matrix:
    """c[i][j] = exp(l[i][j]) / sum over parents; leaky adds a parent of logit 0 to that sum."""
    coefficients = []
    for i in range(len(logits)):
        highest = 0.0 if leaky else -math.inf
        for j in range(len(logits[i])):
            highest = max(highest, logits[i][j])
        total = math.exp(0.0 - highest) if leaky else 0.0
        for j in range(len(logits[i])):
            total += math.exp(logits[i][j] - highest)
        coefficients.append([math.exp(logits[i][j] - highest) / total for j in range(len(logits[i]))])
    return coefficients


def softmax_over_children(logits: Matrix, gates: Vector) -> Matrix:
    """c[i][j] = gate[i] exp(l[i][j]) / the same summed over children; all 0 where no child is present."""
    children, parents = len(logits), len(logits[0])
    coefficients = [[0.0 for _ in range(parents)] for _ in range(children)]
    for j in range(parents):
        # an absent child must not set the maximum: its logit could make all the others underflow
        highest = -math.inf
        for i in range(children):
            if gates[i] > 0.0:
                highest = max(highest, logits[i][j])
        total = 0.0
        for i in range(children):
            if gates[i] > 0.0:
                total += gates[i] * math.exp(logits[i][j] - highest)
        for i in range(children):
            if gates[i] > 0.0:
                coefficients[i][j] = gates[i] * math.exp(logits[i][j] - highest) / total
    return coefficients


def weighted_sum(votes: Tensor3, weights: Matrix, j: int) -> Vector:
    """s[k] = sum over children of weights[i][j] * votes[i][j][k], for one parent j."""
    size = len(votes[0][j])
    out = [0.0 for _ in range(size)]
    for k in range(size):
        for i in range(len(votes)):
            out[k] += weights[i][j] * votes[i][j][k]
    return out


def times_gates(coefficients: Matrix, gates: Vector) -> Matrix:
    """share[i][j] = gate[i] * c[i][j]."""
    out = []
    for i in range(len(coefficients)):
        out.append([gates[i] * coefficients[i][j] for j in range(len(coefficients[i]))])
    return out


def gates_of(gates: Matrix | None, b: int, children: int) -> Vector:
    """Gates of sample b; all ones if gates is None."""
    if gates is None:
        return [1.0 for _ in range(children)]
    assert len(gates[b]) == children
    return gates[b]


def zeros(rows: int, columns: int) -> Matrix:
    """A rows x columns matrix of zeros, each row its own list."""
    return [[0.0 for _ in range(columns)] for _ in range(rows)]


def at(table: Matrix, row: int, column: int) -> float:
    """table[row][column], where an axis of length 1 stands for every index."""
    values = table[0] if len(table) == 1 else table[row]
    return values[0] if len(values) == 1 else values[column]


# Votes


def votes_from_poses(poses: Tensor4, weight: Tensor4, bias: Tensor4 | None = None) -> Tensor4:
    """votes[b][i][j][r*H+h] = sum_d poses[b][i][r][d] * weight[g(i)][j][d][h] + bias[gb(i)][m(j)][r][h].

    `weight` has g groups and n, the number of children, is a multiple of g. Neighboring children share a group:
    g(i) = i // (n // g). `bias` has its own number of groups, and one entry per parent or one for all.
    """
    groups, parents = len(weight), len(weight[0])
    votes = []
    for b in range(len(poses)):
        children = len(poses[b])
        assert children % groups == 0
        votes.append([])
        for i in range(children):
            w = weight[i // (children // groups)]
            votes[b].append([])
            for j in range(parents):
                rows, contracted, features = len(poses[b][i]), len(w[j]), len(w[j][0])
                vote = [0.0 for _ in range(rows * features)]
                for r in range(rows):
                    assert len(poses[b][i][r]) == contracted
                    for h in range(features):
                        total = 0.0
                        for d in range(contracted):
                            total += poses[b][i][r][d] * w[j][d][h]
                        if bias is not None:
                            assert children % len(bias) == 0
                            per_parent = bias[i // (children // len(bias))]
                            assert len(per_parent) in (1, parents)
                            total += per_parent[0 if len(per_parent) == 1 else j][r][h]
                        vote[r * features + h] = total
                votes[b][i].append(vote)
    return votes


# Losses


def margin_loss(lengths: Matrix, labels: list[int]) -> float:
    """Sabour et al. 2017, margin loss (m+ 0.9, m- 0.1, down-weight 0.5): sum of classes, mean of batch."""
    total = 0.0
    for b in range(len(lengths)):
        for j in range(len(lengths[b])):
            if j == labels[b]:
                total += max(0.0, 0.9 - lengths[b][j]) ** 2
            else:
                total += 0.5 * max(0.0, lengths[b][j] - 0.1) ** 2
    return total / len(lengths)


def spread_loss(activations: Matrix, labels: list[int], margin: float) -> float:
    """Hinton et al. 2018, spread loss: sum over the wrong classes, mean of batch."""
    total = 0.0
    for b in range(len(activations)):
        right = activations[b][labels[b]]
        for j in range(len(activations[b])):
            if j != labels[b]:
                total += max(0.0, margin - (right - activations[b][j])) ** 2
    return total / len(activations)


# Routing


def dynamic_routing(
    votes: Tensor4,
    iterations: int,
    softmax: str = "parents",
    bias: Matrix | None = None,
    leaky: bool = False,
    gates: Matrix | None = None,
    start: Matrix | None = None,
) -> Routed:
    """Sabour et al. 2017, Procedure 1, with the authors' options: `bias[j][k]` and leaky routing.

    `start[i][j]` are the first logits (Li et al. 2018, Table 5). softmax="children" is the variant of Li et al. 2018
    (CapNet). Needs at least one iteration.
    """
    if iterations < 1:
        raise ValueError("dynamic routing has no output before its first iteration")
    if softmax not in ("parents", "children"):
        raise ValueError(f"softmax must be one of 'parents', 'children', got {softmax!r}")
    if leaky and softmax != "parents":
        raise ValueError("the leak is a parent: it can only join a softmax over parents")
    all_poses, all_coefficients = [], []
    for b in range(len(votes)):
        children, parents = len(votes[b]), len(votes[b][0])
        gate = gates_of(gates, b, children)
        logits = zeros(children, parents) if start is None else [list(row) for row in start]
        poses: Matrix = []
        coefficients: Matrix = []
        for _ in range(iterations):
            if softmax == "parents":
                coefficients = softmax_over_parents(logits, leaky)
                weights = times_gates(coefficients, gate)
            else:
                coefficients = softmax_over_children(logits, gate)
                weights = coefficients  # the gates are inside this softmax already
            poses = []
            for j in range(parents):
                s = weighted_sum(votes[b], weights, j)
                if bias is not None:
                    for k in range(len(s)):
                        s[k] += bias[j][k]
                poses.append(squash(s))
            # the last of these updates is never read, as in the paper
            for i in range(children):
                for j in range(parents):
                    logits[i][j] += dot(votes[b][i][j], poses[j])
        all_poses.append(poses)
        all_coefficients.append(coefficients)
    return {"poses": all_poses, "scores": None, "variances": None, "coefficients": all_coefficients}


def vector_norm_routing(
    votes: Tensor4,
    iterations: int,
    sharpness: float,
    gates: Matrix | None = None,
    activation: Callable[[Vector], Vector] | None = None,
) -> Routed:
    """Zhao & Huang 2019, Algorithm 1; `sharpness` is their lambda.

    Softmax over children. The agreement is between unit votes and unit parents; every weighted sum is of raw
    votes. After the iterations follows one more sum. Without iterations, it is the mean over the present children.
    """
    all_poses, all_coefficients = [], []
    for b in range(len(votes)):
        children, parents = len(votes[b]), len(votes[b][0])
        gate = gates_of(gates, b, children)
        agreement = zeros(children, parents)
        coefficients = softmax_over_children(agreement, gate)
        for _ in range(iterations):
            for j in range(parents):
                parent = unit(weighted_sum(votes[b], coefficients, j))
                for i in range(children):
                    agreement[i][j] += dot(unit(votes[b][i][j]), parent)
            logits = zeros(children, parents)
            for i in range(children):
                for j in range(parents):
                    logits[i][j] = sharpness * agreement[i][j]
            coefficients = softmax_over_children(logits, gate)
        poses = []
        for j in range(parents):
            s = weighted_sum(votes[b], coefficients, j)
            poses.append(s if activation is None else activation(s))
        all_poses.append(poses)
        all_coefficients.append(coefficients)
    return {"poses": all_poses, "scores": None, "variances": None, "coefficients": all_coefficients}


def inverted_attention_routing(
    votes: Tensor4,
    iterations: int,
    weight: Vector | None = None,
    bias: Vector | None = None,
    eps: float = 1e-5,
    scale: float | None = None,
    layer_norm: bool = True,
    gates: Matrix | None = None,
    start: Tensor3 | None = None,
    betas: tuple[Vector, Vector] | None = None,
) -> Routed:
    """Tsai et al. 2020, Procedure 1, repeated on one layer, with the authors' scaled agreement.

    `start` are the parents' first poses, in place of zeros. `betas` are EM routing's beta_a and beta_u: with them
    the parents get scores from the votes' weighted variances, as after Hinton et al. 2018's M-step. `weight` and
    `bias` belong to LayerNorm.

    Parents start at zero, so the first coefficients are uniform over parents. Without iterations the poses stay
    as they start, and the coefficients are None.
    """
    normalize = _layer_norm_or_not(layer_norm, weight, bias, eps)
    all_poses, all_coefficients, all_scores = [], [], []
    for b in range(len(votes)):
        children, parents, size = len(votes[b]), len(votes[b][0]), len(votes[b][0][0])
        gate = gates_of(gates, b, children)
        factor = 1.0 / math.sqrt(size) if scale is None else scale
        poses = zeros(parents, size) if start is None else start[b]
        coefficients: Matrix | None = None
        scores: Vector = []
        for t in range(iterations):
            agreement = zeros(children, parents)
            for i in range(children):
                for j in range(parents):
                    agreement[i][j] = factor * dot(votes[b][i][j], poses[j])
            coefficients = softmax_over_parents(agreement)
            weights = times_gates(coefficients, gate)
            if betas is not None:
                scores = []
                for j in range(parents):
                    mass = sum(weights[i][j] for i in range(children))
                    sums = weighted_sum(votes[b], weights, j)
                    cost = 0.0
                    for h in range(size):
                        squares = [weights[i][j] * (votes[b][i][j][h] - sums[h] / mass) ** 2 for i in range(children)]
                        cost += (betas[1][j] + 0.5 * math.log(max(sum(squares) / mass, 1e-6))) * mass
                    scores.append(0.01 * (1 - 0.95 ** (t + 1)) * (betas[0][j] - cost))
            poses = [normalize(weighted_sum(votes[b], weights, j)) for j in range(parents)]
        all_poses.append(poses)
        all_coefficients.append(coefficients)
        all_scores.append(scores)
    found = None if betas is None else all_scores
    return {"poses": all_poses, "scores": found, "variances": None, "coefficients": all_coefficients}


def _layer_norm_or_not(
    wanted: bool, weight: Vector | None, bias: Vector | None, eps: float
) -> Callable[[Vector], Vector]:
    """LayerNorm, or the identity. A function of its own, because the routing's argument hides the name layer_norm."""
    if not wanted:
        return lambda x: x
    return lambda x: layer_norm(x, weight, bias, eps)


def em_routing(
    votes: Tensor4,
    activations: Matrix,
    beta_a: Vector,
    beta_u: Vector,
    iterations: int,
    inverse_temperature: float = 0.01,
    decay: float = 0.95,
    eps: float = 1e-6,
    schedule: str = "saturating",
    cost_range: float | None = None,
) -> Routed:
    """Hinton, Sabour & Frosst 2018, Procedure 1, diagonal Gaussians: M first, E between the M steps.

    Li et al. 2018 have schedule="linear" and rescale the costs of the parents to [-cost_range/2, cost_range/2].

    `activations[b][i]` are probabilities and act as gates; the scores returned are the logits of the
    parents' activations. A variance is never below `eps`; a parent without mass has mean 0 and
    variance `eps`.
    """
    if iterations < 1:
        raise ValueError("EM routing has no output before its first M step")
    routed: Routed = {"poses": [], "scores": [], "variances": [], "coefficients": []}
    for b in range(len(votes)):
        children, parents, size = len(votes[b]), len(votes[b][0]), len(votes[b][0][0])
        coefficients = [[1.0 / parents for _ in range(parents)] for _ in range(children)]
        means, variances = zeros(parents, size), zeros(parents, size)
        scores = [0.0 for _ in range(parents)]
        for t in range(iterations):
            if t > 0:
                coefficients = softmax_over_parents(_gaussian_logits(votes[b], means, variances, scores))
            temperature = inverse_temperature * (t + 1 if schedule == "linear" else 1.0 - decay ** (t + 1))
            costs = [0.0 for _ in range(parents)]
            for j in range(parents):
                mass = 0.0
                for i in range(children):
                    mass += coefficients[i][j] * activations[b][i]
                cost = 0.0
                for k in range(size):
                    mean, variance = 0.0, 0.0
                    if mass > 0.0:
                        for i in range(children):
                            mean += coefficients[i][j] * activations[b][i] * votes[b][i][j][k]
                        mean /= mass
                        for i in range(children):
                            deviation = votes[b][i][j][k] - mean
                            variance += coefficients[i][j] * activations[b][i] * deviation**2
                        variance /= mass
                    means[j][k] = mean
                    variances[j][k] = max(variance, eps)
                    # log sigma is half the log of the variance
                    cost += (beta_u[j] + 0.5 * math.log(variances[j][k])) * mass
                costs[j] = cost
            if cost_range is not None:
                least, most = min(costs), max(costs)
                between = most - least if most > least else 1.0
                costs = [cost_range * (cost - least) / between - cost_range / 2.0 for cost in costs]
            for j in range(parents):
                scores[j] = temperature * (beta_a[j] - costs[j])
        routed["poses"].append(means)
        routed["scores"].append(scores)
        routed["variances"].append(variances)
        routed["coefficients"].append(coefficients)
    return routed


def heinsen_routing(
    votes: Tensor4,
    scores: Matrix,
    beta_use: Matrix,
    beta_ignore: Matrix | None,
    iterations: int,
    model: str = "gaussian",
    eps: float = 1e-5,
) -> Routed:
    """Heinsen 2019, Algorithm 1 (E, D, M), with the eps of the authors' code.

    `scores[b][i]` and the scores returned are logits, from -inf (absent) to inf (present). Betas are
    [i or 1][j or 1]; without `beta_ignore`, `beta_use` serves for both. model="kmeans" replaces the
    Gaussian by minus the squared distance; its variances are still returned.
    """
    if iterations < 1:
        raise ValueError("this routing has no output before its first M step")
    if model not in ("gaussian", "kmeans"):
        raise ValueError(f"model must be one of 'gaussian', 'kmeans', got {model!r}")
    beta_ign = beta_use if beta_ignore is None else beta_ignore
    routed: Routed = {"poses": [], "scores": [], "variances": [], "coefficients": []}
    for b in range(len(votes)):
        children, parents, size = len(votes[b]), len(votes[b][0]), len(votes[b][0][0])
        available = [sigmoid(scores[b][i]) for i in range(children)]
        means, variances = zeros(parents, size), zeros(parents, size)
        out_scores = [0.0 for _ in range(parents)]
        coefficients: Matrix = []
        for t in range(iterations):
            # E step
            if t == 0:
                coefficients = [[1.0 / parents for _ in range(parents)] for _ in range(children)]
            elif model == "gaussian":
                coefficients = softmax_over_parents(_gaussian_logits(votes[b], means, variances, out_scores))
            else:
                coefficients = softmax_over_parents(_distance_logits(votes[b], means, out_scores))
            # D step
            use, ignore = zeros(children, parents), zeros(children, parents)
            for i in range(children):
                for j in range(parents):
                    use[i][j] = available[i] * coefficients[i][j]
                    ignore[i][j] = available[i] - use[i][j]
            # M step
            for j in range(parents):
                net, mass = 0.0, 0.0
                for i in range(children):
                    net += at(beta_use, i, j) * use[i][j] - at(beta_ign, i, j) * ignore[i][j]
                    mass += use[i][j]
                out_scores[j] = net
                for k in range(size):
                    mean, variance = 0.0, 0.0
                    for i in range(children):
                        mean += use[i][j] * votes[b][i][j][k] / (mass + eps)
                    for i in range(children):
                        variance += use[i][j] * (votes[b][i][j][k] - mean) ** 2 / (mass + eps)
                    means[j][k] = mean
                    variances[j][k] = variance + eps
        routed["poses"].append(means)
        routed["scores"].append(out_scores)
        routed["variances"].append(variances)
        routed["coefficients"].append(coefficients)
    return routed


def efficient_routing(votes: Tensor4, bias: Matrix, gates: Matrix | None = None) -> Routed:
    """Mazzia et al. 2021 with the softmax over parents of the authors' code; `bias[i or 1][j]` is added to the
    coefficients. The coefficients that are returned are without it."""
    all_poses, all_coefficients = [], []
    for b in range(len(votes)):
        children, parents, size = len(votes[b]), len(votes[b][0]), len(votes[b][0][0])
        gate = gates_of(gates, b, children)
        agreement = zeros(children, parents)
        for j in range(parents):
            for i in range(children):
                for k in range(children):
                    agreement[i][j] += gate[k] * dot(votes[b][i][j], votes[b][k][j]) / math.sqrt(size)
        coefficients = softmax_over_parents(agreement)
        poses = []
        for j in range(parents):
            s = [0.0 for _ in range(size)]
            for i in range(children):
                for k in range(size):
                    s[k] += gate[i] * (coefficients[i][j] + at(bias, i, j)) * votes[b][i][j][k]
            n = length(s)
            poses.append([(1.0 - math.exp(-n)) * x / n if n > 0.0 else 0.0 for x in s])
        all_poses.append(poses)
        all_coefficients.append(coefficients)
    return {"poses": all_poses, "scores": None, "variances": None, "coefficients": all_coefficients}


def self_routing(votes: Tensor4, poses: Tensor4, weight: Tensor4, bias: Matrix, gates: Matrix | None = None) -> Routed:
    """Hahn et al. 2019. `weight[i][j][r][d]` and `bias[i][j]` turn the children's poses `[b][i][r][d]` into logits."""
    all_poses, all_scores, all_coefficients = [], [], []
    for b in range(len(votes)):
        children, parents = len(votes[b]), len(votes[b][0])
        gate = gates_of(gates, b, children)
        logits = zeros(children, parents)
        for i in range(children):
            for j in range(parents):
                logits[i][j] = bias[i][j]
                for r in range(len(poses[b][i])):
                    logits[i][j] += dot(poses[b][i][r], weight[i][j][r])
        coefficients = softmax_over_parents(logits)
        present = sum(gate)
        masses = [sum(gate[i] * coefficients[i][j] for i in range(children)) for j in range(parents)]
        means, scores = [], []
        for j in range(parents):
            total = weighted_sum(votes[b], times_gates(coefficients, gate), j)
            means.append([x / masses[j] for x in total])
            others = sum(mass for k, mass in enumerate(masses) if k != j)
            scores.append(math.log(max(masses[j] / present, 1e-30)) - math.log(max(others / present, 1e-30)))
        all_poses.append(means)
        all_scores.append(scores)
        all_coefficients.append(coefficients)
    return {"poses": all_poses, "scores": all_scores, "variances": None, "coefficients": all_coefficients}


def variational_bayes_routing(
    votes: Tensor4,
    gates: Matrix | None,
    iterations: int,
    running: tuple[Vector, Vector, Vector, Vector] | None,
    alpha0: float = 1.0,
    kappa0: float = 1.0,
    nu0: float | None = None,
    betas: tuple[Vector, Vector] | None = None,
) -> Routed:
    """De Sousa Ribeiro et al. 2020, Algorithm 1, with diagonal precisions, a prior mean of 0 and a prior scale of 1.

    `running` are the running mean and variance of each parent's pose entries, then those of its score; None takes the
    batch's own. `betas` are beta_a and beta_u of each parent.
    """
    poses, scores, coefficients = [], [], []
    for b in range(len(votes)):
        children, parents, size = len(votes[b]), len(votes[b][0]), len(votes[b][0][0])
        gate = gates_of(gates, b, children)
        start = size + 1.0 if nu0 is None else nu0
        assigned = [[1.0 / parents for _ in range(parents)] for _ in range(children)]
        for t in range(iterations):
            shares = times_gates(assigned, gate)
            mass = [sum(shares[i][j] for i in range(children)) for j in range(parents)]
            everything = sum(alpha0 + mass[j] for j in range(parents))
            m, inverse_scale = zeros(parents, size), zeros(parents, size)
            log_share, log_determinant = [], []
            for j in range(parents):
                sums = weighted_sum(votes[b], shares, j)
                for k in range(size):
                    mu = sums[k] / mass[j] if mass[j] > 0.0 else 0.0
                    m[j][k] = sums[k] / (kappa0 + mass[j])
                    squares = sum(shares[i][j] * (votes[b][i][j][k] - mu) ** 2 for i in range(children))
                    inverse_scale[j][k] = 1.0 + squares + kappa0 * mass[j] / (kappa0 + mass[j]) * mu**2
                log_share.append(digamma(alpha0 + mass[j]) - digamma(everything))
                log_determinant.append(size * math.log(2.0))
                for h in range(size):
                    log_determinant[j] += digamma((start + mass[j] - h) / 2.0) - math.log(inverse_scale[j][h])
            if t == iterations - 1:
                break
            logits = zeros(children, parents)
            for i in range(children):
                for j in range(parents):
                    distance = size / (kappa0 + mass[j])
                    for k in range(size):
                        distance += (start + mass[j]) * (votes[b][i][j][k] - m[j][k]) ** 2 / inverse_scale[j][k]
                    logits[i][j] = log_share[j] + 0.5 * log_determinant[j] - 0.5 * distance
            assigned = softmax_over_parents(logits)
        activations = []
        for j in range(parents):
            entropy = 0.5 * size * math.log(2.0 * math.pi * math.e) - 0.5 * log_determinant[j]
            beta_a, beta_u = (0.0, 0.0) if betas is None else (betas[0][j], betas[1][j])
            activations.append(beta_a - (math.exp(log_share[j]) * entropy + beta_u))
        poses.append(m)
        scores.append(activations)
        coefficients.append(assigned)
    as_poses = [[[score] for score in row] for row in scores]
    poses = batch_norm(poses, None if running is None else running[:2])
    scores = [[x[0] for x in row] for row in batch_norm(as_poses, None if running is None else running[2:])]
    return {"poses": poses, "scores": scores, "variances": None, "coefficients": coefficients}


def uniform_routing(
    votes: Tensor4, gates: Matrix | None, logits: Matrix | None, activation: Callable[[Vector], Vector] | None
) -> Routed:
    """Parents from uniform coefficients, or from the softmax of `logits[i][j]`, which no vote changes."""
    routed: Routed = {"poses": [], "scores": None, "variances": None, "coefficients": []}
    for b in range(len(votes)):
        children, parents = len(votes[b]), len(votes[b][0])
        coefficients = softmax_over_parents(zeros(children, parents) if logits is None else logits)
        shares = times_gates(coefficients, gates_of(gates, b, children))
        sums = [weighted_sum(votes[b], shares, j) for j in range(parents)]
        routed["poses"].append(sums if activation is None else [activation(s) for s in sums])
        routed["coefficients"].append(coefficients)
    return routed


def _gaussian_logits(votes: Tensor3, means: Matrix, variances: Matrix, scores: Vector) -> Matrix:
    """Logits of the E step: log sigmoid(score[j]) + log N(votes[i][j]; means[j], variances[j]), without log 2 pi."""
    logits = zeros(len(votes), len(means))
    for i in range(len(votes)):
        for j in range(len(means)):
            # every parent has the same pose size, so the log 2 pi cancels in the softmax
            logits[i][j] = log_sigmoid(scores[j])
            for k in range(len(means[j])):
                deviation = votes[i][j][k] - means[j][k]
                logits[i][j] -= deviation**2 / (2.0 * variances[j][k])
                logits[i][j] -= 0.5 * math.log(variances[j][k])
    return logits


def _distance_logits(votes: Tensor3, means: Matrix, scores: Vector) -> Matrix:
    """Logits of the E step of soft k-means: log sigmoid(score[j]) - |votes[i][j] - means[j]|^2."""
    logits = zeros(len(votes), len(means))
    for i in range(len(votes)):
        for j in range(len(means)):
            logits[i][j] = log_sigmoid(scores[j])
            for k in range(len(means[j])):
                logits[i][j] -= (votes[i][j][k] - means[j][k]) ** 2
    return logits


def slot_attention(
    poses: Tensor3,
    slots: Tensor3,
    learned: dict[str, Any],
    iterations: int,
    gates: Matrix | None,
    mean: bool,
    eps: float,
) -> Routed:
    """Locatello et al. 2020, Algorithm 1. `poses[b][i][d]` are the inputs, `slots[b][j][d]` the first slots; `learned`
    has the weights by their names in a state dict."""

    def linear(x: Vector, name: str) -> Vector:
        weight, bias = learned[f"{name}weight"], learned.get(f"{name}bias")
        return [dot(weight[k], x) + (0.0 if bias is None else bias[k]) for k in range(len(weight))]

    def norm(x: Vector, name: str) -> Vector:
        return layer_norm(x, learned[f"norm_{name}.weight"], learned[f"norm_{name}.bias"], 1e-5)

    def gru(u: Vector, s: Vector) -> Vector:
        size = len(s)
        from_input = [dot(row, u) for row in learned["gru.weight_ih"]]
        from_state = [dot(row, s) for row in learned["gru.weight_hh"]]
        new = []
        for k in range(size):
            at_input = [from_input[p * size + k] + learned["gru.bias_ih"][p * size + k] for p in range(3)]
            at_state = [from_state[p * size + k] + learned["gru.bias_hh"][p * size + k] for p in range(3)]
            reset, update = sigmoid(at_input[0] + at_state[0]), sigmoid(at_input[1] + at_state[1])
            candidate = math.tanh(at_input[2] + reset * at_state[2])
            new.append((1.0 - update) * candidate + update * s[k])
        return new

    all_poses, all_coefficients = [], []
    for b in range(len(poses)):
        gate = gates_of(gates, b, len(poses[b]))
        inputs = [norm(x, "children") for x in poses[b]]
        keys, values = [linear(x, "key.") for x in inputs], [linear(x, "value.") for x in inputs]
        state, size = slots[b], len(slots[b][0])
        coefficients: Matrix = []
        for _ in range(iterations):
            queries = [linear(norm(s, "slots"), "query.") for s in state]
            logits = [[dot(k, q) / math.sqrt(size) for q in queries] for k in keys]
            coefficients = softmax_over_parents(logits)
            after = []
            for j in range(len(state)):
                weights = [gate[i] * (coefficients[i][j] + (eps if mean else 0.0)) for i in range(len(keys))]
                total = sum(weights) if mean else 1.0
                update = [sum(weights[i] * values[i][k] for i in range(len(keys))) / total for k in range(size)]
                s = gru(update, state[j])
                if "mlp.0.weight" in learned:
                    hidden = [max(0.0, x) for x in linear(norm(s, "mlp"), "mlp.0.")]
                    s = [x + y for x, y in zip(s, linear(hidden, "mlp.2."), strict=True)]
                after.append(s)
            state = after
        all_poses.append(state)
        all_coefficients.append(coefficients)
    return {"poses": all_poses, "scores": None, "variances": None, "coefficients": all_coefficients}


def heinsen_vector_routing(
    poses: Tensor3,
    learned: dict[str, Any],
    betas: tuple[Matrix, Matrix] | None,
    iterations: int,
    parents: int,
    gates: Matrix | None,
    normalize: bool,
) -> Routed:
    """Heinsen 2022, Algorithm 2. `poses[b][i][d]` are the inputs. `learned` has the parameters by name, with a row for
    each child (or one row for all) and for each parent; `betas[use or ignore][i][j]`, or None where they are linear in
    the inputs, by the weights of `learned`."""
    all_poses, all_coefficients = [], []
    for b in range(len(poses)):
        children, d = len(poses[b]), len(poses[b][0])
        gate = gates_of(gates, b, children)
        scale = 1.0 / math.sqrt(max(sum(gate), 1e-6))
        h = len(learned["vote_weight"][0])

        def row(name: str, i: int) -> Any:
            return learned[name][i if len(learned[name]) > 1 else 0]

        def beta(kind: int, i: int, j: int) -> float:
            if betas is not None:
                return at(betas[kind], i, j)
            name = ("beta_use", "beta_ignore")[kind]
            return dot(learned[f"{name}.weight"][j], poses[b][i]) + learned[f"{name}.bias"][j]  # noqa: B023

        active, votes = [], []
        for i in range(children):
            x = [scale * value for value in poses[b][i]]
            active.append(gate[i] * sigmoid(dot(x, row("activation_weight", i)) + row("activation_bias", i)))
            own = []
            for j in range(parents):
                scaled = [x[k] * learned["vote_scale"][j][k] for k in range(d)]
                own.append(
                    [
                        sum(scaled[k] * learned["vote_weight"][k][m] for k in range(d)) + learned["vote_bias"][j][m]
                        for m in range(h)
                    ]
                )
            votes.append(own)
        shares = [[1.0 / parents for _ in range(parents)] for _ in range(children)]
        outputs: Matrix = []
        for t in range(iterations):
            if t > 0:
                logits = zeros(children, parents)
                for j in range(parents):
                    normal = layer_norm(outputs[j], None, None, 1e-5) if h > 1 else outputs[j]
                    prediction = []
                    for k in range(d):
                        moved = sum(normal[m] * learned["prediction_weight"][m][k] for m in range(h))
                        prediction.append(moved * learned["prediction_scale"][j][k] + learned["prediction_bias"][j][k])
                    for i in range(children):
                        similarity = dot(poses[b][i], prediction) * row("similarity_weight", i)[j]
                        logits[i][j] = log_sigmoid(similarity + row("similarity_bias", i)[j])
                shares = softmax_over_parents(logits)
            outputs = zeros(parents, h)
            for j in range(parents):
                for i in range(children):
                    used = active[i] * shares[i][j]
                    phi = beta(0, i, j) * used - beta(1, i, j) * (active[i] - used)
                    for m in range(h):
                        outputs[j][m] += phi * votes[i][j][m]
        all_poses.append([layer_norm(o, None, None, 1e-5) if normalize and h > 1 else o for o in outputs])
        all_coefficients.append(shares)
    return {"poses": all_poses, "scores": None, "variances": None, "coefficients": all_coefficients}
