"""The operators of the backends, and the gradients that iterations share."""

import pytest
import torch
from problems import GEOMETRIES, UNSTORED, Geometry, Problem, assert_same, set_sizes
from torch import Tensor
from torch.testing import assert_close

from torchcaps.ops import Dot, Gaussian, Votes, operators
from torchcaps.ops.backend import HAS_TRITON
from torchcaps.ops.children import Children, Options, ParentTensors
from torchcaps.ops.numerics import accumulator
from torchcaps.ops.operators import BACKENDS, Operator, apply_operator


class TestSharedGradients:
    """Gradients of the children are handed from one iteration to the one before it."""

    @pytest.fixture(autouse=True, params=UNSTORED)
    def set_backend(self, request):
        self.backend = request.param

    def iterations(self, votes: Votes, offset: Tensor) -> list[Tensor]:
        first = votes.weighted_sum(None)
        second = votes.weighted_sum(Dot(first, offset=offset))
        third = votes.moments(Gaussian(second, torch.ones_like(second), torch.zeros_like(second[..., 0])))
        fourth = votes.moments(Dot(0.5 * third.mean, offset))
        return [first, second, third.mean, fourth.variance]

    def problem(self) -> tuple[Problem, list[Tensor], list[Tensor]]:
        p = Problem("per type", "each", gates=True)
        offset = p.draw_rows("groups")
        return p, self.iterations(p.votes("reference"), offset), self.iterations(p.votes(self.backend), offset)

    @pytest.mark.parametrize("used", [[0], [1], [2], [3], [0, 2], [1, 3], [0, 1, 2, 3]])
    def test_any_iterations_used(self, used):
        p, expected, found = self.problem()
        assert_same([expected[i] for i in used], [found[i] for i in used], p.leaves)

    def test_there_is_one_gradient_of_the_children(self, monkeypatch):
        """Iterations add to it and allocate none of their own."""
        made = []

        def counted(x: Tensor, *shape: int) -> Tensor:
            made.append(x)
            return accumulator(x, *shape)

        _, _, found = self.problem()
        monkeypatch.setattr(operators, "accumulator", counted)
        found[-1].sum().backward()
        assert len(made) == 4  # of poses, weight, bias and gates

    def test_backward_twice(self):
        p, _, results = self.problem()
        loss = results[2].square().sum()
        once = torch.autograd.grad(loss, p.leaves[:4], retain_graph=True)
        twice = torch.autograd.grad(loss, p.leaves[:4])
        for a, b in zip(once, twice, strict=True):
            assert_close(a, b, rtol=0, atol=0)

    def test_one_branch_does_not_write_into_another(self):
        p = Problem("per child")
        agreement, branches = p.dot(), []
        for backend in ("reference", self.backend):
            votes = p.votes(backend)
            start = votes.weighted_sum(agreement)
            other = votes.gated(torch.full((votes.batch, votes.children), 0.5, dtype=torch.float64))
            branches.append([start, votes.weighted_sum(Dot(start)), other.weighted_sum(Dot(start))])
        assert_same(*branches, p.leaves)

    def test_gradients_that_others_hold_are_not_written_to(self):
        """The loss also depends on the leaves directly."""
        p = Problem("per child", "each", gates=True)
        agreement, losses = p.dot(), []
        for backend in ("reference", self.backend):
            votes = p.votes(backend)
            parents = votes.weighted_sum(Dot(votes.weighted_sum(agreement)))
            losses.append([parents, *(x.square() for x in p.leaves)])
        assert_same(*losses, p.leaves)

    def test_frozen_parts_get_no_gradient(self):
        p = Problem("per child", "each")
        p.weight.requires_grad_(False)
        votes = p.votes(self.backend)
        out = votes.weighted_sum(Dot(votes.weighted_sum(None)))
        _, (poses, weight, bias, gates) = votes.cache.handed_on[True]  # what the next reduction would take
        assert poses.requires_grad
        assert bias.requires_grad
        assert not weight.requires_grad
        assert gates is None
        out.sum().backward()
        assert p.weight.grad is None
        assert p.poses.grad is not None

    def test_an_unused_iteration_hands_gradients_on(self):
        p = Problem("per child")
        agreement, results = p.dot(), []
        for backend in ("reference", self.backend):
            votes = p.votes(backend)
            votes.weighted_sum(None)
            results.append([votes.weighted_sum(agreement)])
        assert_same(*results, p.leaves)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_gradients_of_half_precision_are_summed_in_float32(self, dtype):
        p = Problem("per child", "each")
        for x in p.leaves:
            x.data = x.data.to(dtype)
        votes = p.votes(self.backend)
        found = votes.weighted_sum(Dot(votes.weighted_sum(None)))
        _, carriers = votes.cache.handed_on[True]
        assert {x.dtype for x in carriers if x is not None} == {torch.float32}
        gradients = torch.autograd.grad(found.sum(), p.leaves)
        assert {x.dtype for x in gradients} == {dtype}

    def test_double_backward_says_what_to_do(self):
        p, _, results = self.problem()
        with pytest.raises(RuntimeError, match="create_graph.*'reference'"):
            torch.autograd.grad(results[1].sum(), p.poses, create_graph=True)


