"""Layers with every algorithm: the backends agree in any precision, and those that store no votes need no memory for
votes."""

import copy
import itertools

import pytest
import torch
from algorithms import ALGORITHMS, loss_of, make, randomize
from problems import BACKENDS, UNSTORED, every, label, set_sizes
from torch import Tensor
from torch.testing import assert_close

from torchcaps import CapsuleConv1d, CapsuleConv2d, CapsuleLinear, Capsules, RandomRouting, Routing, SelfRouting
from torchcaps.nn import CapsuleLayer
from torchcaps.ops.backend import HAS_TRITON

# Class, arguments and options of a layer, and the shape of its children.
KINDS = {
    "per child": (CapsuleLinear, (4, 3, (2, 3), (2, 2)), {"bias": True}, (2, 4, 2, 3)),
    "any number": (CapsuleLinear, (None, 3, 4, 3), {}, (3, 5, 4)),
    "free parents": (CapsuleLinear, (None, None, (2, 3), (2, 2)), {"bias": True}, (2, 4, 2, 3)),
    "types": (CapsuleLinear, (2, 3, 4, 3), {"share_positions": True}, (2, 2, 3, 2, 4)),
    "coordinates": (
        CapsuleLinear,
        (2, 3, (2, 3), (2, 2)),
        {"share_positions": True, "coordinates": True},
        (2, 2, 2, 2, 2, 3),
    ),
    "conv": (CapsuleConv2d, (2, 3, (2, 3), (2, 2), 3), {"stride": 2, "bias": True}, (1, 2, 5, 5, 2, 3)),
    "padded conv": (
        CapsuleConv2d,
        (2, 3, 2, 3, (2, 3)),
        {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)},
        (1, 2, 3, 5, 2),
    ),
    "line": (CapsuleConv1d, (2, 3, 2, 3, 3), {"stride": 2, "padding": 1, "dilation": 2, "bias": True}, (2, 2, 7, 2)),
}


def make_layer(kind: str, routing: Routing, backend: str) -> tuple[CapsuleLayer, tuple[int, ...]]:
    if kind == "free parents" and isinstance(routing, RandomRouting | SelfRouting):
        pytest.skip("it needs a number of parents")
    make_of_kind, arguments, options, shape = KINDS[kind]
    return make_of_kind(*arguments, routing=routing, backend=backend, **options), shape


def make_children(layer: CapsuleLayer, shape: tuple[int, ...], with_scores: bool) -> Capsules:
    poses = torch.randn(shape, dtype=torch.float64)
    without_pose = shape[: len(shape) - len(layer.in_pose)]
    return Capsules(poses, torch.randn(without_pose, dtype=torch.float64) if with_scores else None)


def results_of(layer: CapsuleLayer, children: Capsules) -> list[Tensor | None]:
    """Return the values, then all gradients."""
    leaves = [x.detach().requires_grad_() for x in children if x is not None]
    out = layer(Capsules(*leaves), return_coefficients=True)
    values = [x.double() for x in out[:4] if x is not None]
    leaves += layer.parameters()
    return [*(x.detach() for x in values), *torch.autograd.grad(loss_of(values), leaves, allow_unused=True)]


def assert_all_close(expected: list[Tensor | None], found: list[Tensor | None], **tolerance: float) -> None:
    assert len(expected) == len(found)
    for e, f in zip(expected, found, strict=True):
        assert (e is None) == (f is None)
        if e is not None:
            assert f.isfinite().all()
            scale = max(1, e.abs().max().item())
            assert_close(f.double() / scale, e.double() / scale, **tolerance)


@pytest.mark.parametrize(
    "case",
    every(len(ALGORITHMS), name=ALGORITHMS, kind=KINDS, gradient=["unrolled", "last"], with_scores=[False, True]),
    ids=label,
)
def test_backends_are_like_the_reference(case, monkeypatch):
    set_sizes(monkeypatch, (50, 3, 2))
    routing = make(case["name"], gradient=case["gradient"])
    layer, shape = make_layer(case["kind"], routing, "reference")
    children, results = make_children(randomize(layer.double()), shape, case["with_scores"]), []
    for backend in BACKENDS:
        layer.backend = backend
        results.append(results_of(layer, children))
    for found in results[1:]:
        assert_all_close(results[0], found, rtol=1e-8, atol=1e-9)


