"""The kernels against the reference, in Triton's interpreter where there is no GPU."""

import os

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchcaps.ops import Dot, Gaussian, StoredVotes

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms ask for
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from torchcaps.ops import kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
MANY = 5 if INTERPRETED else 131  # parents, more than a block holds

# batch, children, parents, rows, d, h; groups of weights; groups of biases; are biases shared by the parents; gates
LAYOUTS = {
    "per child": ((3, 4, 3, 2, 3, 3), 4, 4, False, True),
    "groups": ((2, 6, MANY, 1, 2, 3), 2, 3, True, True),
    "shared": ((2, 5, MANY, 3, 1, 2), 1, None, False, False),
}
SINGLE = ((1, 1, 1, 1, 1, 1), 1, 1, False, True)


@pytest.fixture(autouse=True)
def poison():
    """Fresh memory is full of NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def make_children(layout, dtype=torch.float64) -> list[Tensor | None]:
    """Poses, weight, bias and gates, of which some are 0, and for the last sample all."""
    (batch, children, parents, rows, d, h), groups, bias_groups, shared, gated = layout
    poses, weight = normal(batch, children, rows, d, dtype=dtype), normal(groups, parents, d, h, seed=1, dtype=dtype)
    bias = gates = None
    if bias_groups is not None:
        bias = normal(bias_groups, 1 if shared else parents, rows, h, seed=2, dtype=dtype)
    if gated:
        gates = normal(batch, children, seed=3).sigmoid().to(torch.float64 if dtype == torch.float64 else torch.float32)
        gates[:1, 0] = 0
        if batch > 1:
            gates[-1] = 0
    return [poses, weight, bias, gates]


def stored(poses, weight, bias, gates) -> StoredVotes:
    votes = torch.einsum("bgprd,gjdh->bgpjrh", poses.unflatten(1, (weight.shape[0], -1)), weight).flatten(1, 2)
    if bias is not None:
        votes = (votes.unflatten(1, (bias.shape[0], -1)) + bias.unsqueeze(1)).flatten(1, 2)
    return StoredVotes(votes).gated(gates)


def differentiate(function, inputs, grads) -> list[Tensor | None]:
    """Values, then gradients of the inputs, None for those that are None."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    values = function(*leaves)
    pairs = zip(values, grads, strict=True)
    pairs = [(value, grad) for value, grad in pairs if value is not None and value.requires_grad]
    wanted = [x for x in leaves if x is not None]
    results, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, grads, materialize_grads=True))
    return [None if x is None else x.detach() for x in values] + [None if x is None else next(found) for x in leaves]


def weighted_sums(inputs, grad, unit, over, leaky) -> list[Tensor | None]:
    def reference(poses, weight, bias, gates, query):
        agreement = None if query is None else Dot(query, unit)
        return (stored(poses, weight, bias, gates).weighted_sum(agreement, over, leaky),)

    return differentiate(reference, inputs, [grad])


def kernel_weighted_sums(inputs, grad, unit, over, leaky) -> list[Tensor | None]:
    total, lse = kernels.weighted_sum(*inputs, unit, over == "children", leaky)
    return [total, *kernels.weighted_sum_backward(grad, total, lse, *inputs, unit, over == "children", leaky)]


