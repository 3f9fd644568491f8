"""The Triton kernels against the definitions; in Triton's interpreter where there is no GPU."""

import os

import pytest
import torch
from problems import ROWS, SOFTMAX, Geometry, Problem, assert_same, compare, results_of
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from torchcaps.ops import Dot, Gaussian, LinearVotes, UnitDot, computed, windows
from torchcaps.ops.children import Gradients, Options, ParentTensors
from torchcaps.ops.numerics import accumulator
from torchcaps.ops.triton import problem
from torchcaps.ops.triton.moments import moments, moments_backward
from torchcaps.ops.triton.weighted_sum import weighted_sum, weighted_sum_backward
from torchcaps.utils.arguments import HALF

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms need it
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"

# Windows that overlap, that are dilated, and that do not overlap; children that share weights, with biases of as many,
# fewer and more groups; sizes that are no powers of 2; more parents than a warp has lanes.
GEOMETRIES = {
    "overlapping": Geometry((2, 1, 2, 3, 2, 2), (1, 2, 2, 2, 2, 1), 1),
    "dilated": Geometry((1, 1, 3, 6, 1, 2), (1, 2, 2, 2, 2, 2), 1, (1, 1), (2, 3)),
    "a kernel of one": Geometry((2, 2, 2, 3, 1, 1), (2, 1, 1, 3, 1, 2), 2, (1, 2)),
    "windows": Geometry((1, 1, 3, 3, 1, 2), (1, 2, 1, 3, 2, 1), 1, (1, 2), (2, 1)),
    "windows of groups": Geometry((1, 4, 2, 2, 1, 2), (2, 2, 1, 3, 2, 1), 4),
    "per child": Geometry((3, 2, 1, 1, 2, 2), (2, 1, 1, 3, 2, 3), 2),
    "groups": Geometry((3, 4, 1, 1, 2, 1), (2, 1, 1, 3, 1, 1), 4),
    "shared": Geometry((3, 4, 1, 1, 1, 3), (1, 1, 1, 3, 3, 2), 2),
    "many parents": Geometry((2, 2, 1, 1, 1, 1), (1, 1, 1, 5 if INTERPRETED else 131, 1, 2), 1),
    "one of everything": Geometry((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1), 1),
}


