"""The Triton kernels against the reference; in Triton's interpreter where there is no GPU."""

import os
import statistics
import sys

import pytest
import torch
from problems import ROWS, SOFTMAX, Geometry, Problem, assert_same, options_of
from problems import compare as compare_votes
from torch import Tensor
from torch.testing import assert_close

from torchcaps.ops import Dot, Gaussian, StoredVotes, UnitDot, triton
from torchcaps.ops.children import Children, Gradients, Options

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms need it
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
MANY = 5 if INTERPRETED else 131  # parents, more than a block holds

# Batch, children, parents, rows, d, h; groups of weights; groups of biases; whether parents share biases; with gates?
LAYOUTS = {
    "per child": ((3, 2, 3, 2, 2, 3), 2, 2, False, True),
    "groups": ((2, 4, MANY, 1, 2, 2), 2, 1, True, True),
    "shared": ((1, 3, MANY, 2, 1, 2), 1, None, False, False),
}
SINGLE = ((1, 1, 1, 1, 1, 1), 1, 1, False, True)


@pytest.fixture(autouse=True)
def poison():
    """Fill fresh memory with NaN, so that a number that a kernel forgets to write is noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


DRAW = 0  # number of the draw: each has other random numbers


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * DRAW)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def make_children(layout, dtype=torch.float64) -> list[Tensor | None]:
    """Poses, weight, bias and gates. Some gates are 0, and all of the last sample."""
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
    """Return the values, then the gradients of the inputs, with None for inputs that are None."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    values = function(*leaves)
    pairs = zip(values, grads, strict=True)
    pairs = [(value, grad) for value, grad in pairs if value is not None and value.requires_grad]
    wanted = [x for x in leaves if x is not None]
    results, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, grads, materialize_grads=True))
    return [None if x is None else x.detach() for x in values] + [None if x is None else next(found) for x in leaves]


def weighted_sums(inputs, grad, options) -> list[Tensor | None]:
    def reference(poses, weight, bias, gates, query, offset):
        agreement = UnitDot(query) if options.unit else Dot(query, offset)
        return (stored(poses, weight, bias, gates).weighted_sum(agreement, options.softmax, options.leaky),)

    return differentiate(reference, inputs, [grad])


def on_map(inputs) -> list[Tensor | None]:
    """Return the children as the kernels take them, on a map of one position, and the other inputs unchanged."""
    poses, weight, bias, gates, *about = inputs
    shapes = poses[:, :, None, None], weight[:, None, None], _rows(bias), _rows(gates, 2)
    return [Children(*shapes), *about]


def _rows(x: Tensor | None, first: int = 1) -> Tensor | None:
    """Insert the dimensions of a window of one place."""
    return None if x is None else x[(slice(None),) * first + (None, None)]


def zeros_into(children: Children) -> Gradients:
    return Gradients(*(None if x is None else torch.zeros_like(x) for x in children))


def off_map(into: Gradients, *about: Tensor | None) -> list[Tensor | None]:
    poses, weight, bias, gates = into
    flat = [poses.flatten(1, 3), weight[:, 0, 0], None if bias is None else bias[:, 0, 0]]
    return [*flat, None if gates is None else gates.flatten(1), *about]


def flat_row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[:, 0, 0]


def kernel_weighted_sums(inputs, grad, options) -> list[Tensor | None]:
    children, query, offset = on_map(inputs)
    into, offset = zeros_into(children), _rows(offset)
    results = triton.weighted_sum(children, query, offset, options)
    found = triton.weighted_sum_backward((grad,), results, children, query, offset, options, into)
    return [results[0], *off_map(into, found[0], flat_row(found[1]))]


def all_moments(inputs, grads, eps) -> list[Tensor | None]:
    def reference(poses, weight, bias, gates, target, precision, prior, offset, betas):
        agreement = None
        if target is not None:
            agreement = Dot(target, offset=offset) if precision is None else Gaussian(target, precision, prior)
        return stored(poses, weight, bias, gates).moments(agreement, betas, eps)

    return differentiate(reference, inputs, grads)