# An algorithm for each kernel, with two kinds of layers and two precisions: windows with gates and biases, and weights
# that positions share, without a bias.
TRITON = [
    ("dynamic", "windows", torch.float64),
    ("dynamic_over_children", "types", torch.float16),
    ("vector_norm", "windows", torch.float16),
    ("em", "types", torch.float64),
    ("heinsen", "windows", torch.float64),
    ("self_routing", "types", torch.float16),
]


@pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
@pytest.mark.parametrize(("name", "kind", "dtype"), TRITON)
def test_triton_is_like_the_reference(name, kind, dtype):
    """Layers reach the kernels. test_kernels.py tests the kernels themselves."""
    check_triton(name, kind, dtype)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["windows", "types"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_triton_is_like_the_reference_in_every_layer(name, kind, dtype):
    check_triton(name, kind, dtype)


def check_triton(name: str, kind: str, dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    routing = make(name, iterations=2)
    if kind == "windows":
        options = {"stride": (2, 1), "padding": (0, 1), "dilation": (1, 2), "bias": True}
        layer, shape = CapsuleConv2d(1, 3, 2, 2, (1, 2), routing, **options), (1, 1, 1, 2, 2)
    else:
        layer, shape = CapsuleLinear(2, 3, (2, 1), (2, 2), routing, share_positions=True), (1, 2, 1, 2, 2, 1)
    torch.manual_seed(0)  # whatever the first weights took: in half precision some draws magnify rounding
    randomize(layer)
    children = Capsules(*(x.to(device, dtype) for x in make_children(layer, shape, True)[:2]))
    layer = layer.to(device, dtype)
    exact = copy.deepcopy(layer).double()
    exact.backend, layer.backend = "reference", "triton"
    expected = results_of(exact, Capsules(*(x.double() for x in children[:2])))
    tolerance = {"rtol": 1e-8, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    assert_all_close(expected, results_of(layer, children), **tolerance)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_empty_batch(name):
    for backend, kind in itertools.product(BACKENDS, ("per child", "types", "padded conv", "line")):
        layer, shape = make_layer(kind, make(name), backend)
        poses = torch.zeros(0, *shape[1:], requires_grad=True)
        out = layer(Capsules(poses, torch.zeros(poses.shape[: -len(layer.in_pose)])), return_coefficients=True)
        assert out.poses.shape[0] == out.coefficients.shape[0] == 0
        out.poses.sum().backward()
        assert poses.grad.shape == poses.shape


class TestPrecision:
    """The error against float64 is at most twice that of stored votes in the same precision."""

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [(name, (torch.float32, torch.bfloat16, torch.float16)[i % 3]) for i, name in enumerate(ALGORITHMS)],
    )
    def test_no_less_exact_than_eager_pytorch(self, name, dtype):
        self.check_precision(name, dtype, draws=9)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_no_less_exact_in_any_precision(self, name, dtype):
        self.check_precision(name, dtype, draws=15)

    def check_precision(self, name: str, dtype: torch.dtype, draws: int) -> None:
        """It compares medians of several draws. In one draw, errors can differ tenfold by chance."""
        errors = [self.errors(name, dtype) for _ in range(draws)]  # [draw][value or gradient][backend]
        eager, *others = torch.tensor(errors).median(0).values.T
        for backend, errors in zip(UNSTORED, others, strict=True):
            assert (errors <= 2 * eager + torch.finfo(dtype).eps / 8).all(), backend

    def errors(self, name: str, dtype: torch.dtype) -> list[list[float]]:
        """Return the relative errors of all values and gradients: of stored votes, then of the other backends."""
        layer = randomize(CapsuleLinear(40, 6, (2, 3), (2, 4), make(name), bias=True)).to(dtype)
        children = Capsules(torch.randn(5, 40, 2, 3).to(dtype), torch.randn(5, 40).to(dtype))

        def run(backend: str, precision: torch.dtype) -> list[Tensor]:
            own = copy.deepcopy(layer).to(precision)
            own.backend = backend
            leaves = [x.to(precision).requires_grad_() for x in children[:2]]
            out = own(Capsules(*leaves))
            values = [x.double() for x in out[:2] if x is not None]
            loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in values)
            return values + [g.double() for g in torch.autograd.grad(loss, [*leaves, *own.parameters()])]

        exact = run("reference", torch.float64)
        found = [run(backend, dtype) for backend in BACKENDS]
        return [
            [((y - x).norm() / x.norm().clamp(min=1e-300)).item() for y in of]
            for x, *of in zip(exact, *found, strict=True)
        ]

    def test_gradients_that_many_children_share(self):
        """Ten thousand children add to one gradient. Added one by one, they would lose digits."""
        layer = randomize(CapsuleLinear(None, 6, (2, 3), (2, 4), make("heinsen", 2), bias=True))
        poses = torch.randn(1, 10_000, 2, 3)

        def run(backend: str, precision: torch.dtype) -> list[Tensor]:
            own = copy.deepcopy(layer).to(precision)
            own.backend = backend
            out = own(poses.to(precision))
            loss = out.poses.sum() + out.scores.sum()
            return [g.double() for g in torch.autograd.grad(loss, list(own.parameters()))]

        exact, eager = run("reference", torch.float64), run("reference", torch.float32)
        names = [name for name, _ in layer.named_parameters()]
        for backend in UNSTORED:
            for name, x, y, z in zip(names, exact, eager, run(backend, torch.float32), strict=True):
                # The terms of the bias's gradient are those of the weight's, and cancel to a thousandth of them.
                size = exact[0].norm() / 4 if name == "bias" else x.norm()
                rounding = 4 * torch.finfo(torch.float32).eps * size
                assert (z - x).norm() <= 2 * (y - x).norm() + rounding, backend


def allocated(layer: torch.nn.Module, poses: Tensor) -> int:
    """Return the peak memory in bytes of a forward and backward pass, minus the gradients that remain."""
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(poses.requires_grad_()).poses.square().sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak - now


# Kinds of layers with n times the children. The algorithms are distributed over them in turn.
GROWING = {
    "per child": lambda n, **kw: (CapsuleLinear(4 * n, 32, **kw), (16, 4 * n)),
    "any number": lambda n, **kw: (CapsuleLinear(None, 32, **kw), (16, 8 * n)),
    "types": lambda n, **kw: (CapsuleLinear(2, 32, share_positions=True, **kw), (16, 2, 2, 2 * n)),
    "conv": lambda n, **kw: (CapsuleConv2d(n, 32, kernel_size=2, stride=2, **kw), (4, n, 4, 4)),
}
MEMORY = [(name, list(GROWING)[(i + i // 4) % 4]) for i, name in enumerate(ALGORITHMS)]


@pytest.mark.parametrize(("name", "kind"), MEMORY)
def test_memory_does_not_grow_with_the_votes(name, kind, monkeypatch):
    """With four times the children, the added memory is small compared to their votes and their coefficients."""
    set_sizes(monkeypatch, (2**11, 64, 16))

    def bytes_for(factor: int) -> int:
        layer, shape = GROWING[kind](factor, in_pose=(2, 2), out_pose=(2, 2), routing=make(name), backend="tiled")
        layer.passes.is_over = True  # the first pass looks at coefficients, at most a million
        return allocated(layer, torch.randn(*shape, 2, 2))

    votes = 4 * 16 * 32 * 4 * (4 if kind in ("per child", "conv") else 8) * 3  # bytes of the added votes
    assert bytes_for(4) - bytes_for(1) < votes / 5
