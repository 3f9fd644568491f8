"""Slot attention and Heinsen's vector routing, whose votes are the poses of the children: against oracles in plain
loops, the laws, gradients, compiling and export."""

import math

import oracles
import pytest
import torch
import torch.nn.functional as F
from algorithms import randomize
from graphs import assert_compiles_for_a_gpu, needs_interpreter
from problems import BACKENDS
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from torchcaps import (
    CapsuleLinear,
    Capsules,
    CapsuleShared,
    HeinsenVectorRouting,
    SelfRouting,
    SlotAttention,
    testing,
)
from torchcaps.explain.recording import record
from torchcaps.explain.shares import shares_of
from torchcaps.ops.tiled import blocks

ROUTINGS = {
    "slots": SlotAttention(start="learned"),
    "slots, large eps": SlotAttention(2, start="learned", eps=0.01),
    "vectors": HeinsenVectorRouting(),
}
names = pytest.mark.parametrize("name", ROUTINGS)
# (batch, children, parents, pose, parents' pose if the routing transforms, each child its own parameters, with scores)
CASES = [
    (2, 5, 3, 4, 6, True, True),
    (3, 6, 2, 3, 1, False, True),
    (2, 1, 3, 4, 5, True, False),
    (2, 4, 1, (2, 2), (2, 3), False, False),
    (1, 7, 4, 2, 3, False, True),
]


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def layer_of(name, children=None, parents=3, pose=4, out_pose=5) -> CapsuleShared:
    routing = ROUTINGS[name]
    return randomize(CapsuleShared(children, parents, pose, routing, out_pose if routing.transforms else None))


def expected_of(layer: CapsuleShared, poses: Tensor, scores: Tensor | None) -> oracles.Routed:
    routing, flat = layer.routing, poses.flatten(2).tolist()
    learned = {name: value.tolist() for name, value in routing.state_dict().items()}
    gates = None if scores is None else scores.sigmoid().tolist()
    if isinstance(routing, SlotAttention):
        slots = learned["first_slots"]
        return oracles.slot_attention(flat, slots, learned, routing.iterations, routing.eps, gates=gates)
    sizes = routing.iterations, layer.out_capsules
    return oracles.heinsen_vector_routing(flat, learned, *sizes, gates=gates)


@names
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(name, case, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 12)  # several blocks even for few children
    batch, children, parents, pose, out_pose, own, scored = case
    layer = layer_of(name, children if own else None, parents, pose, out_pose)
    poses, scores = torch.randn(batch, children, *layer.in_pose), None
    if scored:
        scores = torch.randn(batch, children)
        scores[:, 0], scores[0, 1] = -math.inf, math.inf
    expected = expected_of(layer, poses, scores)
    for backend in BACKENDS:
        layer.backend = backend
        found = layer(Capsules(poses, scores), return_coefficients=True)
        assert_close(found.poses.flatten(2), torch.tensor(expected["poses"]), rtol=0, atol=1e-10)
        assert_close(found.coefficients, torch.tensor(expected["coefficients"]), rtol=0, atol=1e-10)
        assert found.scores is None


@names
def test_laws(name, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 12)  # several blocks even for few children
    if name.startswith("slots"):  # the last iteration alone gives a learned start no gradient
        monkeypatch.setattr(testing, "assert_all_parameters_learn", lambda routing: None)
    testing.assert_routing_laws(ROUTINGS[name])


def test_all_parameters_of_slots_that_are_drawn_learn():
    for gradient in ("unrolled", "last"):
        layer = randomize(CapsuleShared(None, 3, 4, SlotAttention(gradient=gradient)))
        layer(torch.randn(2, 5, 4)).poses.sin().sum().backward()
        without = {name for name, x in layer.named_parameters() if x.grad is None or not x.grad.any()}
        assert without == (set() if gradient == "unrolled" else {"routing.first_mean", "routing.first_log_deviation"})


