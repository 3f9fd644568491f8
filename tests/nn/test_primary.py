"""The first capsules are groups of neighboring channels."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchcaps import PrimaryCapsules, squash


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
