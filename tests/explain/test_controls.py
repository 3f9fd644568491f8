"""Controls: accuracy with and without routing, fresh weights, dead capsules; the network stays as it was."""

from itertools import chain
from typing import Any

import pytest
import torch
from networks import Network
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleConv2d,
    CapsuleFC,
    CapsuleLinear,
    Capsules,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RoutingPool2d,
    create_model,
)
from torchcaps.explain.controls import uniform_coefficients, with_new_weights
from torchcaps.explain.dead import DeadCapsules, dead_capsules
from torchcaps.measures.accuracy import is_right
from torchcaps.measures.predicting import predict


def around(layer: nn.Module, children: Capsules | Tensor) -> Network:
    """A network around a layer; an input is the index of its children."""

    def route(net: Network, index: Tensor) -> Any:
        if isinstance(children, Tensor):
            return net.layer(children[index])
        return net.layer(Capsules(children.poses[index], children.scores[index]))

    return Network(route, layer=layer)


def state_of(network: nn.Module) -> list[Any]:
    """All that a look at a network could leave behind."""
    found: list[Any] = []
    for module in network.modules():
        found += [module.training, len(module._forward_hooks), len(module._forward_pre_hooks), set(vars(module))]
        found += [list(getattr(module, "_watchers", [])), getattr(module, "is_uniform", False)]
    return found + [x.clone() for x in chain(network.parameters(), network.buffers())]


def assert_same_state(before: list[Any], network: nn.Module) -> None:
    after = state_of(network)
    for a, b in zip(before, after, strict=True):
        assert a.equal(b) if isinstance(a, Tensor) else a == b


# Which answers are right


def test_one_label_must_have_the_highest_score():
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5]])
    assert is_right(scores, torch.tensor([1, 0, 0])).tolist() == [True, True, False]


def test_several_labels_must_have_the_highest_scores():
    scores = torch.tensor([[0.9, 0.1, 0.8], [0.9, 0.8, 0.1], [0.2, 0.9, 0.1], [0.5, 0.5, 0.1]])
    labels = torch.tensor([[1.0, 0, 1], [1, 0, 1], [0, 1, 0], [1, 0, 0]])
    assert is_right(scores, labels).tolist() == [True, False, True, False]


def test_nothing_is_right_by_chance():
    nothing = torch.zeros(2, 3)
    assert not is_right(nothing, torch.tensor([0, 1])).any()
    assert not is_right(nothing / 0, torch.tensor([0, 1])).any()
    for score in (torch.inf, -torch.inf):
        assert not is_right(torch.full((2, 3), score), torch.tensor([0, 1])).any()
    assert not is_right(torch.rand(2, 3), torch.zeros(2, 3)).any()


def test_a_class_may_be_ruled_out():
    scores = torch.tensor([[1.0, -torch.inf, 0], [-torch.inf, 0, 1]])
    assert is_right(scores, torch.tensor([0, 0])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("scores", "fits"),
    [
        ([0.0, 1.0], True),
        ([-torch.inf, 1.0], True),
        ([torch.nan, 1.0], False),
        ([torch.inf, 1.0], False),
        ([-torch.inf, -torch.inf], False),
    ],
)
def test_scores_that_become_predictions_are_finite(scores, fits):
    network = Network(lambda self, x: torch.tensor([[0.0, 0.0], scores]))
    if fits:
        assert predict(network, torch.zeros(2, 1)).evidence[1].tolist() == scores
    else:
        with pytest.raises(ValueError, match="^the network gives scores that are NaN or infinite: its weights or its"):
            predict(network, torch.zeros(2, 1))


def test_labels_that_are_no_classes():
    with pytest.raises(ValueError, match="labels must be from 0 to 2, as there are 3 classes, got 3"):
        is_right(torch.rand(2, 3), torch.tensor([3, 0]))
    with pytest.raises(TypeError, match=r"labels must be class indices, integers, got torch.float32"):
        is_right(torch.rand(2, 3), torch.tensor([0.9, 0.0]))


def test_labels_of_another_shape():
    with pytest.raises(ValueError, match=r"\(batch,\) = \(3,\) or \(batch, classes\) = \(3, 2\), got"):
        is_right(torch.rand(3, 2), torch.zeros(2))