@pytest.fixture(autouse=True)
def poison():
    """Fill fresh memory with NaN, so that a number that a kernel forgets to write is noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CASES = [
    ("windows", "each", "dot", "each", "parents"),
    ("windows", "each", "dot", "shared", "children"),
    ("windows", "one", "dot", "each", "moments"),
    ("windows", "one", "poses", "each", "moments"),
    ("windows of groups", "each", "dot", "each", "moments"),
    ("windows of groups", "one", "gaussian", "none", "moments"),
    ("overlapping", "each", "dot", "each", "parents"),
    ("overlapping", "one", "uniform", "none", "leaky"),
    ("dilated", "each", "dot", "none", "children"),
    ("a kernel of one", "each", "dot", "none", "leaky"),
    ("per child", "none", "unit", "none", "children"),
    ("per child", "each", "gaussian", "none", "moments"),
    ("per child", "each", "uniform", "none", "moments"),
    ("groups", "each", "unit", "none", "children"),
    ("groups", "one", "unit", "none", "leaky"),
    ("groups", "each", "gaussian", "none", "parents"),
    ("groups", "one", "dot", "shared", "moments"),
    ("shared", "none", "unit", "none", "parents"),
    ("shared", "one", "dot", "groups", "children"),
    ("many parents", "each", "dot", "each", "leaky"),
    ("many parents", "one", "poses", "shared", "leaky"),
    ("one of everything", "each", "unit", "none", "children"),
    ("one of everything", "none", "gaussian", "none", "moments"),
    ("groups", "one", "gaussian", "none", "children"),  # refused, and the next
    ("groups", "one", "unit", "none", "moments"),
]
AGREEMENTS = ["uniform", "dot", "unit", "gaussian", "poses"]
ALL_CASES = [
    (geometry, bias, agreement, offset, way)
    for geometry in GEOMETRIES
    for bias in ("none", "one")
    for agreement in AGREEMENTS
    for offset in (ROWS if agreement == "dot" else ["none"])
    for way in [*SOFTMAX, "moments"]
]


def check(geometry: str, bias: str, agreement: str, offset: str, way: str) -> None:
    """Compare a reduction with its definition: values and all gradients."""
    p = Problem(GEOMETRIES[geometry], bias, gates=bias != "none", device=DEVICE)
    betas = (
        p.draw_rows(*(("each", 1) if bias == "one" else ("groups",))) if way == "moments" and bias != "none" else None
    )
    compare(p, ["triton"], p.agreement(agreement, offset), way, *((betas, 0.1) if way == "moments" else ()))


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_reductions(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL_CASES if case not in CASES], ids=", ".join)
def test_all_reductions(case):
    check(*case)


@pytest.mark.parametrize("way", [*SOFTMAX, "moments"])
@pytest.mark.parametrize("agreement", ["dot", "gaussian"])
def test_a_program_takes_many_children_and_samples(agreement, way, monkeypatch):
    """As on a device, where the cases above have one child for each program."""
    monkeypatch.setattr(problem, "PROGRAMS", 1)
    p = Problem(Geometry((5, 7, 1, 1, 1, 2), (1, 1, 1, 3, 2, 2), 1), "one", gates=True, device=DEVICE)
    betas = (p.draw_rows("groups"), 0.1) if way == "moments" else ()
    compare(p, ["triton"], p.agreement(agreement, "groups" if agreement == "dot" else "none"), way, *betas)


def test_variance_where_the_first_child_counts_for_little(monkeypatch):
    """The deviation of the next child is nearly all of the new mean, so that their difference has no digits."""
    monkeypatch.setattr(problem, "PROGRAMS", 1)
    poses = 1 + 0.01 * torch.randn(1, 12, 1, 1, device=DEVICE)
    gates = torch.ones(1, 12, device=DEVICE)
    poses[:, 0], gates[:, 0] = 3, 1e-6
    votes = LinearVotes(poses, torch.ones(1, 1, 1, 1, device=DEVICE), None, (1,), backend="triton").gated(gates)
    one = torch.ones(1, 1, 1, device=DEVICE)
    _, mean, variance, _ = votes.moments(Gaussian(one, 0 * one, one[..., 0]))
    exact, shares = poses.double().flatten(), gates.double().flatten()
    expected = (shares * exact).sum() / shares.sum()
    assert_close(mean.double().squeeze(), expected, rtol=1e-6, atol=0)
    assert_close(
        variance.double().squeeze(), (shares * (exact - expected).square()).sum() / shares.sum(), rtol=1e-5, atol=0
    )


def test_parents_that_no_child_can_choose():
    """Logarithms of priors of 0."""
    p = Problem(GEOMETRIES["per child"], "each", gates=True, device=DEVICE)
    gaussian = p.gaussian()
    gaussian.prior.data[:1, :2] = -torch.inf
    compare(p, ["triton"], gaussian, "moments", p.draw_rows("each"), 0.0)


@pytest.mark.parametrize("softmax", SOFTMAX)
def test_logits_that_exp_cannot_take(softmax):
    p = Problem(GEOMETRIES["per child"], "each", gates=True, device=DEVICE)
    agreement = Dot(2000 * p.dot().query.detach())
    expected, found = (results_of(p.votes(kind), agreement, softmax) for kind in ("reference", "triton"))
    assert_same(expected, found, p.leaves, rtol=1e-8, atol=1e-8)


def test_the_largest_logit_is_in_the_last_split():
    """Each child is a split, and splits are joined in blocks."""
    poses = 1000 * torch.arange(8.0, device=DEVICE).view(1, 8, 1, 1)
    one = torch.ones(1, 1, 1, device=DEVICE)
    votes = LinearVotes(poses, one[None], None, (1,), backend="triton")
    assert votes.weighted_sum(Dot(one), "children").item() == 7000


def test_votes_of_zero_point_nowhere():
    p = Problem(GEOMETRIES["per child"], device=DEVICE)
    p.poses.data.zero_()
    for softmax in ("parents", "children"):
        sums = p.votes("triton").weighted_sum(UnitDot(p.dot().query), softmax)
        assert all(x.isfinite().all() for x in torch.autograd.grad(sums.sum(), [p.poses, p.weight]))


def strided(x: Tensor | None) -> Tensor | None:
    """Return the same numbers in another memory layout: the first dimension innermost, and gaps."""
    return None if x is None else torch.stack([x, x + 1], -1).movedim(0, -1).contiguous().movedim(-1, 0)[..., 0]


def test_tensors_in_any_order_in_memory():
    p = Problem(GEOMETRIES["windows"], "each", gates=True, device=DEVICE)
    agreement, gaussian, betas = p.dot("each"), p.gaussian(), p.draw_rows("each")
    expected = [*p.reduced(agreement, "children"), *p.reduced(gaussian, "moments", betas, 0.1)]
    poses, weight, bias, gates = (strided(x) for x in (p.poses, p.weight, p.bias, p.gates))
    votes = LinearVotes(poses, weight, bias, (1, 1), *p.geometry[3:], backend="triton").gated(gates)
    found = results_of(votes, Dot(*map(strided, agreement)), "children")
    found += results_of(votes, Gaussian(*map(strided, gaussian)), "moments", strided(betas), 0.1)
    assert_same(expected, found, p.leaves)


@pytest.mark.parametrize("common", [0, 1e4])
@pytest.mark.parametrize("agreement", ["dot", "gaussian"])
def test_precision(agreement, common):
    """The error is at most twice that of PyTorch in float32, plus some roundings, also of logits with a large number in
    common."""
    results = []
    for dtype, kind in ((torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "triton")):
        torch.manual_seed(0)
        p = Problem(Geometry((4, 3, 1, 1, 1, 3), (3, 1, 1, 3, 3, 2), 3), "each", gates=True, device=DEVICE)
        about, betas = p.agreement(agreement, "each"), p.draw_rows("each")
        (about.offset if agreement == "dot" else about.prior).data += common
        leaves = [x.detach().to(dtype).requires_grad_() for x in p.leaves]
        same = dict(zip(map(id, p.leaves), leaves, strict=True))
        p.poses, p.weight, p.bias, p.gates = (same[id(x)] for x in (p.poses, p.weight, p.bias, p.gates))
        about = type(about)(*(None if x is None else same[id(x)] for x in about))
        found = results_of(p.votes(kind), about, "moments", same[id(betas)], 1e-6)
        assert all(x.dtype == dtype for x in found)
        results.append([*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)])
    for exact, eager, found in zip(*results, strict=True):
        error, expected = ((x - exact).norm() for x in (found, eager))
        assert error <= 2 * expected + 4 * torch.finfo(torch.float32).eps * exact.norm() + 1e-7


class Conversions(TorchDispatchMode):
    """Sees how many numbers each operator converts from half precision to float32."""

    def __init__(self):
        super().__init__()
        self.counts = [0]

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, Tensor)]
        if isinstance(results, Tensor) and results.dtype == torch.float32 and any(x.dtype in HALF for x in given):
            self.counts.append(results.numel())
        return results


class TestHalfPrecision:
    """Poses, weights, biases and gates in half precision are read as they are; all sums are in float32."""

    @pytest.mark.parametrize("geometry", ["groups", "overlapping"])
    @pytest.mark.parametrize(
        ("of_poses", "of_weights"),  # of a layer in half precision, and of one under autocast
        [
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
        ],
        ids=str,
    )
    def test_only_the_gradients_are_rounded_and_only_once(self, of_poses, of_weights, geometry):
        p = Problem(GEOMETRIES[geometry], "each", gates=True, device=DEVICE)
        query, offset = p.dot("each")
        types = [of_poses, of_weights, of_weights, *[torch.float32] * 3]
        exact = [
            x.detach().to(t).double()
            for x, t in zip((p.poses, p.weight, p.bias, p.gates, query, offset), types, strict=True)
        ]
        results = []
        for kind, own in (("reference", exact), ("triton", [x.to(t) for x, t in zip(exact, types, strict=True)])):
            *of_votes, gates, query, offset = leaves = [x.requires_grad_() for x in own]
            votes = LinearVotes(*of_votes, (p.rows, p.h), *p.geometry[3:], backend=kind).gated(gates)
            first = votes.weighted_sum(Dot(query, offset), "children")
            second = votes.weighted_sum(Dot(first))
            found = [first, second, *votes.moments(Gaussian(second, first.square(), first[..., 0]), None, 0.1)[:3]]
            found.append(votes.weighted_sum(None))
            loss = sum((x * torch.linspace(-1, 1, x.numel()).to(x).view_as(x)).sum() for x in found)
            results.append((found, torch.autograd.grad(loss, leaves)))
        (expected, wanted), (found, gradients) = results
        assert {x.dtype for x in found} == {torch.float32}
        assert [x.dtype for x in gradients] == types
        for e, f in zip(expected, found, strict=True):
            assert_close(f.double(), e, rtol=1e-4, atol=1e-5)
        for w, g in zip(wanted, gradients, strict=True):
            rounding = torch.finfo(g.dtype).eps
            # A map adds up the rounded gradients of its windows.
            atol = (rounding if geometry == "overlapping" else 0) + 1e-5
            assert_close(g.double(), w, rtol=rounding / 2 + 1e-4, atol=atol * max(1, w.abs().max().item()))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_no_copy_of_the_children_in_float32(self, dtype):
        p = Problem(Geometry((3, 24, 1, 1, 2, 1), (24, 1, 1, 3, 1, 1), 24), "each", gates=True, device=DEVICE)
        votes = LinearVotes(*(x.detach().to(dtype) for x in (p.poses, p.weight, p.bias)), (2, 1), backend="triton")
        children = votes.tensors(p.gates.detach().to(dtype).unflatten(1, (-1, 1, 1)))
        assert {x.dtype for x in children} == {dtype}
        into = Gradients(*map(accumulator, children))
        query, mean, precision = (torch.rand(3, 3, 2, device=DEVICE) for _ in range(3))
        gaussian = ParentTensors(mean, precision, precision[..., 0].contiguous())
        with Conversions() as conversions:
            results = weighted_sum(children, ParentTensors(query), Options())
            weighted_sum_backward(results[:1], results, children, ParentTensors(query), Options(), into)
            results = moments(children, gaussian, Options())
            moments_backward((*results[:3], results[0]), results[:3], children, gaussian, Options(), into)
        assert all(x.isfinite().all() and x.any() for x in into)
        assert max(conversions.counts) < min(x.numel() for x in children)  # moments converts one child

    def test_compiled_code_converts_the_children(self, monkeypatch):
        """Autograd would round the gradient of each iteration."""
        p = Problem(GEOMETRIES["groups"], "each", device=DEVICE)
        votes = LinearVotes(*(x.detach().half() for x in (p.poses, p.weight, p.bias)), (2, 1), backend="triton")
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert {x.dtype for x in votes.tensors(None) if x is not None} == {torch.float32}


@pytest.mark.parametrize("agreement", ["uniform", "dot", "gaussian"])
def test_variance_of_votes_that_agree_far_from_the_origin(agreement):
    """Expanded squares would be 10^11 times the variance, but float32 has seven digits."""
    poses = torch.randn(1, 12 if INTERPRETED else 40, 1, 1, device=DEVICE).mul(3).round()
    weight, bias = (torch.full((1, 1, 1, 1), x, device=DEVICE) for x in (2.0**-10, 1000.0))  # the votes are exact
    zero = torch.zeros(1, 1, 1, device=DEVICE)
    of_kind = {"uniform": None, "dot": Dot(zero), "gaussian": Gaussian(zero, zero + 1e-9, zero[..., 0])}
    _, mean, variance, _ = LinearVotes(poses, weight, bias, (1,), backend="triton").moments(of_kind[agreement])
    votes = (poses.double() / 1024 + 1000).flatten()
    assert_close(variance.double().squeeze(), votes.var(correction=0), rtol=1e-6, atol=0)
    assert_close(mean.double().squeeze(), votes.mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_windows_are_unfolded_once_for_all_iterations(with_gradients, monkeypatch):
    unfolded = []
    monkeypatch.setattr(computed, "windows", lambda *arguments: unfolded.append(1) or windows(*arguments))
    p = Problem(GEOMETRIES["windows"], device=DEVICE)
    votes, agreement = p.votes("triton"), p.dot()
    with torch.set_grad_enabled(with_gradients):
        for _ in range(2):
            votes.weighted_sum(agreement)
    assert unfolded == [1]


@pytest.mark.parametrize(("items", "programs", "part"), [(2048, 1, 2**20), (7, 3, 10), (1, 5000, 1), (0, 0, 0)])
def test_partial_results_are_bounded(items, programs, part):
    p = Problem(GEOMETRIES["shared"], device=DEVICE)
    kernels = problem.Problem(p.votes("triton").tensors(None), Options())
    splits, per_split = kernels.split(items, programs, part)
    assert splits * per_split >= items
    assert splits >= 1
    assert splits * part <= problem.MOST_PARTS


@pytest.mark.parametrize("kernel", ["moments", "over_children"])
def test_more_than_2_to_the_31_numbers_are_joined(kernel):
    """The first program alone, which needs few of them."""
    device = "cpu" if problem.INTERPRETED else "cuda"
    vectors, scores = torch.ones(7, 16, device=device), torch.ones(7, 16, device=device)
    tensors = {
        "moments": (scores[0], *vectors[:2], scores[1], vectors[2], scores[2], vectors[3], None, vectors[4]),
        "over_children": (vectors[0], scores[0], vectors[1], scores[1], scores[2]),
    }[kernel]
    out = tensors[1 if kernel == "moments" else 0].fill_(-1)
    options = {"eps": 0.0} if kernel == "moments" else {}
    problem.launch(f"joins.join_{kernel}", (1,), out.device, *tensors, 2**30, 4, 1, block_s=1, block_e=16, **options)
    assert_close(out, torch.full_like(out, 2.0 if kernel == "moments" else 1.0))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has one thread")
def test_the_same_digits_each_time():
    p = Problem(GEOMETRIES["windows of groups"], "each", gates=True, device=DEVICE)
    agreement = p.dot("each")
    first, second = (
        torch.autograd.grad(p.votes("triton").moments(agreement).variance.sum(), p.leaves) for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("poses", [(0, 2, 1, 1, 1, 2), (0, 2, 3, 3, 1, 2)])
def test_an_empty_batch(poses, gates):
    p = Problem(Geometry(poses, (1, 1, 1, 3, 2, 2), 1), "each", gates=False, device=DEVICE)
    votes = p.votes("triton").gated(p.poses.new_ones(p.samples, 2) if gates else None)
    s = votes.weighted_sum(None)
    s = s + votes.weighted_sum(Dot(s), "children") + votes.moments(Dot(s)).variance
    assert s.shape == (0, 3, 2)
    for gradient, leaf in zip(torch.autograd.grad(s.sum(), [p.poses, p.weight]), [p.poses, p.weight], strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize("geometry", ["windows", "groups"])
def test_coefficients_and_blocks(geometry):
    p = Problem(GEOMETRIES[geometry], "each", gates=True, device=DEVICE)
    compare(p, ["triton"], p.dot("each"), "coefficients, children")
    found = list(p.votes("triton").blocks())
    assert sum(block.shape[0] * block.shape[1] for block, _ in found) == p.samples * p.children
    total = sum((block * gates[..., None, None]).sum() for block, gates in found)
    assert_close(total, (p.all_votes * p.gates[..., None, None]).sum())


def test_iterations_share_gradients_and_gates_do_not():
    p = Problem(GEOMETRIES["windows"], "each", gates=True, device=DEVICE)
    agreement, results = p.dot(), []
    for backend in ("reference", "triton"):
        votes = p.votes(backend)
        first = votes.weighted_sum(agreement)
        results.append([votes.moments(Dot(first)).variance, votes.gated(None).weighted_sum(Dot(first))])
    assert_same(*results, p.leaves)
    votes = votes.detach()
    assert not votes.weighted_sum(Dot(agreement.query.detach())).requires_grad
