"""Reductions over votes that are the poses of the children, against stored votes; values and all gradients."""

import itertools

import pytest
import torch
from problems import BACKENDS
from torch import Tensor
from torch.testing import assert_close

from torchcaps.ops import Activation, Dot, Gaussian, LazyVotes, Linear, StoredVotes
from torchcaps.ops.tiled import blocks

# (batch, children, parents, rows, features of a row): parents innermost in memory or samples innermost
SIZES = [(2, 5, 3, 1, 4), (3, 7, 20, 2, 3), (1, 40, 17, 1, 5), (20, 4, 2, 1, 3), (2, 1, 1, 1, 2)]


@pytest.fixture(autouse=True)
def _float64(monkeypatch):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    monkeypatch.setattr(blocks, "BLOCK", 40)  # several blocks
    yield
    torch.set_default_dtype(torch.float32)


def with_gradients(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    loss = sum((x * torch.linspace(0.5, 1.5, x.numel()).view_as(x) + x * x).sum() for x in results)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [*results, *grads]


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, requires_grad=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_stored_votes(sizes, gated):
    batch, children, parents, rows, d = sizes
    poses, gates = draw(batch, children, rows, d), (0.1 + torch.rand(batch, children)).requires_grad_()
    query, mean, offset = draw(batch, parents, rows * d), draw(batch, parents, rows * d), draw(children, parents)
    precision = (0.1 + torch.rand(batch, parents, rows * d)).requires_grad_()
    prior, betas = draw(batch, parents), draw(children, parents)
    leaves = [poses, gates, query, mean, offset, precision, prior, betas]

    def run(votes) -> list[Tensor]:
        votes = votes.gated(gates) if gated else votes
        gaussian = Gaussian(mean, precision, prior)
        results = [votes.weighted_sum(None), votes.weighted_sum(None, "children"), votes.constant_sum(betas)]
        results += [votes.constant_sum(betas[:1]), votes.lengths(), votes.weighted_sum(Dot(query), leaky=True)]
        for softmax, unit in itertools.product(("parents", "children"), (False, True)):
            results.append(votes.weighted_sum(Dot(query, unit, 1.3, offset), softmax))
            results.append(votes.coefficients(Dot(query, unit, 1.3, offset), softmax))
        for agreement in (None, Dot(query, offset=offset), gaussian):
            results += votes.moments(agreement, betas, 1e-3)
        return with_gradients([*results, votes.coefficients(gaussian)], leaves)

    expected = run(StoredVotes(poses.unsqueeze(2).expand(-1, -1, parents, -1, -1)))
    for backend in BACKENDS:
        found = run(LazyVotes(poses, parents, None, (rows, d), backend=backend))
        for x, y in zip(found, expected, strict=True):
            assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("own", [False, True], ids=["one row for all", "a row for each child"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_net_sums(sizes, gated, own):
    batch, children, parents, rows, d = sizes
    groups, features = children if own else 1, rows * d
    poses, gates = draw(batch, children, rows, d), torch.rand(batch, children).requires_grad_()
    query, slope, offset = draw(batch, parents, features), draw(groups, parents), draw(groups, parents)
    use, ignore = (Linear(draw(groups, parents), None if own else draw(parents, features)) for _ in range(2))
    activation = Activation(draw(groups, features), draw(groups), draw(batch))
    leaves = [poses, gates, query, slope, offset, *(x for x in (*use, *ignore, *activation) if x is not None)]

    def run(backend) -> list[Tensor]:
        votes = LazyVotes(poses, parents, None, (rows, d), backend=backend)
        votes = votes.gated(gates) if gated else votes
        results: list[Tensor] = []
        for agreement in (None, Dot(query, scale=0.7, offset=offset), Dot(query, slope=slope, offset=offset)):
            for betas, own_activation in itertools.product((None, (use, ignore)), (None, activation)):
                results += votes.net_sum(agreement, betas, own_activation)
        results += votes.net_sum(Dot(results[-2].tanh(), slope=slope), (use, ignore), activation)  # a second iteration
        return with_gradients(results, leaves)

    expected = run("reference")
    for backend in BACKENDS:
        for x, y in zip(run(backend), expected, strict=True):
            assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_a_net_sum_in_plain_loops():
    poses, gates = torch.randn(1, 4, 1, 2), torch.rand(1, 4)
    query, slope, offset = torch.randn(1, 3, 2), torch.randn(4, 3), torch.randn(4, 3)
    use, ignore = torch.randn(4, 3), torch.randn(4, 3)
    votes = LazyVotes(poses, 3, None, (2,)).gated(gates)
    sums, masses = votes.net_sum(Dot(query, slope=slope, offset=offset), (Linear(use), Linear(ignore)))
    expected, total = torch.zeros(3, 2), torch.zeros(3)
    for i in range(4):
        x = poses[0, i, 0]
        logits = [torch.sigmoid(slope[i, j] * (x @ query[0, j]) + offset[i, j]).log() for j in range(3)]
        shares = [logit.exp() / sum(other.exp() for other in logits) for logit in logits]
        for j in range(3):
            phi = gates[0, i] * (use[i, j] * shares[j] - ignore[i, j] * (1 - shares[j]))
            expected[j] += phi * x
            total[j] += phi
    assert_close(sums[0], expected)
    assert_close(masses[0], total)


def test_logits_of_the_children():
    poses, weight, offset = torch.randn(2, 5, 2, 3), torch.randn(1, 4, 2, 3), torch.randn(1, 4)
    query = torch.randn(2, 4, 6)
    votes = LazyVotes(poses, 4, None, (2, 3))
    found = votes.with_logits(weight, offset).coefficients(Dot(query, scale=0.5))
    logits = poses.flatten(2) @ (0.5 * query + weight.flatten(2)).transpose(1, 2) + offset
    assert_close(found, logits.softmax(2))
    with pytest.raises(ValueError, match="must share the weights of their logits"):
        votes.with_logits(torch.randn(5, 4, 2, 3))


def test_what_cannot_be():
    votes = LazyVotes(torch.randn(2, 5, 1, 3), torch.randn(1, 4, 3, 3), None, (3,))
    for call in (lambda: votes.net_sum(None), lambda: votes.with_poses(torch.tanh)):
        with pytest.raises(ValueError, match="CapsuleShared"):
            call()
    shared = LazyVotes(torch.randn(2, 5, 1, 3), 4, None, (3,), backend="tiled")
    agreement = Dot(torch.randn(2, 4, 3), slope=torch.randn(1, 4))
    for reduction in (shared.weighted_sum, shared.moments):
        with pytest.raises(ValueError, match="slope.*backend='reference'"):
            reduction(agreement)
    with pytest.raises(ValueError, match="unit votes"):
        shared.net_sum(Dot(torch.randn(2, 4, 3), unit=True))
