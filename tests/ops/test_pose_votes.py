"""The reductions over votes that are the poses of the children, against their definitions; values and all gradients."""

import itertools

import pytest
import torch
from problems import (
    AGREEMENTS,
    BACKENDS,
    KINDS,
    ROWS,
    SIZES,
    UNSTORED,
    WAYS,
    PoseProblem,
    assert_same,
    compare,
    label,
    mixed,
    set_sizes,
)
from torch import Tensor
from torch.testing import assert_close

from torchcaps.ops import (
    Activation,
    Beta,
    Gaussian,
    PoseLogits,
    PoseVotes,
    SigmoidDot,
    UnitDot,
    WeightedVotes,
)

# Poses (samples, children, rows, features of a row), parents, and groups of rows: parents innermost in memory or
# samples innermost.
SHAPES = [
    ((2, 6, 1, 4), 3, 3),
    ((3, 8, 2, 3), 20, 2),
    ((1, 40, 1, 5), 17, 4),
    ((20, 4, 1, 3), 2, 2),
    ((2, 1, 1, 2), 1, 1),
]
CHILDREN = {"shape": SHAPES, "gates": [False, True], "sizes": [SIZES[0], (40, 64, 16)]}


def problem_of(case: dict, monkeypatch: pytest.MonkeyPatch) -> PoseProblem:
    set_sizes(monkeypatch, case["sizes"])
    return PoseProblem(*case["shape"], case["gates"])


@pytest.mark.parametrize("case", mixed(42, **CHILDREN, agreement=AGREEMENTS, way=WAYS, offset=ROWS), ids=label)
def test_with_an_agreement(case, monkeypatch):
    p, way = problem_of(case, monkeypatch), case["way"]
    options = (p.draw_rows(case["offset"]), 1e-3) if way == "moments" else ()
    agreement = p.agreement(case["agreement"], case["offset"])
    # Where all votes are alike, stored votes give a gate of 0 no gradient.
    compare(p, BACKENDS if agreement is None else KINDS, agreement, way, *options)


@pytest.mark.parametrize("case", mixed(12, **CHILDREN, constants=ROWS[1:]), ids=label)
def test_without_coefficients(case, monkeypatch):
    p = problem_of(case, monkeypatch)
    constants = p.draw_rows(case["constants"])
    expected = [p.gated(p.all_votes).sum(1), p.gated(p.per_row(constants).unsqueeze(2) * p.all_votes).sum(1)]
    expected.append(p.all_votes.pow(2).sum(3).sqrt())
    for votes in map(p.votes, KINDS):
        assert_same(expected, [votes.vote_sum(), votes.constant_sum(constants), votes.lengths()], p.leaves)


def parts_of_net_sums(p: PoseProblem, rows: str) -> tuple[list, tuple[Beta, Beta], Activation]:
    """Return agreements, betas and an activation, with or without weights of the poses."""
    count = p.count(rows)
    agreements = [None, p.dot(rows), p.agreement("sigmoid", rows), PoseLogits(p.draw(1, p.parents, p.rows, p.d))]
    use, ignore = (
        Beta(p.draw_rows(rows, 1 if rows == "groups" else None), p.draw(p.parents, p.features) if count == 1 else None)
        for _ in range(2)
    )
    return agreements, (use, ignore), Activation(p.draw(count, p.features), p.draw(count), p.draw(p.samples))


def net_factors(p: PoseProblem, agreement, betas, activation) -> Tensor:
    """Return the factors of a net sum by definition, `(samples, children, parents)`."""
    phi, poses = p.coefficients(p.logits(agreement), "parents"), p.all_votes[:, :, 0]
    if betas is not None:
        use, ignore = (
            p.per_row(x.rows) + (0 if x.weight is None else torch.einsum("bik,jk->bij", poses, x.weight)) for x in betas
        )
        phi = use * phi - ignore * (1 - phi)
    if activation is not None:
        weight, bias = p.per_row(activation.weight), p.per_row(activation.bias)
        phi = phi * ((poses * weight).sum(2) * activation.scale.unsqueeze(1) + bias).sigmoid().unsqueeze(2)
    return p.gated(phi)


@pytest.mark.parametrize("case", mixed(12, **CHILDREN, rows=ROWS[1:]), ids=label)
def test_net_sums(case, monkeypatch):
    p = problem_of(case, monkeypatch)
    agreements, betas, activation = parts_of_net_sums(p, case["rows"])
    expected, asked = [], list(itertools.product(agreements, (None, betas), (None, activation)))
    for parts in asked:
        phi = net_factors(p, *parts)
        expected += [(phi.unsqueeze(3) * p.all_votes).sum(1), phi.sum(1), phi]
    for backend in BACKENDS:
        votes, found = p.votes(backend), []
        for agreement, *parts in asked:
            weighted = WeightedVotes(votes, agreement)
            found += [*weighted.net_sum(*parts), weighted.factors()]
        assert_same(expected, found, p.leaves)


@pytest.mark.parametrize("backend", UNSTORED)
def test_iterations_of_net_sums(backend):
    """An iteration hands the gradients of the children to the one before it."""
    p = PoseProblem((3, 6, 1, 4), 3, 3, gates=True)
    agreements, *parts = parts_of_net_sums(p, "groups")
    results = []
    for votes in map(p.votes, ("reference", backend)):
        first, _ = votes.net_sum(agreements[2], *parts)
        results.append(votes.net_sum(agreements[2]._replace(query=first.tanh()), *parts))
    assert_same(*results, p.leaves)


def test_a_net_sum_in_plain_loops():
    poses, gates = torch.randn(1, 4, 1, 2), torch.rand(1, 4)
    query, slope, offset = torch.randn(1, 3, 2), torch.randn(4, 3), torch.randn(4, 3)
    use, ignore = torch.randn(4, 3), torch.randn(4, 3)
    votes = PoseVotes(poses, 3, (2,)).gated(gates)
    sums, masses = votes.net_sum(SigmoidDot(query, slope, offset), (Beta(use), Beta(ignore)))
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_changed_poses(backend):
    p = PoseProblem((3, 6, 2, 2), 4, gates=True)
    votes, agreement = p.votes(backend), p.dot()
    expected, found = p.reduced(agreement, "parents"), [votes.weighted_sum(agreement)]
    p.all_votes = p.all_votes.tanh()
    expected += p.reduced(agreement, "parents")
    found += [votes.with_poses(torch.tanh).weighted_sum(agreement)]
    assert_same([*expected, expected[0]], [*found, votes.weighted_sum(agreement)], p.leaves)


def test_what_cannot_be():
    p = PoseProblem((2, 5, 1, 3), 4)
    for votes in (super(PoseProblem, p).computed("tiled", False), p.votes("stored")):
        for method, arguments in ((votes.net_sum, 1), (votes.net_factors, 3), (votes.with_poses, 1)):
            with pytest.raises(ValueError, match="CapsuleShared"):
                method(*[None] * arguments)
    votes, query = p.votes("tiled"), p.dot().query
    for agreement in (UnitDot(query), Gaussian(query, query, query[..., 0])):
        with pytest.raises(ValueError, match="net sum cannot be weighted by a .*: use Dot or SigmoidDot"):
            votes.net_sum(agreement)
    for reduction in (votes.weighted_sum, votes.moments):
        with pytest.raises(ValueError, match="must share the weights of their logits"):
            reduction(PoseLogits(torch.randn(5, 4, 1, 3)))
    with pytest.raises(ValueError, match=r"\(groups, parents or 1\), got \(2, 4\)"):
        votes.constant_sum(torch.ones(2, 4))