# Uniform coefficients


def test_all_layers_of_a_network_are_uniform():
    network = create_model("pooling_cnn", in_channels=1, sharpness=20.0).eval()
    images = torch.rand(4, 1, 20, 20)
    average = create_model("pooling_cnn", in_channels=1, pooling="average").eval()
    average.load_state_dict(network.state_dict())
    before = network(images).scores
    with uniform_coefficients(network):
        assert_close(network(images).scores, average(images).scores)
    assert network(images).scores.equal(before)
    assert not before.allclose(average(images).scores, rtol=1e-3)

    stack = CapsuleStack(CapsuleLinear(4, 3, 2, 2, EMRouting(2)), CapsuleLinear(3, 2, 2, 2, EMRouting(2)))
    with uniform_coefficients(stack):
        assert [layer.routing.is_uniform for layer in stack.layers] == [True, True]
    assert [layer.routing.is_uniform for layer in stack.layers] == [False, False]
    with pytest.raises(ValueError, match="Linear has no layer that routes"), uniform_coefficients(nn.Linear(2, 2)):
        pass


def test_compiled_networks_are_uniform_too():
    layer = CapsuleLinear(5, 3, 4, 4, DynamicRouting(3))
    children = torch.randn(2, 5, 4)
    compiled = torch.compile(layer, backend="eager")
    before = compiled(children).poses
    with uniform_coefficients(compiled):
        found = compiled(children).poses
    with layer.routing.uniform():
        assert_close(found, layer(children).poses)
    assert_close(compiled(children).poses, before)
    assert not found.allclose(before, rtol=1e-3)


# Fresh weights


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("capsnet_digits", [torch.rand(2, 1, 8, 8)]),
        ("pooling_resnet_small", [torch.rand(2, 3, 32, 32)]),
        ("heinsen_sst", [torch.rand(2, 3, 37, 1280)]),
    ],
)
def test_fresh_weights(model, inputs):
    network = create_model(model).eval()
    state = torch.get_rng_state()
    drawn = with_new_weights(network, seed=3)
    assert torch.get_rng_state().equal(state)
    own, others = (dict(x.state_dict()) for x in (network, drawn))
    assert own.keys() == others.keys()
    weights = [name for name in own if name.endswith("weight") and own[name].std() > 0]
    assert weights
    assert not any(own[name].equal(others[name]) for name in weights)
    assert with_new_weights(network, seed=3)(*inputs).evidence.equal(drawn(*inputs).evidence)
    assert not drawn.training


def test_weights_that_no_module_draws():
    with pytest.raises(ValueError, match="1, a ParameterList, has no reset_parameters"):
        with_new_weights(nn.Sequential(nn.Linear(2, 2), nn.ParameterList([torch.ones(1)])))


# Dead capsules


def test_dead_capsules_by_hand():
    poses, scores = torch.randn(6, 8, 4), torch.zeros(6, 8)
    poses[:, 1] = poses[0, 1]  # neither changes: dead
    poses[:, 2] = poses[0, 2]
    scores[:, 2] = 7.5
    scores[5, 2] = 2.5  # the score changes, in the second batch
    scores[:, 3] = -torch.inf  # never there: dead
    scores[:, 4] = 40.0  # always there, and the pose changes
    scores[:5, 5] = -torch.inf  # there once, in the second batch
    scores[:, 6] = -9.5  # less than 1 in 10,000: dead
    scores[:, 7] = -9.0  # more than that
    layer = CapsuleLinear(8, 2, 4, 4, DynamicRouting())
    found = dead_capsules(around(layer, Capsules(poses, scores)), torch.arange(6).split(4))
    assert found == {"layer": DeadCapsules(3 / 8, 0.0)}
    layer.weight.data[:, 1] = 0  # the second parent gets votes of zero
    assert dead_capsules(around(layer, Capsules(poses, scores)), [torch.arange(6)])["layer"].parents == 0.5


