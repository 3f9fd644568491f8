"""Stacks of capsule layers: two schedules, against the procedure written out and against each other."""

import contextlib
import itertools

import algorithms
import pytest
import torch
from torch import nn

from torchcaps import (
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    PrimaryCapsules,
    SelfRouting,
    VectorNormRouting,
    squash,
)
from torchcaps.ops import StoredVotes

# All features of a routing that a schedule must handle.
ROUTINGS = {
    "first state": lambda n: DynamicRouting(n, start="learned", learn_bias=True),
    "over children": lambda n: VectorNormRouting(n - 1, sharpness=2.0, activation=squash),
    "scores and first state": lambda n: InvertedAttentionRouting(n, activations=True, start="learned"),
    "temperature": lambda n: EMRouting(n, inverse_temperature=1.0),
    "one step": lambda n: SelfRouting(),
}


def three_layers(routing, **kw) -> CapsuleStack:
    stack = CapsuleStack(
        CapsuleConv2d(2, 3, (2, 3), (2, 3), kernel_size=2, routing=routing),
        CapsuleConv2d(3, 2, (2, 3), (2, 2), kernel_size=2, routing=routing),
        CapsuleLinear(2 * 2 * 3, 4, (2, 2), (2, 2), routing=routing),
        **kw,
    )
    for parameter in stack.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return stack


def children() -> torch.Tensor:
    return torch.randn(2, 2, 4, 5, 2, 3)


