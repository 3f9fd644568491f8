"""Votes that are not stored against votes that are: values and every gradient."""

import copy
import itertools

import pytest
import torch
from algorithms import ROUTINGS
from torch import Tensor
from torch.testing import assert_close

import torchcaps
from torchcaps import CapsuleConv2d, CapsuleLinear, Capsules, use_backend
from torchcaps.ops import Dot, Gaussian, LazyVotes, library, tiled
from torchcaps.ops.backend import HAS_TRITON

EXACT = {"rtol": 1e-9, "atol": 1e-10}

# poses (batch, channels, height, width, rows, d), weight (groups, kernel, kernel, parents, d, h), groups of the bias,
# stride
GEOMETRIES = {
    "per child": ((9, 6, 1, 1, 2, 3), (6, 1, 1, 5, 3, 4), 6, 1),
    "per type": ((9, 6, 1, 1, 2, 3), (2, 1, 1, 5, 3, 4), 6, 1),
    "shared by all": ((3, 6, 1, 1, 1, 3), (1, 1, 1, 5, 3, 4), 3, 1),
    "windows": ((2, 3, 5, 6, 2, 3), (3, 3, 3, 5, 3, 4), 3, 2),
    "windows that overlap": ((2, 2, 5, 6, 2, 3), (2, 2, 2, 3, 3, 2), 2, 1),
    "one parent": ((7, 4, 3, 3, 1, 2), (4, 2, 2, 1, 2, 3), 4, 1),
    "one of everything": ((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1), 1, 1),
}


@pytest.fixture(params=[(30, 2, 2), (300, 4, 99), (2**19, 64, 16)], ids=str)
def block_sizes(request, monkeypatch) -> None:
    for name, value in zip(("BLOCK", "SAMPLES", "LANES"), request.param, strict=True):
        monkeypatch.setattr(tiled, name, value)


class Problem:
    """The same random children for both backends."""

    def __init__(self, geometry: str, bias: bool = False, one_bias_for_parents: bool = False, gates: bool = False):
        torch.manual_seed(0)
        poses, weight, groups, stride = GEOMETRIES[geometry]
        kernel, parents, h = weight[1], weight[3], weight[5]
        self.poses = torch.randn(poses, dtype=torch.float64, requires_grad=True)
        self.weight = torch.randn(weight, dtype=torch.float64, requires_grad=True)
        shape = (groups, kernel, kernel, 1 if one_bias_for_parents else parents, poses[4], h)
        self.bias = torch.randn(shape, dtype=torch.float64, requires_grad=True) if bias else None
        self.stored, self.tiled = (
            LazyVotes(self.poses, self.weight, self.bias, (poses[4], h), stride, backend)
            for backend in ("reference", "tiled")
        )
        self.gates = None
        if gates:
            present = torch.rand(self.stored.batch, self.stored.children, dtype=torch.float64)
            present[present < 0.3] = 0
            present[0] = 0  # a sample without children
            self.gates = present.requires_grad_()
            self.stored, self.tiled = self.stored.gated(self.gates), self.tiled.gated(self.gates)
        self.parent_shape = (self.stored.batch, parents, poses[4] * h)
        self.children = [x for x in (self.poses, self.weight, self.bias, self.gates) if x is not None]

    def parents(self, *shape: int) -> Tensor:
        return torch.randn(*(shape or self.parent_shape), dtype=torch.float64, requires_grad=True)


def assert_same(expected: list[Tensor], actual: list[Tensor], leaves: list[Tensor]) -> None:
    """Same values, and same gradients of a random function of them."""
    assert len(expected) == len(actual)
    for e, a in zip(expected, actual, strict=True):
        assert a.shape == e.shape
        assert_close(a, e, **EXACT)
    if not leaves:
        return
    torch.manual_seed(1)
    losses = [(torch.randn_like(e) * e).sum() for e in expected if e.requires_grad]
    torch.manual_seed(1)
    others = [(torch.randn_like(a) * a).sum() for e, a in zip(expected, actual, strict=True) if e.requires_grad]
    wanted = torch.autograd.grad(sum(losses), leaves, allow_unused=True, retain_graph=True)
    found = torch.autograd.grad(sum(others), leaves, allow_unused=True, retain_graph=True)
    for w, f in zip(wanted, found, strict=True):
        zero = torch.zeros(())
        scale = 1 if w is None else max(1, w.abs().max().item())
        assert_close((zero if f is None else f) / scale, (zero if w is None else w) / scale, **EXACT)


