"""Layers with any number of parents: as many as asked for, or as many as children."""

import doctest
import math
from collections.abc import Callable

import algorithms
import oracles
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleLinear,
    Capsules,
    CapsuleStack,
    DynamicRouting,
    Equilibrium,
    HeinsenRouting,
    InvertedAttentionRouting,
    Routing,
)

ROUTINGS: dict[str, Callable[..., Routing]] = algorithms.ROUTINGS | {
    "dynamic_random": lambda: DynamicRouting(start="random"),
    "dynamic_learned": lambda: DynamicRouting(start="learned"),
    "dynamic_over_children_learned": lambda: DynamicRouting(softmax="children", start="learned"),
    "inverted_attention_random": lambda: InvertedAttentionRouting(start="random"),
    "inverted_attention_learned": lambda: InvertedAttentionRouting(start="learned"),
}
routings = pytest.mark.parametrize("name", ROUTINGS)
backends = pytest.mark.parametrize("backend", ["reference", "tiled"])
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def layer_of(routing: Routing, children: int | None = None, **options) -> CapsuleLinear:
    """As after some training: no parameter is zero, none is like another."""
    layer = CapsuleLinear(children, None, (2, 3), (2, 2), routing, bias=True, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def votes_of(layer: CapsuleLinear, poses: Tensor, parents: int) -> Tensor:
    """As the author's code has them: one weight for all parents, and a line of offsets from -1 to 1."""
    offsets = torch.linspace(-1, 1, parents)[:, None, None] * layer.symmetry_breaking
    return torch.einsum("bird,idh->birh", poses, layer.weight[:, 0].expand(poses.shape[1], -1, -1)).unsqueeze(2) + (
        layer.bias + offsets
    )


def evidence(out: Capsules, leaves: list[Tensor]) -> list[Tensor]:
    """What came out, and all gradients of a function of it in which every number counts."""
    results = [x for x in out if x is not None]
    gradients = torch.autograd.grad(algorithms.loss_of(results), leaves, allow_unused=True, materialize_grads=True)
    return [*results, *gradients]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert_close(f, e, **EXACT)


@backends
@routings
@pytest.mark.parametrize("children", [None, 5])
def test_votes_of_all_parents(name, backend, children):
    layer = layer_of(ROUTINGS[name](), children, backend=backend)
    poses, scores = torch.randn(2, 5, 2, 3, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    leaves = [poses, scores, *layer.parameters()]
    for asked, parents in ((None, 5), (1, 1), (2, 2), (7, 7)):
        results = []
        for run in (
            lambda asked=asked: layer(Capsules(poses, scores), out_capsules=asked, return_coefficients=True),
            lambda parents=parents: layer.routing(votes_of(layer, poses, parents), scores, return_coefficients=True),
        ):
            torch.manual_seed(1)  # for random starts
            results.append(evidence(run(), leaves))
        assert results[0][0].shape == (2, parents, 2, 2)
        assert_same(*results)


@backends
@pytest.mark.parametrize("parents", [1, 4])
def test_heinsens_algorithm_in_plain_loops(parents, backend):
    layer = layer_of(HeinsenRouting(3), backend=backend)
    poses, scores = torch.randn(2, 5, 2, 3), torch.randn(2, 5)
    offsets = [2 * j / (parents - 1) - 1 for j in range(parents)] if parents > 1 else [-1.0]
    weight = layer.weight.expand(-1, parents, -1, -1).tolist()
    bias = [[(layer.bias[0, 0] + offset * layer.symmetry_breaking).tolist() for offset in offsets]]
    betas = layer.routing.beta_use.tolist(), layer.routing.beta_ignore.tolist()
    expected = oracles.heinsen_routing(
        oracles.votes_from_poses(poses.tolist(), weight, bias), scores.tolist(), *betas, iterations=3
    )
    out = layer(Capsules(poses, scores), out_capsules=parents)
    for field in ("poses", "scores", "variances"):
        found = getattr(out, field)
        assert_close(found.flatten(2) if found.dim() > 2 else found, torch.tensor(expected[field]), **EXACT)


@backends
@routings
def test_padding(name, backend):
    """It changes nothing if a number of parents is asked for. Where they are as many as children, it counts as one."""
    layer = layer_of(ROUTINGS[name](), backend=backend)
    poses, scores = torch.randn(2, 4, 2, 3), torch.randn(2, 4)
    padding = 1e4 * torch.randn(2, 3, 2, 3), torch.full((2, 3), -math.inf)
    padded = [torch.cat(x, 1).requires_grad_() for x in zip(padding, (poses, scores), strict=True)]
    alone = [x.requires_grad_() for x in (poses, scores)]
    parameters = list(layer.parameters())
    for asked, without in ((5, 5), (None, 7)):
        torch.manual_seed(1)
        expected = evidence(layer(Capsules(*alone), out_capsules=without), [*parameters, *alone])
        torch.manual_seed(1)
        *found, of_poses, of_scores = evidence(layer(Capsules(*padded), out_capsules=asked), [*parameters, *padded])
        assert not of_poses[:, :3].any()
        assert not of_scores[:, :3].any()
        assert_same([*found, of_poses[:, 3:], of_scores[:, 3:]], expected)


@backends
@routings
def test_parents_are_told_apart_as_they_start(name, backend):
    """They would not be without their offsets, nor would these learn to, of a loss that makes no difference."""
    layer = CapsuleLinear(None, None, 3, 4, ROUTINGS[name](), backend=backend)
    x = torch.randn(2, 5, 3)
    for told_apart in (True, False):
        out = layer(x)
        (gradient,) = torch.autograd.grad(out.poses.pow(3).sum(), layer.symmetry_breaking)
        assert torch.allclose(out.poses, out.poses[:, :1]) != told_apart
        assert (gradient.abs().max() > 1e-6) == told_apart
        if "random" in name:
            return  # which tells them apart as well
        nn.init.zeros_(layer.symmetry_breaking)


def test_types_on_a_grid():
    """Children that share weights per type, as if each had its own."""
    layer = layer_of(HeinsenRouting(), children=2, share_positions=True)
    own = layer_of(HeinsenRouting(), children=12)
    for name, parameter in layer.named_parameters():  # a row per type, but for the offset of the parents
        of_each = parameter if name == "symmetry_breaking" else parameter.repeat_interleave(6, 0)
        own.get_parameter(name).data = of_each.data
    grid = torch.randn(3, 2, 2, 3, 2, 3)
    for asked, parents in ((None, 12), (4, 4)):
        out = layer(grid, out_capsules=asked)
        assert out.poses.shape == (3, parents, 2, 2)
        assert_same(list(out[:3]), list(own(grid.flatten(1, 3), out_capsules=asked)[:3]))


@pytest.mark.parametrize("schedule", ["sequential", "concurrent", Equilibrium()], ids=["s", "c", "e"])
def test_a_stack_of_them(schedule):
    """As many capsules in every layer as there are children, and a fixed number at the end."""
    layers = [CapsuleLinear(None, parents, 3, 3, HeinsenRouting(2), bias=True) for parents in (None, None, 4)]
    stack = CapsuleStack(*layers, schedule=schedule)
    for children in (1, 2, 6):
        out = stack(torch.randn(2, children, 3))
        assert out.poses.shape == (2, 4, 3)
        out.poses.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in stack.parameters())
        layer_of_parents = [trace.parents.poses.shape[1] for trace in stack.trace(torch.randn(2, children, 3))]
        assert layer_of_parents == [children, children, 4]


def test_a_number_of_parents_that_is_none():
    layer = layer_of(HeinsenRouting())
    for asked in (0, -2):
        with pytest.raises(ValueError, match=f"out_capsules must be at least 1, or None .*, got {asked}"):
            layer(torch.randn(2, 5, 2, 3), out_capsules=asked)


def test_the_example_of_the_documentation():
    (example,) = doctest.DocTestFinder(recurse=False).find(CapsuleLinear, "CapsuleLinear")
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
