"""Laws, gradients, and the places where published code gives NaN."""

import math

import pytest
import torch
from algorithms import OVER_CHILDREN, ROUTES
from torch.autograd import gradcheck

import torchcaps.functional as F
from torchcaps.ops import LazyVotes
from torchcaps.testing import assert_coefficients_sum_to_one, assert_routing_laws

algorithms = pytest.mark.parametrize("name", ROUTES)


def over(name: str) -> str:
    return "children" if name in OVER_CHILDREN else "parents"


def votes(*shape: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@algorithms
def test_laws(name):
    assert_routing_laws(ROUTES[name], votes(3, 5, 4, 2, 3), over(name))


def test_a_softmax_over_the_wrong_axis_breaks_a_law():
    with pytest.raises(AssertionError, match="sum to one over the parents"):
        assert_coefficients_sum_to_one(F.dynamic_routing(votes(2, 5, 3, 4), softmax="children"), "parents")


@algorithms
@pytest.mark.parametrize("with_scores", [False, True])
def test_gradients_of_stored_votes(name, with_scores):
    v = votes(2, 4, 3, 2).requires_grad_()
    scores = votes(2, 4, seed=1).requires_grad_() if with_scores else None

    def outputs(v, scores=None):
        c = ROUTES[name](v, scores)
        return tuple(x for x in (c.poses, c.scores, c.variances, c.coefficients) if x is not None)

    assert gradcheck(outputs, (v,) if scores is None else (v, scores))


@algorithms
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_lazy_votes(name, groups):
    poses, weight = votes(2, 4, 2, 3).requires_grad_(), votes(groups, 3, 3, 2, seed=1).requires_grad_()
    bias = votes(groups, 3, 2, 2, seed=2).requires_grad_()

    def poses_of_parents(poses, weight, bias):
        return ROUTES[name](LazyVotes(poses, weight, bias, (2, 2)), None, iterations=2).poses

    assert gradcheck(poses_of_parents, (poses, weight, bias))


def test_gradients_of_parameters():
    v, scores = votes(2, 4, 3, 2), votes(2, 4, seed=1)
    row = votes(3, seed=2).requires_grad_()
    table = votes(4, 3, seed=3).requires_grad_()
    pose = votes(3, 2, seed=4).requires_grad_()
    entry = votes(2, seed=5).requires_grad_()
    sharpness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda b: F.dynamic_routing(v, bias=b).poses, pose)
    assert gradcheck(lambda s: F.vector_norm_routing(v, sharpness=s).poses, sharpness)
    assert gradcheck(lambda w, b: F.inverted_attention_routing(v, weight=w, bias=b).poses, (entry, entry))
    assert gradcheck(lambda a, u: F.em_routing(v, scores.sigmoid(), a, u, inverse_temperature=1.0)[:3], (row, row))
    assert gradcheck(lambda u, i: F.heinsen_routing(v, scores, u, i)[:3], (table, table))


@algorithms
def test_gradient_through_the_last_iteration_only(name):
    def gradient(policy, iterations):
        v = votes(2, 5, 3, 2).requires_grad_()
        out = ROUTES[name](v, None, iterations=iterations, gradient=policy)
        (grad,) = torch.autograd.grad(out.poses.square().sum(), v)
        return out.poses.detach(), grad

    (unrolled, full), (last, partial) = gradient("unrolled", 3), gradient("last", 3)
    torch.testing.assert_close(last, unrolled)
    assert partial.isfinite().all()
    assert not torch.allclose(full, partial)


