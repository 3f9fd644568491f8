"""Pooling by agreement as one autograd function, in PyTorch and C++, against vector-normed routing of stored votes."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from algorithms import route
from torch import Tensor
from torch.testing import assert_close

from torchcaps import VectorNormRouting
from torchcaps.functional import squash
from torchcaps.ops import StoredVotes, native
from torchcaps.ops.backend import NATIVE_MISSING
from torchcaps.ops.pool import pool_by_agreement

Pool = Callable[..., Tensor]


@pytest.fixture(params=["tiled", "native"])
def pool(request) -> Pool:
    if request.param == "native" and NATIVE_MISSING is not None:
        pytest.skip(f"needs the native kernels: {NATIVE_MISSING}")
    return functools.partial(pool_by_agreement, backend=request.param)


def stored(poses: Tensor) -> StoredVotes:
    return StoredVotes(poses.transpose(1, 2).unsqueeze(2))


def make_poses(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    poses = torch.randn(shape, dtype=torch.float64).to(dtype)
    poses[0, :, 0] = 0
    return poses.requires_grad_()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("iterations", "learned"), [(0, False), *itertools.product((1, 2, 5), (False, True))])
@pytest.mark.parametrize("shape", [(5, 4, 7), (2, 4, 1), (3, 1, 6)], ids=str)
def test_values_and_gradients(pool, shape, iterations, learned, masked):
    poses, sharpness, present = make_poses(*shape), 3.0, None
    leaves = [poses]
    if learned:
        sharpness = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        leaves.append(sharpness)
    if masked:
        present = torch.rand(shape[0], shape[2]) < 0.6
        present[:, 0] = True
    scores = None if present is None else torch.where(present, torch.inf, -torch.inf)
    total = pool(poses, iterations, sharpness, present)
    routing = VectorNormRouting(iterations, 3.0, learn_sharpness=len(leaves) > 1)
    given = {"learned_sharpness": sharpness} if routing.learn_sharpness else {}
    expected = route(routing, stored(poses), scores, **given).poses
    weights = torch.linspace(-1, 2, total.numel(), dtype=torch.float64).view_as(total)
    assert_close(total, expected.squeeze(1), rtol=1e-10, atol=1e-12)
    found, expected = (
        torch.autograd.grad((x.view_as(weights) * weights).sum(), leaves) for x in (total, expected.squeeze(1))
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_in_a_larger_graph(pool):
    """The backward pass adds to gradients in place, which must not change gradients of other operators."""
    poses = make_poses(3, 4, 5)
    results = []
    for run in (
        lambda u, t: pool(u, t, 2.0, None),
        lambda u, t: VectorNormRouting(t, 2.0)(stored(u)).poses,
    ):
        loss = run(poses, 2).square().sum() + poses.pow(3).sum() + run(2 * poses, 1).sum()
        once = torch.autograd.grad(loss, poses, retain_graph=True)[0]
        assert_close(torch.autograd.grad(loss, poses)[0], once, rtol=0, atol=0)
        results.append(once)
    assert_close(*results, rtol=1e-10, atol=1e-12)


def test_poses_that_cancel_or_are_zero_have_finite_gradients(pool):
    cancel = torch.tensor([[[1.0, -1.0], [2.0, -2.0]]], dtype=torch.float64, requires_grad=True)
    for poses in (cancel, torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)):
        found, expected = (
            torch.autograd.grad(x.sum(), poses)[0]
            for x in (pool(poses, 2, 3.0, None), VectorNormRouting(2, 3.0)(stored(poses)).poses)
        )
        assert found.isfinite().all()
        assert_close(found, expected)


def test_no_second_derivatives(pool):
    poses = make_poses(2, 3, 4)
    total = pool(poses, 1, 2.0, None).sum()
    with pytest.raises(RuntimeError, match="no second derivatives .*: use backend='reference'"):
        torch.autograd.grad(total, poses, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errs_at_most_twice_as_much_as_eager(pool, dtype):
    poses = make_poses(16, 8, 50, dtype=dtype)
    routing = VectorNormRouting(2, 4.0)
    in_double = poses.detach().double().requires_grad_()
    weights = torch.randn(16, 8, dtype=torch.float64)
    truth = routing(stored(in_double)).poses.squeeze(1)
    truths = truth.detach(), torch.autograd.grad((truth * weights).sum(), in_double)[0]
    errors = []
    for total in (pool(poses, 2, 4.0, None), routing(stored(poses)).poses.squeeze(1)):
        assert total.dtype == dtype
        found = total.detach(), torch.autograd.grad((total * weights.to(dtype)).sum(), poses)[0]
        errors.append([float((x.double() - t).norm() / t.norm()) for x, t in zip(found, truths, strict=True)])
    for ours, eager in zip(*errors, strict=True):
        assert ours <= 2 * eager + 4 * torch.finfo(torch.float32).eps


def test_autocast_leaves_it_in_the_precision_of_the_poses(pool):
    poses = make_poses(3, 4, 50, dtype=torch.float32)
    expected = pool(poses, 2, 4.0, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(pool(poses, 2, 4.0, None), expected, rtol=0, atol=0)


def test_the_module_applies_its_activation(pool):
    poses = make_poses(3, 4, 5)
    routing = VectorNormRouting(2, 3.0, activation=squash)
    assert_close(routing.pool(poses), routing(stored(poses)).poses.squeeze(1))
    assert_close(routing.pool(poses), squash(pool(poses, 2, 3.0, None)))


@pytest.mark.skipif(NATIVE_MISSING is not None, reason="needs the native kernels")
@pytest.mark.parametrize(
    ("dtype", "takes"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, True), (torch.float16, False)]
)
def test_the_kernel_runs_where_it_takes_the_poses(dtype, takes, monkeypatch):
    """Without it the results would be the same, only later."""
    calls, run = [], native.routing_pool
    monkeypatch.setattr(native, "routing_pool", lambda *args: calls.append(args) or run(*args))
    pool_by_agreement(torch.randn(2, 3, 4).to(dtype), 1, 3.0, None, backend="native")
    assert bool(calls) == takes
