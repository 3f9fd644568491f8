"""Capsule layers: what they compute, on which shapes, and what they say to bad input."""

import copy
import math

import oracles
import pytest
import torch
from algorithms import ROUTINGS
from torch import nn

from torchcaps import (
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    PrimaryCapsules,
    RoutingPool2d,
    VectorNormRouting,
)

routings = pytest.mark.parametrize("name", ROUTINGS)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=0, atol=1e-10)


def randomize(layer):
    """Parameters as after training: none is zero, none is like another."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)


# CapsuleLinear


def test_linear_is_votes_and_routing():
    layer = CapsuleLinear(5, 3, in_pose=(2, 4), out_pose=(2, 3), routing=DynamicRouting(3), bias=True)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 2, 4)
    votes = oracles.votes_from_poses(x.tolist(), layer.weight.tolist(), layer.bias.tolist())
    expected = oracles.dynamic_routing(votes, 3)
    out = layer(x, return_coefficients=True)
    assert out.poses.shape == (2, 3, 2, 3)
    close(out.poses.flatten(2), expected["poses"])
    close(out.coefficients, expected["coefficients"])
    assert layer(x).coefficients is None


def test_linear_takes_any_number_of_children():
    layer = CapsuleLinear(None, 4, in_pose=3, out_pose=5, routing=HeinsenRouting(2), bias=True)
    assert layer.weight.shape == (1, 4, 3, 5)
    assert layer.routing.beta_use.shape == (1, 4)
    nn.init.normal_(layer.routing.beta_use)
    nn.init.normal_(layer.routing.beta_ignore)
    for children in (1, 7):
        x, scores = torch.randn(2, children, 3), torch.randn(2, children)
        votes = oracles.votes_from_poses(x.unsqueeze(2).tolist(), layer.weight.tolist(), layer.bias.tolist())
        betas = layer.routing.beta_use.tolist(), layer.routing.beta_ignore.tolist()
        expected = oracles.heinsen_routing(votes, scores.tolist(), *betas, 2)
        out = layer(Capsules(x, scores))
        close(out.poses, expected["poses"])
        close(out.scores, expected["scores"])
        close(out.variances, expected["variances"])


@routings
def test_padding_changes_nothing(name):
    layer = CapsuleLinear(None, 4, in_pose=3, out_pose=5, routing=ROUTINGS[name]())
    randomize(layer)
    x, scores = torch.randn(2, 6, 3), torch.randn(2, 6)
    padded = torch.cat([x, torch.randn(2, 3, 3)], 1), torch.cat([scores, torch.full((2, 3), -math.inf)], 1)
    expected, out = layer(Capsules(x, scores)), layer(Capsules(*padded))
    close(out.poses, expected.poses)
    if expected.scores is not None:
        close(out.scores, expected.scores)


def test_linear_shares_weights_over_positions():
    types, height, width = 2, 2, 3
    layer = CapsuleLinear(types, 4, in_pose=(2, 3), out_pose=(2, 2), routing=DynamicRouting(2), share_positions=True)
    x = torch.randn(2, types, height, width, 2, 3)
    own = CapsuleLinear(types * height * width, 4, in_pose=(2, 3), out_pose=(2, 2), routing=DynamicRouting(2))
    own.weight.data = layer.weight.data.repeat_interleave(height * width, dim=0)
    close(layer(x).poses, own(x).poses)
    assert layer(torch.randn(2, types, 5, 1, 2, 3)).poses.shape == (2, 4, 2, 2)


def test_heinsen_betas_follow_the_types():
    layer = CapsuleLinear(2, 3, in_pose=2, out_pose=2, routing=HeinsenRouting(2), share_positions=True)
    nn.init.normal_(layer.routing.beta_use)
    x = torch.randn(2, 2, 2, 2, 2)
    votes = oracles.votes_from_poses(x.flatten(1, 3).unsqueeze(2).tolist(), layer.weight.tolist(), None)
    use = layer.routing.beta_use[[0, 0, 0, 0, 1, 1, 1, 1]].tolist()
    ignore = layer.routing.beta_ignore[[0, 0, 0, 0, 1, 1, 1, 1]].tolist()
    close(layer(x).scores, oracles.heinsen_routing(votes, [[math.inf] * 8] * 2, use, ignore, 2)["scores"])


def test_coordinate_addition():
    """With no weights, a vote is the place of its child: (row, column) in the last column, scaled to [0, 1]."""
    layer = CapsuleLinear(
        1, 1, in_pose=(4, 4), out_pose=(4, 4), routing=EMRouting(1), share_positions=True, coordinates=True
    )
    nn.init.zeros_(layer.weight)
    x = torch.randn(1, 1, 2, 4, 4, 4)
    scores = torch.full((1, 1, 2, 4), -math.inf)
    scores[..., 1, 2] = 0.0  # one child: row 1 of 2, column 2 of 4
    out = layer(Capsules(x, scores)).poses[0, 0]
    close(out[:, 3], [0.75, 0.625, 0.0, 0.0])
    close(out[:, :3], torch.zeros(4, 3))


def test_linear_with_any_number_of_parents():
    layer = CapsuleLinear(None, None, in_pose=3, out_pose=2, routing=HeinsenRouting(), bias=True)
    x = torch.randn(2, 5, 3)
    out = layer(x)
    assert out.poses.shape == (2, 5, 2)
    assert layer(x, out_capsules=3).poses.shape == (2, 3, 2)
    assert not torch.allclose(out.poses[:, 0], out.poses[:, 1])  # the parents are told apart
    votes = x @ layer.weight[0, 0]  # and this is how
    line = torch.tensor([-1.0, 0.0, 1.0])
    expected = votes.unsqueeze(2) + line[:, None] * layer.symmetry_breaking
    once = HeinsenRouting(1).for_layer(1, 1, 2)(expected)
    layer.routing.iterations = 1
    close(layer(x, out_capsules=3).poses, once.poses)


def test_linear_keeps_its_own_copy_of_the_routing():
    routing = EMRouting()
    one, two = (CapsuleLinear(4, 3, in_pose=2, out_pose=2, routing=routing) for _ in range(2))
    assert one.routing.beta_a is not two.routing.beta_a
    assert list(routing.parameters()) == []
    assert {name for name, _ in one.named_parameters()} == {"weight", "routing.beta_a", "routing.beta_u"}


@pytest.mark.parametrize("routing", [EMRouting(), HeinsenRouting(), DynamicRouting(bias=True)])
def test_routing_without_a_layer_says_so(routing):
    with pytest.raises(RuntimeError, match="give it to a capsule layer"):
        routing(torch.randn(1, 2, 2, 2))


# CapsuleConv2d


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 0), (2, 1)])
def test_conv_is_linear_on_every_window(stride, padding):
    conv = CapsuleConv2d(2, 3, (2, 2), (2, 4), 3, InvertedAttentionRouting(3), stride, padding, bias=True)
    nn.init.normal_(conv.bias)
    x, scores = torch.randn(2, 2, 5, 6, 2, 2), torch.randn(2, 2, 5, 6)
    out = conv(Capsules(x, scores), return_coefficients=True)
    height, width = ((side + 2 * padding - 3) // stride + 1 for side in (5, 6))
    assert out.poses.shape == (2, 3, height, width, 2, 4)
    assert out.coefficients.shape == (2, height, width, 2, 3, 3, 3)
    weight, bias = conv.weight.flatten(0, 2).tolist(), conv.bias.flatten(0, 2).tolist()
    for y in range(height):
        for z in range(width):
            poses, gates = torch.zeros(2, 2, 3, 3, 2, 2), torch.zeros(2, 2, 3, 3)
            for k in range(3):
                for m in range(3):
                    row, column = y * stride + k - padding, z * stride + m - padding
                    if 0 <= row < 5 and 0 <= column < 6:
                        poses[:, :, k, m] = x[:, :, row, column]
                        gates[:, :, k, m] = scores[:, :, row, column].sigmoid()
            votes = oracles.votes_from_poses(poses.flatten(1, 3).tolist(), weight, bias)
            expected = oracles.inverted_attention_routing(votes, 3, gates=gates.flatten(1).tolist())
            close(out.poses[:, :, y, z].flatten(2), expected["poses"])
            close(out.coefficients[:, y, z].flatten(1, 3), expected["coefficients"])


@routings
def test_conv_with_padding_and_without_scores(name):
    """A padded place holds no capsule: the corner parent is routed from the children that are there."""
    conv = CapsuleConv2d(2, 3, 4, 5, kernel_size=3, routing=ROUTINGS[name](), padding=1)
    x = torch.randn(2, 2, 4, 4, 4)
    corner = CapsuleConv2d(2, 3, 4, 5, kernel_size=2, routing=ROUTINGS[name]())
    randomize(conv)
    corner.weight.data = conv.weight.data[:, 1:, 1:]
    for key, beta in conv.routing.named_parameters():
        if key.startswith("beta_") and beta.dim() == 2:  # Heinsen's, one row per child: those of the corner
            beta = beta.unflatten(0, (2, 3, 3))[:, 1:, 1:].flatten(0, 2)
        corner.routing.get_parameter(key).data = beta.data
    close(conv(x).poses[:, :, 0, 0], corner(x[:, :, :2, :2]).poses[:, :, 0, 0])


# PrimaryCapsules


def test_primary_capsules_group_channels():
    primary = PrimaryCapsules(3, 2, (2, 2), kernel_size=3, stride=2, normalization=nn.LayerNorm(4), scores=True)
    x = torch.randn(2, 3, 7, 7)
    out = primary(x)
    assert out.poses.shape == (2, 2, 3, 3, 2, 2)
    channels = primary.pose_conv(x)
    close(out.poses[1, 1, 2, 0].flatten(), nn.functional.layer_norm(channels[1, 4:8, 2, 0], (4,)))
    close(out.scores, primary.score_conv(x))
    squashed = PrimaryCapsules(3, 2, 4)(x)
    assert squashed.scores is None
    assert (squashed.activations < 1).all()


# What torch can do with them


def layers(name):
    """Each layer with a routing, and an input for it."""
    make = ROUTINGS[name]
    yield CapsuleLinear(6, 3, in_pose=4, out_pose=5, routing=make()), torch.randn(2, 6, 4)
    yield CapsuleLinear(None, 3, (2, 2), (2, 3), make(), bias=True), torch.randn(2, 4, 2, 2)
    yield CapsuleConv2d(2, 3, (2, 2), (2, 2), 3, make(), stride=2, padding=1), torch.randn(2, 2, 5, 5, 2, 2)


POOL = (RoutingPool2d(features=2, sharpness=5.0), (2, 4, 3, 3))
PRIMARY = (PrimaryCapsules(3, 2, 4, kernel_size=3, scores=True), (2, 3, 5, 5))


def flat(out) -> list:
    return [x for x in ((out,) if isinstance(out, torch.Tensor) else out) if x is not None]


def all_layers(name):
    yield from layers(name)
    if name == "vector_norm":
        for layer, shape in (POOL, PRIMARY):
            yield copy.deepcopy(layer).double(), torch.randn(shape)


@routings
def test_compile_without_a_graph_break(name):
    for layer, x in all_layers(name):
        torch._dynamo.reset()
        x.requires_grad_()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for actual, expected in zip(flat(compiled(x)), flat(layer(x)), strict=True):
            close(actual, expected)
        (actual,) = torch.autograd.grad(flat(compiled(x))[0].square().sum(), x)
        (expected,) = torch.autograd.grad(flat(layer(x))[0].square().sum(), x)
        close(actual, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@routings
def test_compile_with_the_default_backend(name):
    for layer, x in all_layers(name):
        torch._dynamo.reset()
        for actual, expected in zip(flat(torch.compile(layer, fullgraph=True)(x)), flat(layer(x)), strict=True):
            close(actual, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_compiled_gradients_of_a_convolution_that_several_threads_share(backend):
    torch._dynamo.reset()
    layer = CapsuleConv2d(16, 8, (4, 4), (4, 4), 3, InvertedAttentionRouting(), stride=2, backend=backend)
    poses = torch.randn(4, 16, 16, 16, 4, 4, requires_grad=True)
    scores = torch.randn(4, 16, 16, 16, requires_grad=True)
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        loss = run(Capsules(poses, scores)).poses.square().sum()
        found.append(torch.autograd.grad(loss, (poses, scores, layer.weight)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@routings
def test_export_with_any_batch_and_any_number_of_children(name):
    for layer, x in all_layers(name):
        sizes = {0: torch.export.Dim("batch")}
        larger = torch.cat([x, x, x])
        if isinstance(layer, CapsuleLinear) and layer.in_capsules is None:
            sizes[1] = torch.export.Dim("children")
            larger = torch.cat([larger, larger], dim=1)
        exported = torch.export.export(layer, (x,), dynamic_shapes=(sizes,)).module()
        for actual, expected in zip(flat(exported(larger)), flat(layer(larger)), strict=True):
            close(actual, expected)


def test_export_with_any_number_of_parents():
    layer = CapsuleLinear(None, None, 3, 2, HeinsenRouting())
    x = torch.randn(2, 5, 3)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("children", min=2)}
    exported = torch.export.export(layer, (x,), dynamic_shapes=(sizes,)).module()
    larger = torch.randn(3, 7, 3)
    close(exported(larger).poses, layer(larger).poses)


def test_an_export_can_be_saved(tmp_path):
    layer, x = CapsuleLinear(4, 3, 2, 2, EMRouting()), torch.randn(2, 4, 2)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    close(torch.export.load(tmp_path / "layer.pt2").module()(x).poses, layer(x).poses)


def test_meta_tensors_have_shapes():
    with torch.device("meta"):
        out = CapsuleConv2d(2, 3, 4, 5, 3, HeinsenRouting())(torch.randn(2, 2, 5, 5, 4))
    assert out.poses.shape == (2, 3, 3, 3, 5)
    assert out.poses.is_meta


@routings
def test_reset_parameters(name):
    for layer, x in layers(name):
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.constant_(parameter, math.nan)
        layer.reset_parameters()
        assert all(x is None or x.isfinite().all() for x in layer(x))


@routings
def test_gradients_reach_all_parameters_through_the_last_iteration(name):
    iterations = {} if name == "vector_norm" else {"iterations": 3}
    layer = CapsuleLinear(6, 3, in_pose=4, out_pose=5, routing=ROUTINGS[name](gradient="last", **iterations))
    randomize(layer)
    out = layer(torch.randn(2, 6, 4))
    sum(x.square().sum() for x in flat(out)).backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


@routings
def test_compile_with_scores(name):
    torch._dynamo.reset()
    layer = CapsuleLinear(None, 3, in_pose=4, out_pose=5, routing=ROUTINGS[name]())
    capsules = Capsules(torch.randn(2, 6, 4), torch.randn(2, 6))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(capsules).poses, layer(capsules).poses)


@routings
def test_deep_copy_and_state_dict(name):
    for layer, x in all_layers(name):
        twin = copy.deepcopy(layer)
        for actual, expected in zip(flat(twin(x)), flat(layer(x)), strict=True):
            close(actual, expected)
        for p in twin.parameters():
            nn.init.normal_(p)
        layer.load_state_dict(twin.state_dict())
        for actual, expected in zip(flat(layer(x)), flat(twin(x)), strict=True):
            close(actual, expected)


@routings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_modules(name, dtype):
    for layer, x in all_layers(name):
        if isinstance(layer, PrimaryCapsules):
            continue
        out = copy.deepcopy(layer).to(dtype)(x.to(dtype))
        for half, exact in zip(flat(out), flat(layer(x)), strict=True):
            assert half.dtype == dtype
            assert (half.double() - exact).abs().max() <= 0.05 * exact.abs().max().clamp_min(1)


@routings
def test_repr_names_the_routing(name):
    layer, _ = next(layers(name))
    assert "6, 3, in_pose=4, out_pose=5" in repr(layer)
    assert "Routing(iterations=" in repr(layer)


# Bad input

linear = {"in_pose": 4, "out_pose": 4, "routing": DynamicRouting()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CapsuleLinear(2, 2, (4, 4), 4, DynamicRouting()), r"in_pose=\(4, 4\) has 4 and out_pose=4 has 1"),
        (lambda: CapsuleLinear(2, 2, 0, 4, DynamicRouting()), "a pose is an int"),
        (lambda: CapsuleLinear(None, 2, share_positions=True, **linear), "needs in_capsules"),
        (lambda: CapsuleLinear(2, 2, coordinates=True, **linear), "needs share_positions=True"),
        (lambda: CapsuleLinear(2, 2, share_positions=True, coordinates=True, **linear), "adds to two rows"),
        (lambda: CapsuleLinear(5, 2, **linear)(torch.randn(2, 4, 4)), "expected in_capsules=5, got 4"),
        (lambda: CapsuleLinear(5, 2, **linear)(torch.randn(2, 5, 3)), r"expected poses of shape \(batch, 5, 4\)"),
        (lambda: CapsuleLinear(None, 2, **linear)(torch.randn(2, 0, 4)), r"expected at least one child .*\(2, 0, 4\)"),
        (lambda: CapsuleLinear(5, 2, **linear)(torch.randn(2, 5, 4), out_capsules=3), "forward cannot change it"),
        (
            lambda: CapsuleLinear(5, 2, **linear)(Capsules(torch.randn(2, 5, 4), torch.randn(2, 4))),
            r"expected scores of shape \(2, 5\), got \(2, 4\)",
        ),
        (
            lambda: CapsuleLinear(2, 2, share_positions=True, **linear)(torch.randn(2, 2, 4)),
            "takes children on a grid",
        ),
        (
            lambda: CapsuleConv2d(2, 2, 4, 4, 3, DynamicRouting())(torch.randn(2, 3, 5, 5, 4)),
            r"expected poses of shape \(batch, 2, height, width, 4\)",
        ),
        (
            lambda: CapsuleConv2d(2, 2, 4, 4, 3, DynamicRouting())(torch.randn(2, 2, 2, 5, 4)),
            "a grid of 2x5 is smaller than kernel_size=3",
        ),
        (
            lambda: CapsuleConv2d(2, 2, 4, 4, 3, DynamicRouting())(
                Capsules(torch.randn(2, 2, 5, 6, 4), torch.randn(2, 2, 6, 5))
            ),
            r"expected scores of shape \(2, 2, 5, 6\), got \(2, 2, 6, 5\)",
        ),
        (lambda: CapsuleLinear(5, 0, **linear), "out_capsules must be at least 1, or None"),
        (
            lambda: CapsuleLinear(2, None, (2, 2), (2, 2), EMRouting(), share_positions=True, coordinates=True),
            "coordinates=True needs a number of parents",
        ),
        (lambda: VectorNormRouting(iterations=-1), "iterations must be at least 0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