@algorithms
def test_gradient_through_the_last_iteration_of_lazy_votes(name):
    """Votes that earlier iterations made without gradients must not serve the last one."""
    poses, weight = votes(2, 4, 2, 3).requires_grad_(), votes(4, 3, 3, 2, seed=1).requires_grad_()
    bias = votes(4, 3, 2, 2, seed=2).requires_grad_()
    stored = torch.einsum("bird,ijdh->bijrh", poses, weight) + bias
    results = []
    for v in (LazyVotes(poses, weight, bias, (2, 2)), stored):
        out = ROUTES[name](v, None, iterations=3, gradient="last")
        results.append(torch.autograd.grad(out.poses.square().sum(), (poses, weight, bias)))
    for actual, expected in zip(*results, strict=True):
        assert actual.abs().sum() > 0
        torch.testing.assert_close(actual, expected)


def test_gradient_through_the_last_iteration_is_that_of_given_coefficients():
    v = votes(2, 5, 3, 2).requires_grad_()
    (actual,) = torch.autograd.grad(F.dynamic_routing(v, 2, gradient="last").poses.square().sum(), v)
    first = F.squash(v.detach().mean(1) * 5 / 3)
    logits = (v * first.unsqueeze(1)).sum(-1)
    parents = F.squash((logits.softmax(2).unsqueeze(-1) * v).sum(1))
    (expected,) = torch.autograd.grad(parents.square().sum(), v)
    torch.testing.assert_close(actual, expected)


def test_pooling_limits():
    v = votes(2, 6, 1, 4)
    torch.testing.assert_close(F.vector_norm_routing(v, sharpness=0.0).poses, v.mean(1))
    torch.testing.assert_close(F.vector_norm_routing(v, iterations=0).poses, v.mean(1))
    selected = F.vector_norm_routing(v, sharpness=1e4)
    assert (selected.coefficients.amax(1) > 0.999).all()
    chosen = selected.coefficients.squeeze(-1).argmax(1)
    torch.testing.assert_close(selected.poses.squeeze(1), v[torch.arange(2), chosen, 0])


# Where published code gives NaN


def assert_finite(name: str, v: torch.Tensor) -> None:
    """All that a routing returns, and the gradients of the votes."""
    v.requires_grad_()
    out = ROUTES[name](v)
    out.poses.sum().backward()
    assert v.grad is not None
    for x in (*out, v.grad):
        assert x is None or x.isfinite().all()


@algorithms
@pytest.mark.parametrize("value", [0.0, 1.0, 1000.0])
@pytest.mark.parametrize("children", [1, 4])
def test_equal_votes(name, value, children):
    """Zero poses and zero variances, in float32."""
    assert_finite(name, torch.full((2, children, 3, 4), value))


@algorithms
@pytest.mark.parametrize("seed", range(10))
def test_a_parent_that_nobody_chooses(name, seed):
    """Coefficients, and with them a parent's mass, so small that their reciprocal overflows float32."""
    v = votes(1, 4, 2, 64, dtype=torch.float32, seed=seed)
    v[:, :, 0] *= 30**-0.5
    assert_finite(name, v)


