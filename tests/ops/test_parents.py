"""What Triton's kernels compute of the parents, against the operators of the routings; without a GPU in Triton's
interpreter."""

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from algorithms import make
from torch import Tensor
from torch.testing import assert_close

from torchcaps import CapsuleLinear, Capsules, use_backend
from torchcaps.functional import squash
from torchcaps.ops import normalize
from torchcaps.ops.triton import formulas, parents
from torchcaps.ops.votes import Moments
from torchcaps.routing.squash import _by_operators

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
D = torch.float64


def draw(*shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_()


def kernel_squash(dim: int):
    def of(x: Tensor) -> Tensor:
        with use_backend("triton"):
            return squash(x, dim)

    return of


def fitted(variance: Tensor, score: Tensor) -> tuple[Tensor, ...]:
    """As of Heinsen routing."""
    moved = variance + 1e-5
    log_sigma = 0.5 * moved.log()
    prior = torch.nn.functional.logsigmoid(score) - log_sigma.sum(-1)
    return moved, score * 1, (-2 * log_sigma).exp(), prior


def fitted_as_em(variance: Tensor, mass: Tensor, beta_a: Tensor, beta_u: Tensor) -> tuple[Tensor, ...]:
    moved = variance.clamp_min(0.3)
    log_sigma = 0.5 * moved.log()
    score = 0.3 * (beta_a - (beta_u.unsqueeze(-1) + log_sigma).sum(-1) * mass)
    prior = torch.nn.functional.logsigmoid(score) - log_sigma.sum(-1)
    return moved, score, (-2 * log_sigma).exp(), prior


class Digamma(torch.autograd.Function):
    """The derivative that PyTorch takes has ten digits alone; this zeta function is the same."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.digamma()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.special.zeta(torch.full_like(x, 2), x)


def posterior(mass: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """As of Variational Bayes routing."""
    d, r = mean.shape[-1], mass.unsqueeze(-1)
    p = 1 + r * variance + r / (1 + r) * mean**2
    dirichlet = Digamma.apply(1 + mass) - Digamma.apply((1 + mass).sum(-1, keepdim=True))
    log_det = sum(Digamma.apply((d + 1 + mass - h) / 2) + torch.log(2 / p[..., h]) for h in range(d))
    entropy = d / 2 * torch.log(2 * torch.tensor(torch.pi * torch.e, dtype=mean.dtype)) - log_det / 2
    prior = dirichlet + log_det / 2 - d / (2 * (1 + mass))
    return r / (1 + r) * mean, (d + 1 + r) / p, prior, -dirichlet.exp() * entropy


def share_logits(mass: Tensor) -> Tensor:
    """As of self-routing."""
    share = mass / mass.sum(-1, keepdim=True)
    return share.log() - (1 - share).log()


# The kernels, the same by operators, and the tensors that both take.
CASES = {
    "squash": (kernel_squash(-1), lambda x: _by_operators(x, -1)[0], lambda: [draw(5, 3, 3)]),
    "squash in planes": (kernel_squash(1), lambda x: _by_operators(x, 1)[0], lambda: [draw(2, 3, 3)]),
    "unit": (parents.unit, normalize, lambda: [draw(5, 3, 3)]),
    "fit": (
        lambda variance, score: parents.fit(variance, score, eps=1e-5),
        fitted,
        lambda: [torch.rand(5, 3, 3, dtype=D, device=DEVICE).requires_grad_(), draw(5, 3)],
    ),
    **{
        name: (
            lambda v, mass, a, u: parents.fit(v, None, mass, a, u, 0.3, floor=0.3),
            fitted_as_em,
            lambda count=count: [
                torch.rand(5, 3, 3, dtype=D, device=DEVICE).requires_grad_(), draw(5, 3), draw(count), draw(count)
            ],
        )
        for name, count in (("fit as EM", 3), ("fit as EM, any parents", 1))
    },
    "logits of shares": (
        parents.share_logits, share_logits, lambda: [torch.rand(3, 3, dtype=D, device=DEVICE).add(0.1).requires_grad_()]
    ),
    "posterior": (
        parents.posterior,
        posterior,
        lambda: [
            torch.rand(3, 3, dtype=D, device=DEVICE).mul(9).requires_grad_(),
            draw(3, 3, 5),
            torch.rand(3, 3, 5, dtype=D, device=DEVICE).requires_grad_(),
        ],
    ),
}  # fmt: skip


def as_list(results: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def with_gradients(function, tensors: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Return the results, and the gradients of their sum with weights."""
    results = as_list(function(*tensors))
    loss = sum((x * weight).sum() for x, weight in zip(results, weights, strict=True))
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_like_the_operators(name):
    kernel, formula, make_tensors = CASES[name]
    tensors = make_tensors()
    weights = [torch.randn_like(x) for x in as_list(formula(*tensors))]
    expected, found = (with_gradients(x, tensors, weights) for x in (formula, kernel))
    for x, y in zip(expected, found, strict=True):
        assert_close(y, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_tensors_in_any_memory(name):
    """Apart from each other, and negated when they are read."""
    kernel, formula, make_tensors = CASES[name]
    tensors = make_tensors()
    apart = [torch.stack([x.detach()] * 2, -1)[..., 0].requires_grad_() for x in tensors]
    negated = [(-x.detach())._neg_view().requires_grad_() for x in tensors]
    weights = [torch.randn_like(x) for x in as_list(formula(*tensors))]
    expected = with_gradients(formula, tensors, weights)
    for strange in (apart, negated):
        found = with_gradients(kernel, strange, [(-x)._neg_view() for x in weights])
        for x, y in zip(expected, found, strict=True):
            assert_close(y, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_differences(name):
    kernel, _, make_tensors = CASES[name]
    assert torch.autograd.gradcheck(kernel, make_tensors(), fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_precision(name):
    """The error in float32 is at most twice that of the operators, plus a few roundings."""
    kernel, formula, make_tensors = CASES[name]
    tensors = make_tensors()
    weights = [torch.randn_like(x) for x in as_list(formula(*tensors))]
    single = [x.detach().float().requires_grad_() for x in tensors]
    exact = with_gradients(formula, [x.detach().double().requires_grad_() for x in single], weights)
    weights = [x.float() for x in weights]
    for e, eager, found in zip(exact, *(with_gradients(x, single, weights) for x in (formula, kernel)), strict=True):
        assert found.dtype == torch.float32
        slack = 4 * torch.finfo(torch.float32).eps * e.norm()
        assert (found - e).norm() <= 2 * (eager - e).norm() + slack


@pytest.mark.parametrize("name", CASES)
def test_nan_stays(name):
    """A number that is NaN is NaN in all results in which it is by the operators: a bound does not hide it.
    Triton's interpreter keeps NaN in any case; on a GPU a bound of Triton drops it unless it is told not to."""
    kernel, formula, make_tensors = CASES[name]
    for place in range(len(make_tensors())):
        tensors = [x.detach() for x in make_tensors()]
        tensors[place].flatten()[0] = torch.nan
        for expected, found in zip(*(as_list(function(*tensors)) for function in (formula, kernel)), strict=True):
            assert expected.isnan().any() or len(as_list(formula(*tensors))) > 1
            assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_schedule_of_the_inverse_temperature_compiles_once():
    """Each value of a constant of a kernel is a compilation of seconds."""
    for kernel in (formulas.fit, formulas.fit_grads):
        assert {"factor", "rest"}.isdisjoint(
            name for name, x in inspect.signature(kernel.fn).parameters.items() if "constexpr" in str(x.annotation)
        )
    variance, mass, betas = torch.rand(2, 3, 3, dtype=D, device=DEVICE), draw(2, 3).detach(), draw(3).detach()
    scores = [parents.fit(variance, None, mass, betas, betas, factor, floor=0.3)[1] for factor in (1.0, 0.1, 1e-3, 7)]
    for factor, score in zip((0.1, 1e-3, 7), scores[1:], strict=True):
        assert_close(score, factor * scores[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["squash", "squash in planes", "unit"])
def test_vectors_of_zero(name):
    kernel, formula, _ = CASES[name]
    x = torch.zeros(1, 3, 3, dtype=D, device=DEVICE, requires_grad=True)
    for function in (kernel, formula):
        found = function(x)
        assert not found.any()
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert_close(gradient, torch.full_like(x, name == "unit"))


@pytest.mark.parametrize("mass", [[[0.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]], [[1.0, 1e-9, 0.0]], [[3.0]], [[0.0]]])
def test_shares_of_none_and_of_all(mass):
    """As by the operators of self-routing, which stay finite."""
    layer, found = CapsuleLinear(1, len(mass[0]), 1, 1, make("self_routing")).routing, []
    for has_kernels in (False, True):
        x = torch.tensor(mass, dtype=D, device=DEVICE, requires_grad=True)
        moments = Moments(x, x.new_zeros(*x.shape, 1), x.new_zeros(*x.shape, 1), None)
        votes = SimpleNamespace(
            moments=lambda moments=moments: moments,
            has_kernels=has_kernels,
            parents=len(mass[0]),
            capsules=lambda poses, scores: scores,
        )
        scores = layer.step(votes, None, 0)[0]
        found.append(
            [scores, *torch.autograd.grad((scores * torch.arange(1, 1 + len(mass[0]), device=DEVICE)).sum(), x)]
        )
    for expected, x in zip(*found, strict=True):
        assert_close(x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squash_of_half_precision_is_computed_in_float32(dtype):
    x = draw(4, 3, dtype=dtype)
    expected, found = (with_gradients(f, [x], [torch.ones_like(x)]) for f in (CASES["squash"][1], kernel_squash(-1)))
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype == dtype
        assert_close(a, b)


def test_squash_in_any_order_of_memory():
    x = draw(2, 3, 4, 5)
    for view in (x.permute(2, 0, 3, 1), x[:, ::2], x.movedim(1, -1)):
        for dim in (0, 2, -1):
            y = view.detach().requires_grad_()
            grad = torch.randn_like(y).transpose(0, 1).contiguous().transpose(0, 1)
            found, expected = kernel_squash(dim)(y), _by_operators(y, dim)[0]
            assert_close(found, expected)
            assert_close(*(torch.autograd.grad(r, y, grad)[0] for r in (found, expected)))


def test_squash_has_second_derivatives():
    assert torch.autograd.gradgradcheck(kernel_squash(-1), draw(2, 3), fast_mode=True)


@pytest.mark.parametrize("name", ["em", "heinsen", "variational_bayes", "vector_norm", "self_routing"])
def test_layers_use_the_kernels_and_refuse_second_derivatives(name, monkeypatch):
    used, launch = [], parents.problem.launch

    def noted(kernel: str, *arguments, **options) -> None:
        used.append(kernel)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(parents.problem, "launch", noted)
    layer = CapsuleLinear(2, 2, 2, 2, make(name, 2), backend="triton").to(DEVICE)
    poses = draw(2, 2, 2, dtype=torch.float32)
    found = layer(Capsules(poses)).poses.sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(found, poses, create_graph=True)
    assert any(kernel.startswith("formulas.") for kernel in used)


@pytest.mark.parametrize("name", ["dynamic", "em"])
def test_children_that_are_negated_when_they_are_read(name):
    layer = CapsuleLinear(2, 2, 2, 2, make(name, 2), backend="triton").to(DEVICE)
    poses, scores = draw(2, 2, 2, dtype=torch.float32).detach(), draw(2, 2, dtype=torch.float32).detach()
    expected, found = (
        layer(Capsules(*x)).poses for x in ((poses, scores), ((-poses)._neg_view(), (-scores)._neg_view()))
    )
    assert_close(found, expected)
