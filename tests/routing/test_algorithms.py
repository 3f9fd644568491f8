"""Tests of every routing algorithm: every entry of `helpers/algorithms.py` must pass them."""

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from algorithms import ALGORITHMS, expected_of, loss_of, make, randomize
from graphs import assert_compiles_for_a_gpu, needs_interpreter
from problems import BACKENDS
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchcaps
from torchcaps import (
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    SlotAttention,
    list_routings,
    use_backend,
)
from torchcaps.ops.tiled import blocks
from torchcaps.testing import (
    assert_padding_changes_nothing,
    assert_routing_laws,
    assert_stacks_are_alive,
    measure_first_pass,
    propose_gain,
)

names = pytest.mark.parametrize("name", ALGORITHMS)
iterative = pytest.mark.parametrize("name", [name for name in ALGORITHMS if make(name).iterative])

# (batch, children, parents, in_pose, out_pose, weights of "each" child or one set for "all", iterations, with scores).
# They include poses of one entry, one child, one parent and one sample.
CASES = [
    (2, 5, 3, 3, 4, "each", 3, True),
    (1, 7, 2, (2, 3), (2, 3), "all", 4, True),
    (3, 1, 4, 2, 3, "each", 1, False),
    (2, 6, 1, (2, 2), (2, 2), "all", 4, False),
    (2, 4, 3, 2, 1, "each", 2, True),
    (2, 4, 3, (3, 1), (3, 2), "all", 1, True),
]


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(actual, expected, tolerance: float = 1e-10):
    assert_close(actual, torch.as_tensor(expected), rtol=0, atol=tolerance)


def flat(capsules: Capsules) -> list[Tensor]:
    return [x for x in capsules if isinstance(x, Tensor)]


@names
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(name, case):
    batch, children, parents, in_pose, out_pose, weights, iterations, scored = case
    routing = make(name, iterations)
    layer = CapsuleLinear(children if weights == "each" else None, parents, in_pose, out_pose, routing, bias=True)
    randomize(layer)
    poses, scores = torch.randn(batch, children, *layer.in_pose), None
    if scored:
        scores = torch.randn(batch, children)
        scores[:, 0], scores[0, 1] = -math.inf, math.inf
    expected = expected_of(name, layer, poses, scores)
    for backend in BACKENDS:
        layer.backend = backend
        found = layer(Capsules(poses, scores), return_coefficients=True)
        for field in ("poses", "scores", "variances", "coefficients"):
            actual = getattr(found, field)
            assert (actual is None) == (expected[field] is None), field
            if actual is not None:
                close(actual.flatten(2) if field in ("poses", "variances") else actual, expected[field])


def test_learned_first_logits_over_children():
    layer = randomize(CapsuleLinear(5, 3, 2, 4, DynamicRouting(softmax="children", start="learned")))
    poses = torch.randn(2, 5, 2)
    expected = expected_of("dynamic_over_children", layer, poses)
    for backend in BACKENDS:
        layer.backend = backend
        found = layer(poses, return_coefficients=True)
        close(found.poses, expected["poses"])
        close(found.coefficients, expected["coefficients"])


@names
def test_laws(name, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 100)  # several blocks even for few children
    assert_routing_laws(make(name))


@pytest.mark.slow
@iterative
def test_laws_with_the_last_gradient(name):
    assert_routing_laws(make(name, None, "last"))


@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if entry.stable])
def test_stacks_are_alive(name):
    torch.set_default_dtype(torch.float32)
    assert_stacks_are_alive(make(name))


def test_a_stack_that_dies():
    with pytest.raises(AssertionError, match="alive.*layer"):
        assert_stacks_are_alive(DynamicRouting(2, init="paper"))


def test_hard_first_coefficients_are_found():
    routing = EMRouting()
    routing.shared_variance = 0.0
    with pytest.raises(AssertionError, match="nearly hard.*propose_gain"):
        assert_stacks_are_alive(routing)


@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if entry.stable])
def test_own_gains_are_as_measured(name):
    torch.set_default_dtype(torch.float32)
    routing = make(name)
    row = measure_first_pass(routing, routing.gain, routing.shared_variance)
    assert (row.gain, row.shared_variance) == (routing.gain, routing.shared_variance)
    assert 0.01 <= row.shortest <= row.longest <= 1.001
    assert row.largest <= 0.9
    assert row.spread > 0.1


def test_gains_are_found(capsys):
    """A gain that somebody has guessed, half and twice of the right one, and what is proposed in its place."""
    torch.set_default_dtype(torch.float32)
    for guessed in (1.0, 4.4):
        routing = DynamicRouting()
        routing.gain, routing.shared_variance = guessed, 0.0
        found = propose_gain(routing, gains=(1.0, 2.0), shared_variances=(0.0, 0.98))
        assert (found.gain, found.shared_variance) == (2.0, 0.98)
        assert (routing.gain, routing.shared_variance) == (guessed, 0.0)
        printed = capsys.readouterr().out
        assert f"{guessed:7.3g}                 0 " in printed
        assert "<- now" in printed
        assert printed.endswith("proposed: gain = 2, shared_variance = 0.98\n")
    with pytest.raises(ValueError, match="takes the poses as votes"):
        propose_gain(SlotAttention())
    with pytest.raises(ValueError, match="takes the poses as votes"):
        assert_stacks_are_alive(SlotAttention())
    routing.gain = 0.1
    with pytest.raises(ValueError, match="no gain and shared variance keep stacks alive"):
        propose_gain(routing, gains=(), shared_variances=())