def kernel_moments(inputs, grads, eps) -> list[Tensor | None]:
    children, *about, offset, betas = on_map(inputs)
    about, options, into = (*about, _rows(offset), _rows(betas)), Options(eps=eps), zeros_into(children)
    values = triton.moments(children, *about, options)
    sent = [*grads[:3], None if betas is None else grads[3]]
    *found, grad_offset, grad_betas = triton.moments_backward(sent, values[:3], children, *about, options, into)
    benefit = None if betas is None else values[3]
    return [*values[:3], benefit, *off_map(into, *found, flat_row(grad_offset), flat_row(grad_betas))]


def groups_of(layout, rows: str) -> int | None:
    """Number of rows that groups of children share: None, 1, some, or one for each child."""
    children = layout[0][1]
    return {"none": None, "shared": 1, "groups": children // 2 if children % 2 == 0 else 1, "each": children}[rows]


def make_rows(layout, rows: str, parents: int | None = None, seed: int = 8) -> Tensor | None:
    groups = groups_of(layout, rows)
    return None if groups is None else normal(groups, parents or layout[0][2], seed=seed)


def make_dot(layout, offset="none", dtype=torch.float64) -> list[Tensor | None]:
    """The children, the query and the offset."""
    batch, _, parents, rows, _, h = layout[0]
    about = normal(batch, parents, rows * h, seed=4), make_rows(layout, offset)
    return [*make_children(layout, dtype), *(None if x is None else x.to(at_least_float32(dtype)) for x in about)]


def make_moments(layout, agreement, betas="none", offset="none", dtype=torch.float64) -> list[Tensor | None]:
    """The children; a Gaussian's mean, precision and prior, or a query; offset and betas. Some parents have a prior of
    -inf: as many as a block of parents has in the interpreter."""
    batch, _, parents, rows, _, h = layout[0]
    about = [None] * 4
    if agreement == "gaussian":
        prior = normal(batch, parents, seed=6)
        prior[:1, : min(4, parents - 1)] = -torch.inf
        shape = batch, parents, rows * h
        about = [normal(*shape, seed=4), normal(*shape, seed=5).exp(), prior, None]
    elif agreement == "dot":
        about = [normal(batch, parents, rows * h, seed=4), None, None, make_rows(layout, offset)]
    if betas.startswith("one"):
        about.append(make_rows(layout, "shared" if betas == "one number" else "each", 1, seed=7))
    else:
        about.append(make_rows(layout, betas, seed=7))
    return [*make_children(layout, dtype), *(None if x is None else x.to(at_least_float32(dtype)) for x in about)]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compare(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(x, y, rtol=1e-10, atol=1e-10)


# Layout, whether the votes' directions are compared, softmax, offset. The slow tests have all combinations.
WEIGHTED_SUMS = [
    ("per child", False, "parents", "each"),
    ("per child", True, "children", "none"),
    ("groups", True, "leaky", "none"),
    ("shared", False, "children", "none"),
    ("shared", True, "parents", "none"),
]


@pytest.mark.parametrize(("layout", "unit", "softmax", "offset"), WEIGHTED_SUMS)
def test_weighted_sum(layout, unit, softmax, offset):
    inputs = make_dot(LAYOUTS[layout], offset)
    arguments = inputs, normal(*inputs[4].shape, seed=9), Options(unit=unit, **options_of(softmax))
    compare(kernel_weighted_sums(*arguments), weighted_sums(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "offset"), [*((False, rows) for rows in ROWS), (True, "none")])
@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weighted_sum(layout, unit, softmax, offset):
    test_weighted_sum(layout, unit, softmax, offset)


def test_normalizer_over_the_children():
    *inputs, offset = make_dot(LAYOUTS["per child"], "each")
    _, lse = triton.weighted_sum(*on_map(inputs), _rows(offset), Options("children"))
    logits = stored(*inputs[:4]).logits(Dot(inputs[4], offset=offset))
    expected = (logits + inputs[3].log().unsqueeze(-1)).logsumexp(1)
    expected[-1] = torch.inf  # no child is present
    assert_close(lse, expected)


def moment_grads(inputs) -> list[Tensor | None]:
    """Gradients of mass, mean, variance and benefit."""
    (batch, _, rows, _), (_, parents, _, h) = inputs[0].shape, inputs[1].shape
    score, feature = (batch, parents), (batch, parents, rows * h)
    grads = [normal(*shape, seed=9 + i) for i, shape in enumerate((score, feature, feature, score))]
    return grads if inputs[-1] is not None else [*grads[:3], None]


BETAS = [*ROWS, "one number", "one per child"]
# Layout, agreement, offset, betas, eps. The slow tests have all combinations.
MOMENTS = [
    ("per child", "uniform", "none", "one per child", 0.0),
    ("per child", "gaussian", "none", "each", 0.0),
    ("groups", "gaussian", "none", "groups", 0.1),
    ("shared", "dot", "shared", "none", 0.0),
    ("per child", "dot", "each", "one number", 0.1),
]


@pytest.mark.parametrize(("layout", "agreement", "offset", "betas", "eps"), MOMENTS)
def test_moments(layout, agreement, offset, betas, eps):
    inputs = make_moments(LAYOUTS[layout], agreement, betas, offset)
    grads = moment_grads(inputs)
    compare(kernel_moments(inputs, grads, eps), all_moments(inputs, grads, eps))


@pytest.mark.slow
@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize(
    ("agreement", "offset"), [("uniform", "none"), ("gaussian", "none"), *(("dot", rows) for rows in ROWS)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_moments(layout, agreement, offset, betas):
    test_moments(layout, agreement, offset, betas, 0.1)


def test_three_blocks_of_parents():
    """Each block of parents reads what the block before has written. In the interpreter a block has four parents."""
    layout = ((1, 2, 3 * MANY - 4 if INTERPRETED else 3 * MANY, 1, 2, 2), 1, None, False, True)
    inputs, options = make_dot(layout), Options(leaky=True)
    grad = normal(*inputs[4].shape, seed=9)
    compare(kernel_weighted_sums(inputs, grad, options), weighted_sums(inputs, grad, options))


@pytest.mark.parametrize("softmax", ["parents", "children"])
def test_one_child_one_parent_one_sample(softmax):
    inputs, options = make_dot(SINGLE), Options(softmax, unit=True)
    for gate in (0.3, 0.0):
        inputs[3] = torch.full_like(inputs[3], gate)
        grad = normal(1, 1, 1, seed=9)
        compare(kernel_weighted_sums(inputs, grad, options), weighted_sums(inputs, grad, options))
        moment_inputs = make_moments(SINGLE, "gaussian", "one per child")
        moment_inputs[3] = inputs[3]
        grads = moment_grads(moment_inputs)
        compare(kernel_moments(moment_inputs, grads, 0.0), all_moments(moment_inputs, grads, 0.0))


def test_votes_of_zero():
    inputs = make_dot(LAYOUTS["shared"])
    inputs[0] = torch.zeros_like(inputs[0])
    grad, options = normal(*inputs[4].shape, seed=9), Options("children", unit=True)
    compare(*(f(inputs, grad, options) for f in (kernel_weighted_sums, weighted_sums)))


@pytest.mark.parametrize("softmax", ["parents", "children"])
def test_logits_that_exp_cannot_take(softmax):
    inputs = make_dot(LAYOUTS["shared"], "each")
    inputs[4] = 2000 * inputs[4]
    grad = normal(*inputs[4].shape, seed=9)
    compare(*(f(inputs, grad, Options(softmax)) for f in (kernel_weighted_sums, weighted_sums)))


def test_gradients_that_nobody_sends():
    inputs = make_moments(LAYOUTS["per child"], "gaussian", "each")
    grads = moment_grads(inputs)
    for sent in (0, 2):
        some = [grad if i == sent else torch.zeros_like(grad) for i, grad in enumerate(grads)]
        compare(kernel_moments(inputs, some, 0.1), all_moments(inputs, some, 0.1))


def test_gradients_share_no_memory():
    """Results of an operator must not share memory."""
    inputs = make_moments(LAYOUTS["per child"], "gaussian", "each")
    found = kernel_moments(inputs, moment_grads(inputs), 0.1)
    memory = [x.untyped_storage().data_ptr() for x in found[-5:] if x is not None]
    assert len(set(memory)) == len(memory) == 4


def strided(x: Tensor | None) -> Tensor | None:
    """Return the same numbers in another memory layout: the first dimension innermost, and gaps."""
    return None if x is None else torch.stack([x, x + 1], -1).movedim(0, -1).contiguous().movedim(-1, 0)[..., 0]


def test_strides():
    inputs = make_dot(LAYOUTS["per child"], "each")
    grad, options = normal(1, 1, 1, seed=9).expand_as(inputs[4]), Options("children")
    compare(kernel_weighted_sums([strided(x) for x in inputs], grad, options), weighted_sums(inputs, grad, options))
    inputs = make_moments(LAYOUTS["per child"], "gaussian", "one per child")
    grads = [normal(1, seed=9).expand_as(x) for x in moment_grads(inputs)]
    compare(kernel_moments([strided(x) for x in inputs], grads, 0.0), all_moments(inputs, grads, 0.0))


def test_no_samples():
    (_, *sizes), *rest = LAYOUTS["groups"]
    layout = ((0, *sizes), *rest)
    inputs = make_dot(layout, "groups")
    for softmax in ("parents", "children"):
        found = kernel_weighted_sums(inputs, inputs[4], Options(softmax))
        compare(found, [inputs[4], *(None if x is None else torch.zeros_like(x) for x in inputs)])
    for agreement in ("uniform", "dot", "gaussian"):
        inputs = make_moments(layout, agreement, "each", "groups")
        grads = moment_grads(inputs)
        compare(
            kernel_moments(inputs, grads, 0.0), [*grads, *(None if x is None else torch.zeros_like(x) for x in inputs)]
        )


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


ROUNDING = 4 * torch.finfo(torch.float32).eps
FEW, LARGER = ((4, 3, 3, 1, 3, 2), 3, 3, False, True), ((12, 6, 4, 2, 4, 2), 6, 6, False, True)


def check_errors(draws: list[list[tuple[float, float, float]]], rounding: float) -> None:
    """Check that the median error over the draws is at most twice that of PyTorch in the same precision, plus
    `rounding`."""
    for of_result in zip(*draws, strict=True):
        error, eager, size = (statistics.median(x) for x in zip(*of_result, strict=True))
        assert error <= 2 * eager + rounding * size + 1e-7


def errors(found, eager, expected) -> list[tuple[float, float, float]]:
    """Return for each result its error, the error of PyTorch, and its norm."""
    assert all(x is None or x.dtype == torch.float32 for x in found)
    return [
        (float((x - z).norm()), float((y - z).norm()), float(z.norm()))
        for x, y, z in zip(found, eager, expected, strict=True)
        if x is not None
    ]


def errors_of_sums(unit, softmax, layout) -> list[tuple[float, float, float]]:
    inputs = make_dot(layout, "none" if unit else "each", torch.float32)
    grad, options = normal(*inputs[4].shape, seed=9, dtype=torch.float32), Options(softmax, unit)
    expected = weighted_sums([double(x) for x in inputs], grad.double(), options)
    return errors(kernel_weighted_sums(inputs, grad, options), weighted_sums(inputs, grad, options), expected)


def errors_of_moments(agreement, layout) -> list[tuple[float, float, float]]:
    inputs = make_moments(layout, agreement, "each", "each", torch.float32)
    if agreement == "gaussian":
        inputs[5] *= 0.1  # the rounding errors of large logits would hide all others
        inputs[6].clamp_(min=-3)
    grads = [x.float() for x in moment_grads(inputs)]
    expected = all_moments([double(x) for x in inputs], [double(x) for x in grads], 1e-6)
    return errors(kernel_moments(inputs, grads, 1e-6), all_moments(inputs, grads, 1e-6), expected)


PRECISION = [
    (errors_of_sums, (False, "parents")),
    (errors_of_sums, (True, "children")),
    (errors_of_moments, ("dot",)),
    (errors_of_moments, ("gaussian",)),
]


@pytest.mark.parametrize(
    ("of", "arguments"),
    [case if case in PRECISION[1:3] else pytest.param(*case, marks=pytest.mark.slow) for case in PRECISION],
)
def test_precision(of, arguments):
    check_errors([of(*arguments, FEW)], ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "arguments"), PRECISION)
def test_precision_of_many(monkeypatch, of, arguments):
    draws = []
    for draw in range(7):
        monkeypatch.setattr(sys.modules[__name__], "DRAW", draw)
        draws.append(of(*arguments, LARGER))
    check_errors(draws, 0)


@pytest.mark.parametrize(
    ("agreement", "origin", "error"),
    [("uniform", None, 1e-6), ("dot", 0.0, 1e-6)]
    + [("gaussian", origin, error) for origin, error in ((1000.0, 1e-6), (990.0, 1e-3), (0.0, 0.1))],
)
def test_variance_of_votes_that_agree_far_from_the_origin(agreement, origin, error):
    """Expanded squares would be 10^11 times the variance, but float32 has seven digits."""
    poses = normal(1, 12 if INTERPRETED else 40, 1, 1).mul(3).round().float()
    weight, bias = (torch.full((1, 1, 1, 1), x, device=DEVICE) for x in (2.0**-10, 1000.0))  # the votes are exact
    target = None if origin is None else torch.full((1, 1, 1), origin, device=DEVICE)
    rest = [None] * 2
    if agreement == "gaussian":
        rest = [torch.full_like(target, 1e-9), torch.zeros_like(target[..., 0])]
    children = on_map([poses, weight, bias, None, target])
    _, mean, variance, _ = triton.moments(*children, *rest, None, None, Options())
    votes = (poses.double() / 1024 + 1000).flatten()
    assert_close(variance.double().squeeze(), votes.var(correction=0), rtol=error, atol=0)
    assert_close(mean.double().squeeze(), votes.mean(), rtol=1e-6, atol=0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has one thread")
def test_the_same_digits_each_time():
    inputs = make_moments(LAYOUTS["per child"], "dot", "each", "groups", torch.float32)
    grads = [x.float() for x in moment_grads(inputs)]
    first, second = (kernel_moments(inputs, grads, 0.0) for _ in range(2))
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_refuses_other_dtypes():
    inputs = make_dot(LAYOUTS["shared"])
    inputs[1] = inputs[1].to(torch.int32)
    with pytest.raises(ValueError, match=r"got torch\.int32"):
        triton.weighted_sum(*on_map(inputs), Options())


# Windows that overlap, that are dilated, and that do not overlap; children that share weights; parents in two blocks.
SMALL = {
    "overlapping": Geometry((2, 1, 2, 3, 2, 2), (1, 2, 2, 2, 2, 1), 1),
    "dilated": Geometry((1, 1, 3, 6, 1, 2), (1, 2, 2, 2, 2, 2), 1, (1, 1), (2, 3)),
    "a kernel of one": Geometry((2, 2, 2, 3, 1, 1), (2, 1, 1, 3, 1, 2), 2, (1, 2)),
    "windows": Geometry((1, 1, 3, 3, 1, 2), (1, 2, 1, 3, 2, 1), 1, (1, 2), (2, 1)),
    "groups": Geometry((2, 4, 1, 1, 2, 1), (2, 1, 1, 3, 1, 1), 2),
    "many parents": Geometry((2, 2, 1, 1, 1, 1), (1, 1, 1, MANY, 1, 2), 1),
}


class TestVotes:
    """The kernels behind the votes of layers, against the definitions."""

    @pytest.mark.parametrize(
        ("geometry", "bias", "agreement", "offset", "way"),
        [
            ("windows", "each", "dot", "each", "parents"),
            ("windows", "each", "dot", "shared", "children"),
            pytest.param("overlapping", "each", "dot", "each", "parents", marks=pytest.mark.slow),
            ("dilated", "each", "dot", "none", "children"),
            ("a kernel of one", "each", "dot", "none", "leaky"),
            ("many parents", "each", "dot", "each", "leaky"),
            ("groups", "each", "unit", "none", "children"),
            ("groups", "each", "gaussian", "none", "parents"),
            ("windows", "one", "dot", "each", "moments"),
            ("groups", "one", "dot", "shared", "moments"),
            ("windows", "one", "poses", "each", "parents"),
            ("windows", "one", "poses", "each", "moments"),
            ("many parents", "one", "poses", "shared", "leaky"),
            ("groups", "one", "gaussian", "none", "children"),  # refused, and the next
            ("groups", "one", "unit", "none", "moments"),
        ],
    )
    def test_reductions(self, geometry, bias, agreement, offset, way):
        p = Problem(SMALL[geometry], bias, gates=True, device=DEVICE)
        options = (p.draw_rows("each" if geometry == "windows" else "groups"), 0.1) if way == "moments" else ()
        compare_votes(p, ["triton"], p.agreement(agreement, offset), way, *options)

    @pytest.mark.parametrize(
        ("geometry", "gates"),
        [
            (name, gates)
            if (name, gates) in [("overlapping", True), ("groups", False), ("many parents", True)]
            else pytest.param(name, gates, marks=pytest.mark.slow)
            for name in SMALL
            for gates in (False, True)
        ],
    )
    def test_uniform_sum(self, geometry, gates):
        p = Problem(SMALL[geometry], "one" if gates else "each", gates=gates, device=DEVICE)
        for softmax in ("parents", "leaky") if geometry == "groups" else ("leaky",):
            compare_votes(p, ["triton"], None, softmax)

    @pytest.mark.parametrize("gates", [False, True])
    @pytest.mark.parametrize("poses", [(0, 2, 1, 1, 1, 2), (0, 2, 3, 3, 1, 2)])
    def test_an_empty_batch(self, poses, gates):
        p = Problem(Geometry(poses, (1, 1, 1, 3, 2, 2), 1), "each", gates=False, device=DEVICE)
        votes = p.votes("triton").gated(torch.ones(p.samples, 2, dtype=torch.float64) if gates else None)
        s = votes.weighted_sum(None)
        s = s + votes.weighted_sum(Dot(s), "children") + votes.moments(Dot(s)).variance
        assert s.shape == (0, 3, 2)
        for gradient, leaf in zip(torch.autograd.grad(s.sum(), [p.poses, p.weight]), [p.poses, p.weight], strict=True):
            assert gradient.shape == leaf.shape
            assert not gradient.any()

    @pytest.mark.parametrize("geometry", ["windows", "groups"])
    def test_coefficients_and_blocks(self, geometry):
        p = Problem(SMALL[geometry], "each", gates=True, device=DEVICE)
        compare_votes(p, ["triton"], p.dot("each"), "coefficients, children")
        found = [(block, gates) for _, block, gates in p.votes("triton").blocks()]
        assert sum(block.shape[0] * block.shape[1] for block, _ in found) == p.samples * p.children
        total = sum((block * gates[..., None, None]).sum() for block, gates in found)
        assert_close(total, (p.all_votes * p.gates[..., None, None]).sum())

    def test_iterations_share_gradients_and_gates_do_not(self):
        p = Problem(SMALL["windows"], "each", gates=True, device=DEVICE)
        agreement, results = p.dot(), []
        for backend in ("reference", "triton"):
            votes = p.votes(backend)
            first = votes.weighted_sum(agreement)
            results.append([votes.moments(Dot(first)).variance, votes.gated(None).weighted_sum(Dot(first))])
        assert_same(*results, p.leaves)
        votes = votes.detach()
        assert not votes.weighted_sum(Dot(agreement.query.detach())).requires_grad