def test_first_values_of_vectors_that_are_drawn():
    """As in the author's code: a weight of a product with a vector is smaller, the more entries the vector has."""
    d, h = 100, 64
    routing = CapsuleShared(50, 40, d, HeinsenVectorRouting(), h).routing
    expected = {
        "activation_weight": 2 / d**0.5,
        "vote_scale": 1,
        "vote_weight": 2 / d**0.5,
        "prediction_weight": 1 / h**0.5,
        "prediction_scale": 1,
        "similarity_weight": 1 / d**0.5,
        "beta_use": 1,
        "beta_ignore": 1,
    }
    for name, parameter in routing.named_parameters():
        assert parameter.std().item() == pytest.approx(expected.get(name, 0), rel=0.1), name


@pytest.mark.parametrize(("name", "children"), [("slots", None), ("vectors", None), ("vectors", 4)])
@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients(name, children, fast_mode, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 12)
    layer = layer_of(name, children, 2, 3, 2)
    poses, scores = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def parents(poses, scores, *values):
        state = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(layer, state, (Capsules(poses, scores),)).poses

    layer.backend = "tiled"  # the laws compare it with the others
    assert gradcheck(parents, (poses, scores, *parameters.values()), fast_mode=fast_mode)


@names
def test_half_precision_and_autocast(name):
    torch.set_default_dtype(torch.float32)
    layer, poses = layer_of(name), torch.randn(2, 6, 4)
    expected = layer(poses).poses
    for dtype in (torch.bfloat16, torch.float16):
        assert_close(layer(poses.to(dtype)).poses.float(), expected, atol=0.1, rtol=0.1)
        found = layer.to(dtype)(poses.to(dtype)).poses
        assert found.dtype == dtype
        assert found.isfinite().all()
        layer.float()
    expected = layer(poses).poses
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(layer(poses).poses.float(), expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    "name", [name if name == "vectors" else pytest.param(name, marks=pytest.mark.slow) for name in ROUTINGS]
)
def test_compile_and_export(name):
    layer, poses = layer_of(name), torch.randn(2, 6, 4, requires_grad=True)
    torch._dynamo.reset()
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out = run(poses).poses
        results.append((out, torch.autograd.grad(out.sin().sum(), poses)[0]))
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected)
    program = torch.export.export(layer, (poses.detach(),))
    assert_close(program.module()(poses.detach()).poses, results[0][0])


@needs_interpreter
@names
def test_compile_for_a_gpu(name):
    assert_compiles_for_a_gpu(layer_of(name), torch.randn(2, 6, 4))


@names
def test_uniform_coefficients(name):
    layer, poses = layer_of(name), torch.randn(2, 6, 4)
    with layer.routing.uniform():
        found = layer(poses, return_coefficients=True)
    assert_close(found.coefficients, torch.full((2, 6, 3), 1 / 3))
    assert not torch.allclose(found.poses, layer(poses).poses)
    # Everything else stays: the same as with agreements that are zero.
    routing = layer.routing
    if isinstance(routing, SlotAttention):
        nn.init.zeros_(routing.query.weight)
    else:
        nn.init.zeros_(routing.similarity_weight)
        nn.init.zeros_(routing.similarity_bias)
    assert_close(layer(poses).poses, found.poses)


@pytest.mark.parametrize("routing", [SlotAttention(), HeinsenVectorRouting()], ids=str)
def test_any_number_of_parents(routing):
    layer = CapsuleShared(None, None, 4, routing)
    for parents in (1, 2, 5):
        found = layer(torch.randn(2, 6, 4), out_capsules=parents).poses
        assert found.shape == (2, parents, 4)
        assert parents == 1 or (found[:, 0] - found[:, 1]).abs().max() > 0.01  # something tells them apart
    found.sin().sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in layer.parameters())