def assert_same(ours, theirs, rtol=0.0, atol=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


# Sequential and concurrent


def test_sequential_is_one_layer_after_the_other():
    stack = three_layers(DynamicRouting(3))
    x = children()
    expected = stack.layers[2](stack.layers[1](stack.layers[0](x)), return_coefficients=True)
    assert_same(stack(x).poses, expected.poses)
    assert_same(stack(x, return_coefficients=True).coefficients, expected.coefficients)


def attention_step(votes, start, **learned):
    """Run one iteration of inverted attention on stored votes, from these parents."""
    routing = InvertedAttentionRouting().with_values(**learned)
    return routing.advance(StoredVotes(votes), start, 0)[0].parents.poses


def procedure_2(stack, x, iterations):
    """Run Procedure 2 line by line on stored votes; return the poses of the last layer."""

    def route(layer, below, above):
        def attend(votes, start):
            learned = {"weight": layer.routing.weight, "bias": layer.routing.bias}
            return attention_step(votes, start, **learned)

        if isinstance(layer, CapsuleConv2d):
            rows, grid = [], [size - 1 for size in below.shape[2:4]]
            for y, z in itertools.product(*map(range, grid)):
                window = below[:, :, y : y + 2, z : z + 2]
                votes = torch.einsum("bcklrd,ckljdh->bckljrh", window, layer.weight).flatten(1, 3)
                rows.append(attend(votes, None if above is None else above[:, :, y, z].flatten(2)))
            return torch.stack(rows, dim=2).unflatten(2, grid)
        votes = torch.einsum("bird,ijdh->bijrh", below.flatten(1, -3), layer.weight)
        return attend(votes, None if above is None else above.flatten(2))

    poses = [x]
    for layer in stack.layers:
        poses.append(route(layer, poses[-1], None))
    for _ in range(iterations - 1):
        after = [
            route(layer, below, above) for layer, below, above in zip(stack.layers, poses, poses[1:], strict=False)
        ]
        poses = [x, *after]
    return poses[-1]


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_concurrent_is_procedure_2(iterations):
    stack = three_layers(InvertedAttentionRouting(iterations), schedule="concurrent")
    x = children()
    expected = procedure_2(stack, x, iterations)
    assert_same(stack(x).poses, expected)
    wanted = torch.autograd.grad(expected.square().sum(), stack.layers[0].weight)
    assert_same(torch.autograd.grad(stack(x).poses.square().sum(), stack.layers[0].weight), wanted)
    if iterations > 1:
        sequential = three_layers(InvertedAttentionRouting(iterations))
        sequential.load_state_dict(stack.state_dict())
        assert (sequential(x).poses - stack(x).poses).abs().max() > 1e-3


@pytest.mark.parametrize("name", ROUTINGS)
def test_concurrent_passes_of_every_kind_of_routing(name):
    """All passes run, and each gets its iteration."""
    stack = three_layers(ROUTINGS[name](3), schedule="concurrent")
    x = children()

    def votes_of(layer, below):
        return layer.routing.prepare(layer.votes(below))

    parents, states, below = [], [], x
    for layer in stack.layers:
        votes = votes_of(layer, below)
        last, state = layer.routing.advance(votes, layer.routing.first_state(votes), 0)
        below = last.parents
        parents.append(below)
        states.append(state)
    for t in range(1, stack.layers[0].routing.steps):
        found = [
            layer.routing.advance(votes_of(layer, below), state, t)
            for layer, below, state in zip(stack.layers, [x, *parents], states, strict=False)
        ]
        last, states = found[-1][0], [state for _, state in found]
        parents = [iteration.parents for iteration, _ in found]
    coefficients = last.votes.coefficients()
    ours = stack(x, return_coefficients=True)
    assert_same(ours.coefficients, coefficients)
    assert_same(ours.poses, parents[2].poses)
    if ours.scores is not None:
        assert_same(ours.scores, parents[2].scores)


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
@pytest.mark.parametrize("pose", [3, (2, 3)], ids=str)
def test_sequences_are_grids_of_height_1(pose, schedule):
    routing = InvertedAttentionRouting(2, activations=True)
    last = {"out_capsules": 4, "in_pose": pose, "out_pose": pose, "routing": routing}
    line, grid = (
        CapsuleStack(
            conv(2, 3, pose, pose, kernel, routing, padding=padding),
            conv(3, 2, pose, pose, kernel, routing),
            CapsuleLinear(2, **last, share_positions=True),
            schedule=schedule,
        )
        for conv, kernel, padding in ((CapsuleConv1d, 2, 1), (CapsuleConv2d, (1, 2), (0, 1)))
    )
    algorithms.randomize(line)
    for key, value in grid.named_parameters():
        value.data = line.get_parameter(key).data.reshape(value.shape)
    x, scores = torch.randn(2, 2, 5, *line.layers[0].in_pose), torch.randn(2, 2, 5)
    found, expected = line(Capsules(x, scores)), grid(Capsules(x.unsqueeze(2), scores.unsqueeze(2)))
    assert found.poses.shape == (2, 4, *line.layers[2].out_pose)
    assert_same(found, expected)


def test_sequential_calls_its_layers():
    stack = three_layers(InvertedAttentionRouting())
    called = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda module, *rest: called.append(module))
    stack(children())
    assert called == list(stack.layers)


def test_a_schedule_may_be_changed_and_is_checked():
    stack = three_layers(InvertedAttentionRouting(2))
    x = children()
    sequential = stack(x).poses
    stack.schedule = "concurrent"
    assert (stack(x).poses - sequential).abs().max() > 1e-3
    stack.layers[1].routing.iterations = 3
    with pytest.raises(ValueError, match=r"the same number of iterations, got \[2, 3\]"):
        stack(x)
    stack.schedule = "concurent"
    with pytest.raises(ValueError, match="got 'concurent'"):
        stack(x)


def test_a_random_start_is_one():
    x = children()
    stack = three_layers(InvertedAttentionRouting(1, start="random"), schedule="concurrent")
    first, second = stack(x).poses, stack(x).poses
    assert (first - second).abs().max() > 1e-3
    layer = CapsuleLinear(4, 3, 2, 2, InvertedAttentionRouting(2, start="random"), backend="reference").double()
    votes = layer.votes(torch.randn(2, 4, 2)).stored(slice(None))
    torch.manual_seed(3)
    ours = layer.routing(votes).poses
    torch.manual_seed(3)
    learned = {"weight": torch.ones(2), "bias": torch.zeros(2)}
    first = attention_step(votes, torch.randn(2, 3, 2), **learned)
    assert_same(ours, attention_step(votes, first, **learned))
    torch.set_default_dtype(torch.float32)
    assert layer(torch.randn(2, 4, 2).double()).poses.dtype == torch.float64