@names
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "native"])  # which has none
def test_padding_in_blocks_of_its_own(name, backend, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 16)
    assert_padding_changes_nothing(make(name), backend)


# Differences along one direction in the fast tests, for every entry in the slow ones.
fast_mode = pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.slow)])


@names
@fast_mode
def test_gradients(name, fast_mode):
    """Gradients of children, weights and all learned parameters agree with finite differences."""
    layer = randomize(CapsuleLinear(None, 3, (2, 2), (2, 2), make(name, 2), bias=True))
    poses, scores = torch.randn(2, 3, 2, 2, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def parents(poses, scores, *values):
        out = torch.func.functional_call(
            layer, dict(zip(parameters, values, strict=True)), (Capsules(poses, scores),), {"return_coefficients": True}
        )
        return tuple(flat(out))

    for backend in BACKENDS:
        layer.backend = backend
        assert gradcheck(parents, (poses, scores, *parameters.values()), fast_mode=fast_mode)


@names
def test_activation_checkpointing(name):
    """A layer may be computed again in the backward pass, in both modes of PyTorch."""
    layer = randomize(CapsuleLinear(4, 3, 2, 3, make(name, 3))).eval()  # in training VB routing counts each computation
    for backend in BACKENDS:
        layer.backend, results = backend, []
        for again in (lambda f, x: f(x), *(partial(checkpoint, use_reentrant=mode) for mode in (False, True))):
            torch.manual_seed(0)
            poses, layer.weight.grad = torch.randn(2, 4, 2, requires_grad=True), None
            torch.stack([x.square().sum() for x in flat(again(layer, poses))]).sum().backward()
            results.append((poses.grad, layer.weight.grad))
        for found in results[1:]:
            for x, y in zip(found, results[0], strict=True):
                close(x, y)


@iterative
def test_gradient_through_the_last_iteration_only(name):
    results = []
    for gradient in ("unrolled", "last"):
        torch.manual_seed(0)
        layer = randomize(CapsuleLinear(4, 3, 2, 3, make(name, 3, gradient)))
        poses = torch.randn(2, 4, 2, requires_grad=True)
        out = layer(poses).poses
        results.append((out.detach(), torch.autograd.grad(out.square().sum(), poses)[0]))
    (unrolled, full), (last, partial) = results
    close(last, unrolled)
    assert not torch.allclose(full, partial)


def layers(name):
    """Yield a layer of each kind with an entry's routing, and its children."""
    yield randomize(CapsuleLinear(None, 3, (2, 2), (2, 3), make(name), bias=True)), torch.randn(2, 4, 2, 2)
    conv = CapsuleConv2d(2, 3, (2, 2), (2, 2), (2, 3), make(name), stride=2, padding=1)
    yield randomize(conv), torch.randn(2, 2, 4, 5, 2, 2)


COMPILED = ("dynamic_over_children", "em", "heinsen", "variational_bayes")  # the slow tests have all


some = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COMPILED else pytest.mark.slow) for name in ALGORITHMS]
)


@some
def test_compile_without_a_graph_break(name):
    *_, (layer, x) = layers(name)
    torch._dynamo.reset()
    scores = torch.randn(x.shape[:4])
    x.requires_grad_()
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out = run(Capsules(x, scores))
        results.append([*flat(out), *torch.autograd.grad(loss_of(flat(out)), x)])
    for expected, actual in zip(*results, strict=True):
        close(actual, expected)


@needs_interpreter
@names
def test_compile_for_a_gpu(name):
    layer, x = next(layers(name))
    assert_compiles_for_a_gpu(layer, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@names
def test_compile_with_the_default_backend(name):
    for layer, x in layers(name):
        torch._dynamo.reset()
        for actual, expected in zip(flat(torch.compile(layer, fullgraph=True)(x)), flat(layer(x)), strict=True):
            close(actual, expected)


@some
def test_export_with_any_batch_and_any_number_of_children(name):
    layer, x = next(layers(name))
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("children")}
    exported = torch.export.export(layer, (x,), dynamic_shapes=(sizes,)).module()
    larger = torch.randn(6, 8, 2, 2)
    for actual, expected in zip(flat(exported(larger)), flat(layer(larger)), strict=True):
        close(actual, expected)


@names
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast(name, dtype):
    """Sums run in float32, so the error is that of rounding the inputs."""
    layer = CapsuleLinear(6, 3, 4, 5, make(name)).float()
    poses = torch.randn(2, 6, 4).to(dtype)
    half = copy.deepcopy(layer).to(dtype)
    exact = copy.deepcopy(half).double()(poses.double())
    out = half(poses.requires_grad_())
    assert out.poses.dtype == dtype
    scale = exact.poses.abs().max().item()
    close(out.poses.double(), exact.poses, 4 * torch.finfo(dtype).eps * max(1, scale))
    out.poses.float().sum().backward()
    assert poses.grad.isfinite().all()
    with torch.autocast("cpu", dtype=dtype):
        mixed = layer(poses.detach().float())
    assert mixed.poses.dtype == torch.float32
    assert (mixed.poses - layer(poses.detach().float()).poses).abs().max() <= 1e-4 * max(1, scale)


