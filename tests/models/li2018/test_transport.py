"""Optimal transport between batches: by hand, against plain loops, against POT."""

import math

import numpy as np
import ot
import pytest
import torch
from torch.testing import assert_close

from torchcaps.functional import feature_kl, sinkhorn_divergence, transport_cost, transport_plan

COSTS = ("cosine", "l2")


def exact(ours, theirs, atol=1e-12):
    assert_close(ours, torch.as_tensor(theirs), rtol=0, atol=atol)


def batches(n=6, m=4, features=5):
    return torch.randn(n, features), torch.randn(m, features)


# Costs


@pytest.mark.parametrize("cost", COSTS)
def test_costs_in_plain_loops(cost):
    x, y = batches()
    expected = []
    for a in x.tolist():
        row = []
        for b in y.tolist():
            dot = sum(p * q for p, q in zip(a, b, strict=True))
            distance = math.dist(a, b)
            row.append(1 - dot / math.hypot(*a) / math.hypot(*b) if cost == "cosine" else distance)
        expected.append(row)
    exact(transport_cost(x, y, cost), expected)


def test_zero_vectors_are_at_cosine_zero_and_have_zero_gradients():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    y = torch.tensor([[0.0, 0.0], [0.0, 2.0], [-3.0, -4.0]], requires_grad=True)
    costs = transport_cost(x, y)
    exact(costs, [[1.0, 1.0, 1.0], [1.0, 0.2, 2.0]])
    of_x, of_y = torch.autograd.grad((costs * torch.randn(2, 3)).sum(), (x, y))
    assert not of_x[0].any()
    assert not of_y[0].any()
    assert of_x[1].any()
    assert of_x.isfinite().all()
    assert of_y.isfinite().all()


def test_equal_points_have_finite_gradients_and_near_ones_all_digits():
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0]], requires_grad=True)
    distances = transport_cost(x, x, "l2")
    exact(distances, [[0.0, 0.0], [0.0, 0.0]], atol=0)
    (gradient,) = torch.autograd.grad(distances.sum(), x)
    assert not gradient.any()
    near = torch.full((30, 7), 1000.0, dtype=torch.float32)
    moved = near.clone()
    moved[:, 0] += 0.125
    exact(transport_cost(near, moved, "l2"), torch.full((30, 30), 0.125, dtype=torch.float32), atol=0)


# Plans


def test_one_iteration_by_hand():
    """K = ((1, 1/2), (1, 1)): u = (2/3, 1/2), v = (3/7, 3/5). The columns, last, sum to 1/2; the rows do not yet."""
    plan = transport_plan(torch.tensor([[0.0, math.log(2)], [0.0, 0.0]]), 1.0, 1)
    exact(plan, [[2 / 7, 1 / 5], [3 / 14, 3 / 10]])


def test_a_divergence_by_hand():
    """Two axes against the first one twice: W(x, y) = 1/2, W(x, x) = 1 / (1 + e), W(y, y) = 0."""
    x, y = torch.eye(2), torch.tensor([[2.0, 0.0], [3.0, 0.0]])
    exact(sinkhorn_divergence(x, y, debias=False), 0.5)
    exact(sinkhorn_divergence(x, y), math.e / (1 + math.e))
    exact(sinkhorn_divergence(x, y, eps=0.5), 1 - 1 / (1 + math.e**2))


def plan_in_plain_loops(costs, eps, iterations):
    n, m = len(costs), len(costs[0])
    kernel = [[math.exp(-c / eps) for c in row] for row in costs]
    u, v = [1.0] * n, [1.0 / m] * m
    for _ in range(iterations):
        u = [1 / n / sum(kernel[i][j] * v[j] for j in range(m)) for i in range(n)]
        v = [1 / m / sum(kernel[i][j] * u[i] for i in range(n)) for j in range(m)]
    return [[u[i] * kernel[i][j] * v[j] for j in range(m)] for i in range(n)]


