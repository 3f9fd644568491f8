"""Uniform coefficients on the same weights: each algorithm's own step without an agreement, in every schedule."""

import copy
import math
import pickle

import pytest
import torch
from algorithms import ALGORITHMS, make, randomize
from problems import BACKENDS
from torch import Tensor
from torch.nn.functional import avg_pool2d
from torch.testing import assert_close

from torchcaps import (
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    CapsuleStack,
    DynamicRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RoutingPool2d,
    VectorNormRouting,
)
from torchcaps.ops import WeightedVotes
from torchcaps.routing import Routing


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def layer_of(routing: Routing, children: int = 5, parents: int = 3, pose: int = 4) -> CapsuleLinear:
    layer = CapsuleLinear(children, parents, pose, pose, routing, bias=True)
    randomize(layer)
    return layer


def children_of(layer: CapsuleLinear, batch: int = 2) -> Capsules:
    scores = torch.randn(batch, layer.in_capsules)
    scores[0, 0] = -math.inf
    return Capsules(torch.randn(batch, layer.in_capsules, *layer.in_pose), scores)


def uniform_step(layer: CapsuleLinear | CapsuleConv2d, children: Capsules | Tensor, t: int) -> Capsules:
    """Return the parents of the algorithm's own step without an agreement."""
    votes = WeightedVotes(layer.votes(children), None, layer.routing.softmax, layer.routing.leaky)
    return layer.routing.step(votes, None, t)[0]


def same(found: Capsules, expected: Capsules) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if isinstance(a, Tensor):
            assert_close(a, b)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_its_own_step_from_uniform_coefficients(name):
    layer = layer_of(make(name, 3))
    routing, children = layer.routing, children_of(layer)
    for backend in BACKENDS:
        layer.backend = backend
        before = layer(children, return_coefficients=True)
        with routing.uniform():
            found = layer(children, return_coefficients=True)
        expected = uniform_step(layer, children, routing.steps - 1)
        same(found._replace(coefficients=None), expected)
        assert found.poses.allclose(before.poses, rtol=1e-3) == name.startswith("uniform")

        gates = children.scores.sigmoid().unsqueeze(-1).expand(-1, -1, 3)
        even = torch.full_like(gates, 1 / (3 + routing.leaky))
        assert_close(found.coefficients, even if routing.softmax == "parents" else gates / gates.sum(1, keepdim=True))
        same(layer(children, return_coefficients=True), before)


@pytest.mark.parametrize("name", ["dynamic", "em", "self_routing"])
def test_convolutions(name):
    layer = randomize(CapsuleConv2d(2, 3, 4, 4, 3, make(name), padding=1))
    children = torch.randn(2, 2, 5, 5, 4)
    with layer.routing.uniform():
        found = layer(children, return_coefficients=True)
    expected = uniform_step(layer, children, layer.routing.steps - 1)
    same(found._replace(coefficients=None), expected)
    assert_close(found.coefficients, torch.full_like(found.coefficients, 1 / 3))


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
@pytest.mark.parametrize("routing", [DynamicRouting(3), HeinsenRouting(3), InvertedAttentionRouting(2)], ids=repr)
def test_stacks(routing, schedule):
    stack = CapsuleStack(layer_of(routing), layer_of(routing, 3, 2), schedule=schedule)
    children = children_of(stack.layers[0])
    with stack.layers[0].routing.uniform(), stack.layers[1].routing.uniform():
        found = stack(children, return_coefficients=True)
        expected = stack.layers[1](stack.layers[0](children), return_coefficients=True)
    same(found, expected)


@pytest.mark.parametrize("window", [{}, {"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}], ids=str)
@pytest.mark.parametrize("options", [{"sharpness": 5.0}, {"routing": DynamicRouting(2, softmax="children")}], ids=str)
def test_a_pool_averages(window, options):
    torch.set_default_dtype(torch.float32)
    pool, x = RoutingPool2d(4, **window, **options), torch.randn(2, 8, 6, 6)
    before = pool(x)
    with pool.routing.uniform():
        found = pool(x)
        _, coefficients = pool(x, return_coefficients=True)
    mean = avg_pool2d(x, **(window or {"kernel_size": 6}), count_include_pad=False)
    if "routing" in options:  # dynamic routing squashes the average
        groups = mean.unflatten(1, (2, 4))
        size = groups.norm(dim=2, keepdim=True)
        mean = (groups * size / (1 + size**2)).flatten(1, 2)
    assert_close(found, mean)
    places = (4, 5) if window else (2, 3)
    assert_close(coefficients.sum(places), torch.ones(coefficients.shape[: places[0]]))
    held = coefficients[coefficients > 0] if "padding" in window else coefficients
    assert_close(held.min(), torch.tensor(1 / 36 if not window else 1 / 4 if window["kernel_size"] == 2 else 1 / 9))
    assert pool(x).equal(before)
    assert not before.allclose(found, rtol=1e-3)


def test_the_context_ends():
    routing = VectorNormRouting()
    with routing.uniform():
        with routing.uniform():
            assert routing.is_uniform
        assert routing.is_uniform
    assert not routing.is_uniform
    with pytest.raises(RuntimeError, match="stop"), routing.uniform():
        raise RuntimeError("stop")
    assert not routing.is_uniform


def test_copies_are_not_in_the_context():
    layer = layer_of(DynamicRouting())
    with layer.routing.uniform():
        copies = copy.copy(layer.routing), copy.deepcopy(layer.routing), pickle.loads(pickle.dumps(layer.routing))
        assert not any(x.is_uniform for x in copies)
        assert not copy.deepcopy(layer).routing.is_uniform
        assert not layer.routing.for_layer(layer.layer_shape).is_uniform
        assert not layer.routing.with_values().is_uniform
        assert layer.routing.is_uniform


def test_gradients_are_those_of_the_step():
    layer = layer_of(DynamicRouting(3))
    children = torch.randn(2, 5, 4, requires_grad=True)
    with layer.routing.uniform():
        (found,) = torch.autograd.grad(layer(children).poses.square().sum(), children)
    (expected,) = torch.autograd.grad(uniform_step(layer, children, 2).poses.square().sum(), children)
    assert_close(found, expected)
