"""The containers of capsules and predictions."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from torchcaps import (
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    CapsuleShared,
    DynamicRouting,
    EMRouting,
    InvertedAttentionRouting,
    Prediction,
)

SHAPES = {  # shape of the poses, given pose_dims, true dimensions of a pose
    "vectors": ((2, 3, 4), None, 1),
    "matrices": ((2, 3, 4, 5), 2, 2),
    "vectors on a line": ((2, 3, 4, 5), 1, 1),
    "matrices on a line": ((2, 3, 4, 5, 6), 2, 2),
    "vectors on a grid": ((2, 3, 4, 5, 6), None, 1),
    "matrices on a grid": ((2, 3, 4, 5, 6, 7), 2, 2),
    "vectors in a volume": ((2, 3, 4, 5, 6, 7), 1, 1),
    "matrices in a volume": ((2, 3, 2, 3, 2, 3, 4), None, 2),
}
shapes = pytest.mark.parametrize(("shape", "given", "dims"), SHAPES.values(), ids=SHAPES)


def full(shape, given, dims) -> Capsules:
    poses = torch.randn(shape)
    coefficients = torch.rand(2, 6, 3)
    return Capsules(poses, torch.randn(shape[:-dims]), torch.rand(shape), coefficients, given)


@shapes
def test_activations(shape, given, dims):
    capsules = full(shape, given, dims)
    assert_close(capsules.activations, 1 / (1 + (-capsules.scores).exp()))
    lengths = capsules._replace(scores=None).activations
    assert lengths.shape == shape[:-dims]
    assert_close(lengths, capsules.poses.flatten(-dims).square().sum(-1).sqrt())


@shapes
def test_flatten_grid(shape, given, dims):
    capsules = full(shape, given, dims)
    flat = capsules.flatten_grid()
    assert isinstance(flat, Capsules)
    pose, count = shape[-dims:], torch.Size(shape[1:-dims]).numel()
    assert flat.poses.shape == flat.variances.shape == (2, count, *pose)
    assert_close(flat.poses, capsules.poses.reshape(2, count, *pose), rtol=0, atol=0)
    assert_close(flat.variances, capsules.variances.reshape(2, count, *pose), rtol=0, atol=0)
    assert_close(flat.scores, capsules.scores.reshape(2, count), rtol=0, atol=0)
    assert flat.coefficients is None
    assert_close(flat.activations, capsules.activations.reshape(2, count))
    without = Capsules(capsules.poses, pose_dims=given).flatten_grid()
    assert without.scores is without.variances is None
    assert_close(without.activations, Capsules(capsules.poses, pose_dims=given).activations.reshape(2, count))
    again = flat.flatten_grid()
    assert_close(again.poses, flat.poses, rtol=0, atol=0)


@shapes
def test_to(shape, given, dims):
    capsules = full(shape, given, dims)
    for moved, dtype, device in (
        (capsules.to(torch.float64), torch.float64, "cpu"),
        (capsules.to("meta"), torch.float32, "meta"),
        (capsules.to(device="meta", dtype=torch.bfloat16), torch.bfloat16, "meta"),
        (capsules.to(torch.empty(0, dtype=torch.float16)), torch.float16, "cpu"),
    ):
        assert isinstance(moved, Capsules)
        for found, before in zip(moved[:4], capsules[:4], strict=True):
            assert (found.dtype, found.device.type, found.shape) == (dtype, device, before.shape)
        assert moved.pose_dims == given
    assert_close(capsules.to(torch.float64).poses, capsules.poses.double(), rtol=0, atol=0)
    assert Capsules(capsules.poses).to(torch.float64)[1:] == (None,) * 4
    absent = torch.full(capsules.poses.shape[:2], -torch.inf) if capsules.scores.dim() == 2 else None
    if absent is not None:
        assert_close(Capsules(capsules.poses, absent == 0).to(torch.float64).scores, absent.double())
        with pytest.raises(TypeError, match=r"mask\.bool\(\)"):
            Capsules(capsules.poses, absent.isfinite().long()).to(torch.float64)


@pytest.mark.parametrize(
    ("shape", "matrices", "vectors"),
    [
        ((2, 4, 10, 8), "batch, capsules, rows, features", "batch, types, length, features"),
        (
            (2, 4, 3, 5, 2, 8),
            "batch, types, height, width, rows, features",
            "batch, types, depth, height, width, features",
        ),
    ],
)
def test_four_and_six_dimensions_alone_say_nothing(shape, matrices, vectors):
    capsules = Capsules(torch.randn(shape))
    says = rf"matrices \({matrices}\) or vectors \({vectors}\): give Capsules pose_dims=2 or pose_dims=1$"
    for use in (lambda: capsules.activations, capsules.flatten_grid):
        with pytest.raises(ValueError, match=says):
            use()
    assert capsules._replace(scores=torch.zeros(shape[:-1])).activations.shape == shape[:-1]


@pytest.mark.parametrize("pose", [6, (2, 3)])
def test_layers_say_what_a_pose_is(pose):
    """The result has the activations of its capsules, on a line and on a grid, with and without scores."""
    for routing in (InvertedAttentionRouting(), DynamicRouting(), EMRouting()):
        for layer, children, shape in (
            (CapsuleLinear(3, 2, pose, pose, routing), (3,), (2,)),
            (CapsuleShared(3, 2, pose, routing), (3,), (2,)),
            (CapsuleConv1d(3, 2, pose, pose, 2, routing), (3, 5), (2, 4)),
            (CapsuleConv2d(3, 2, pose, pose, 2, routing), (3, 5, 4), (2, 4, 3)),
        ):
            parents = layer.eval()(torch.randn(2, *children, *layer.in_pose))
            assert parents.activations.shape == (2, *shape)
            assert parents.flatten_grid().activations.shape == (2, torch.Size(shape).numel())


def test_scores_that_are_nan_warn():
    scores = torch.tensor([[0.0, torch.nan]])
    with pytest.warns(UserWarning, match="NaN scores make all parents NaN"):
        CapsuleLinear(2, 2, 3, 3, DynamicRouting())(Capsules(torch.randn(1, 2, 3), scores))


def test_detach():
    capsules = full((2, 3, 4, 5), 1, 1)
    attached = tree_map(lambda x: x.requires_grad_() if isinstance(x, torch.Tensor) else x, capsules)
    constant = attached.detach()
    assert isinstance(constant, Capsules)
    for found, before in zip(constant[:4], attached[:4], strict=True):
        assert before.requires_grad
        assert not found.requires_grad
        assert_close(found, before.detach(), rtol=0, atol=0)
    assert constant.pose_dims == 1
    assert Capsules(torch.zeros(1, 1, 1)).detach()[1:] == (None,) * 4


def test_capsules_and_predictions_pass_through_exports():
    class Network(torch.nn.Module):
        def forward(self, prediction: Prediction) -> Prediction:
            capsules = prediction.capsules
            return Prediction(activations=capsules.activations, capsules=capsules._replace(poses=2 * capsules.poses))

    given = Prediction(torch.rand(2, 3), Capsules(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4), pose_dims=1))
    out = torch.export.export(Network(), (given,)).module()(given)
    assert isinstance(out, Prediction)
    assert isinstance(out.capsules, Capsules)
    assert_close(out.capsules.poses, 2 * given.capsules.poses)
    assert out.capsules.pose_dims == 1
