"""CapsuleLinear: any number of children and parents, children on a grid or in a sequence, and errors."""

import doctest
import math
import re

import algorithms
import pytest
import torch
from problems import BACKENDS
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    Routing,
)
from torchcaps.routing import LayerShape

EXACT = {"rtol": 1e-10, "atol": 1e-10}
backends = pytest.mark.parametrize("backend", BACKENDS)


def close(actual, expected):
    assert_close(actual, torch.as_tensor(expected), rtol=0, atol=1e-10)


def trained(*args, **options) -> CapsuleLinear:
    layer = CapsuleLinear(*args, **options)
    algorithms.randomize(layer)
    return layer


# On a grid and in a sequence


def own_weights(layer: CapsuleLinear, positions: int) -> CapsuleLinear:
    """Return a layer in which each child has its own copy of its type's weights."""
    children = layer.in_capsules * positions
    own = CapsuleLinear(
        children, layer.out_capsules, layer.in_pose, layer.out_pose, layer.routing, bias=layer.bias is not None
    )
    for key, value in own.named_parameters():
        value.data = layer.get_parameter(key).data.repeat_interleave(positions, 0)
    return own


@pytest.mark.parametrize("places", [(2, 3), (6,), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("pose", [(3, 2), ((2, 3), (2, 2))], ids=str)
def test_types_share_weights_over_positions(places, pose):
    layer = trained(2, 4, *pose, HeinsenRouting(2), bias=True, share_positions=True)
    own = own_weights(layer, math.prod(places))
    poses, scores = torch.randn(2, 2, *places, *layer.in_pose), torch.randn(2, 2, *places)
    out = layer(Capsules(poses, scores), return_coefficients=True)
    for given in (Capsules(poses, scores), Capsules(poses, scores, pose_dims=len(layer.in_pose)).flatten_grid()):
        expected = own(given, return_coefficients=True)
        assert_close(out[:4], expected[:4], **EXACT)
    assert layer(torch.randn(2, 2, 5, 1, *layer.in_pose)).poses.shape == (2, 4, *layer.out_pose)


def test_a_grid_is_flattened_types_first():
    layer = trained(12, 3, 4, 2, EMRouting(2))
    x = torch.randn(2, 2, 3, 2, 4)
    rows = [x[:, t, y, z] for t in range(2) for y in range(3) for z in range(2)]
    assert_close(layer(x), layer(torch.stack(rows, 1)), **EXACT)
    line = x.flatten(2, 3)
    assert_close(layer(line), layer(x), **EXACT)


@backends
def test_coordinate_addition(backend):
    """With zero weights, a vote holds its child's position: (row, column) in the last column, scaled to [0, 1]."""
    options = {"share_positions": True, "coordinates": True, "backend": backend}
    layer = CapsuleLinear(2, 1, (3, 4), (3, 5), EMRouting(1), **options)
    nn.init.zeros_(layer.weight)
    x = torch.randn(1, 2, 2, 4, 3, 4)
    for t, row, column in ((0, 0, 0), (0, 1, 2), (1, 1, 2), (1, 0, 3)):
        scores = torch.full((1, 2, 2, 4), -math.inf)
        scores[0, t, row, column] = 0.0  # one child
        out = layer(Capsules(x, scores)).poses[0, 0]
        close(out[:, 4], [(row + 0.5) / 2, (column + 0.5) / 4, 0.0])
        close(out[:, :4], torch.zeros(3, 4))
    nn.init.normal_(layer.weight)  # to which the place is added
    plain = CapsuleLinear(2, 1, (3, 4), (3, 5), EMRouting(1), share_positions=True)
    plain.weight.data = layer.weight.data
    placed = layer(Capsules(x, scores)).poses - plain(Capsules(x, scores)).poses
    close(placed[0, 0, :, 4], [0.25, 0.875, 0.0])
    close(placed[..., :4], torch.zeros(1, 1, 3, 4))


# Any number of parents

ROUTINGS = {
    name: (lambda name=name: algorithms.make(name))
    for name in algorithms.ALGORITHMS
    if name not in ("random", "self_routing")
} | {
    "dynamic, random start": lambda: DynamicRouting(start="random", leaky=True),
    "inverted attention, learned start": lambda: InvertedAttentionRouting(activations=True, start="learned"),
    "inverted attention, random start": lambda: InvertedAttentionRouting(start="random"),
}
routings = pytest.mark.parametrize("name", ROUTINGS)


def layer_of(routing: Routing, children: int | None = None, **options) -> CapsuleLinear:
    return trained(children, None, (2, 3), (2, 2), routing, bias=True, **options)


def evidence(out: Capsules, leaves: list[Tensor]) -> list[Tensor]:
    """Return the results, and all gradients of a loss in which every result has its own weight."""
    results = [x for x in out if isinstance(x, Tensor)]
    gradients = torch.autograd.grad(algorithms.loss_of(results), leaves, allow_unused=True, materialize_grads=True)
    return [*results, *gradients]


@routings
@pytest.mark.parametrize(
    ("children", "asked", "backend"),
    [(None, None, "reference"), (5, 7, "tiled"), (None, 1, "reference")],
)
def test_votes_of_all_parents(name, children, asked, backend):
    """The layer equals one with as many parents, whose biases differ along a line from -1 to 1."""
    layer, parents = layer_of(ROUTINGS[name](), children, backend=backend), asked or 5
    fixed = CapsuleLinear(children, parents, (2, 3), (2, 2), ROUTINGS[name](), bias=True, backend="reference").eval()
    line = torch.linspace(-1, 1, parents)[:, None, None]
    own = layer.state_dict(keep_vars=True)
    # Contiguous: the gradient of PyTorch's batch norm is wrong where running values are expanded.
    values = {
        key: own[key].expand(value.shape).contiguous() for key, value in fixed.state_dict().items() if key != "bias"
    }
    values["bias"] = layer.bias + line * layer.symmetry_breaking
    poses, scores = torch.randn(2, 5, 2, 3, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    results = []
    for run in (
        lambda: layer(Capsules(poses, scores), out_capsules=asked, return_coefficients=True),
        lambda: torch.func.functional_call(fixed, values, (Capsules(poses, scores),), {"return_coefficients": True}),
    ):
        torch.manual_seed(1)  # for random starts
        results.append(evidence(run(), [poses, scores, *layer.parameters()]))
    assert results[0][0].shape == (2, parents, 2, 2)
    assert_close(*results, **EXACT)


@pytest.mark.parametrize(("asked", "backend"), [(5, "tiled"), (None, "reference")])
def test_padding(asked, backend):
    """Padding changes nothing if the number of parents is given. Without a number, each padded child adds a parent."""
    layer = layer_of(HeinsenRouting(2), backend=backend)
    poses, scores = torch.randn(2, 4, 2, 3), torch.randn(2, 4)
    padding = 1e4 * torch.randn(2, 3, 2, 3), torch.full((2, 3), -math.inf)
    padded = [torch.cat(x, 1).requires_grad_() for x in zip(padding, (poses, scores), strict=True)]
    alone = [x.requires_grad_() for x in (poses, scores)]
    parameters = list(layer.parameters())
    expected = evidence(layer(Capsules(*alone), out_capsules=asked or 7), [*parameters, *alone])
    *found, grad_poses, grad_scores = evidence(layer(Capsules(*padded), out_capsules=asked), [*parameters, *padded])
    assert not grad_poses[:, :3].any()
    assert not grad_scores[:, :3].any()
    assert_close([*found, grad_poses[:, 3:], grad_scores[:, 3:]], expected, **EXACT)


@routings
def test_parents_are_told_apart_as_they_start(name):
    """Parents differ because of their offsets. With zero offsets they are equal, and the offsets get no gradient from a
    symmetric loss."""
    layer = CapsuleLinear(None, None, 3, 4, ROUTINGS[name]()).eval()  # a batch norm in training mode removes the scale
    assert layer.symmetry_breaking.tolist() == [[1, -1, 1, -1]]
    x = torch.randn(2, 5, 3)
    for told_apart in (True, False):
        out = layer(x)
        (gradient,) = torch.autograd.grad(out.poses.pow(3).sum(), layer.symmetry_breaking)
        assert torch.allclose(out.poses, out.poses[:, :1]) != told_apart
        assert (gradient.abs().max() > 1e-6) == told_apart
        if "random" in name:
            return  # which tells them apart as well
        nn.init.zeros_(layer.symmetry_breaking)


@pytest.mark.parametrize("asked", [None, 4])
def test_types_on_a_grid_for_any_number_of_parents(asked):
    layer = layer_of(HeinsenRouting(), children=2, share_positions=True)
    own = layer_of(HeinsenRouting(), children=12)
    for name, parameter in layer.named_parameters():  # one row per type, except for the offset of the parents
        per_child = parameter if name == "symmetry_breaking" else parameter.repeat_interleave(6, 0)
        own.get_parameter(name).data = per_child.data
    grid = torch.randn(3, 2, 2, 3, 2, 3)
    out = layer(grid, out_capsules=asked)
    assert out.poses.shape == (3, asked or 12, 2, 2)
    assert_close(out[:3], own(grid.flatten(1, 3), out_capsules=asked)[:3], **EXACT)


def test_a_saved_export_takes_any_number_of_children_and_parents(tmp_path):
    layer = CapsuleLinear(None, None, 3, 2, HeinsenRouting())
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("children", min=2)}
    program = torch.export.export(layer, (torch.randn(2, 5, 3),), dynamic_shapes=(sizes,))
    torch.export.save(program, tmp_path / "layer.pt2")
    larger = torch.randn(3, 7, 3)
    close(torch.export.load(tmp_path / "layer.pt2").module()(larger).poses, layer(larger).poses)


def test_the_example_of_the_documentation():
    (example,) = doctest.DocTestFinder(recurse=False).find(CapsuleLinear, "CapsuleLinear")
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


# Repr and errors


def linear(**options):
    return CapsuleLinear(
        **{"in_capsules": 5, "out_capsules": 2, "in_pose": 4, "out_pose": 4, "routing": DynamicRouting()} | options
    )


ROWS = {"in_pose": (2, 4), "out_pose": (2, 4)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(share_positions=True, coordinates=True), "adds to two rows of a pose"),
        (
            lambda: linear(**ROWS, out_capsules=None, share_positions=True, coordinates=True),
            "coordinates=True needs a number of parents",
        ),
        (
            lambda: linear(**ROWS, share_positions=True, coordinates=True, bias=True),
            "coordinates=True .*needs bias=False",
        ),
        (lambda: linear()(torch.randn(2, 4, 4)), "in_capsules=5, got 4"),
        (lambda: linear(in_capsules=None)(torch.randn(2, 0, 4)), r"at least one child .*\(2, 0, 4\)"),
        (lambda: linear()(torch.randn(2, 5, 4), out_capsules=3), "out_capsules=2: forward cannot change it"),
        (lambda: linear(share_positions=True)(torch.randn(2, 4, 3, 3, 4)), "types=5, got 4"),
        (
            lambda: linear(**ROWS, share_positions=True, coordinates=True)(torch.randn(2, 5, 3, 2, 4)),
            r"on a grid, .*got \(2, 5, 3, 2, 4\)",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_heads_of_attention_at_each_token():
    """As the error says, each token's heads are routed by themselves."""
    layer, x = CapsuleLinear(8, 3, 4, 6, DynamicRouting()), torch.randn(2, 10, 8, 4)
    with pytest.raises(
        ValueError, match=r"^expected in_capsules=8, got 80 .*: to route the 8 of each position al"
    ) as error:
        layer(x)
    flatten, unflatten = re.findall(r"\.((?:un)?flatten\(.*?\)+)", str(error.value))
    parents = eval(f"layer(x.{flatten}).poses.{unflatten}")
    assert_close(parents, torch.stack([layer(token).poses for token in x.unbind(1)], 1))
    for other in (torch.randn(2, 8, 10, 4), torch.randn(2, 80, 4)):
        with pytest.raises(ValueError, match=r"^expected in_capsules=8, got 80 \([^:]*\)$"):
            layer(other)
    on_grid = CapsuleLinear(8, 3, 4, 6, DynamicRouting(), share_positions=True)
    with pytest.raises(ValueError, match=r"^expected types=8, got 5 \([^:]*\)$"):
        on_grid(torch.randn(2, 5, 5, 8, 4))


def test_expected_children_of_a_layer_that_has_so_many():
    assert linear(expected_children=5).layer_shape.children == 5
    assert linear(in_capsules=None, expected_children=9).layer_shape.children == 9
    assert linear(share_positions=True, expected_children=45).layer_shape == LayerShape(
        5, 45, 2, 1, 4, 4, any_children=True
    )
    assert linear(share_positions=True).layer_shape.children is None


def test_many_parents_differ_in_half_precision():
    layer = CapsuleLinear(None, None, 2, 3, HeinsenRouting(1)).bfloat16()
    nn.init.ones_(layer.symmetry_breaking)
    votes = layer.votes(torch.zeros(1, 3, 2, dtype=torch.bfloat16), 1000)
    assert len(votes.weighted_sum(None)[0, :, 0].unique()) == 1000  # bfloat16 does not tell 512 from 513