def test_empty_batch():
    for schedule in ("sequential", "concurrent"):
        stack = three_layers(InvertedAttentionRouting(2), schedule=schedule)
        assert stack(children()[:0]).poses.shape == (0, 4, 2, 2)


def test_scores_flow_between_layers():
    routing = InvertedAttentionRouting(2, activations=True)
    stack = three_layers(routing, schedule="concurrent")
    primary = PrimaryCapsules(1, 2, (2, 3), kernel_size=2, normalization=None, scores=True)
    images = torch.randn(2, 1, 5, 6)
    capsules = primary(images)
    assert stack(capsules).scores.shape == (2, 4)
    absent = capsules._replace(scores=capsules.scores - 20)
    assert (stack(capsules).poses - stack(absent).poses).abs().max() > 1e-3


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
def test_as_many_capsules_in_every_layer_as_there_are_children(schedule):
    """All layers but the last take any number of capsules."""
    layers = [CapsuleLinear(None, parents, 3, 3, HeinsenRouting(2), bias=True) for parents in (None, None, 4)]
    stack = CapsuleStack(*layers, schedule=schedule)
    for number in (1, 2, 6):
        out = stack(torch.randn(2, number, 3))
        assert out.poses.shape == (2, 4, 3)
        out.poses.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in stack.parameters())


def test_watchers_see_every_iteration():
    for schedule, expected in (
        ("sequential", [0, 1, 2, 0, 1, 2]),
        ("concurrent", [0, 0, 1, 1, 2]),
    ):
        stack = two_layers(InvertedAttentionRouting(3), schedule=schedule)
        x, seen = torch.randn(2, 2, 3, 3, 2, 2), []
        with contextlib.ExitStack() as watched:
            for layer in stack.layers:
                watched.enter_context(layer.routing.watched(seen.append))
            out = stack(x)
        assert [iteration.t for iteration in seen] == expected
        assert_same(seen[-1].parents.poses, out.poses)
        stack(x)
        assert len(seen) == len(expected)
        with pytest.raises(ZeroDivisionError), stack.layers[1].routing.watched(lambda _: 1 / 0):
            stack(x)
        stack(x)


def two_layers(routing, **kw) -> CapsuleStack:
    conv = CapsuleConv2d(2, 2, (2, 2), (2, 2), kernel_size=2, routing=routing)
    stack = CapsuleStack(conv, CapsuleLinear(8, 3, (2, 2), (2, 2), routing=routing), **kw)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return stack


# Bad input


def test_bad_stacks():
    attention = InvertedAttentionRouting(2)
    layer = CapsuleLinear(4, 3, 2, 2, attention)
    with pytest.raises(ValueError, match="at least one capsule layer"):
        CapsuleStack()
    with pytest.raises(TypeError, match="layers must be a CapsuleLayer, got the module Linear"):
        CapsuleStack(layer, nn.Linear(2, 2))
    last = InvertedAttentionRouting(2, gradient="last")
    with pytest.raises(ValueError, match="gradient='last' would cut off"):
        CapsuleStack(CapsuleLinear(4, 3, 2, 2, last), schedule="concurrent")


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
def test_scores_are_read_once(schedule):
    """They are checked by the first layer, not by the stack as well: the warning about them comes once."""
    layers = [CapsuleLinear(4, 4, 3, 3, DynamicRouting()) for _ in range(2)]
    with pytest.warns(UserWarning, match="as in a mask") as seen:
        CapsuleStack(*layers, schedule=schedule).eval()(Capsules(torch.randn(2, 4, 3), torch.ones(2, 4)))
    assert len(seen) == 1
