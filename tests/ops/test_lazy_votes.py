"""The reductions over stored and lazy votes against their definitions: values and all gradients."""

import warnings

import pytest
import torch
from problems import (
    AGREEMENTS,
    BACKENDS,
    BIASES,
    EXACT,
    GEOMETRIES,
    ROWS,
    SIZES,
    SOFTMAX,
    WAYS,
    Problem,
    agreement_of,
    assert_same,
    compare_with_logits,
    covering,
    draw,
    label,
    options_of,
    set_sizes,
)
from torch import Tensor
from torch.testing import assert_close

import torchcaps
from torchcaps import CapsuleConv2d, CapsuleLinear, use_backend
from torchcaps.ops import Dot, Gaussian, LazyVotes, StoredVotes, as_votes, backend, windows
from torchcaps.ops.children import Children, Options, count_samples
from torchcaps.ops.numerics import nonzero
from torchcaps.ops.tiled.blocks import blocks

CHILDREN = {"geometry": GEOMETRIES, "bias": BIASES, "gates": [False, True], "sizes": SIZES}


def cases(**parameters):
    """Combinations in which any two values of two parameters occur together, those of the children included."""
    return pytest.mark.parametrize("case", covering(**CHILDREN, **parameters), ids=label)


def problem_of(case: dict, monkeypatch: pytest.MonkeyPatch) -> Problem:
    set_sizes(monkeypatch, case["sizes"])
    return Problem(case["geometry"], case["bias"], case["gates"])