def all_moments(inputs, grads, eps) -> list[Tensor | None]:
    def reference(poses, weight, bias, gates, target, precision, prior, betas):
        agreement = None
        if target is not None:
            agreement = Dot(target) if precision is None else Gaussian(target, precision, prior)
        if betas is not None:
            betas = betas.repeat_interleave(poses.shape[1] // betas.shape[0], 0)
        return stored(poses, weight, bias, gates).moments(agreement, betas, eps)

    return differentiate(reference, inputs, grads)


def kernel_moments(inputs, grads, eps) -> list[Tensor | None]:
    values = kernels.moments(*inputs, eps)
    return [*values, *kernels.moments_backward(*grads, *values[:3], *inputs, eps)]


def make_dot(layout, dtype=torch.float64) -> list[Tensor | None]:
    batch, _, parents, rows, _, h = layout[0]
    return [*make_children(layout, dtype), normal(batch, parents, rows * h, seed=4).to(at_least_float32(dtype))]


def make_gaussian(layout, betas, dtype=torch.float64) -> list[Tensor | None]:
    """With parents that nobody can belong to, as many as a block of parents in the interpreter."""
    batch, children, parents, rows, _, h = layout[0]
    prior = normal(batch, parents, seed=6)
    prior[:1, : min(4, parents - 1)] = -torch.inf
    agreement = normal(batch, parents, rows * h, seed=4), normal(batch, parents, rows * h, seed=5).exp(), prior
    rows_of_betas = {"none": None, "per child": (children, parents), "one": (1, 1), "shared": (children, 1)}[betas]
    betas = None if rows_of_betas is None else normal(*rows_of_betas, seed=7)
    rest = [None if x is None else x.to(at_least_float32(dtype)) for x in (*agreement, betas)]
    return [*make_children(layout, dtype), *rest]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compare(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("over", "leaky"), [("parents", False), ("parents", True), ("children", False)])
@pytest.mark.parametrize("agreement", ["uniform", "dot", "unit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weighted_sum(layout, agreement, over, leaky):
    inputs = make_dot(LAYOUTS[layout])
    grad = normal(*inputs[4].shape, seed=9)
    if agreement == "uniform":
        inputs[4] = None
    arguments = inputs, grad, agreement == "unit", over, leaky
    compare(kernel_weighted_sums(*arguments), weighted_sums(*arguments))


def test_normaliser_over_the_children():
    inputs = make_dot(LAYOUTS["per child"])
    _, lse = kernels.weighted_sum(*inputs, False, True, False)
    expected = (stored(*inputs[:4]).logits(Dot(inputs[4])) + inputs[3].log().unsqueeze(-1)).logsumexp(1)
    expected[-1] = torch.inf  # nobody is there
    assert_close(lse, expected)


def moment_grads(inputs) -> list[Tensor | None]:
    """Gradients of mass, mean, variance and benefit."""
    (batch, _, rows, _), (_, parents, _, h) = inputs[0].shape, inputs[1].shape
    score, feature = (batch, parents), (batch, parents, rows * h)
    grads = [normal(*shape, seed=9 + i) for i, shape in enumerate((score, feature, feature, score))]
    return grads if inputs[-1] is not None else [*grads[:3], None]


@pytest.mark.parametrize(("betas", "eps"), [("none", 0.0), ("per child", 0.1), ("one", 1e-8)])
@pytest.mark.parametrize("agreement", ["uniform", "dot", "gaussian"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments(layout, agreement, betas, eps):
    inputs = make_gaussian(LAYOUTS[layout], betas)
    if agreement != "gaussian":
        inputs[5:7] = [None] * 2
    if agreement == "uniform":
        inputs[4] = None
    grads = moment_grads(inputs)
    compare(kernel_moments(inputs, grads, eps), all_moments(inputs, grads, eps))


@pytest.mark.parametrize("over", ["parents", "children"])
def test_one_child_one_parent_one_sample(over):
    inputs = make_dot(SINGLE)
    for gate in (0.3, 0.0):
        inputs[3] = torch.full_like(inputs[3], gate)
        grad = normal(1, 1, 1, seed=9)
        compare(kernel_weighted_sums(inputs, grad, True, over, False), weighted_sums(inputs, grad, True, over, False))
        inputs_ = make_gaussian(SINGLE, "shared")
        inputs_[3] = inputs[3]
        grads = moment_grads(inputs_)
        compare(kernel_moments(inputs_, grads, 0.0), all_moments(inputs_, grads, 0.0))


def test_votes_of_zero():
    inputs = make_dot(LAYOUTS["shared"])
    inputs[0] = torch.zeros_like(inputs[0])
    grad = normal(*inputs[4].shape, seed=9)
    compare(*(f(inputs, grad, True, "children", False) for f in (kernel_weighted_sums, weighted_sums)))


@pytest.mark.parametrize("over", ["parents", "children"])
def test_logits_that_exp_cannot_take(over):
    inputs = make_dot(LAYOUTS["groups"])
    inputs[4] = 2000 * inputs[4]
    grad = normal(*inputs[4].shape, seed=9)
    compare(*(f(inputs, grad, False, over, False) for f in (kernel_weighted_sums, weighted_sums)))


def test_gradients_that_nobody_sends():
    inputs = make_gaussian(LAYOUTS["per child"], "per child")
    grads = moment_grads(inputs)
    zeros = [torch.zeros_like(x) for x in grads]
    for sent in range(4):
        some = [grad if i == sent else None for i, grad in enumerate(grads)]
        same = [grad if i == sent else zeros[i] for i, grad in enumerate(grads)]
        compare(kernel_moments(inputs, some, 0.1), all_moments(inputs, same, 0.1))


def strided(x: Tensor | None) -> Tensor | None:
    """The same numbers, with the first dimension innermost and gaps."""
    return None if x is None else torch.stack([x, x + 1], -1).movedim(0, -1).contiguous().movedim(-1, 0)[..., 0]


def test_strides():
    inputs = make_dot(LAYOUTS["per child"])
    grad = normal(1, 1, 1, seed=9).expand_as(inputs[4])
    arguments = grad, False, "children", False
    compare(kernel_weighted_sums([strided(x) for x in inputs], *arguments), weighted_sums(inputs, *arguments))
    inputs = make_gaussian(LAYOUTS["per child"], "shared")
    grads = [normal(1, seed=9).expand_as(x) for x in moment_grads(inputs)]
    compare(kernel_moments([strided(x) for x in inputs], grads, 0.0), all_moments(inputs, grads, 0.0))


def test_no_samples():
    (_, *sizes), *rest = LAYOUTS["groups"]
    inputs = make_dot(((0, *sizes), *rest))
    for over in ("parents", "children"):
        found = kernel_weighted_sums(inputs, inputs[4], False, over, False)
        compare(found, [inputs[4], *(None if x is None else torch.zeros_like(x) for x in inputs)])
    inputs = make_gaussian(((0, *sizes), *rest), "per child")
    for agreement in ([None] * 3, [inputs[4], None, None], inputs[4:7]):
        inputs[4:7] = agreement
        grads = moment_grads(inputs)
        found = kernel_moments(inputs, grads, 0.0)
        compare(found, [*grads, *(None if x is None else torch.zeros_like(x) for x in inputs)])


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def check_error(found, eager, expected):
    """At most twice the error of PyTorch in the same precision."""
    for x, y, z in zip(found, eager, expected, strict=True):
        if x is not None:
            assert x.dtype == torch.float32
            assert (x - z).norm() <= 2 * (y - z).norm() + 1e-7


LARGER = ((12, 6, 4, 2, 4, 2), 6, 6, False, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("unit", "over"), [(False, "parents"), (True, "children")])
def test_precision_of_weighted_sums(unit, over, dtype):
    inputs = make_dot(LARGER, dtype)
    grad = normal(*inputs[4].shape, seed=9, dtype=torch.float32)
    expected = weighted_sums([double(x) for x in inputs], grad.double(), unit, over, False)
    arguments = inputs, grad, unit, over, False
    check_error(kernel_weighted_sums(*arguments), weighted_sums(*arguments), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("agreement", ["dot", "gaussian"])
def test_precision_of_moments(agreement, dtype):
    inputs = make_gaussian(LARGER, "per child", dtype)
    inputs[5] *= 0.1  # large logits have rounding errors beside which there are no others
    inputs[6].clamp_(min=-3)
    if agreement == "dot":
        inputs[5:7] = [None] * 2
    grads = [x.float() for x in moment_grads(inputs)]
    expected = all_moments([double(x) for x in inputs], [double(x) for x in grads], 1e-6)
    check_error(kernel_moments(inputs, grads, 1e-6), all_moments(inputs, grads, 1e-6), expected)


@pytest.mark.parametrize(
    ("agreement", "origin", "error"),
    [("uniform", None, 1e-6), ("dot", 0.0, 1e-6)]
    + [("gaussian", origin, error) for origin, error in ((1000.0, 1e-6), (990.0, 1e-3), (0.0, 0.1))],
)
def test_variance_of_votes_that_agree_far_from_the_origin(agreement, origin, error):
    """Expanded squares would be 10^11 times the variance, and float32 has seven digits."""
    poses = normal(1, 40, 1, 1).mul(3).round().float()
    weight, bias = (torch.full((1, 1, 1, 1), x, device=DEVICE) for x in (2.0**-10, 1000.0))  # the votes are exact
    target = None if origin is None else torch.full((1, 1, 1), origin, device=DEVICE)
    rest = [None] * 2
    if agreement == "gaussian":
        rest = [torch.full_like(target, 1e-9), torch.zeros_like(target[..., 0])]
    _, mean, variance, _ = kernels.moments(poses, weight, bias, None, target, *rest, None, 0.0)
    votes = (poses.double() / 1024 + 1000).flatten()
    assert_close(variance.double().squeeze(), votes.var(correction=0), rtol=error, atol=0)
    assert_close(mean.double().squeeze(), votes.mean(), rtol=1e-6, atol=0)


def test_the_same_digits_each_time():
    inputs = make_gaussian(LAYOUTS["per child"], "per child", torch.float32)
    grads = [x.float() for x in moment_grads(inputs)]
    first, second = (kernel_moments(inputs, grads, 0.0) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_refuses_other_dtypes():
    inputs = make_dot(LAYOUTS["shared"])
    inputs[1] = inputs[1].to(torch.int32)
    with pytest.raises(ValueError, match=r"takes float16, bfloat16, float32 and float64, got torch\.int32"):
        kernels.weighted_sum(*inputs, False, False, False)