def test_poses_without_scores():
    poses = torch.randn(5, 4, 3)
    poses[:, 0] *= 1e-6
    poses[:, 1] = torch.tensor([3.0, 4.0, 0.0])
    poses[:, 2] = nn.functional.normalize(poses[:, 2], dim=-1)  # a length that is always 1 says nothing; a pose does
    layer = CapsuleLinear(4, 3, 3, 3, InvertedAttentionRouting(2))
    assert dead_capsules(around(layer, poses), [torch.arange(5)]) == {"layer": DeadCapsules(0.5, 0.0)}


def test_rounding_is_no_change():
    poses = torch.full((100, 2, 3), 0.1)
    poses[:, 1] += 1e-8 * torch.randn(100, 3)
    layer = CapsuleLinear(2, 2, 3, 3, DynamicRouting())
    assert dead_capsules(around(layer, poses), torch.arange(100).split(7))["layer"].children == 1


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
def test_children_in_a_stack(schedule):
    poses = torch.randn(6, 4, 5, 5, 3)
    poses[:, 0] = 0
    first = CapsuleConv2d(4, 3, 3, 3, 3, HeinsenRouting(2), padding=1, stride=2)
    second = CapsuleLinear(27, 2, 3, 3, HeinsenRouting(2))
    found = dead_capsules(around(CapsuleStack(first, second, schedule=schedule), poses), torch.arange(6).split(3))
    assert found["layer.layers.0"] == DeadCapsules(0.25, 0.0)
    assert found["layer.layers.1"] == DeadCapsules(0.0, 0.0)


def test_pools_and_other_capsule_layers():
    x = torch.randn(6, 4, 3, 3)
    x[:, 2:, 0] = 0  # three of nine places of the second of two groups
    assert dead_capsules(around(RoutingPool2d(2), x), [torch.arange(6)]) == {"layer": DeadCapsules(3 / 18, 0.0)}
    layer = CapsuleFC(3, 2, 4)
    layer.weight.data[:, :, 1] = 0
    poses = torch.randn(6, 3, 4)
    poses[:, 0] = poses[0, 0]
    assert dead_capsules(around(layer, poses), [torch.arange(6)]) == {"layer": DeadCapsules(1 / 3, 0.5)}


def test_texts_of_different_lengths():
    network = create_model("heinsen_sst", layers=2, width=4, parts=3)
    batches = [((torch.randn(4, length, 2, 4), torch.ones(4, length)), torch.zeros(4)) for length in (3, 5)]
    found = dead_capsules(network, batches)
    assert found == {"capsules.layers.0": DeadCapsules(None, 0.0), "capsules.layers.1": DeadCapsules(0.0, 0.0)}


def test_images_of_different_sizes():
    network = Network(lambda net, x: net.layer(x), layer=CapsuleConv2d(1, 2, 3, 3, 3, HeinsenRouting(2)))
    found = dead_capsules(network, [torch.randn(2, 1, side, side, 3) for side in (5, 6)])
    assert found == {"layer": DeadCapsules(None, None)}


def test_too_little_to_say():
    layer = CapsuleLinear(2, 2, 3, 3, DynamicRouting())
    with pytest.raises(ValueError, match="one input changes nothing"):
        dead_capsules(around(layer, torch.randn(1, 2, 3)), [torch.arange(1)])
    with pytest.raises(ValueError, match="Linear ran no capsule layer"):
        dead_capsules(nn.Linear(2, 2), [torch.ones(3, 2)])


def test_nothing_is_left_behind():
    stack = CapsuleStack(
        CapsuleLinear(4, 3, 2, 2, DynamicRouting()),
        CapsuleLinear(3, 2, 2, 2, DynamicRouting()),
        schedule="concurrent",
    )
    children = torch.randn(3, 4, 2)
    network = around(stack, children).train()
    stack.eval()

    def fail(net: Network, index: Tensor) -> None:
        net.layer(children[index])
        raise RuntimeError("stop")

    watch: Any = [].append
    with stack.layers[0].routing.watched(watch):
        before = state_of(network)
        dead_capsules(network, [torch.arange(3)])
        assert_same_state(before, network)
        network.function = fail
        with pytest.raises(RuntimeError, match="stop"):
            dead_capsules(network, [torch.arange(3)])
        with pytest.raises(RuntimeError, match="stop"), uniform_coefficients(network):
            predict(network, torch.arange(3))
        assert_same_state(before, network)
    assert network.training
    assert not stack.training