class TestReductions:
    @cases(softmax=SOFTMAX)
    def test_uniform_sum(self, case, monkeypatch):
        p, softmax = problem_of(case, monkeypatch), case["softmax"]
        if softmax == "children" and p.gates is not None:  # with uniform coefficients a gate of 0 has a gradient
            total = (p.gates[..., None, None] * p.all_votes).sum(1)
            expected = total / p.gates.sum(1).masked_fill(p.gates.sum(1) == 0, 1)[:, None, None]
        else:
            expected = p.weighted_sum(p.logits(None), softmax)
        for kind in BACKENDS:
            assert_same([expected], [p.lazy(kind).weighted_sum(None, **options_of(softmax))], p.leaves)

    @cases(softmax=SOFTMAX, unit=[False, True], scale=["1", "number", "learned"], offset=ROWS)
    def test_dot(self, case, monkeypatch):
        p, softmax = problem_of(case, monkeypatch), case["softmax"]
        agreement = p.dot(case["unit"], case["scale"], case["offset"])
        expected = p.weighted_sum(p.logits(agreement), softmax)
        for kind in BACKENDS:
            assert_same([expected], [p.lazy(kind).weighted_sum(agreement, **options_of(softmax))], p.leaves)

    @pytest.mark.parametrize(
        "case",
        covering(
            geometry=["per type", "shared by all"], gates=[False, True], sizes=SIZES, softmax=SOFTMAX, offset=ROWS
        ),
        ids=label,
    )
    def test_dot_of_children_that_share_weights(self, case, monkeypatch):
        """Without a bias, no votes are computed: the query is pulled through the weights instead."""
        self.test_dot(case | {"bias": "none", "unit": False, "scale": "number"}, monkeypatch)

    @cases(
        kind=["uniform", "dot", "gaussian"],
        eps=[0.0, 1e-2],
        scale=["1", "number", "learned"],
        offset=ROWS,
        betas=[*ROWS, "one number", "one per child"],
    )
    def test_moments(self, case, monkeypatch):
        p, eps, betas_kind = problem_of(case, monkeypatch), case["eps"], case["betas"]
        agreement = None
        if case["kind"] != "uniform":
            agreement = p.gaussian() if case["kind"] == "gaussian" else p.dot(False, case["scale"], case["offset"])
        if betas_kind.startswith("one"):
            betas = p.draw_rows("shared" if betas_kind == "one number" else "each", 1)
        else:
            betas = p.draw_rows(betas_kind)
        expected = p.moments(p.logits(agreement), betas, eps)
        for kind in BACKENDS:
            found = p.lazy(kind).moments(agreement, betas, eps)
            assert (found.benefit is None) == (betas is None)
            assert_same(expected, [x for x in found if x is not None], p.leaves)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_uniform_coefficients_need_no_votes(self, backend):
        votes = LazyVotes(torch.randn(2, 3, 1, 4), torch.randn(3, 5, 4, 6), None, (6,), backend=backend)
        assert_close(votes.coefficients(None), torch.full((2, 3, 5), 0.2))
        assert not votes.cache.stored

    @cases(softmax=SOFTMAX, kind=["uniform", "dot", "unit", "gaussian"], scale=["1", "number"], offset=ROWS)
    def test_coefficients(self, case, monkeypatch):
        p, softmax, agreement = problem_of(case, monkeypatch), case["softmax"], None
        if case["kind"] == "gaussian":
            agreement = p.gaussian()
        elif case["kind"] != "uniform":
            agreement = p.dot(case["kind"] == "unit", case["scale"], case["offset"])
        expected = p.coefficients(p.logits(agreement), softmax)
        for kind in BACKENDS:
            found = p.lazy(kind).coefficients(agreement, **options_of(softmax))
            assert_same([expected], [found], p.leaves)

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_rows_that_children_of_a_window_share(self, kind):
        """The children of a group are neighbors in the order of the weights: types before places."""
        p = Problem("overlapping")  # 2 types in kernels of 2 x 2
        for groups in (2, 4):
            agreement = p.dot()._replace(offset=p.draw(groups, p.parents))
            logits, betas = p.logits(agreement), p.draw(groups, p.parents)
            votes = p.lazy(kind)
            assert_same([p.weighted_sum(logits, "parents")], [votes.weighted_sum(agreement)], p.leaves)
            assert_same(p.moments(logits, betas, 0.0), list(votes.moments(agreement, betas)), p.leaves)

    @pytest.mark.parametrize("softmax", SOFTMAX)
    def test_logits_that_exp_cannot_take(self, softmax, monkeypatch):
        """Nothing overflows: a logit that is far larger than the others has a coefficient of 1."""
        set_sizes(monkeypatch, SIZES[0])
        p = Problem("per child", gates=True)
        p.gates.data[:, 0] = 0.5
        agreement = Dot(1e4 * draw(5, 5, 4))
        expected, *others = (p.lazy(kind).weighted_sum(agreement, **options_of(softmax)) for kind in BACKENDS)
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
        votes = LazyVotes(poses, torch.randn(3, 4, 2, 2), None, (2,), backend=kind)
        for softmax in ("parents", "children"):
            votes.weighted_sum(Dot(torch.randn(2, 4, 2), unit=True), softmax).sum().backward(retain_graph=True)
        assert poses.grad.isfinite().all()

    @pytest.mark.parametrize("agreement", [None, Dot(torch.ones(3, 4, 2))], ids=["uniform", "dot"])
    @pytest.mark.parametrize("kind", BACKENDS)
    def test_variance_of_votes_that_agree_far_from_zero(self, kind, agreement, monkeypatch):
        set_sizes(monkeypatch, (100, 64, 16))
        poses = 1000 + 0.1 * torch.randn(3, 50, 1, 2)
        votes = LazyVotes(poses, torch.eye(2).view(1, 1, 2, 2).repeat(1, 4, 1, 1), None, (2,), backend=kind)
        expected = poses.double().flatten(2).var(1, correction=0).unsqueeze(1).expand(-1, 4, -1)
        assert_close(votes.moments(agreement).variance.double(), expected, rtol=1e-3, atol=0)


def test_a_divisor_whose_reciprocal_overflows_counts_as_zero():
    x = torch.tensor([0.0, 1e-40, -1e-40, 1e-20])
    assert_close(nonzero(x), torch.tensor([1.0, 1.0, 1.0, 1e-20]), rtol=0, atol=0)


