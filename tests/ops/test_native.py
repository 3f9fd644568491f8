"""The C++ kernels: shapes, instruction sets, threads, signals, and loading of the library."""

import copy
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, make
from problems import every, label, mixed
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from torchcaps import CapsuleConv2d, CapsuleLinear, Capsules, RoutingPool2d, use_backend
from torchcaps.ops import Dot, Gaussian, LinearVotes, native, operators
from torchcaps.ops.backend import NATIVE_MISSING
from torchcaps.ops.children import Children, Options, ParentTensors
from torchcaps.ops.pool import pool_by_agreement

if NATIVE_MISSING is not None:
    pytest.skip(f"needs the native kernels: {NATIVE_MISSING}", allow_module_level=True)

SETS = ["AVX-512", "AVX2", "baseline"]
SHAPES = [((4, 4), (4, 4)), (8, 16), ((2, 3), (2, 5)), (2, 2)]  # parts of vectors and whole ones


@pytest.fixture(params=SETS)
def instructions(request):
    library, best = native.load(), native.instructions()
    if not library.torchcaps_choose(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    library.torchcaps_choose(best.encode())


THREADS = [1, 2, 3]


@pytest.fixture(params=THREADS)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def small(layer: torch.nn.Module) -> torch.nn.Module:
    """Set random parameters: none is zero, and logits are small enough for float32."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


def results_of(layer: torch.nn.Module, children: Capsules) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in children[:2] if x is not None]
    out = layer(Capsules(*leaves))
    values = [x for x in out[:3] if x is not None]
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in values)
    return values + list(torch.autograd.grad(loss, [*leaves, *layer.parameters()], materialize_grads=True))


def compare(layer: torch.nn.Module, children: Capsules, tolerance: float) -> None:
    """Compare with the reference in float64, relative to the largest number of each tensor."""
    exact = copy.deepcopy(layer).double()
    exact.backend, layer.backend = "reference", "native"
    expected = results_of(exact, Capsules(*(None if x is None else x.double() for x in children[:2])))
    for x, y in zip(results_of(layer, children), expected, strict=True):
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3)


# Parents: fewer than half a vector has, one more than that, a vector, and one more. Children: not a multiple of a
# chunk, and more than a run. Samples: not a multiple of those processed together, and more than a block.
@pytest.mark.parametrize(
    "case",
    every(
        16,
        name=["dynamic", "dynamic_over_children", "heinsen"],
        shape=SHAPES,
        sizes=[(3, 5, 2), (9, 261, 3), (16, 8, 67), (17, 6, 5)],
    ),
    ids=label,
)
def test_every_size(case, instructions):
    """It uses float32, whose vectors have more lanes than those of float64, which other tests use."""
    name, (parents, children, batch) = case["name"], case["sizes"]
    layer = CapsuleLinear(children, parents, *case["shape"], make(name), bias=name == "heinsen")
    poses = torch.randn(batch, children, *layer.in_pose)
    scores = torch.randn(batch, children) if children != 8 else None
    compare(small(layer), Capsules(poses, scores), 1e-4)


# Widths for which vectors hold columns of one parent, of several, or one column of many, with and without empty lanes;
# and few samples, whose weights are not packed: vectors then end in the next row, which may be another thread's.
@pytest.mark.parametrize("samples", [1, 7, 9])
@pytest.mark.parametrize(
    "case",
    mixed(
        30,
        name=["dynamic", "dynamic_over_children", "heinsen", "em"],
        shape=[(3, 4), (9, 6), (5, 11), (2, 24), ((3, 2), (3, 19)), ((2, 5), (2, 8)), (1, 33)],
        parents=[1, 2, 5, 10, 33],
        children=[6, 9, 301],
        threads=THREADS,
    ),
    ids=label,
)
def test_every_layout(case, samples, instructions, monkeypatch):
    """Variances of few children are in float64: their gradients enlarge what is rounded."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: case["threads"])
    dtype = torch.float64 if case["name"] in ("heinsen", "em") else torch.float32
    layer = CapsuleLinear(case["children"], case["parents"], *case["shape"], make(case["name"])).to(dtype)
    poses = torch.randn(samples, case["children"], *layer.in_pose, dtype=dtype)
    scores = torch.randn(samples, case["children"], dtype=dtype)
    compare(small(layer), Capsules(poses, scores), 3e-4 if dtype == torch.float32 else 1e-9)


def test_gradients_over_the_children_are_as_exact_as_those_of_pytorch():
    """Children are not squashed, so that few coefficients are neither 0 nor 1 and rounding is enlarged. The ratio of a
    single seed is from 0.1 to 10; their mean is known to a tenth."""
    ratios = []
    for seed in range(60):
        torch.manual_seed(seed)
        layer = CapsuleLinear(64, 10, 16, 16, make("dynamic_over_children"))
        children, exact = Capsules(torch.randn(8, 64, 16)), copy.deepcopy(layer).double()
        errors = {}
        exact.backend = "reference"
        expected = results_of(exact, Capsules(children.poses.double()))
        for layer.backend in ("reference", "native"):
            found = zip(results_of(layer, children), expected, strict=True)
            errors[layer.backend] = torch.stack([(x - y).abs().max() / y.abs().max() for x, y in found])
        ratios.append(errors["native"] / errors["reference"])
    assert torch.stack(ratios).log().mean(0).exp().max() <= 2


# More children and more tiles of parents than are processed at once, and not a multiple of either.
@pytest.mark.parametrize(
    "case",
    every(40, name=ALGORITHMS, shape=SHAPES, sizes=[(20, (2, 5), False), (70, (5, 9), True)], threads=THREADS),
    ids=label,
)
def test_children_that_share_weights(case, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: case["threads"])
    parents, places, bias = case["sizes"]
    layer = CapsuleLinear(2, parents, *case["shape"], make(case["name"]), bias=bias, share_positions=True)
    children = Capsules(torch.randn(3, 2, *places, *layer.in_pose), torch.randn(3, 2, *places))
    compare(small(layer), children, 3e-4)


@pytest.mark.parametrize("name", ["dynamic", "dynamic_over_children"])
def test_more_children_share_weights_than_are_summed_up_at_once(name):
    layer = CapsuleLinear(2, 5, 3, 2, make(name), bias=True, share_positions=True)
    compare(small(layer), Capsules(torch.randn(2, 2, 30, 40, 3)), 3e-4)


@pytest.mark.parametrize("case", every(40, name=ALGORITHMS, shape=SHAPES, threads=THREADS), ids=label)
def test_windows(case, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: case["threads"])
    layer = CapsuleConv2d(3, 18, *case["shape"], 3, make(case["name"]), stride=2, padding=1)
    poses = torch.randn(3, 3, 5, 4, *layer.in_pose)
    compare(small(layer), Capsules(poses, torch.randn(3, 3, 5, 4)), 3e-4)


@pytest.mark.parametrize(("batch", "children"), [(1, 7), (2, 2), (5, 1), (1, 1)])
def test_more_threads_than_there_is_to_share(batch, children, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for name in ("dynamic_over_children", "em"):
        layer = small(CapsuleLinear(children, 5, 3, 2, make(name), bias=True))
        compare(layer, Capsules(torch.randn(batch, children, 3), torch.randn(batch, children)), 3e-4)


def problem(batch: int = 6, children: int = 50, parents: int = 20) -> tuple[Tensor, Tensor, Dot]:
    poses, weight = torch.randn(batch, children, 4, 4), torch.randn(children, parents, 4, 4)
    return poses.requires_grad_(), weight.requires_grad_(), Dot(torch.randn(batch, parents, 16))


def votes_of(poses: Tensor, weight: Tensor) -> LinearVotes:
    return LinearVotes(poses, weight, None, (4, 4), backend="native")


def sums_and_gradients(poses: Tensor, weight: Tensor, agreement: Dot) -> list[Tensor]:
    sums = votes_of(poses, weight).weighted_sum(agreement)
    return [sums, *torch.autograd.grad(sums.square().sum(), [poses, weight])]


def test_the_same_threads_give_the_same_bits(threads):
    arguments = problem()
    found = sums_and_gradients(*arguments)
    for _ in range(5):
        for x, y in zip(sums_and_gradients(*arguments), found, strict=True):
            assert torch.equal(x, y)


def test_several_python_threads_at_once():
    arguments = problem(batch=40)
    expected = sums_and_gradients(*arguments)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: sums_and_gradients(*arguments), range(20)):
            for x, y in zip(found, expected, strict=True):
                assert torch.equal(x, y)


def test_a_forked_process():
    """The parent process has used its threads; the child does not have them."""
    arguments = problem()
    expected = sums_and_gradients(*arguments)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(2)
            with torch.no_grad():
                found = votes_of(*arguments[:2]).weighted_sum(arguments[2])
            os.write(writer, b"y" if torch.allclose(found, expected[0], atol=1e-5) else b"n")
        finally:
            os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("a forked process hangs")
        time.sleep(0.01)
    assert os.read(reader, 1) == b"y"
    os.close(reader)


@pytest.mark.parametrize("softmax", ["parents", "children"])
def test_nan_in_nan_out(softmax):
    poses, weight, agreement = problem()
    with torch.no_grad():
        poses[1, 3, 2, 1] = torch.nan
        votes = votes_of(poses, weight)
        sums = votes.weighted_sum(agreement, softmax)
        mean = votes.moments(Gaussian(sums, torch.ones_like(sums), sums[..., 0])).mean
    for found in (sums, mean):
        assert found[1].isnan().all()
    assert sums[[0, 2, 3, 4, 5]].isfinite().all()


def test_an_infinite_pose_changes_the_gradient_of_its_weights_alone():
    """Few samples and a width that is no multiple of the lanes: vectors end in the weights of the next child."""
    poses, weight = torch.randn(2, 5, 1, 4), torch.randn(5, 3, 4, 11, requires_grad=True)
    poses[:, 1] = torch.inf
    LinearVotes(poses, weight, None, (11,), backend="native").vote_sum().sum().backward()
    finite = weight.grad.isfinite().flatten(1)
    assert finite[[0, 2, 3, 4]].all()
    assert not finite[1].any()


@pytest.mark.parametrize("size", [(10, 4), (3, 3), (10, 11)], ids=str)
def test_nan_stays_in_its_sample(size, instructions):
    """Nothing of a sample is left in lanes without a parent or a number, for the next group or block of samples."""
    (parents, h), batch = size, 130
    poses, weight = torch.randn(batch, 9, 4, 4), torch.randn(9, parents, 4, h)
    healthy = torch.arange(batch) % 4 != 3  # groups and blocks have multiples of four
    healthy[:3] = False
    poses[~healthy, 3] = torch.nan
    query = torch.randn(batch, parents, 4 * h)
    for agreement in (Dot(query), Gaussian(query, torch.rand_like(query), query[..., 0])):
        leaf = poses.clone().requires_grad_()
        votes = LinearVotes(leaf, weight, None, (4, h), backend="native")
        found = list(votes.moments(agreement, eps=1e-6)[1:3])
        if isinstance(agreement, Dot):
            found.append(votes.weighted_sum(agreement))
        for x in found:
            (grad,) = torch.autograd.grad(x[healthy].square().sum(), leaf, retain_graph=True)
            for y in (x, grad):
                assert y[healthy].isfinite().all()


def test_an_empty_batch_of_many_parents():
    for agreement in (None, Dot(torch.randn(0, 20_000, 2))):
        votes = LinearVotes(torch.randn(0, 5, 1, 4), torch.randn(5, 20_000, 4, 2), None, (2,), backend="native")
        assert votes.moments(agreement).mean.shape == (0, 20_000, 2)


def test_children_with_fewer_weights_than_lanes(instructions):
    """Nothing is written beyond the gradient of the weights."""
    memory = torch.zeros(12 + 32)
    grad = memory[:12].view(3, 1, 1, 1, 4, 1)
    poses = torch.randn(1, 3, 1, 1, 1, 4)
    poses[0, 1] = torch.inf  # times the 0 of a lane without a number it is NaN
    children = Children(poses, torch.randn(3, 1, 1, 1, 4, 1), None, None)
    operation = native.OPERATIONS["vote_sum"] + 1
    into = (None, grad, None, None)
    native.reduce(operation, (torch.ones(1, 1, 1),), (), children, ParentTensors(), Options(), into)
    assert grad[0].isfinite().all()
    assert grad[1].isinf().any()
    assert not memory[12:].any()


class Interruption(Exception):
    pass


def assert_interrupted(run: Callable[[], object]) -> None:
    """Assert that the handler of a signal runs during a long call, where the library asks, not before or after it."""

    def interrupt(number: int, frame: Any) -> None:
        if frame.f_code.co_name == "_asking":
            raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(Interruption):
            run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_during_a_long_call():
    poses, weight, agreement = problem(batch=500, children=1000)
    votes = votes_of(poses.detach(), weight.detach())

    def seconds() -> float:
        start = time.monotonic()
        votes.weighted_sum(agreement)
        return time.monotonic() - start

    torch.set_num_threads(1)
    times = 1 + int(1.5 / min(seconds(), seconds()))
    votes = votes_of(poses.detach().repeat(times, 1, 1, 1), weight.detach())
    agreement = Dot(agreement.query.repeat(times, 1, 1))
    assert_interrupted(lambda: votes.weighted_sum(agreement))
    assert votes.weighted_sum(agreement).isfinite().all()


def laid_out(poses: Tensor, layout: str) -> Tensor:
    """Return poses `(batch, groups, features, children)` in memory as in a map that is contiguous, one with channels
    last, or one of which every second column is taken."""
    if layout == "channels last":
        return poses.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return torch.stack([poses, poses], -1)[..., 0] if layout == "strided" else poses


def pooled(poses: Tensor, sharpness: float, iterations: int, present: Tensor | None, backend: str) -> list[Tensor]:
    leaves = [poses.detach(), torch.tensor(sharpness, dtype=torch.promote_types(poses.dtype, torch.float32))]
    leaves = [leaf.requires_grad_() for leaf in leaves[: 2 if iterations else 1]]
    total = pool_by_agreement(leaves[0], iterations, leaves[1] if iterations else sharpness, present, backend)
    weights = torch.linspace(-1, 2, total.numel(), dtype=torch.float64).view_as(total).to(total.dtype)
    return [total, *torch.autograd.grad((total * weights).sum(), leaves)]


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


# Features and children: whole vectors, parts of vectors of every size, one.
@pytest.mark.parametrize("sizes", [(2, 3, 16, 49), (1, 1, 64, 144), (3, 2, 5, 7), (2, 2, 3, 17), (0, 2, 4, 5)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "strided"])
def test_pool_of_every_size(sizes, layout, instructions):
    """It is at most twice as far from float64 as PyTorch's operators in the same precision."""
    for dtype, iterations, masked in itertools.product(DTYPES, range(4), (False, True)):
        poses = torch.randn(*sizes, dtype=torch.float64)
        poses[:1, :, :, 0] = 0
        poses = laid_out(poses.to(dtype), layout)
        present = None
        if masked:
            present = torch.rand(sizes[0] * sizes[1], sizes[3]) < 0.6
            present[:, -1] = True
        arguments = 3.0, iterations, present
        exact = pooled(poses.double(), *arguments, "tiled")
        found, eager = (pooled(poses, *arguments, backend) for backend in ("native", "tiled"))
        if layout != "strided":
            assert found[1].stride() == poses.stride()
        for i, (x, y, z) in enumerate(zip(found, eager, exact, strict=True)):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            scale = z.norm().clamp(min=1e-3)
            rounding = 1e-12 if dtype == torch.float64 else 1e-6 if i < 2 else 1e-4  # the last is one number
            assert (x.double() - z).norm() / scale <= 2 * (y.double() - z).norm() / scale + rounding


def test_pool_gives_the_same_bits_with_any_number_of_threads(monkeypatch):
    poses = torch.randn(13, 4, 16, 200)
    expected = pooled(poses, 3.0, 2, None, "native")
    for count in (2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for x, y in zip(pooled(poses, 3.0, 2, None, "native"), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pool_keeps_nan_to_its_sample(layout, number, dtype):
    """Nothing of a sample is left for the next one, nor in the lanes that fill up a vector."""
    poses = torch.randn(3, 2, 5, 7).to(dtype)
    expected = pooled(laid_out(poses, layout), 3.0, 2, None, "native")
    poses[1, 0, 2, 3] = number
    total, grad, _ = pooled(laid_out(poses, layout), 3.0, 2, None, "native")
    for spoiled in (total[2], grad[1, 0]):
        assert spoiled.isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(total[rest], expected[0][rest])
    assert torch.equal(grad.flatten(0, 1)[rest], expected[1].flatten(0, 1)[rest])


def test_a_signal_during_a_long_pool():
    poses = torch.randn(20, 100, 16, 100)
    assert_interrupted(lambda: native.routing_pool(poses, 10000, 1.0, None))


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_pool_of_a_map_is_not_copied(format):
    x = torch.randn(2, 8, 5, 5).to(memory_format=format).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
        out = RoutingPool2d(4, 2.0, backend="native")(x)
    assert [y.data_ptr() for y in saved] == [x.data_ptr()]
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.is_contiguous(memory_format=format)


@pytest.mark.parametrize("learned", [False, True])
def test_pool_has_batched_gradients(learned):
    pool, x = RoutingPool2d(2, 2.0, learn_sharpness=learned), torch.randn(2, 4, 3, 3, requires_grad=True)
    leaves, results = [x, *pool.parameters()], []
    for backend in ("native", "tiled"):
        with use_backend(backend):
            out = pool(x)
        rows = torch.eye(out.numel()).view(-1, *out.shape)
        results.append(torch.autograd.grad(out, leaves, rows, is_grads_batched=True))
    assert_close(*results)


def test_pool_of_tensors_without_memory():
    pool, x = RoutingPool2d(2, backend="native"), torch.randn(2, 4, 3, 3)
    assert_close(make_fx(pool, tracing_mode="fake")(x)(x), pool(x))


def test_poses_in_another_order_in_memory():
    poses, weight, agreement = problem()
    turned = poses.detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0).requires_grad_()
    found, expected = sums_and_gradients(turned, weight, agreement), sums_and_gradients(poses, weight, agreement)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("kind", [Dot, Gaussian])
def test_parents_in_another_order_in_memory(kind):
    """Their gradients too are those of the reference: einsum, for one, returns permuted tensors."""
    poses, weight = (x.double() for x in problem()[:2])
    row, table = torch.rand(6, 20).double(), torch.rand(6, 20, 16).double()
    tensors = (table, torch.rand(50, 20).double()) if kind is Dot else (table, table + 1, row)
    found = []
    for backend, turned in (("native", True), ("reference", False)):
        given = [x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x.clone() for x in tensors]
        votes = LinearVotes(poses, weight, None, (4, 4), backend=backend)
        sums = votes.weighted_sum(kind(*(x.requires_grad_() for x in given)))
        found.append([sums, *torch.autograd.grad(sums.square().sum(), given)])
    for x, y in zip(*found, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("damage", ["missing", "empty", "of another version"])
def test_a_library_that_cannot_be_used(damage, tmp_path, monkeypatch):
    """`why_not` says what is wrong with it."""
    library = tmp_path / "kernels.so"
    if damage == "missing":
        (tmp_path / "why_not.txt").write_text("the C++ compiler g++ is not installed")
    elif damage == "empty":
        library.write_bytes(b"")
    else:
        shutil.copy(native.FOLDER / "kernels.so", library)
        monkeypatch.setattr(
            native, "_Problem", type("Longer", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_int)]})
        )
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    reason = why_not_anew()
    assert {"missing": "g++ is not installed", "empty": "kernels.so", "of another version": "install"}[damage] in reason


