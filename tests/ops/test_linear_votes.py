"""The reductions over stored and linear votes against their definitions: values and all gradients."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from problems import (
    BACKENDS,
    BIASES,
    EXACT,
    GEOMETRIES,
    KINDS,
    ROWS,
    SIZES,
    SOFTMAX,
    UNSTORED,
    Geometry,
    PoseProblem,
    Problem,
    assert_same,
    compare,
    draw,
    label,
    mixed,
    options_of,
    results_of,
    set_sizes,
)
from torch import Tensor
from torch.testing import assert_close

from torchcaps.ops import (
    Activation,
    Beta,
    Dot,
    Gaussian,
    LinearVotes,
    PoseLogits,
    StoredVotes,
    UnitDot,
    WeightedVotes,
    windows,
)
from torchcaps.ops.children import Options, check_parents
from torchcaps.ops.numerics import nonzero

CHILDREN = {"geometry": GEOMETRIES, "bias": BIASES, "gates": [False, True], "sizes": SIZES}


def cases(count, **parameters):
    """Random combinations, those of the children included."""
    return pytest.mark.parametrize("case", mixed(count, **CHILDREN | parameters), ids=label)


def problem_of(case: dict, monkeypatch: pytest.MonkeyPatch) -> Problem:
    set_sizes(monkeypatch, case["sizes"])
    return Problem(case["geometry"], case["bias"], case["gates"])


@pytest.mark.parametrize("way", ["parents", "children", "moments"])
@pytest.mark.parametrize("agreement", ["dot", "poses"])
@pytest.mark.parametrize("unfolds", [False, True])
def test_types_that_share_weights_in_windows(unfolds, agreement, way, monkeypatch):
    """Children of a group of types do not follow one another: between them are those at other places."""
    if unfolds:  # as on a GPU
        monkeypatch.setattr(LinearVotes, "unfolds", property(lambda votes: votes.backend == "tiled"))
    p = Problem(Geometry((2, 4, 3, 3, 2, 1), (2, 2, 1, 3, 1, 2), 1, (1, 2)), "each", gates=True)
    compare(p, BACKENDS, p.agreement(agreement, "each"), way)


class TestReductions:
    @cases(18, softmax=SOFTMAX)
    def test_uniform_sum(self, case, monkeypatch):
        compare(problem_of(case, monkeypatch), BACKENDS, None, case["softmax"])

    @pytest.mark.parametrize("agreement", ["dot", "unit", "gaussian", "poses"])
    @cases(24, softmax=SOFTMAX, offset=ROWS)
    def test_weighted_sum(self, case, agreement, monkeypatch):
        p = problem_of(case, monkeypatch)
        compare(p, KINDS, p.agreement(agreement, case["offset"]), case["softmax"])

    @cases(12, bias=["none"], geometry=["per type", "shared by all"], softmax=SOFTMAX, offset=ROWS)
    def test_weighted_sum_of_children_that_share_weights(self, case, monkeypatch):
        """Without a bias, no votes are computed: the query is pulled through the weights instead."""
        self.test_weighted_sum(case, "dot", monkeypatch)

    @cases(
        45,
        agreement=["uniform", "dot", "unit", "gaussian", "poses"],
        eps=[0.0, 1e-2],
        offset=ROWS,
        betas=[*ROWS, "one number", "one per child"],
    )
    def test_moments(self, case, monkeypatch):
        p, betas = problem_of(case, monkeypatch), case["betas"]
        if betas.startswith("one"):
            betas = p.draw_rows("shared" if betas == "one number" else "each", 1)
        else:
            betas = p.draw_rows(betas)
        compare(p, KINDS, p.agreement(case["agreement"], case["offset"]), "moments", betas, case["eps"])

    @cases(36, softmax=SOFTMAX, agreement=["uniform", "dot", "unit", "sigmoid", "gaussian", "poses"], offset=ROWS)
    def test_coefficients(self, case, monkeypatch):
        p = problem_of(case, monkeypatch)
        compare(p, KINDS, p.agreement(case["agreement"], case["offset"]), f"coefficients, {case['softmax']}")

    @pytest.mark.parametrize("way", [*SOFTMAX, "moments"])
    @pytest.mark.parametrize("agreement", ["sigmoid", "unit", "gaussian"])
    def test_what_stored_votes_alone_have(self, agreement, way):
        p = Problem("per type", "one", gates=True)
        compare(p, KINDS, p.agreement(agreement, "groups"), way)

    @cases(18, constants=["each", "one"])
    def test_sums_without_coefficients(self, case, monkeypatch):
        p = problem_of(case, monkeypatch)
        constants = p.draw(p.weight.shape[:3].numel(), p.parents if case["constants"] == "each" else 1)
        rows = p.per_place(constants)
        expected = [x.sum(1) for x in (p.gated(p.all_votes), p.gated(rows.unsqueeze(2) * p.all_votes))]
        for kind in KINDS:
            votes = p.votes(kind)
            found = [votes.vote_sum(), votes.constant_sum(rows if kind == "stored" else constants)]
            assert_same(expected, found, p.leaves)

    @pytest.mark.parametrize("parents", [1, 3])
    def test_constants_of_groups(self, parents):
        p = Problem("per type", gates=True)
        constants = p.draw(2, parents)
        expected = [p.gated(p.per_row(constants).unsqueeze(2) * p.all_votes).sum(1)]
        for kind in KINDS:
            assert_same(expected, [p.votes(kind).constant_sum(constants)], p.leaves)
        for votes in map(p.votes, BACKENDS):
            with pytest.raises(ValueError, match=r"constants of shape \(2, parents or 1\), got \(3, 1\)"):
                votes.constant_sum(torch.ones(3, 1))

    @pytest.mark.parametrize("way", ["parents", "moments", "coefficients, parents"])
    @pytest.mark.parametrize("groups", [2, 4])
    def test_rows_that_children_of_a_window_share(self, groups, way):
        """The children of a group are neighbors in the order of the weights: types before places."""
        p = Problem("overlapping")  # 2 types in kernels of 2 x 2
        agreement = p.dot()._replace(offset=p.draw(groups, p.parents))
        compare(p, KINDS, agreement, way, p.draw(groups, p.parents) if way == "moments" else None)

    @pytest.mark.parametrize("softmax", SOFTMAX)
    def test_logits_that_exp_cannot_take(self, softmax, monkeypatch):
        """Nothing overflows: a logit that is far larger than the others has a coefficient of 1."""
        set_sizes(monkeypatch, SIZES[0])
        p = Problem("per child", gates=True)
        p.gates.data[:, 0] = 0.5
        agreement = Dot(1e4 * draw(5, 5, 4))
        expected, *others = (p.votes(kind).weighted_sum(agreement, **options_of(softmax)) for kind in BACKENDS)
        for found in others:
            assert_same([expected], [found], p.leaves, rtol=1e-7, atol=1e-7)
        axis = 1 if softmax == "children" else 2
        logits = p.logits(agreement)
        if softmax == "children":
            logits = logits.masked_fill(p.gates.unsqueeze(2) == 0, -torch.inf)
        best = torch.zeros_like(logits).scatter(axis, logits.argmax(axis, keepdim=True), 1)
        if softmax == "leaky":
            best = best * (logits > 0)
        shares = best if softmax == "children" else best * p.gates.unsqueeze(2)
        assert_close(found, torch.einsum("bij,bijk->bjk", shares, p.all_votes), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_votes_of_zero_point_nowhere(self, kind):
        poses = torch.zeros(2, 3, 1, 2, requires_grad=True)
        votes = LinearVotes(poses, torch.randn(3, 4, 2, 2), None, (2,), backend=kind)
        for softmax in ("parents", "children"):
            votes.weighted_sum(UnitDot(torch.randn(2, 4, 2)), softmax).sum().backward(retain_graph=True)
        assert poses.grad.isfinite().all()

    @pytest.mark.parametrize("agreement", [None, Dot(torch.ones(3, 4, 2))], ids=["uniform", "dot"])
    @pytest.mark.parametrize("kind", BACKENDS)
    def test_variance_of_votes_that_agree_far_from_zero(self, kind, agreement, monkeypatch):
        set_sizes(monkeypatch, (100, 64, 16))
        poses = 1000 + 0.1 * torch.randn(3, 50, 1, 2)
        votes = LinearVotes(poses, torch.eye(2).view(1, 1, 2, 2).repeat(1, 4, 1, 1), None, (2,), backend=kind)
        expected = poses.double().flatten(2).var(1, correction=0).unsqueeze(1).expand(-1, 4, -1)
        assert_close(votes.moments(agreement).variance.double(), expected, rtol=1e-3, atol=0)


def test_a_divisor_whose_reciprocal_overflows_counts_as_zero():
    x = torch.tensor([0.0, 1e-40, -1e-40, 1e-20])
    assert_close(nonzero(x), torch.tensor([1.0, 1.0, 1.0, 1e-20]), rtol=0, atol=0)


class TestAdd:
    """What is added to an agreement has the sum of the logits."""

    @pytest.mark.parametrize("offset", ROWS)
    def test_dot(self, offset):
        p = Problem("per type")
        start, query = p.dot(offset), p.dot().query
        after = Dot.add(start, query)
        assert after.offset is start.offset
        assert_same([p.logits(start) + p.logits(Dot(query))], [p.logits(after)], p.leaves)
        assert Dot.add(None, query) == Dot(query)

    def test_unit_dot(self):
        p = Problem("per type")
        start, query = UnitDot(p.dot().query), p.dot().query
        assert_same([p.logits(start) + p.logits(UnitDot(query))], [p.logits(UnitDot.add(start, query))], p.leaves)
        assert UnitDot.add(None, query) == UnitDot(query)

    @pytest.mark.parametrize("zero", ["neither", "first", "second", "both"])
    def test_gaussian(self, zero):
        """Where both precisions are 0, there is no mean that could have the gradient."""
        p = Problem("per type")
        first, second = p.gaussian(), p.gaussian()
        for name, x in (("first", first), ("second", second)):
            if zero in (name, "both"):
                x.precision.data[:, ::2] = 0
        after = Gaussian.add(first, *second)
        leaves = p.leaves if zero != "both" else [x for x in p.leaves if x not in {first.precision, second.precision}]
        assert_same([p.logits(first) + p.logits(second)], [p.logits(after)], leaves)
        gradients = torch.autograd.grad(p.logits(after).sum(), p.leaves)
        assert all(x.isfinite().all() for x in gradients)
        assert Gaussian.add(None, *second) == second

    @pytest.mark.parametrize("softmax", SOFTMAX)
    def test_one_of_three_in_a_reduction(self, softmax):
        p = Problem("per type", "each", gates=True)
        gaussians, queries = [p.gaussian() for _ in range(3)], [p.dot().query for _ in range(3)]
        for cls, parts in ((Gaussian, gaussians), (Dot, [(x,) for x in queries])):
            agreement = None
            for part in parts:
                agreement = cls.add(agreement, *part)
            expected = p.weighted_sum(sum(p.logits(cls(*x)) for x in parts), softmax)
            kinds = ["stored", "reference"] if cls is Gaussian and softmax != "parents" else KINDS
            for kind in kinds:
                assert_same([expected], results_of(p.votes(kind), agreement, softmax), p.leaves)


class TestPoseLogits:
    def test_of_a_half_precision_map(self):
        """The logits are computed like the votes, and sums run in float32."""
        p = Problem("per child")
        poses, weight = (x.detach().to(torch.bfloat16) for x in (p.poses.flatten(1, 3), p.weight.flatten(0, 2)))
        votes = LinearVotes(poses, weight, None, (2, 2), backend="tiled")
        found = votes.weighted_sum(PoseLogits(torch.randn(4, 5, 2, 3), torch.randn(4, 5)))
        assert found.shape == (5, 5, 4)
        assert found.dtype == torch.float32

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_shapes_that_are_refused(self, kind):
        p = Problem("per child")
        weight, offset = p.pose_logits("each")
        for wrong, what in (
            (PoseLogits(weight[:2]), r"weight of the logits of shape \(4, .*got \(2, 5, 2, 3\)"),
            (PoseLogits(weight[..., :2]), r"weight of the logits .*, 2, 3\), got \(4, 5, 2, 2\)"),
            (PoseLogits(weight, offset[:2]), r"offset of the logits of shape \(4, .*got \(2, 5\)"),
        ):
            with pytest.raises(ValueError, match=what):
                p.votes(kind).weighted_sum(wrong)


@pytest.mark.parametrize("over", ["parents", "leaky", "children"])
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
class TestWeightedVotes:
    """What a routing step gets."""

    def problem(self, kind: str, gates: bool, over: str) -> tuple[Problem, Dot, WeightedVotes]:
        p = Problem("per type", "each", gates=gates)
        agreement = p.dot("groups")
        return p, agreement, WeightedVotes(p.votes(kind), agreement, **options_of(over))

    def test_they_reduce_with_their_coefficients(self, kind, gates, over):
        p, agreement, weighted = self.problem(kind, gates, over)
        betas, constants = p.draw_rows("groups"), p.draw(2, p.parents)
        expected = [p.reduced(agreement, f"coefficients, {over}")[0], *p.reduced(agreement, over)]
        found = [weighted.coefficients(), weighted.weighted_sum()]
        sums = [p.gated(x * p.all_votes).sum(1) for x in (1, p.per_row(constants).unsqueeze(2))]
        assert_same([*expected, *sums], [*found, weighted.vote_sum(), weighted.constant_sum(constants)], p.leaves)
        if over == "parents":
            assert_same(p.reduced(agreement, "moments", betas, 0.1), list(weighted.moments(betas, 0.1)), p.leaves)
        else:
            with pytest.raises(ValueError, match="^moments need a softmax over the parents .*: use weighted_sum$"):
                weighted.moments(betas)

    def test_shares_and_factors(self, kind, gates, over):
        """Sums of the votes with their factors are the sums that the step asked for."""
        p, agreement, weighted = self.problem(kind, gates, over)
        shares = p.coefficients(p.logits(agreement), over)
        shares = shares if over == "children" else p.gated(shares)
        assert_same([shares] * 2, [weighted.shares(), weighted.factors()], p.leaves)
        parents = weighted.weighted_sum() + weighted.constant_sum(constants := p.draw(2, p.parents))
        factors = weighted.factors()
        assert_same([shares + p.gated(p.per_row(constants).expand_as(shares))], [factors], p.leaves)
        assert_same([parents], [(factors.unsqueeze(3) * p.all_votes).sum(1)], p.leaves)
        more = parents + weighted.constant_sum(constants[:, :1]) + weighted.vote_sum()
        assert_same([more], [(weighted.factors().unsqueeze(3) * p.all_votes).sum(1)], p.leaves)

    def test_they_are_freed_by_their_last_reference(self, kind, gates, over):
        _, _, weighted = self.problem(kind, gates, over)
        weighted.weighted_sum(), weighted.constant_sum(torch.ones(2, 1)), weighted.factors()
        votes, weighted = weakref.ref(weighted.votes), weakref.ref(weighted)
        assert weighted() is votes() is None


def test_weighted_votes_have_the_sizes_of_their_votes():
    p = Problem("windows", gates=True)
    votes = p.votes("reference")
    weighted = WeightedVotes(votes, None)
    assert (weighted.parents, weighted.children, weighted.gates) == (votes.parents, votes.children, p.gates)
    assert_close(weighted.count(), p.gates.sum(1))
    assert weighted.parents_like().shape == (p.samples, p.parents, p.features)
    assert weighted.capsules(weighted.vote_sum()).poses.shape == (2, 3, 2, 2, 2, 2)
    with pytest.raises(ValueError, match="not the poses of the children: use this routing in a CapsuleShared"):
        weighted.net_sum()


@pytest.mark.parametrize("case", mixed(18, geometry=GEOMETRIES, bias=BIASES, sizes=SIZES), ids=label)
def test_blocks(case, monkeypatch):
    """Each vote is in one block, with its gate."""
    set_sizes(monkeypatch, case["sizes"])
    p = Problem(case["geometry"], case["bias"], gates=True)
    for votes in (p.votes("tiled"), p.votes("reference"), StoredVotes(p.all_votes).gated(p.gates)):
        found = zip(*votes.blocks(), strict=True)
        assert_same([p.all_votes, p.gates], [torch.cat(x, dim=1) for x in found], [])
    assert all(gates is None for _, gates in p.votes("tiled").gated(None).blocks())


class TestShapes:
    """Results have the shapes of grids, lines or lists."""

    def test_windows_by_hand(self):
        x = torch.arange(30.0).view(1, 1, 5, 6)
        found = windows(x, (2, 3), (3, 1), (1, 2))
        rows = [
            [y * 6 + x for y in (top, top + 1) for x in (left, left + 2, left + 4)] for top in (0, 3) for left in (0, 1)
        ]
        assert_close(found, torch.tensor(rows, dtype=torch.float32))

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_grid(self, kind):
        p = Problem("windows")  # 2 images of 2 x 2 windows, 3 types in 3 x 2 kernels, 3 parents of 2 x 2
        votes = p.votes(kind)
        sums, agreement = votes.weighted_sum(None), p.dot()
        parents = votes.with_coefficients(votes.capsules(sums, sums[..., 0], sums), votes.coefficients(agreement))
        assert parents.poses.shape == parents.variances.shape == (2, 3, 2, 2, 2, 2)
        assert_close(parents.poses[1, 2, 1, 0].flatten(), sums[4 + 2, 2])
        assert_close(parents.variances[1, 2, 0, 1].flatten(), sums[4 + 1, 2])
        assert_close(parents.scores[1, 2, 1, 0], sums[4 + 2, 2, 0])
        assert parents.coefficients.shape == (2, 2, 2, 3, 3, 2, 3)
        expected = p.coefficients(p.logits(agreement), "parents")
        assert_close(parents.coefficients[1, 1, 0, 2, 1, 0], expected[4 + 2, 2 * 6 + 1 * 2], **EXACT)

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_line(self, kind):
        p = Problem("line")  # 2 sequences of 3 windows, 2 types in kernels of 3, 2 parents of 2 x 3
        votes = p.votes(kind, line=True)
        sums, agreement = votes.weighted_sum(None), p.dot()
        parents = votes.with_coefficients(votes.capsules(sums, sums[..., 0]), votes.coefficients(agreement))
        assert parents.poses.shape == (2, 2, 3, 2, 3)
        assert parents.pose_dims == 2
        assert parents.activations.shape == parents.scores.shape == (2, 2, 3)
        assert_close(parents.poses[1, 1, 2].flatten(), sums[3 + 2, 1])
        assert parents.coefficients.shape == (2, 3, 2, 3, 2)
        expected = p.coefficients(p.logits(agreement), "parents")
        assert_close(parents.coefficients[1, 1, 1, 2], expected[3 + 1, 3 + 2], **EXACT)

    def test_no_grid(self):
        p = Problem("per type")
        votes = LinearVotes(p.poses.flatten(1, 3), p.weight.flatten(0, 2), None, (2, 2), backend="tiled")
        sums = votes.weighted_sum(None)
        assert_same([p.weighted_sum(p.logits(None), "parents")], [sums], [p.poses, p.weight])
        assert votes.capsules(sums).poses.shape == (5, 3, 2, 2)
        assert votes.with_coefficients(votes.capsules(sums), votes.coefficients(None)).coefficients.shape == (5, 6, 3)

    def test_precision_of_the_parents_is_that_of_the_poses(self):
        votes = LinearVotes(torch.randn(2, 3, 1, 2).half(), torch.randn(3, 4, 2, 2).half(), None, (2,), backend="tiled")
        assert votes.weighted_sum(None).dtype == votes.parents_like().dtype == torch.float32
        parents = votes.capsules(votes.weighted_sum(None))
        assert parents.poses.dtype == torch.float16
        assert votes.with_coefficients(parents, votes.coefficients(None)).coefficients.dtype == torch.float16


class TestCache:
    """The cache belongs to the votes that it was computed from."""

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_other_gates(self, kind):
        p = Problem("windows", "each", gates=True)
        agreement, expected, found = p.dot(), [], []
        votes, first = p.votes(kind), p.gates
        for gates in (first, p.draw(p.samples, p.children, low=0.1), None, first):
            p.gates, votes = gates, votes.gated(gates)
            for softmax in ("parents", "children"):
                expected.append(p.weighted_sum(p.logits(agreement), softmax))
                found.append(votes.weighted_sum(agreement, softmax))
        assert_same(expected, found, p.leaves)

    @pytest.mark.parametrize("agreement", ["dot", "gaussian", "poses"])
    @pytest.mark.parametrize("kind", BACKENDS)
    def test_constants(self, kind, agreement):
        p = Problem("per child", "each", gates=True)
        children, agreement, votes = len(p.leaves), p.agreement(agreement, "each"), p.votes(kind)
        before = votes.weighted_sum(agreement)  # fills the cache
        constants = votes.detach()
        found = constants.weighted_sum(agreement)
        assert_close(found, before, **EXACT)
        gradients = torch.autograd.grad(found.sum(), p.leaves, materialize_grads=True)
        assert [bool(x.any()) for x in gradients] == [i >= children for i in range(len(p.leaves))]
        assert not constants.weighted_sum(type(agreement)(*(x.detach() for x in agreement))).requires_grad
        assert votes.weighted_sum(None).requires_grad  # as before

    def test_stored_votes_as_constants(self):
        p = Problem("per child", gates=True)
        votes = StoredVotes(p.all_votes).gated(p.gates)
        assert not votes.detach().weighted_sum(None).requires_grad
        assert votes.weighted_sum(None).requires_grad

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_votes_made_without_gradients_serve_no_reduction_with_them(self, kind):
        p = Problem("per child", "each", gates=True)
        votes, agreement = p.votes(kind), p.dot()
        with torch.no_grad():
            votes.weighted_sum(agreement)
            votes.coefficients(agreement)
        expected = [p.weighted_sum(p.logits(agreement), "parents")]
        assert_same(expected, [votes.weighted_sum(agreement)], p.leaves)
        with torch.no_grad():
            assert not votes.weighted_sum(agreement).requires_grad

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_logits_of_the_children_leave_the_votes_as_they_were(self, kind):
        p = Problem("per child", "each", gates=True)
        votes, agreement = p.votes(kind), p.dot()
        expected = [p.weighted_sum(p.logits(agreement), "parents")]
        before = votes.weighted_sum(agreement)
        votes.weighted_sum(p.pose_logits("each"))
        assert_same(expected * 2, [before, votes.weighted_sum(agreement)], p.leaves)


def test_autocast_does_not_reach_into_a_reduction():
    p = Problem("per child", bias="each")
    for x in (p.poses, p.weight, p.bias):
        x.data = x.data.float()
    agreement = Dot(torch.randn(5, 5, 4), offset=torch.randn(1, 5))

    def results() -> list[Tensor]:
        votes = p.votes("tiled")
        total = votes.weighted_sum(None), votes.weighted_sum(agreement), *votes.moments(agreement)[:3]
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in total), p.poses)
        return [*total, gradient, p.votes("tiled").coefficients(agreement)]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        found = results()
    for f, e in zip(found, expected, strict=True):
        assert_close(f, e, rtol=0, atol=0)


class TestTensorsThatAreRefused:
    """Kernels read memory where the shapes say."""

    def test_unknown_softmax(self):
        with pytest.raises(ValueError, match="softmax must be one of 'parents', 'children', got 'parent'"):
            WeightedVotes(Problem("per child").votes("tiled"), None, "parent")
        with pytest.raises(ValueError, match="leaky=True adds a parent to the softmax: it needs softmax='parents'"):
            WeightedVotes(Problem("per child").votes("tiled"), None, "children", leaky=True)

    def test_gates(self):
        p = Problem("windows")
        for votes in map(p.votes, KINDS):
            with pytest.raises(ValueError, match=r"scores.*\(8, 18\), got \(8, 3\)"):
                votes.gated(torch.ones(8, 3))

    def test_sizes_of_zero(self):
        """A kernel divides by them."""
        for weight, rows in ((torch.zeros(3, 0, 4, 5), 1), (torch.zeros(3, 2, 4, 0), 1), (torch.zeros(3, 2, 4, 5), 0)):
            with pytest.raises(ValueError, match="the weights of the votes.* do not fit poses"):
                LinearVotes(torch.zeros(2, 3, rows, 4), weight, None, (rows, weight.shape[-1]))
        with pytest.raises(ValueError, match="the weights of the votes.* do not fit poses"):
            LinearVotes(torch.zeros(2, 0, 1, 4), torch.zeros(1, 2, 4, 5), None, (5,))

    def test_a_map_without_windows(self):
        """Two negative sides would be a positive number of windows."""
        with pytest.raises(ValueError, match=r"a map of 1x1 has no window of \(3, 3\)"):
            LinearVotes(torch.zeros(1, 1, 1, 1, 1, 4), torch.zeros(1, 3, 3, 2, 4, 5), None, (5,))

    def test_votes(self):
        with pytest.raises(ValueError, match=r"\(batch, children, parents, \*pose\), got \(2, 3, 4\)"):
            StoredVotes(torch.ones(2, 3, 4))

    @pytest.mark.parametrize("name", ["weight", "bias"])
    @pytest.mark.parametrize("geometry", ["per child", "windows"])
    def test_weight_and_bias(self, geometry, name):
        p = Problem(geometry, "each")
        # A weight may have any kernel, number of parents and width: they are those of the votes.
        dims, right = [0, 4] if name == "weight" else range(6), getattr(p, name).detach()
        for x in [*wrong_tensors(right, dims), right[0], right.to("meta")]:
            setattr(p, name, x)
            with pytest.raises((ValueError, TypeError), match=f"{name}[^\n]*$"):
                p.votes("tiled")

    @pytest.mark.parametrize("backend", UNSTORED)
    @pytest.mark.parametrize("geometry", ["per type", "windows"])
    def test_agreements_and_betas(self, geometry, backend):
        p = Problem(geometry)
        votes, gaussian, (query, offset) = p.votes(backend), p.gaussian(), p.dot("groups")
        for name, right, call in (
            ("query", query, lambda x: votes.weighted_sum(Dot(x, offset))),
            ("query", query, lambda x: votes.weighted_sum(UnitDot(x), "children")),
            ("offset", offset, lambda x: votes.weighted_sum(Dot(query, x))),
            ("offset", offset, lambda x: votes.moments(Dot(query, x))),
            ("query", query, lambda x: votes.moments(Dot(x))),
            ("query", query, lambda x: votes.weighted_sum(gaussian._replace(mean=x))),
            ("precision", gaussian.precision, lambda x: votes.moments(gaussian._replace(precision=x))),
            ("prior", gaussian.prior, lambda x: votes.moments(gaussian._replace(prior=x))),
            ("betas", offset, lambda x: votes.moments(None, x)),
        ):
            check_refusals(name, wrong_tensors(right), call)

    @pytest.mark.parametrize("backend", UNSTORED)
    def test_tensors_of_net_sums(self, backend):
        p = PoseProblem((5, 6, 2, 2), 3, 3)
        net_sum, sigmoid = p.votes(backend).net_sum, p.agreement("sigmoid", "groups")
        beta, active = Beta(p.draw(3, 3), p.draw(3, 4)), Activation(p.draw(3, 4), p.draw(3), p.draw(5))
        for name, right, call in (
            ("query", sigmoid.query, lambda x: net_sum(Dot(x))),
            ("slope", sigmoid.slope, lambda x: net_sum(sigmoid._replace(slope=x))),
            ("offset", sigmoid.offset, lambda x: net_sum(sigmoid._replace(offset=x))),
            ("activation_weight", active.weight, lambda x: net_sum(None, None, active._replace(weight=x))),
            ("activation_bias", active.bias, lambda x: net_sum(None, None, active._replace(bias=x))),
            ("activation_scale", active.scale, lambda x: net_sum(None, None, active._replace(scale=x))),
        ):
            check_refusals(name, wrong_tensors(right), call)
        for field, dim in (("rows", 0), ("weight", 1)):  # along the other one, expand refuses
            wrong = wrong_tensors(getattr(beta, field), [dim])
            suffix = "_weight" * dim
            check_refusals(
                f"use{suffix}", wrong, lambda x, field=field: net_sum(None, (beta._replace(**{field: x}), beta))
            )
            check_refusals(
                f"ignore{suffix}", wrong, lambda x, field=field: net_sum(None, (beta, beta._replace(**{field: x})))
            )

    def test_another_device(self):
        p = Problem("per type")
        with pytest.raises(ValueError, match="query is on meta and the poses are on cpu: move one of them"):
            check_parents(p.votes("tiled").tensors(None), {"query": p.dot().query.to("meta")}, Options())


def wrong_tensors(x: Tensor, dims: Iterable[int] | None = None) -> list[Tensor]:
    """Return tensors like x with one entry more along a dimension, one without any, and one of another precision."""
    x, dims = x.detach(), range(x.dim()) if dims is None else dims
    longer = [torch.cat([x, x.narrow(dim, 0, 1)], dim) for dim in dims]
    return [*longer, x.narrow(dims[0], 0, 0), x.float()]


def check_refusals(name: str, wrong: list[Tensor], call: Callable[[Tensor], Any]) -> None:
    for x in wrong:
        with pytest.raises((ValueError, TypeError), match=rf"^(expected )?{name} [^\n]*$"):
            call(x)


@pytest.mark.parametrize("kind", UNSTORED)
def test_a_query_without_memory_is_refused(kind):
    p = Problem("per child")
    with pytest.raises(ValueError, match="query is on meta and the votes are on cpu: move one of them"):
        p.votes(kind).weighted_sum(Dot(p.dot().query.to("meta")))