@names
def test_numbers_at_which_published_code_gives_nan(name):
    """Zero poses, votes that all agree, and poses that are very short or very long, in float32."""
    agree = [(torch.full((2, children, 4), value), True) for value in (0.0, 1.0, 1e3) for children in (1, 4)]
    random = [(torch.randn(2, 6, 4) * scale, False) for scale in (1e-12, 1e4)]
    for poses, votes_agree in (*agree, *random):
        layer, poses = CapsuleLinear(None, 3, 4, 4, make(name)).float(), poses.float().requires_grad_()
        if votes_agree:
            nn.init.constant_(layer.weight, 0.5)
        out = layer(poses)
        loss_of(flat(out) if votes_agree else [out.poses]).backward()
        gradients = [x.grad for x in (poses, *layer.parameters()) if x.grad is not None]
        assert all(x.isfinite().all() for x in (*flat(out), *gradients))


@names
def test_first_values_and_state(name):
    """Parameters and buffers are reset to their initial values, copied with the layer, and loaded from another one."""
    layer = CapsuleLinear(6, 3, 4, 5, make(name))
    torch.manual_seed(0)  # of those that are drawn
    layer.reset_parameters()
    first = {key: value.clone() for key, value in layer.state_dict().items()}
    randomize(layer)
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 6, 4)
    close(twin(x).poses, layer(x).poses)
    torch.manual_seed(0)
    layer.reset_parameters()
    for key, value in layer.state_dict().items():
        close(value, first[key])
    assert not torch.allclose(layer.weight, twin.weight)
    layer.load_state_dict(twin.state_dict())
    close(layer(x).poses, twin(x).poses)
    assert "iterations" in repr(layer.routing) or not layer.routing.iterative


@names
def test_meta_tensors_and_materialized_ones(name):
    with torch.device("meta"):
        layer = CapsuleConv1d(2, 3, 4, 5, 3, make(name))
        assert layer(torch.randn(2, 2, 5, 4)).poses.shape == (2, 3, 3, 5)
    layer.to_empty(device="cpu").reset_parameters()
    assert all(x.isfinite().all() for x in flat(layer(torch.randn(2, 2, 5, 4))))


@names
def test_second_derivatives_of_the_reference(name):
    layer = randomize(CapsuleLinear(3, 2, 2, 2, make(name, 2)))
    x = torch.randn(1, 3, 2, requires_grad=True)
    with use_backend("tiled"), pytest.raises(RuntimeError, match="reference"):
        torch.autograd.grad(layer(x).poses.square().sum(), x, create_graph=True)
    with use_backend("reference"):
        assert gradgradcheck(lambda x: layer(x).poses, x, fast_mode=True)


def test_every_algorithm_stands_where_people_look_for_it():
    """The exports, the tables of docs/algorithms.md, and the entries that bring the tests."""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    entries = {type(entry.make()) for entry in ALGORITHMS.values()}
    for name in list_routings():
        algorithm = getattr(torchcaps.routing, name, None)
        if algorithm is None:
            assert not any(x.__name__ == name for x in entries), f"{name} is missing in torchcaps.routing"
            continue  # of a test
        rows = [row for row in page.splitlines() if row.startswith("| `") and f"`{name}" in row.split("|")[1]]
        missing = {
            "torchcaps.__all__": name not in torchcaps.__all__,
            "the three tables of docs/algorithms.md": len(rows) < 3,
            "tests/helpers/algorithms.py": algorithm not in entries and not algorithm.needs_poses,
        }
        assert not any(missing.values()), f"{name} is missing in {[place for place, is_so in missing.items() if is_so]}"


def test_the_cost_of_children_in_half_precision():
    """It is summed in float32, whether there are gates or not."""
    layer = CapsuleLinear(2000, 3, 4, 4, HeinsenRouting(1)).to(torch.bfloat16)
    nn.init.uniform_(layer.routing.beta_ignore, 0.1, 0.5)
    poses = torch.randn(1, 2000, 4, dtype=torch.bfloat16)
    present = torch.ones(1, 2000, dtype=torch.bool)
    scores = layer(poses).scores, layer(Capsules(poses, present)).scores
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-2)


def test_betas_are_added_in_float32():
    layer = CapsuleLinear(1, 2, 4, 4, HeinsenRouting(1)).to(torch.bfloat16)
    nn.init.constant_(layer.routing.beta_use, 256)
    nn.init.constant_(layer.routing.beta_ignore, 1)
    scores = layer(torch.randn(1, 1, 4, dtype=torch.bfloat16)).scores
    close(scores.double(), [[127.5, 127.5]])  # 256 / 2 of the half that is used, minus 1 / 2 of the other