@pytest.mark.parametrize("iterations", [1, 2, 10])
@pytest.mark.parametrize("eps", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("cost", COSTS)
def test_plain_loops(cost, eps, iterations):
    x, y = batches()
    costs = transport_cost(x, y, cost)
    exact(transport_plan(costs, eps, iterations), plan_in_plain_loops(costs.tolist(), eps, iterations))

    def moved(a, b):
        between = transport_cost(a, b, cost).tolist()
        plan = plan_in_plain_loops(between, eps, iterations)
        return sum(p * c for ps, cs in zip(plan, between, strict=True) for p, c in zip(ps, cs, strict=True))

    options = eps, iterations, cost
    exact(sinkhorn_divergence(x, y, *options, debias=False), moved(x, y))
    exact(sinkhorn_divergence(x, y, *options), 2 * moved(x, y) - moved(x, x) - moved(y, y))


@pytest.mark.parametrize("iterations", [1, 10, 1000])
@pytest.mark.parametrize("cost", COSTS)
def test_pot_in_logarithms(cost, iterations):
    costs = transport_cost(*batches(), cost)
    theirs = ot.sinkhorn(
        np.full(4, 1 / 4), np.full(6, 1 / 6), costs.T.numpy(), 1e-3, "sinkhorn_log", iterations, 0, warn=False
    )
    exact(transport_plan(costs, 1e-3, iterations), theirs.T)


@pytest.mark.parametrize(("cost", "eps"), [("l2", 0.3), ("cosine", 1.0)])
def test_pot_converged_divergence(cost, eps):
    x, y = batches()
    metric = "cosine" if cost == "cosine" else "euclidean"
    theirs = ot.bregman.empirical_sinkhorn_divergence(
        x.numpy(), y.numpy(), eps, metric=metric, numIterMax=2000, stopThr=0, warn=False
    )
    exact(sinkhorn_divergence(x, y, eps, 2000, cost) / 2, theirs, atol=1e-10)


@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [2, 1e4])
def test_any_epsilon_is_finite_with_right_sums(scale, dtype, eps):
    costs = torch.rand(7, 5, dtype=dtype) * scale
    plan = transport_plan(costs, eps)
    assert plan.dtype == dtype
    assert plan.isfinite().all()
    assert (plan >= 0).all()
    atol = 1e-7 if dtype == torch.float32 else 1e-15
    assert_close(plan.sum(0), torch.full((5,), 1 / 5, dtype=dtype), rtol=0, atol=atol)
    if eps >= 0.1 * scale:
        assert_close(transport_plan(costs, eps, 500).sum(1), torch.full((7,), 1 / 7, dtype=dtype), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("least", "most"), [(0, 2), (100, 101), (0, 1e4)])
def test_float32_is_right_where_the_kernel_is_tiny(least, most):
    """exp(-1e7) underflows, and log u + log v - C/eps would keep only one digit."""
    costs = (torch.rand(16, 12) * (most - least) + least).float()
    for eps in (1e-3, 1e-2, 0.1, 1.0):
        expected = transport_plan(costs.double(), eps)
        assert_close(transport_plan(costs, eps).double(), expected, rtol=0, atol=1e-7)


# Divergences


@pytest.mark.parametrize("plan_gradient", [False, True])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_batches_are_at_zero(dtype, cost, plan_gradient):
    for n in (1, 5, 32):
        x = torch.randn(n, 4, 3, dtype=dtype, requires_grad=True)
        for eps in (1e-2, 1.0):
            divergence = sinkhorn_divergence(x, x.clone(), eps, cost=cost, plan_gradient=plan_gradient)
            assert divergence.item() == 0
        if n > 1:
            assert sinkhorn_divergence(x, x.clone(), cost=cost, debias=False).item() > 0.1


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("cost", COSTS)
def test_gradients_through_the_plan(cost, debias):
    x, y = (z.requires_grad_() for z in batches(4, 3, 3))
    for eps in (0.1, 1.0):
        assert torch.autograd.gradcheck(
            lambda x, y, eps=eps: sinkhorn_divergence(x, y, eps, 4, cost, debias, plan_gradient=True), (x, y)
        )