class TestDot:
    def test_what_is_added_keeps_scale_unit_and_offset(self):
        query, offset = draw(2, 3, 4), draw(1, 3)
        assert Dot.add(None, query, unit=True) == Dot(query, unit=True)
        start = Dot(query, scale=0.5, offset=offset)
        after = Dot.add(start, query)
        assert_close(after.query, 2 * query)
        assert (after.scale, after.unit, after.offset) == (0.5, False, offset)
        assert after.with_state(after.state()).offset is offset


class TestWithLogits:
    @cases(agreement=AGREEMENTS, offset=[False, True], way=WAYS)
    def test_against_logits_that_are_added(self, case, monkeypatch):
        p = problem_of(case, monkeypatch)
        compare_with_logits(p, BACKENDS, agreement_of(p, case["agreement"]), case["offset"], case["way"])

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_blocks_are_the_votes_alone(self, kind):
        p = Problem("windows", "each", gates=True)
        votes = p.lazy(kind).with_logits(p.draw(18, p.parents, p.rows, p.d), p.draw(18, p.parents))
        assert_same([p.all_votes], [collect(p, votes)[0]], [p.poses, p.weight, p.bias])

    def test_of_a_half_precision_map(self):
        """The logits are computed like the votes, and sums run in float32."""
        p = Problem("per child")
        poses, weight = (x.detach().to(torch.bfloat16) for x in (p.poses.flatten(1, 3), p.weight.flatten(0, 2)))
        votes = LazyVotes(poses, weight, None, (2, 2), backend="tiled")
        found = votes.with_logits(torch.randn(4, 5, 2, 3), torch.randn(4, 5)).weighted_sum(None)
        assert found.shape == (5, 5, 4)
        assert found.dtype == torch.float32

    def test_what_has_no_place_for_it(self):
        p = Problem("per child")
        votes = p.lazy("tiled").with_logits(p.draw(4, 5, 2, 3))
        for agreement in (p.dot(unit=True), p.gaussian()):
            with pytest.raises(ValueError, match="logits of the children need a dot agreement"):
                votes.moments(agreement)
        with pytest.raises(ValueError, match="stored votes do not know the poses"):
            StoredVotes(p.all_votes).with_logits(p.weight)


def collect(p: Problem, votes) -> tuple[Tensor, Tensor]:
    """Return all votes of the blocks and their gates. The order of children in blocks is not specified, so children are
    matched by their votes."""
    found: dict[tuple[int, ...], list] = {}
    for samples, block, gates in votes.blocks():
        found.setdefault(tuple(range(p.samples)[samples]), []).append((block, gates))
    assert sorted(n for samples in found for n in samples) == list(range(p.samples))
    whole = [[torch.cat(x, 1) for x in zip(*found[key], strict=True)] for key in sorted(found)]
    all_votes, all_gates = (torch.cat(x) for x in zip(*whole, strict=True))
    assert all_votes.shape == p.all_votes.shape
    order = torch.cdist(p.all_votes.flatten(2), all_votes.flatten(2)).argmin(2)
    index = torch.arange(p.samples).unsqueeze(1)
    return all_votes[index, order], all_gates[index, order]


@pytest.mark.parametrize("case", covering(geometry=GEOMETRIES, bias=BIASES, sizes=SIZES), ids=label)
def test_blocks(case, monkeypatch):
    """Each vote is in one block, with its gate."""
    set_sizes(monkeypatch, case["sizes"])
    p = Problem(case["geometry"], case["bias"], gates=True)
    for votes in (p.lazy("tiled"), p.lazy("reference"), StoredVotes(p.all_votes).gated(p.gates)):
        assert_same([p.all_votes, p.gates], list(collect(p, votes)), [])
    assert all(gates is None for *_, gates in p.lazy("tiled").gated(None).blocks())