BIAS_AND_GATES = [(False, False, False), (True, False, True), (True, True, False), (False, False, True)]


@pytest.mark.usefixtures("block_sizes")
@pytest.mark.parametrize(("bias", "one", "gates"), BIAS_AND_GATES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
class TestReductions:
    @pytest.mark.parametrize("over", ["parents", "children"])
    def test_uniform_sum(self, geometry, bias, one, gates, over):
        p = Problem(geometry, bias, one, gates)
        assert_same([p.stored.weighted_sum(None, over)], [p.tiled.weighted_sum(None, over)], p.children)

    @pytest.mark.parametrize(
        ("over", "unit", "leaky"),
        [(over, unit, False) for over in ("parents", "children") for unit in (False, True)]
        + [("parents", False, True)],
    )
    def test_dot(self, geometry, bias, one, gates, over, unit, leaky):
        p = Problem(geometry, bias, one, gates)
        agreement = Dot(p.parents(), unit)
        expected, actual = (v.weighted_sum(agreement, over, leaky) for v in (p.stored, p.tiled))
        assert_same([expected], [actual], [*p.children, agreement.query])

    @pytest.mark.parametrize("betas", [None, "one", "each"])
    @pytest.mark.parametrize(
        ("kind", "eps"), [("gaussian", 0.0), ("gaussian", 1e-2), ("dot", 0.0), ("dot", 1e-2), ("uniform", 1e-2)]
    )
    def test_moments(self, geometry, bias, one, gates, kind, eps, betas):
        p = Problem(geometry, bias, one, gates)
        agreement, leaves = None, list(p.children)
        if kind == "gaussian":
            precision = torch.rand(p.parent_shape, dtype=torch.float64, requires_grad=True)
            agreement = Gaussian(p.parents(), precision, p.parents(*p.parent_shape[:2]))
            leaves += agreement
        elif kind == "dot":
            agreement = Dot(p.parents())
            leaves.append(agreement.query)
        weights = None
        if betas is not None:
            weights = p.parents(1, 1) if betas == "one" else p.parents(p.stored.children, p.stored.parents)
            leaves.append(weights)
        expected, actual = (
            [x for x in v.moments(agreement, weights, eps) if x is not None] for v in (p.stored, p.tiled)
        )
        assert_same(expected, actual, leaves)

    @pytest.mark.parametrize("over", ["parents", "children"])
    def test_coefficients(self, geometry, bias, one, gates, over):
        p = Problem(geometry, bias, one, gates)
        for agreement in (Dot(p.parents()), Dot(p.parents(), unit=True), None):
            expected, actual = (v.coefficients(agreement, over) for v in (p.stored, p.tiled))
            leaves = [] if agreement is None else [p.poses, p.weight, agreement.query]
            assert_same([expected], [actual], leaves)


def layers(routing, backend) -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    """Layers of all kinds, and the shapes of their children."""
    linear = {"routing": routing, "backend": backend}
    made: dict[str, tuple[torch.nn.Module, tuple[int, ...]]] = {
        "per child": (CapsuleLinear(7, 3, (2, 3), (2, 4), bias=True, **linear), (2, 7, 2, 3)),
        "any number": (CapsuleLinear(None, 3, 4, 5, **linear), (3, 9, 4)),
        "free parents": (CapsuleLinear(None, None, (2, 3), (2, 4), bias=True, **linear), (2, 4, 2, 3)),
        "types": (CapsuleLinear(2, 3, 4, 5, share_positions=True, **linear), (2, 2, 3, 2, 4)),
        "coordinates": (
            CapsuleLinear(2, 3, (2, 3), (2, 2), share_positions=True, coordinates=True, **linear),
            (2, 2, 3, 2, 2, 3),
        ),
        "conv": (
            CapsuleConv2d(2, 3, (2, 3), (2, 4), 3, routing, stride=2, bias=True, backend=backend),
            (2, 2, 7, 6, 2, 3),
        ),
        "padded conv": (CapsuleConv2d(2, 3, 4, 5, 3, routing, padding=1, backend=backend), (1, 2, 4, 5, 4)),
    }
    return made


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("gradient", ["unrolled", "last"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_layers(name, gradient, with_scores, monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK", 200)
    routing = ROUTINGS[name](gradient=gradient)
    results: dict[str, list] = {}
    for backend in ("reference", "tiled"):
        for kind, (layer, shape) in layers(routing, backend).items():
            torch.manual_seed(2)
            layer = layer.double()
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
            poses = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            grid = shape[: len(shape) - (len(layer.in_pose))]
            scores = torch.randn(grid, dtype=torch.float64, requires_grad=True) if with_scores else None
            out = layer(Capsules(poses, scores), return_coefficients=True)
            values = [x for x in out if x is not None]
            loss = sum((x * torch.linspace(0, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in values)
            leaves = [poses, *layer.parameters(), *([] if scores is None else [scores])]
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            results.setdefault(kind, []).append([*values, *(g for g in grads if g is not None)])
    for kind, (expected, actual) in results.items():
        assert len(expected) == len(actual), kind
        for e, a in zip(expected, actual, strict=True):
            assert_close(a, e, rtol=1e-8, atol=1e-9, msg=lambda m, kind=kind: f"{kind}: {m}")


@pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_layers_in_triton(name, dtype):
    """That layers reach the kernels, with windows, groups, gates, betas and biases; the kernels have tests of
    their own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    routing = ROUTINGS[name](iterations=2)
    kinds = [
        (CapsuleConv2d(2, 3, 2, 2, 2, routing, stride=2, padding=1, bias=True), (2, 2, 2, 2, 2)),
        (CapsuleLinear(2, 3, (2, 1), (2, 2), routing, share_positions=True), (2, 2, 1, 2, 2, 1)),
    ]
    for layer, shape in kinds:
        torch.manual_seed(0)
        for parameter in layer.to(device, dtype).parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        results = []
        for backend in ("reference", "triton"):
            layer.backend = backend
            exact = backend == "reference"
            poses = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            scores = torch.linspace(-1, 1, poses[..., 0].numel()).to(device, dtype).view(poses.shape[:-1])
            scores = scores[..., 0] if scores.dim() == 5 else scores
            if exact:
                layer, poses, scores = copy.deepcopy(layer).double(), poses.double(), scores.double()
            poses.requires_grad_(), scores.requires_grad_()
            out = layer(Capsules(poses, scores), return_coefficients=True)
            values = [x.double() for x in out if x is not None]
            loss = sum(
                (x * torch.linspace(0, 1, x.numel(), dtype=x.dtype, device=device).view_as(x)).sum() for x in values
            )
            leaves = [poses, scores, *layer.parameters()]
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            results.append([*values, *(g.double() for g in grads if g is not None)])
            layer = layer.to(dtype)
        tolerance = EXACT if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
        for expected, actual in zip(*results, strict=True):
            assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_empty_batch(name, backend):
    for layer, shape in layers(ROUTINGS[name](), backend).values():
        poses = torch.zeros(0, *shape[1:], requires_grad=True)
        scores = torch.zeros(poses.shape[: -len(layer.in_pose)])
        out = layer(Capsules(poses, scores), return_coefficients=True)
        assert out.poses.shape[0] == out.coefficients.shape[0] == 0
        out.poses.sum().backward()
        assert poses.grad.shape == poses.shape


class TestSharedGradients:
    """What is special about gradients that are handed from one iteration to the one before it."""

    def iterations(self, votes: LazyVotes) -> list[Tensor]:
        first = votes.weighted_sum(None)
        second = votes.weighted_sum(Dot(first))
        third = votes.moments(Gaussian(second, torch.ones_like(second), torch.zeros_like(second[..., 0])))
        fourth = votes.moments(Dot(third.mean))
        return [first, second, third.mean, fourth.variance]

    def problem(self) -> tuple[Problem, list[Tensor]]:
        p = Problem("per type", bias=True, gates=True)
        return p, self.iterations(p.tiled)

    def expected(self, p: Problem) -> list[Tensor]:
        return self.iterations(p.stored)

    @pytest.mark.parametrize("used", [[0], [1], [2], [3], [0, 2], [1, 3], [0, 1, 2, 3]])
    def test_any_iterations_used(self, used):
        p, results = self.problem()
        expected = self.expected(p)
        assert_same([expected[i] for i in used], [results[i] for i in used], p.children)

    def test_backward_twice(self):
        p, results = self.problem()
        loss = results[2].square().sum()
        once = torch.autograd.grad(loss, p.children, retain_graph=True)
        twice = torch.autograd.grad(loss, p.children)
        for a, b in zip(once, twice, strict=True):
            assert_close(a, b, rtol=0, atol=0)

    def test_one_branch_does_not_write_into_another(self):
        p = Problem("per child")
        query = p.parents()
        stored, lazy = p.stored, p.tiled
        branches = []
        for votes in (stored, lazy):
            start = votes.weighted_sum(Dot(query))
            other = votes.gated(torch.full((votes.batch, votes.children), 0.5, dtype=torch.float64))
            branches.append([start, votes.weighted_sum(Dot(start)), other.weighted_sum(Dot(start))])
        assert_same(*branches, [*p.children, query])

    def test_frozen_parts_get_no_gradient(self):
        p = Problem("per child", bias=True)
        p.weight.requires_grad_(False)
        votes = LazyVotes(p.poses, p.weight, p.bias, p.tiled.pose, backend="tiled")
        out = votes.weighted_sum(Dot(votes.weighted_sum(None)))
        poses, weight, *_ = votes._next  # what the next reduction would take
        assert poses.requires_grad
        assert not weight.requires_grad
        out.sum().backward()
        assert p.weight.grad is None
        assert p.poses.grad is not None

    def test_an_unused_iteration_hands_gradients_on(self):
        p = Problem("per child")
        query = p.parents()
        results = []
        for votes in (p.stored, p.tiled):
            votes.weighted_sum(None)
            results.append([votes.weighted_sum(Dot(query))])
        assert_same(*results, [*p.children, query])

    def test_double_backward_says_what_to_do(self):
        p, results = self.problem()
        with pytest.raises(RuntimeError, match="backend='reference'"):
            torch.autograd.grad(results[1].sum(), p.children, create_graph=True)

    def test_reference_has_second_derivatives(self):
        p = Problem("per child")
        (grad,) = torch.autograd.grad(self.expected(p)[1].sum(), p.poses, create_graph=True)
        grad.square().sum().backward()
        assert p.poses.grad is not None


def operator_calls():
    p = Problem("windows that overlap", bias=True, gates=True)
    gates = p.gates.detach().unflatten(1, (-1, 2, 2)).requires_grad_()
    children = (p.poses, p.weight, p.bias, gates)
    query, prior, stride = p.parents(), p.parents(*p.parent_shape[:2]), 1
    betas = p.parents(1, 2, 2, p.stored.parents)
    yield "vote_sum", children, (stride,)
    for unit, over_children, leaky in [(False, False, True), (True, True, False)]:
        yield "weighted_sum", children, (query, unit, over_children, leaky, stride)
    yield "moments", children, (query, query.detach().square().requires_grad_(), prior, betas, 1e-3, stride)
    yield "moments", children, (query, None, None, betas, 1e-3, stride)
    yield "moments", (p.poses, p.weight, None, None), (None, None, None, None, 1e-3, stride)


@pytest.mark.parametrize("call", list(operator_calls()), ids=lambda call: call[0])
def test_opcheck(call):
    name, children, rest = call
    reduction = library.REDUCTIONS["tiled", name]
    torch.library.opcheck(reduction.forward, (*children, *rest))
    with torch.no_grad():
        results = reduction.forward(*children, *rest)
        results = [results] if isinstance(results, Tensor) else results
        grads = [torch.randn_like(x) for x in results[: reduction.differentiable]]
        buffers = [None if x is None else tiled.accumulator(x) for x in children]
        arguments = (*grads, *results[: reduction.kept], *children, *rest, *buffers)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        torch.library.opcheck(reduction.backward, detached)


@pytest.mark.parametrize("call", [call for call in operator_calls() if call[0] == "moments"], ids=lambda call: call[0])
def test_gradcheck(call):
    name, children, rest = call
    assert torch.autograd.gradcheck(library.REDUCTIONS["tiled", name].forward, (*children, *rest), fast_mode=True)


@pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
def test_opcheck_of_triton_operators():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(2, 2, 1, 1, 1, 2), (2, 1, 1, 3, 2, 2), (2, 1, 1, 3, 1, 2), (2, 2, 1, 1)]
    children = [torch.rand(*shape, device=device, requires_grad=True) for shape in shapes]
    features, scores, betas = (torch.rand(*shape, device=device) for shape in ((2, 3, 2), (2, 3), (1, 1, 1, 3)))
    for name, rest in (
        ("weighted_sum", (features, False, True, False, 1)),
        ("moments", (features, features, scores, betas, 1e-3, 1)),
        ("moments", (features, None, None, betas, 1e-3, 1)),
    ):
        utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(library.REDUCTIONS["triton", name].forward, (*children, *rest), test_utils=utilities)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_less_exact_than_eager_pytorch(name, dtype):
    """Against float64 the error is at most twice that of stored votes in the same precision."""

    def run(backend: str, precision: torch.dtype) -> list[Tensor]:
        torch.manual_seed(3)
        layer = CapsuleLinear(40, 6, (2, 3), (2, 4), ROUTINGS[name](), bias=True, backend=backend).to(dtype)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        poses = torch.randn(5, 40, 2, 3).to(dtype)
        scores = torch.randn(5, 40).to(dtype)
        layer, poses, scores = layer.to(precision), poses.to(precision), scores.to(precision)
        poses.requires_grad_(), scores.requires_grad_()
        out = layer(Capsules(poses, scores))
        values = [x.double() for x in (out.poses, out.scores) if x is not None]
        loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in values)
        leaves = [poses, scores, *layer.parameters()]
        return values + [g.double() for g in torch.autograd.grad(loss, leaves)]

    exact, eager, ours = run("reference", torch.float64), run("reference", dtype), run("tiled", dtype)
    for e, r, o in zip(exact, eager, ours, strict=True):
        error, allowed = (o - e).norm(), 2 * (r - e).norm()
        assert error <= allowed + torch.finfo(dtype).eps * e.norm() / 8


def test_gradients_that_many_children_share_are_no_less_exact():
    """A gradient to which ten thousand add, one by one, would lose digits."""

    def run(backend: str, precision: torch.dtype) -> list[Tensor]:
        torch.manual_seed(3)
        layer = CapsuleLinear(None, 6, (2, 3), (2, 4), torchcaps.HeinsenRouting(2), bias=True, backend=backend)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        out = layer.to(precision)(torch.randn(1, 10_000, 2, 3).to(precision))
        return [g.double() for g in torch.autograd.grad(out.poses.sum() + out.scores.sum(), list(layer.parameters()))]

    exact, eager, ours = run("reference", torch.float64), run("reference", torch.float32), run("tiled", torch.float32)
    for e, r, o in zip(exact, eager, ours, strict=True):
        assert (o - e).norm() <= 2 * (r - e).norm() + 4 * torch.finfo(torch.float32).eps * e.norm()


def test_autocast_does_not_reach_into_a_reduction():
    p = Problem("per child", bias=True)
    float32 = [x.detach().float() for x in (p.poses, p.weight, p.bias)]
    votes, query = LazyVotes(*float32, p.tiled.pose, backend="tiled"), Dot(p.parents().detach().float())
    expected = votes.weighted_sum(query)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(votes.weighted_sum(query), expected, rtol=0, atol=0)


@pytest.mark.parametrize("agreement", [None, Dot(torch.ones(3, 4, 2))], ids=["uniform", "dot"])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_variance_of_votes_that_agree_far_from_zero(backend, agreement, monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK", 100)
    torch.manual_seed(0)
    poses = 1000 + 0.1 * torch.randn(3, 50, 1, 2)
    votes = LazyVotes(poses, torch.eye(2).view(1, 1, 2, 2).repeat(1, 4, 1, 1), None, (2,), backend=backend)
    expected = poses.double().flatten(2).var(1, correction=0).unsqueeze(1).expand(-1, 4, -1)
    assert_close(votes.moments(agreement).variance.double(), expected, rtol=1e-3, atol=0)


class TestBackends:
    def test_context_sets_what_auto_means(self):
        x, w = torch.randn(1, 2, 1, 3), torch.randn(2, 4, 3, 3)
        assert LazyVotes(x, w, None, (3,)).backend == "tiled"
        with use_backend("reference"):
            assert LazyVotes(x, w, None, (3,)).backend == "reference"
            assert LazyVotes(x, w, None, (3,), backend="tiled").backend == "tiled"
            with use_backend("auto"):
                assert LazyVotes(x, w, None, (3,)).backend == "tiled"
        assert LazyVotes(x, w, None, (3,)).backend == "tiled"

    def test_unknown(self):
        with pytest.raises(
            ValueError, match="backend must be one of 'auto', 'reference', 'tiled', 'triton', got 'cuda'"
        ):
            CapsuleLinear(2, 2, 2, 2, torchcaps.DynamicRouting(), backend="cuda")
        with pytest.raises(ValueError, match="got 'fast'"), use_backend("fast"):
            pass

    def test_impossible_requests_raise(self):
        votes = LazyVotes(torch.randn(1, 2, 1, 3), torch.randn(2, 4, 3, 3), None, (3,), backend="tiled")
        state = torch.ones(1, 4, 3)
        with pytest.raises(ValueError, match="use backend='reference'"):
            votes.weighted_sum(Gaussian(state, state, state[..., 0]))
        with pytest.raises(ValueError, match="use backend='reference'"):
            votes.moments(Dot(state, unit=True))

    def test_layers_say_their_backend(self):
        routing = torchcaps.DynamicRouting()
        assert "backend='tiled'" in repr(CapsuleLinear(2, 2, 2, 2, routing, backend="tiled"))
        assert "backend='reference'" in repr(CapsuleConv2d(2, 2, 2, 2, 3, routing, backend="reference"))
        assert "backend" not in repr(CapsuleLinear(2, 2, 2, 2, routing))


def test_blocks_cover_every_pair_once():
    for (poses, weight, _, stride), sizes in itertools.product(
        GEOMETRIES.values(), [(1, 1), (7, 3), (20, 20), (1000, 5), (10**6, 10**6)]
    ):
        poses, weight = torch.empty(poses), torch.empty(weight)
        kernel, samples = weight.shape[1], tiled.count_samples(poses, weight, stride)
        seen = torch.zeros(samples, poses.shape[1], kernel, kernel)
        for block in tiled.blocks(poses, weight, stride, *sizes):
            seen[block.samples, block.channels, block.place[0], block.place[1]] += 1
        assert (seen == 1).all()


def allocated(layer: torch.nn.Module, poses: Tensor) -> int:
    """Bytes at the peak of a forward and backward pass, beyond the gradients that stay."""
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(poses.requires_grad_()).poses.square().sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak - now


@pytest.mark.parametrize("kind", ["per child", "any number", "types", "conv"])
@pytest.mark.parametrize(
    "name", ["dynamic", "vector_norm", "inverted_attention", "inverted_attention_c", "em", "heinsen"]
)
def test_ten_times_the_children_need_no_more_memory(name, kind, monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK", 2**9)
    routing, pose = ROUTINGS[name](), (2, 2)

    def bytes_for(factor: int) -> int:
        n = 20 * factor
        if kind == "per child":
            return allocated(CapsuleLinear(n, 8, pose, pose, routing, backend="tiled"), torch.randn(4, n, 2, 2))
        if kind == "any number":
            return allocated(CapsuleLinear(None, 8, pose, pose, routing, backend="tiled"), torch.randn(4, 5 * n, 2, 2))
        if kind == "types":
            layer = CapsuleLinear(2, 8, pose, pose, routing, share_positions=True, backend="tiled")
            return allocated(layer, torch.randn(4, 2, 5, n, 2, 2))
        layer = CapsuleConv2d(n // 5, 8, pose, pose, 3, routing, stride=2, backend="tiled")
        return allocated(layer, torch.randn(2, n // 5, 5, 5, 2, 2))

    bytes_for(1)
    assert bytes_for(10) <= 1.3 * bytes_for(1)
