"""Votes that are the children's own poses against the same votes stored: values and every gradient."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchcaps import DynamicRouting, VectorNormRouting
from torchcaps.functional import squash
from torchcaps.ops import Dot, OwnVotes, StoredVotes, own

EXACT = {"rtol": 1e-10, "atol": 1e-12}

ROUTINGS = {
    "average": VectorNormRouting(0),
    "one iteration": VectorNormRouting(1, 5.0),
    "three iterations": VectorNormRouting(3, 2.0, squash),
    "last": VectorNormRouting(2, 3.0, gradient="last"),
    "learned": VectorNormRouting(2, 3.0, learn_sharpness=True).for_layer(1, 1, 4),
    "votes of any length": DynamicRouting(3, softmax="children"),
}


def stored(poses: Tensor) -> StoredVotes:
    return StoredVotes(poses.transpose(1, 2).unsqueeze(2))


def make_poses(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    poses = torch.randn(shape, dtype=torch.float64).to(dtype)
    poses[0, :, 0] = 0
    return poses.requires_grad_()


def gates_for(poses: Tensor) -> Tensor:
    gates = torch.rand(poses.shape[0], poses.shape[2], dtype=torch.float64)
    gates[gates < 0.4] = 0
    gates[0, 1:3] = 1
    gates[-1] = 0  # a sample without children
    return gates


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("shape", [(5, 4, 7), (2, 4, 1), (3, 1, 6)], ids=str)
def test_every_routing_over_children(name, shape, gated, monkeypatch):
    monkeypatch.setattr(own, "BLOCK", 2 * shape[1] * shape[2])
    routing = ROUTINGS[name].double()
    poses = make_poses(*shape)
    gates = gates_for(poses) if gated else None
    leaves = [poses, *routing.parameters()]
    results = []
    for votes in (OwnVotes(poses), stored(poses)):
        parents = routing(votes.gated(gates), None, True)
        weights = torch.linspace(-1, 2, parents.poses.numel()).view_as(parents.poses)
        gradients = torch.autograd.grad((parents.poses * weights).sum(), leaves, allow_unused=True)
        results.append((parents.poses, parents.coefficients, *gradients))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_gradcheck(iterations):
    routing = VectorNormRouting(iterations, 2.0)
    poses = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: routing(OwnVotes(x)).poses, poses)


def test_gradients_are_handed_on_and_added_to_those_of_others():
    """Of one tensor of gradients that iterations share nobody else may see a thing."""
    poses = make_poses(3, 4, 5)
    results = []
    for make in (OwnVotes, stored):
        votes = make(poses)
        first, second = VectorNormRouting(2, 2.0)(votes).poses, VectorNormRouting(1, 4.0)(votes).poses
        loss = first.square().sum() + poses.pow(3).sum() + second.sum()
        once = torch.autograd.grad(loss, poses, retain_graph=True)[0]
        assert_close(torch.autograd.grad(loss, poses)[0], once, rtol=0, atol=0)
        results.append(once)
    assert_close(*results, **EXACT)


def test_one_tensor_of_gradients_whatever_the_iterations():
    """The sums of all iterations are one chain from the poses."""
    poses = make_poses(3, 4, 5)
    node, sums = VectorNormRouting(3, 2.0)(OwnVotes(poses)).poses.grad_fn, []
    waiting = [node]
    while waiting:
        node = waiting.pop()
        sums += [node] if "_Sum" in type(node).__name__ and node not in sums else []
        waiting += [after for after, _ in node.next_functions if after is not None]
    before = [type(node.next_functions[0][0]).__name__ for node in sums]
    assert len(sums) == 4
    assert sum("_Sum" not in name for name in before) == 1


def test_no_second_derivatives():
    poses = make_poses(2, 3, 4)
    parents = VectorNormRouting(1)(OwnVotes(poses)).poses
    (gradient,) = torch.autograd.grad(parents.sum(), poses, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_learned_gates_and_softmax_over_parents_are_left_to_the_reference():
    poses = make_poses(3, 4, 5)
    gates = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    query = torch.randn(3, 1, 4, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(make(poses).gated(gates).weighted_sum(Dot(query), "children").sum(), (poses, gates))
        for make in (OwnVotes, stored)
    )
    assert_close(found, expected, **EXACT)
    for over in ("parents", "children"):
        assert_close(OwnVotes(poses).weighted_sum(None, over), stored(poses).weighted_sum(None, over), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errs_at_most_twice_as_much_as_eager(dtype):
    poses = make_poses(16, 8, 50, dtype=dtype)
    routing = VectorNormRouting(2, 4.0)
    truth_poses = poses.detach().double().requires_grad_()
    truth = routing(stored(truth_poses)).poses
    weights = torch.randn_like(truth)
    truth = (truth.detach(), *torch.autograd.grad((truth * weights).sum(), truth_poses))
    errors = []
    for make in (OwnVotes, stored):
        parents = routing(make(poses)).poses
        assert parents.dtype == dtype
        gradient = torch.autograd.grad((parents * weights.to(dtype)).sum(), poses)
        results = zip((parents, *gradient), truth, strict=True)
        errors.append([float((x.detach().double() - t).norm() / t.norm()) for x, t in results])
    for ours, eager in zip(*errors, strict=True):
        assert ours <= 2 * eager + 4 * torch.finfo(torch.float32).eps


def test_detached_votes_have_no_gradient():
    poses = make_poses(2, 3, 4)
    votes = OwnVotes(poses)
    VectorNormRouting(1)(votes)
    assert not VectorNormRouting(1)(votes.detach()).poses.requires_grad