@pytest.mark.parametrize("cost", COSTS)
def test_by_default_the_plan_is_a_constant(cost):
    x, y = (z.requires_grad_() for z in batches(4, 3, 3))

    def moved(a, b):
        costs = transport_cost(a, b, cost)
        with torch.no_grad():
            plan = transport_plan(costs)
        return (plan * costs).sum()

    def gradients(value):
        return torch.autograd.grad(value, (x, y))

    assert_close(gradients(sinkhorn_divergence(x, y, cost=cost, debias=False)), gradients(moved(x, y)))
    expected = gradients(2 * moved(x, y) - moved(x, x) - moved(y, y))
    assert_close(gradients(sinkhorn_divergence(x, y, cost=cost)), expected)
    through = gradients(sinkhorn_divergence(x, y, cost=cost, plan_gradient=True))
    assert (through[0] - expected[0]).abs().max() > 1e-3


@pytest.mark.parametrize("cost", COSTS)
def test_zero_samples_keep_gradients_finite(cost):
    x, y = torch.randn(4, 3), torch.randn(3, 3)
    x[1] = y[2] = y[0] = 0
    x.requires_grad_()
    for plan_gradient in (False, True):
        (gradient,) = torch.autograd.grad(sinkhorn_divergence(x, y, cost=cost, plan_gradient=plan_gradient), x)
        assert gradient.isfinite().all()
        assert gradient[0].any()
        assert cost == "l2" or not gradient[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cost", COSTS)
def test_half_precision_and_autocast_are_computed_in_float32(cost, dtype):
    x, y = (z.to(dtype) for z in batches())
    for function in (
        lambda x, y: transport_cost(x, y, cost),
        lambda x, y: sinkhorn_divergence(x, y, 1e-2, cost=cost),
        lambda x, y: feature_kl(x[:4], y),
    ):
        out = function(x, y)
        assert out.dtype == torch.float32
        assert_close(out, function(x.float(), y.float()), rtol=0, atol=0)
    x, y = x.float(), y.float()
    expected = sinkhorn_divergence(x, y, 1e-2, cost=cost)
    with torch.autocast("cpu", dtype=dtype):
        assert_close(sinkhorn_divergence(x, y, 1e-2, cost=cost), expected, rtol=0, atol=0)
    costs = torch.rand(3, 4).to(dtype) * 1e4
    assert_close(transport_plan(costs, 1e-3), transport_plan(costs.float(), 1e-3), rtol=0, atol=0)


# Kullback-Leibler


def test_kl_by_hand_and_in_plain_loops():
    x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3)]])  # (1/2, 1/2) and (1/4, 3/4)
    exact(feature_kl(x, y), 0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    x, y = torch.randn(3, 2, 2, requires_grad=True), torch.randn(3, 2, 2, requires_grad=True)
    expected = 0.0
    for a, b in zip(x.flatten(1).tolist(), y.flatten(1).tolist(), strict=True):
        p, q = ([math.exp(value) / sum(map(math.exp, z)) for value in z] for z in (a, b))
        expected += sum(t * math.log(t / s) for s, t in zip(p, q, strict=True)) / 3
    exact(feature_kl(x, y), expected)
    assert torch.autograd.gradcheck(feature_kl, (x, y))
    assert feature_kl(x, x.clone()).item() == 0
    assert feature_kl(x + 1e4, y - 1e4).isfinite()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: transport_cost(x, x[:, :2]), r"\(n, features\) and \(m, features\), got \(4, 3\) and \(4, 2\)"),
        (lambda x: transport_plan(x[0]), r"shape \(n, m\) with at least one sample each, got \(3,\)"),
        (lambda x: sinkhorn_divergence(x, x[:, :2]), r"the same number of features, got shapes \(4, 3\) and \(4, 2\)"),
        (lambda x: sinkhorn_divergence(x, x[:0]), r"got shapes \(4, 3\) and \(0, 3\)"),
        (lambda x: feature_kl(x, x[:2]), "the same number of samples in both batches, got 4 and 2"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make(torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_batches_of_two_precisions(dtype):
    """The error says which one to convert, and to what."""
    x, y = torch.randn(4, 3, dtype=dtype), torch.randn(4, 3, dtype=torch.float64)
    for pair in ((x, y), (y, x)):
        with pytest.raises(TypeError, match=r": convert that of torch.float64 by .to\(torch.float32\)$"):
            sinkhorn_divergence(*pair)
    assert sinkhorn_divergence(x, y.to(torch.float32)).isfinite()