def test_fields_in_another_order_are_refused(monkeypatch):
    """The library describes its fields: two of one size that are swapped would be two wrong numbers."""
    fields = list(native._Problem._fields_)
    fields[4], fields[5] = fields[5], fields[4]
    monkeypatch.setattr(native, "_Problem", type("Swapped", (ctypes.Structure,), {"_fields_": fields}))
    assert "another version" in why_not_anew()


def test_the_environment_chooses_instructions():
    code = "from torchcaps.ops import native; print(native.instructions())"
    environment = os.environ | {"TORCHCAPS_INSTRUCTIONS": "baseline"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "baseline\n"


def test_instructions_that_this_machine_lacks(monkeypatch):
    monkeypatch.setenv("TORCHCAPS_INSTRUCTIONS", "AVX-1024")
    expected = "TORCHCAPS_INSTRUCTIONS must be one of .*baseline on this machine, got 'AVX-1024'"
    with pytest.raises(ValueError, match=expected):
        why_not_anew()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_number_of_a_result_is_written(name, monkeypatch):
    """PyTorch fills new tensors with NaN here."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        layer = small(CapsuleLinear(7, 5, 6, 6, make(name), bias=True))
        compare(layer, Capsules(torch.randn(3, 7, 6), torch.randn(3, 7)), 3e-4)
    finally:
        torch.use_deterministic_algorithms(False)


# Numbers of PyTorch's operators, beside one library call for each reduction. In a small layer they take most of the
# time. These include those of the loss. The oldest PyTorch has some 3 more than the newest.
OPERATORS = {"dynamic": 105, "em": 325, "variational_bayes": 740, "inverted_attention": 180, "self_routing": 230}


@pytest.mark.parametrize(("name", "most"), OPERATORS.items())
def test_operators_of_a_small_layer(name, most, monkeypatch):
    monkeypatch.setattr(operators, "is_profiled", lambda: False)
    layer, poses = CapsuleLinear(32, 10, 16, 16, make(name, 3)), torch.randn(4, 32, 16, requires_grad=True)
    layer(poses).poses.square().sum().backward()  # the first pass looks at the layer
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(poses).poses.square().sum().backward()
    assert sum(event.name.startswith("aten::") for event in profile.events()) <= most


# Orders of memory of (batch, types, height, width, size), and whether the library reads them without a copy.
ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "contiguous": (lambda x: x, True),
    "of a convolution": (lambda x: x.movedim(-1, 2).contiguous().movedim(2, -1), True),
    "of a convolution, channels last": (lambda x: x.movedim(1, 3).contiguous().movedim(3, 1), True),
    "entries first": (lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1), True),
    "reversed": (lambda x: x.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0), False),
    "every second": (lambda x: x.repeat_interleave(2, -1)[..., ::2], False),
    "every second vector": (lambda x: x.repeat_interleave(2, 3)[..., ::2, :], False),
    "expanded": (lambda x: x[:1, :, :1].expand_as(x), False),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 5, 8, 16, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squash_in_every_order_of_memory(order, size, dtype, instructions, threads):
    """Values and gradients are those of the equation, also where threads divide a plane."""
    change, in_place = ORDERS[order]
    x = change(torch.randn(3, 2, 5, 7, size, dtype=dtype))
    grad = change(torch.randn(3, 2, 5, 7, size, dtype=dtype))
    exact = x.double().contiguous().requires_grad_()
    length = exact.norm(dim=-1, keepdim=True)
    v = length / (1 + length**2) * exact
    (of_x,) = torch.autograd.grad(v, exact, grad.double())
    out, gradient = native.squash(x), native.squash(x, grad)
    assert out.is_contiguous()
    assert not in_place or gradient.stride() == torch.empty_like(x).stride()
    assert_close(out, v.detach().to(dtype))
    assert_close(gradient, of_x.to(dtype))


def why_not_anew() -> str:
    native.load.cache_clear()
    native.why_not.cache_clear()
    try:
        return native.why_not() or ""
    finally:
        native.load.cache_clear()
        native.why_not.cache_clear()


@pytest.mark.slow
def test_more_numbers_than_32_bits_count():
    children = 2**31 // 8 + 10
    poses = torch.zeros(1, children, 1, 8)
    poses[0, -1] = 1
    votes = LinearVotes(poses, torch.ones(1, 1, 8, 1), None, (1,), backend="native")
    assert votes.weighted_sum(Dot(torch.ones(1, 1, 1)), "children").item() == pytest.approx(
        8 * 2980.958 / children, rel=1e-2
    )