def test_blocks_cover_every_pair_once():
    for geometry in GEOMETRIES.values():
        children, (down, across) = (
            Children(torch.empty(geometry.poses), torch.empty(geometry.weight), None, None),
            (geometry.weight[1:3]),
        )
        options = Options(stride=geometry.stride, dilation=geometry.dilation)
        for sizes in [(1, 1), (7, 3), (20, 20), (1000, 5), (10**6, 10**6)]:
            seen = torch.zeros(count_samples(children, options), geometry.poses[1], down, across)
            for block in blocks(children, options, *sizes):
                seen[block.samples, block.types, block.place[0], block.place[1]] += 1
            assert (seen == 1).all()


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
        votes = p.lazy(kind)
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
        votes = p.lazy(kind, line=True)
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
        votes = LazyVotes(p.poses.flatten(1, 3), p.weight.flatten(0, 2), None, (2, 2), backend="tiled")
        sums = votes.weighted_sum(None)
        assert_same([p.weighted_sum(p.logits(None), "parents")], [sums], [p.poses, p.weight])
        assert votes.capsules(sums).poses.shape == (5, 3, 2, 2)
        assert votes.with_coefficients(votes.capsules(sums), votes.coefficients(None)).coefficients.shape == (5, 6, 3)

    def test_precision_of_the_parents_is_that_of_the_poses(self):
        votes = LazyVotes(torch.randn(2, 3, 1, 2).half(), torch.randn(3, 4, 2, 2).half(), None, (2,), backend="tiled")
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
        votes, first = p.lazy(kind), p.gates
        for gates in (first, p.draw(p.samples, p.children, low=0.1), None, first):
            p.gates, votes = gates, votes.gated(gates)
            for softmax in ("parents", "children"):
                expected.append(p.weighted_sum(p.logits(agreement), softmax))
                found.append(votes.weighted_sum(agreement, softmax))
        assert_same(expected, found, p.leaves)

    def test_gates_do_not_make_stored_votes_anew(self):
        p = Problem("per child", gates=True)
        votes = p.lazy("reference")
        votes.weighted_sum(p.dot())
        other = votes.gated(None)
        assert other.cache.stored is votes.cache.stored
        assert votes._stored().votes is other._stored().votes

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_constants(self, kind):
        p = Problem("per child", "each", gates=True)
        agreement, (weight, rows) = p.dot(offset="each"), (p.draw(4, 5, 2, 3), p.draw(4, 5))
        for votes in (p.lazy(kind), p.lazy(kind).with_logits(weight, rows)):
            before = votes.weighted_sum(agreement)  # fills the cache
            constants = votes.detach()
            found = constants.weighted_sum(agreement)
            assert_close(found, before, **EXACT)
            query_grad, *child_grads = torch.autograd.grad(
                found.sum(), [agreement.query, *p.leaves], materialize_grads=True
            )
            assert query_grad.abs().sum() > 0
            about = {id(agreement.query), id(agreement.offset)}
            for x, gradient in zip(p.leaves, child_grads, strict=True):
                assert (gradient.abs().sum() > 0) == (id(x) in about)
            assert not constants.weighted_sum(Dot(agreement.query.detach())).requires_grad
            assert votes.weighted_sum(None).requires_grad  # as before

    def test_stored_votes_as_constants(self):
        p = Problem("per child", gates=True)
        votes = as_votes(p.all_votes).gated(p.gates)
        assert not votes.detach().weighted_sum(None).requires_grad
        assert votes.weighted_sum(None).requires_grad
        assert as_votes(votes) is votes

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_votes_made_without_gradients_serve_no_reduction_with_them(self, kind):
        p = Problem("per child", "each", gates=True)
        votes, agreement = p.lazy(kind), p.dot()
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
        votes, agreement = p.lazy(kind), p.dot()
        expected = [p.weighted_sum(p.logits(agreement), "parents")]
        before = votes.weighted_sum(agreement)
        votes.with_logits(p.draw(4, 5, 2, 3), p.draw(4, 5)).weighted_sum(agreement)
        assert_same(expected * 2, [before, votes.weighted_sum(agreement)], p.leaves)