def test_the_order_of_any_number_of_parents():
    """Parent 0 has the offset -1 and the last one +1, times what is learned to tell them apart."""
    layer = CapsuleShared(None, None, 4, HeinsenVectorRouting(1))
    routing = layer.routing
    nn.init.normal_(routing.vote_bias)
    for name, parameter in routing.named_parameters():
        if name not in ("vote_bias", "symmetry_breaking"):
            nn.init.zeros_(parameter)
    nn.init.ones_(routing.beta_use.bias)
    for parents, offsets in ((1, [-1]), (2, [-1, 1]), (3, [-1, 0, 1])):
        # Each child is active by 1/2, and used by 1/parents: the factors of each parent sum to 1.
        found = layer(torch.randn(2, 2 * parents, 4), out_capsules=parents).poses
        expected = routing.vote_bias + torch.tensor(offsets).unsqueeze(1) * routing.symmetry_breaking
        assert_close(found, F.layer_norm(expected, (4,)).expand(2, -1, -1))


@pytest.mark.parametrize("children", [None, 6])
def test_a_child_that_no_parent_may_use(children):
    """The published code of vector routing (github.com/glassroom/heinsen_routing) gives NaN here."""
    layer = layer_of("vectors", children)
    poses = torch.randn(2, 6, 4, requires_grad=True)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 2] = False
    mask[1] = False  # nothing at all
    out = layer(Capsules(poses, mask)).poses
    assert out.isfinite().all()
    out.sin().sum().backward()
    assert poses.grad.isfinite().all()
    assert not poses.grad[0, 2].any()


@names
def test_an_empty_batch(name):
    layer = layer_of(name)
    assert layer(Capsules(torch.randn(0, 6, 4), torch.randn(0, 6))).poses.shape == (0, 3, *layer.out_pose)


def test_explaining_a_network_of_poses_as_votes():
    layer, poses = layer_of("vectors"), torch.randn(1, 6, 4)
    (run,) = record(layer, poses)[1]
    shares = shares_of(run)
    assert_close(shares.table.sum(1), torch.ones(1, 3))
    # phi from the sums: without one child they change by phi times its pose.
    votes, phi = run.last.votes, run.last.votes.factors()
    total, mass = votes.net_sum(*votes._net)
    assert_close(torch.einsum("bij,bid->bjd", phi, poses), total)
    assert_close(phi.sum(1), mass)
    amounts = phi.abs() * poses.norm(dim=-1, keepdim=True)
    assert_close(shares.table, amounts / amounts.sum(1, keepdim=True))


def test_nothing_is_stored_for_each_child_and_parent(monkeypatch):
    """The largest tensor that the backward pass keeps has the size of the children."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(blocks, "BLOCK", 512)
    for routing in (HeinsenVectorRouting(), SlotAttention()):
        layer, poses = CapsuleShared(None, 64, 8, routing), torch.randn(1, 500, 8, requires_grad=True)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            layer(poses).poses.sum().backward()
        assert max(kept) <= 64 * 64 * 3 < 500 * 64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CapsuleLinear(4, 3, 2, 2, SlotAttention()), "SlotAttention takes the poses.*CapsuleShared"),
        (lambda: CapsuleShared(4, 3, 2, SlotAttention(), out_pose=3), "SlotAttention.*out_pose=3.*leave out_pose out"),
        (lambda: CapsuleShared(4, 3, (2, 2), HeinsenVectorRouting(), out_pose=4), "rows"),
        (lambda: CapsuleShared(4, None, 2, SlotAttention())(torch.randn(1, 4, 2)), "out_capsules=None.*number"),
        (
            lambda: CapsuleShared(4, 3, 2, SlotAttention())(torch.randn(1, 4, 2), out_capsules=2),
            "out_capsules=3.*cannot change",
        ),
        (lambda: CapsuleShared(4, 3, 2, SlotAttention())(torch.randn(1, 5, 2)), "in_capsules=4, got 5"),
        (lambda: CapsuleShared(4, 3, 2, SlotAttention())(torch.randn(1, 4, 3)), r"poses of shape \(batch, 4, 2\)"),
        (lambda: CapsuleShared(4, None, 2, SlotAttention(start="learned")), "start='learned' needs a number of slots"),
        (lambda: CapsuleShared(4, 3, 2, SelfRouting())(torch.randn(1, 4, 2)), "share the weights.*in_capsules=None"),
        (lambda: SlotAttention()(torch.randn(1, 4, 3, 2)), "takes the poses.*CapsuleShared"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises((ValueError, RuntimeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)