def calls(p: Problem) -> list[tuple]:
    """Return calls of every operator, with and without optional tensors: name, children, other arguments."""
    gates = p.gates.unflatten(1, (-1, *p.kernel)).detach().requires_grad_()
    children, fewer = (p.poses, p.weight, p.bias, gates), (p.poses, p.weight, None, None)
    agreement, gaussian = p.dot(offset="each"), p.gaussian()
    query, offset = agreement.query, agreement.offset.unflatten(0, (-1, *p.kernel)).detach().requires_grad_()
    dot, betas = ParentTensors(query, offset=offset), p.draw(*offset.shape)
    windows = {"stride": p.geometry.stride, "dilation": p.geometry.dilation}
    return [
        ("vote_sum", children, *ParentTensors(), Options(**windows)),
        ("weighted_sum", children, *dot, Options(leaky=True, **windows)),
        ("weighted_sum", children, *dot, Options("children", unit=True, **windows)),
        ("weighted_sum", fewer, *ParentTensors(query), Options("children", **windows)),
        ("moments", children, *ParentTensors(*gaussian, betas=betas), Options(eps=1e-3, **windows)),
        ("moments", children, *dot._replace(betas=betas), Options(eps=1e-3, **windows)),
        ("moments", fewer, *ParentTensors(), Options(**windows)),
    ]


NAMES = ["vote_sum", *["weighted_sum"] * 3, *["moments"] * 3]
each_call = pytest.mark.parametrize("index", range(len(NAMES)), ids=[f"{name} {i}" for i, name in enumerate(NAMES)])


def check_operators(operator: Operator, children, rest, utilities: tuple[str, ...]) -> None:
    arguments = (*children, *rest[:-1], *rest[-1])
    torch.library.opcheck(operator.forward, arguments, test_utils=utilities)
    reduction = operator.reduction
    with torch.no_grad():
        results = operator.forward(*arguments)
        results = [results] if isinstance(results, Tensor) else results
        grads = [torch.randn_like(x) for x in results[: reduction.differentiable]]
        into = [None if x is None else accumulator(x) for x in children]
        backward = (*grads, *results[: reduction.kept], *arguments, *into)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in backward]
        torch.library.opcheck(operator.backward, detached, test_utils=utilities[:3])


UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of opcheck itself, in PyTorch 2.14
@pytest.mark.parametrize("kind", UNSTORED)
@each_call
def test_operators_are_what_pytorch_takes_them_for(index, kind):
    name, children, *rest = calls(Problem("overlapping", "each", gates=True))[index]
    check_operators(operators.BACKENDS[kind][name], children, rest, UTILITIES)


@pytest.mark.parametrize("kind", UNSTORED)
@each_call
def test_gradients_by_differences(index, kind, monkeypatch):
    set_sizes(monkeypatch, (30, 2, 2))
    name, children, *rest = calls(Problem("dilated", "each", gates=True))[index]
    forward = operators.BACKENDS[kind][name].forward
    inputs = [x if x is None else x.detach().requires_grad_() for x in (*children, *rest[:-1])]
    if name != "vote_sum" and index != 5 and inputs[3] is not None:
        inputs[3].data.clamp_(min=0.1)  # at 0 the function is not differentiable

    def differentiable(*inputs):
        results = forward(*inputs, *rest[-1])
        return results[0] if name == "weighted_sum" else results

    assert torch.autograd.gradcheck(differentiable, inputs, fast_mode=True)


@pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
@pytest.mark.parametrize("index", [2, 5])
def test_operators_of_triton(index):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = Problem(
        GEOMETRIES["per type"]._replace(poses=(2, 2, 1, 1, 1, 2), weight=(1, 1, 1, 3, 2, 2), groups=2),
        "each",
        True,
        device,
    )
    name, children, *rest = calls(p)[index]
    check_operators(operators.TRITON[name], children, rest, UTILITIES[:3])


@pytest.mark.parametrize("backend", [*UNSTORED, *(["triton"] if HAS_TRITON else [])])
@pytest.mark.parametrize("index", [2, 4])
def test_what_is_told_of_the_parents_in_any_order_of_memory(backend, index):
    """The fake operators must return gradients with the same strides as the real ones."""
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    p = Problem(Geometry((2, 2, 1, 1, 1, 2), (1, 1, 1, 3, 2, 2), 1), "each", True, device)
    name, children, *about, options = calls(p)[index]
    permuted = [x.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(x, Tensor) else x for x in about]
    check_operators(operators.BACKENDS[backend][name], children, [*permuted, options], UTILITIES[:3])


@pytest.mark.parametrize("kind", UNSTORED)
def test_what_only_the_backward_pass_needs_has_no_gradient(kind):
    _, children, *parents, options = calls(Problem("per child", "each", gates=True))[3]
    (sums, log_masses), _ = apply_operator(BACKENDS[kind]["weighted_sum"], Children(*children), tuple(parents), options)
    assert sums.requires_grad
    assert not log_masses.requires_grad


@pytest.mark.parametrize("kind", UNSTORED)
def test_a_profiler_sees_the_operators(kind):
    """Without one they are left out, which takes less time."""
    p = Problem("per child")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        p.votes(kind).weighted_sum(p.dot()).sum().backward()
    names = {event.name for event in profile.events()}
    assert {f"torchcaps::{kind}_weighted_sum", f"torchcaps::{kind}_weighted_sum_backward"} <= names