def test_autocast_does_not_reach_into_a_reduction():
    p = Problem("per child", bias="each")
    for x in (p.poses, p.weight, p.bias):
        x.data = x.data.float()
    agreement = Dot(torch.randn(5, 5, 4), offset=torch.randn(1, 5))

    def results() -> list[Tensor]:
        votes = p.lazy("tiled")
        total = votes.weighted_sum(None), votes.weighted_sum(agreement), *votes.moments(agreement)[:3]
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in total), p.poses)
        return [*total, gradient, p.lazy("tiled").coefficients(agreement)]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        found = results()
    for f, e in zip(found, expected, strict=True):
        assert_close(f, e, rtol=0, atol=0)


class TestBackends:
    def test_context_sets_what_auto_means(self):
        x, w = torch.randn(1, 2, 1, 3), torch.randn(2, 4, 3, 3)
        best = BACKENDS[-1]
        assert LazyVotes(x, w, None, (3,)).backend == best
        with use_backend("reference"):
            assert LazyVotes(x, w, None, (3,)).backend == "reference"
            assert LazyVotes(x, w, None, (3,), backend="tiled").backend == "tiled"
            with use_backend("auto"):
                assert LazyVotes(x, w, None, (3,)).backend == best
        assert LazyVotes(x, w, None, (3,)).backend == best

    def test_auto_is_the_fastest_that_there_is(self, monkeypatch):
        for missing, expected in ((None, "native"), ("there is no compiler", "tiled")):
            monkeypatch.setattr(backend, "NATIVE_MISSING", missing)
            assert backend.choose_backend("auto", torch.device("cpu")) == expected
        monkeypatch.setattr(backend, "HAS_TRITON", True)
        monkeypatch.setattr(backend, "CHECKED", {(8, 0)})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert backend.choose_backend("auto", torch.device("cuda"), (4, 4, 4)) == "triton"
        assert backend.choose_backend("auto", torch.device("meta")) == "tiled"

    @pytest.mark.parametrize(
        ("installed", "capability", "sizes", "reason"),
        [
            (False, (9, 0), (4, 4, 4), "triton is not installed"),
            (True, (7, 5), (4, 4, 4), r"capability 8\.0, this device has 7\.5"),
            (True, (9, 0), (16, 2, 16), "at most 64 numbers, these have 256"),
            (True, (9, 0), (1, 64, 64), "at most 512 weights .* 4096"),
        ],
    )
    def test_auto_says_once_why_it_is_tiled_on_a_gpu(self, monkeypatch, installed, capability, sizes, reason):
        monkeypatch.setattr(backend, "HAS_TRITON", installed)
        monkeypatch.setattr(backend, "_warned", set())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        device = torch.device("cuda")
        with pytest.warns(UserWarning, match=f"{reason}.*'auto' uses 'tiled'"):
            assert backend.choose_backend("auto", device, sizes) == "tiled"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert backend.choose_backend("auto", device, sizes) == "tiled"
        with pytest.raises(ValueError, match=f"'triton' cannot be used, .*{reason}.*'tiled'"):
            backend.choose_backend("triton", device, sizes)

    def test_a_compiler_takes_the_reason_as_it_is(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(backend, "_warned", {"told before"})

        def f(x):
            return x + (1 if backend.choose_backend("auto", torch.device("cuda")) == "tiled" else 2)

        with pytest.warns(UserWarning, match="'tiled'"):
            assert torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(1)) == 1

    def test_what_there_is_and_why_not(self, monkeypatch):
        monkeypatch.setattr(backend, "NATIVE_MISSING", "there is no compiler")
        monkeypatch.setattr(backend, "HAS_TRITON", False)
        found = backend.backends()
        assert list(found) == ["reference", "tiled", "native", "triton"]
        assert found["reference"] is found["tiled"] is None
        assert "compiler" in found["native"]
        assert "not installed" in found["triton"]
        with pytest.raises(ValueError, match="there is no compiler.*'tiled'"):
            backend.choose_backend("native", torch.device("cpu"))

    def test_native_needs_the_cpu(self, monkeypatch):
        monkeypatch.setattr(backend, "NATIVE_MISSING", None)
        with pytest.raises(ValueError, match="CPU, got cuda.*'auto'"):
            backend.choose_backend("native", torch.device("cuda"))

    @pytest.mark.parametrize("kind", BACKENDS)
    def test_unknown_softmax(self, kind):
        votes = Problem("per child").lazy(kind)
        for reduction in (votes.weighted_sum, votes.coefficients):
            with pytest.raises(ValueError, match="softmax must be one of 'parents', 'children', got 'parent'"):
                reduction(None, "parent")

    def test_unknown(self):
        with pytest.raises(ValueError, match=r"'auto', 'reference', 'tiled', 'native', 'triton', got 'cuda'"):
            CapsuleLinear(2, 2, 2, 2, torchcaps.DynamicRouting(), backend="cuda")
        with pytest.raises(ValueError, match="backend must be one of .* got 'fast'"), use_backend("fast"):
            pass
        with pytest.raises(ValueError, match="backend must be one of .* got 'fast'"):
            LazyVotes(torch.randn(1, 2, 1, 3), torch.randn(2, 4, 3, 3), None, (3,), backend="fast")

    def test_triton_needs_what_it_needs(self, monkeypatch):
        monkeypatch.setattr(backend, "HAS_TRITON", False)
        with pytest.raises(ValueError, match="package triton.*'tiled'"):
            backend.choose_backend("triton", torch.device("cuda"))
        with pytest.raises(ValueError, match="package triton.*'tiled'"):
            backend.choose_backend("triton", torch.device("cpu"))
        monkeypatch.setattr(backend, "HAS_TRITON", True)
        with pytest.raises(ValueError, match="at most 64 numbers.*'tiled'"):
            backend.choose_backend("triton", torch.device("cpu"), (16, 16, 16))
        monkeypatch.setattr(backend, "INTERPRETED", False)
        with pytest.raises(ValueError, match="CUDA device, got cpu.*'tiled'"):
            backend.choose_backend("triton", torch.device("cpu"))

    def test_impossible_requests(self):
        votes = LazyVotes(torch.randn(1, 2, 1, 3), torch.randn(2, 4, 3, 3), None, (3,), backend="tiled")
        state = torch.ones(1, 4, 3)
        with pytest.raises(ValueError, match="'tiled'.*Gaussian.*'reference'"):
            votes.weighted_sum(Gaussian(state, state, state[..., 0]))
        with pytest.raises(ValueError, match="'tiled'.*unit.*'reference'"):
            votes.moments(Dot(state, unit=True))

    def test_the_reference_has_all(self):
        p = Problem("per type", "one", gates=True)
        for agreement in (p.gaussian(), p.dot(unit=True)):
            logits, votes = p.logits(agreement), p.lazy("reference")
            assert_same([p.weighted_sum(logits, "parents")], [votes.weighted_sum(agreement)], p.leaves)
            assert_same(p.moments(logits, None, 0.0), list(votes.moments(agreement)[:3]), p.leaves)

    def test_layers_say_their_backend(self):
        routing = torchcaps.DynamicRouting()
        assert "backend='tiled'" in repr(CapsuleLinear(2, 2, 2, 2, routing, backend="tiled"))
        assert "backend='reference'" in repr(CapsuleConv2d(2, 2, 2, 2, 3, routing, backend="reference"))
        assert "backend" not in repr(CapsuleLinear(2, 2, 2, 2, routing))


class TestShapesThatAreRefused:
    def test_gates(self):
        p = Problem("windows")
        for votes in (p.lazy("tiled"), StoredVotes(p.all_votes)):
            with pytest.raises(ValueError, match=r"scores.*\(8, 18\), got \(8, 3\)"):
                votes.gated(torch.ones(8, 3))

    def test_votes(self):
        with pytest.raises(ValueError, match=r"\(batch, children, parents, \*pose\), got \(2, 3, 4\)"):
            as_votes(torch.ones(2, 3, 4))
