"""The first capsules are groups of neighboring channels."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchcaps import CapsuleLinear, Capsules, DynamicRouting, PrimaryCapsules, squash


@pytest.mark.parametrize(
    ("pose", "normalization"),
    [(4, squash), ((2, 2), nn.LayerNorm(4, dtype=torch.float64)), ((4, 1), None), (1, lambda poses: 2 * poses)],
    ids=["squash", "layer norm", "none", "function"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_poses_are_neighboring_channels(pose, normalization, bias):
    primary = PrimaryCapsules(3, 2, pose, 3, stride=2, padding=1, bias=bias, normalization=normalization)
    assert (primary.pose_conv.bias is not None) == bias
    shape = (pose,) if isinstance(pose, int) else pose
    features = torch.Size(shape).numel()
    x = torch.randn(2, 3, 7, 9)
    channels = nn.functional.conv2d(x, primary.pose_conv.weight, primary.pose_conv.bias, 2, 1)
    out = primary(x)
    assert out.poses.shape == (2, 2, 4, 5, *shape)
    assert out.scores is None
    for t in range(2):
        for y, z in ((0, 0), (1, 4), (3, 2)):
            expected = channels[:, t * features : (t + 1) * features, y, z]
            expected = expected if normalization is None else normalization(expected)
            assert_close(out.poses[:, t, y, z].flatten(1), expected)


def test_scores_have_a_convolution_of_their_own():
    primary = PrimaryCapsules(3, 2, 4, 3, stride=(2, 1), padding=(0, 1), scores=True)
    x = torch.randn(2, 3, 7, 6)
    out = primary(x)
    assert out.poses.shape == (2, 2, 3, 6, 4)
    conv = primary.score_conv
    assert_close(out.scores, nn.functional.conv2d(x, conv.weight, conv.bias, (2, 1), (0, 1)), rtol=0, atol=0)
    assert conv.bias is not None
    assert PrimaryCapsules(3, 2, 4, bias=False, scores=True).score_conv.bias is None


def test_by_default_lengths_are_below_one():
    primary = PrimaryCapsules(3, 2, 4)
    assert primary.pose_conv.kernel_size == (1, 1)
    assert primary(100 * torch.randn(2, 3, 5, 5)).activations.max() < 1


def test_the_normalization_learns_with_the_layer():
    primary = PrimaryCapsules(3, 2, (2, 2), normalization=nn.LayerNorm(4))
    assert "normalization.weight" in dict(primary.named_parameters())
    double = PrimaryCapsules(3, 2, 4, normalization=nn.LayerNorm(4), dtype=torch.float64)
    assert double(torch.rand(1, 3, 2, 2, dtype=torch.float64)).poses.dtype == torch.float64


def test_groups_divide_all_channels():
    assert PrimaryCapsules(4, 2, 4, groups=4).pose_conv.weight.shape == (8, 1, 1, 1)
    for arguments in ({"in_channels": 6}, {"out_pose": 1}, {"scores": True}):
        with pytest.raises(ValueError, match=r"^groups=4 must divide the channels of input and outputs: \["):
            PrimaryCapsules(**{"in_channels": 4, "out_capsules": 2, "out_pose": 4, "groups": 4, **arguments})


@pytest.mark.parametrize("pose", [4, (2, 2)])
@pytest.mark.parametrize(
    ("sides", "kernel", "stride", "padding"),
    [((9,), 3, 2, 1), ((9,), (3,), (1,), (0,)), ((5, 7), (2, 3), 1, (0, 1)), ((4, 5, 6), (2, 3, 1), 2, (1, 0, 2))],
)
def test_lines_and_volumes(sides, kernel, stride, padding, pose):
    """A capsule is given by the window at its position; layers that share weights over positions take all of them."""
    dims = len(sides)
    primary = PrimaryCapsules(3, 2, pose, kernel, stride, padding, scores=True, dims=dims)
    x = torch.randn(2, 3, *sides)
    conv = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}[dims]
    channels = conv(x, primary.pose_conv.weight, primary.pose_conv.bias, stride, padding)
    out = primary(x)
    count = torch.Size(channels.shape[2:]).numel()
    assert_close(out.poses.reshape(2, 2, count, 4), squash(channels.reshape(2, 2, 4, count).transpose(2, 3)))
    conv_scores = conv(x, primary.score_conv.weight, primary.score_conv.bias, stride, padding)
    assert_close(out.scores, conv_scores, rtol=0, atol=0)
    assert out.poses.shape[2 : 2 + dims] == channels.shape[2:]
    assert out.activations.shape == out.scores.shape == (2, 2, *channels.shape[2:])
    assert_close(
        out._replace(scores=None).activations.flatten(2), squash(channels.reshape(2, 2, 4, count), 2).norm(dim=2)
    )
    layer = CapsuleLinear(2, 3, pose, pose, DynamicRouting(), share_positions=True, expected_children=2 * count)
    one_by_one = CapsuleLinear(None, 3, pose, pose, DynamicRouting())
    assert layer(out).poses.shape == (2, 3, *primary.out_pose)
    assert_close(one_by_one(out).poses, one_by_one(out.flatten_grid()).poses)


def test_wrong_sizes_of_lines_and_volumes_are_one_line():
    with pytest.raises(ValueError, match=r"^kernel_size must be an int, got \(3, 3\)$"):
        PrimaryCapsules(3, 2, 4, (3, 3), dims=1)
    with pytest.raises(ValueError, match=r"^padding must be an int or a pair, got \(1,\)$"):
        PrimaryCapsules(3, 2, 4, padding=(1,))
    with pytest.raises(ValueError, match=r"^stride must be an int or three numbers, got \(1, 2\)$"):
        PrimaryCapsules(3, 2, 4, stride=(1, 2), dims=3)
    with pytest.raises(ValueError, match=r"^expected a map of shape \(batch, 3, length\), got \(2, 3, 5, 5\)$"):
        PrimaryCapsules(3, 2, 4, dims=1)(torch.randn(2, 3, 5, 5))
    with pytest.raises(
        ValueError, match=r"^expected a map of shape \(batch, 3, depth, height, width\), got \(3, 5, 5\)$"
    ):
        PrimaryCapsules(3, 2, 4, dims=3)(torch.randn(3, 5, 5))
    with pytest.raises(ValueError, match=r"^a map of 2x5x5 is too small for kernel_size=\(3, 3, 3\) and padding="):
        PrimaryCapsules(3, 2, 4, 3, dims=3)(torch.randn(2, 3, 2, 5, 5))


def test_a_layer_takes_no_matrices_for_a_volume_of_vectors():
    layer = CapsuleLinear(2, 3, 4, 4, DynamicRouting(), share_positions=True)
    poses = torch.randn(2, 2, 3, 3, 4, 4)
    with pytest.raises(ValueError, match="may be matrices .* or vectors .*: give Capsules pose_dims=2 or pose_dims=1"):
        layer(poses)
    with pytest.raises(ValueError, match=r"^expected poses of 1 dimension, got \(2, 2, 3, 3, 4, 4\) with pose_dims=2$"):
        layer(PrimaryCapsules(3, 2, (4, 4))(torch.randn(2, 3, 3, 3)))
    assert layer(Capsules(poses, pose_dims=1)).poses.shape == (2, 3, 4)