@algorithms
def test_votes_of_one_zero_child(name):
    v = votes(2, 4, 3, 5, dtype=torch.float32)
    v[:, 1] = 0
    assert_finite(name, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squash_in_half_precision(dtype):
    """The square of a length of 300 overflows float16."""
    vectors = torch.tensor([[300.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    assert F.squash(vectors.to(dtype)).dtype == dtype
    torch.testing.assert_close(
        F.squash(vectors.to(dtype)).float(), F.squash(vectors), rtol=torch.finfo(dtype).eps, atol=0
    )


def test_zero_poses_have_zero_gradients():
    zero = torch.zeros(2, 3, requires_grad=True)
    F.squash(zero).sum().backward()
    assert zero.grad is not None
    assert (zero.grad == 0).all()
    v = torch.zeros(1, 3, 1, 4, requires_grad=True)
    F.vector_norm_routing(v).poses.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.full_like(v, 1 / 3))  # that of the mean: zero votes agree with nobody


@algorithms
def test_padding(name):
    v = votes(3, 4, 3, 2, dtype=torch.float32).requires_grad_()
    scores = torch.tensor([[0.0, -math.inf, 1.0, 2.0], [-math.inf] * 4, [math.inf] * 4], requires_grad=True)
    out = ROUTES[name](v, scores)
    out.poses.square().sum().backward()
    assert v.grad is not None
    assert scores.grad is not None
    for x in (*out, v.grad, scores.grad):
        assert x is None or x.isfinite().all()
    assert (v.grad[0, 1] == 0).all()
    assert (v.grad[1] == 0).all()
    torch.testing.assert_close(out.poses[2:], ROUTES[name](v[2:]).poses)  # inf: as if there were no scores
    present = ROUTES[name](v[:1, [0, 2, 3]], scores[:1, [0, 2, 3]])
    torch.testing.assert_close(out.poses[:1], present.poses)


@algorithms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Votes in half precision: sums in float32, results in the votes' precision, as good as that precision can be."""
    exact = votes(2, 300, 3, 4) + 2
    half = exact.to(dtype).requires_grad_()
    out = ROUTES[name](half)
    assert out.poses.dtype == dtype
    expected = ROUTES[name](half.detach().double())
    torch.testing.assert_close(out.poses.double(), expected.poses, rtol=torch.finfo(dtype).eps, atol=1e-4)
    out.poses.float().sum().backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


@algorithms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name, dtype):
    poses, weight = votes(2, 40, 1, 8, dtype=torch.float32), votes(40, 5, 8, 4, dtype=torch.float32, seed=1)
    poses.requires_grad_()
    expected = ROUTES[name](LazyVotes(poses, weight, None, (4,)))
    with torch.autocast("cpu", dtype=dtype):
        out = ROUTES[name](LazyVotes(poses, weight, None, (4,)))
    assert out.poses.dtype == torch.float32
    assert (out.poses - expected.poses).abs().max() < 0.1 * expected.poses.abs().max()
    (grad,) = torch.autograd.grad(out.poses.sum(), poses)
    assert grad.isfinite().all()


@algorithms
def test_empty_batch(name):
    out = ROUTES[name](torch.zeros(0, 4, 3, 2))
    assert out.poses.shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: F.dynamic_routing(v, iterations=0), "iterations must be at least 1, got 0"),
        (lambda v: F.dynamic_routing(v, softmax="child"), "softmax must be over 'parents' or 'children'"),
        (lambda v: F.dynamic_routing(v, softmax="children", leaky=True), "needs softmax='parents'"),
        (lambda v: F.dynamic_routing(v, gradient="all"), "gradient must be 'unrolled' or 'last'"),
        (lambda v: F.dynamic_routing(v[0]), r"expected votes of shape \(batch, children, parents, \*pose\)"),
        (
            lambda v: F.dynamic_routing(v, scores=v[:, :1, 0, 0]),
            r"scores of shape .* = \(2, 4\), got \(2, 1\)",
        ),
        (lambda v: F.dynamic_routing(v, bias=v[0, 0, :2]), r"expected a bias of shape \(parents, \*pose\) = \(3, 5\)"),
        (
            lambda v: F.em_routing(v, None, torch.zeros(2, 1), torch.zeros(3)),
            r"expected beta_a of shape \(parents,\) = \(3,\), got \(2, 1\)",
        ),
        (lambda v: F.vector_norm_routing(v, iterations=-1), "iterations must be at least 0"),
        (lambda v: F.heinsen_routing(v, None, v[0, :, :, 0], model="skm"), "model must be 'gaussian' or 'kmeans'"),
        (
            lambda v: F.margin_loss(v[:, :, 0, 0], torch.zeros(2, 3)),
            r"targets of shape \(batch,\) or \(2, 4\)",
        ),
        (lambda v: F.spread_loss(v[:, :, 0, 0], torch.zeros(2, 4)), r"expected class indices of shape \(batch,\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(votes(2, 4, 3, 5))
    assert "\n" not in str(error.value)
