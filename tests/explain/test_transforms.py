"""Images that turn, grow and move by hand-worked amounts, and the poses that follow."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchcaps import Capsules, Prediction, create_model
from torchcaps.measures.transforms import affine, pose_paths


def test_a_quarter_turn_is_counterclockwise():
    image = torch.arange(9.0).view(1, 1, 3, 3)
    assert_close(affine(image, rotation=90.0), image.rot90(1, (2, 3)), atol=1e-4, rtol=0)
    wide = torch.rand(2, 3, 5, 8)
    assert_close(affine(wide, rotation=180.0), wide.flip(2, 3), atol=1e-4, rtol=0)
    assert_close(affine(wide, rotation=0.0), wide)
    assert_close(affine(wide, rotation=-30.0), affine(wide, rotation=330.0), atol=1e-4, rtol=0)


def test_a_turn_keeps_the_shape_of_wide_images():
    image = torch.zeros(1, 1, 5, 9)
    image[..., 2, 6] = 1  # two pixels to the right of the center
    turned = affine(image, rotation=90.0)
    expected = torch.zeros(1, 1, 5, 9)
    expected[..., 0, 4] = 1  # two pixels above it
    assert_close(turned, expected, atol=1e-5, rtol=0)


def test_twice_as_large():
    image = torch.zeros(1, 1, 4, 4)
    image[..., 1:3, 1:3] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    # Each pixel of the result lies a quarter of a pixel from the center of one of the image's.
    line = torch.tensor(
        [[0.25, 0.75, 0.0, 0.0], [0.0, 0.75, 0.25, 0.0], [0.0, 0.25, 0.75, 0.0], [0.0, 0.0, 0.75, 0.25]]
    )
    assert_close(affine(image, scale=2.0)[0, 0], line @ image[0, 0] @ line.T)
    assert_close(affine(torch.ones(1, 1, 4, 4), scale=0.5)[0, 0, 1:3, 1:3], torch.ones(2, 2))
    assert affine(torch.ones(1, 1, 4, 4), scale=0.5)[0, 0, 0].max() == 0


@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_whole_pixels(padding):
    image = torch.rand(2, 1, 4, 6)
    moved = affine(image, shift=(2.0 / 6, 0.0), padding=padding)
    assert_close(moved[..., 2:], image[..., :4])
    edge = image[..., :1] if padding == "border" else torch.zeros(2, 1, 4, 1)
    assert_close(moved[..., :2], edge.expand(-1, -1, -1, 2))
    assert_close(affine(image, shift=(-1.0 / 6, 0.0))[..., :5], image[..., 1:])
    half = affine(image, shift=(0.5 / 6, 0.0))
    assert_close(half[..., 1:], (image[..., 1:] + image[..., :-1]) / 2)
    assert_close(affine(image.half(), shift=(2.0 / 6, 0.0), padding=padding), moved.half(), atol=1e-3, rtol=0)


def test_shear_scales_of_both_axes_and_angles_of_each_image():
    images = torch.rand(2, 1, 9, 9)
    slanted = affine(images, shear=1.0)
    assert_close(slanted[:, :, 6, 2:], images[:, :, 6, :-2], atol=1e-5, rtol=0)  # two rows below the center: 2 pixels
    point = torch.zeros(1, 1, 9, 9)
    point[..., 4, 6] = 1
    assert affine(point, scale=torch.tensor([[1.5, 1.0]]))[0, 0, 4, 7] > 0.6  # two pixels from the center become three
    each = affine(images, rotation=torch.tensor([0.0, 90.0]))
    assert_close(each, torch.stack([images[0], images[1].rot90(1, (1, 2))]), atol=1e-5, rtol=0)


class Corners(nn.Module):
    """A network with a capsule for each of two classes: the upper row and the left column of an image."""

    def forward(self, images):
        poses = torch.stack([images[:, 0, 0, :4], images[:, 0, :, 0]], 1)
        return Prediction(poses.sum(2), Capsules(poses))


def test_paths_of_a_network_without_a_decoder():
    image = torch.rand(1, 4, 4)
    found = pose_paths(Corners(), image, 1, "moved", torch.tensor([0.0, 1.0]))
    assert found.reconstructions is None
    assert found.values.tolist() == [0, 1]
    assert_close(found.inputs[0], image)
    assert_close(found.poses, torch.stack([image[0, :, 0], torch.zeros(4)]))
    assert_close(found.scores, torch.stack([found.inputs[:, 0, 0].sum(1), found.inputs[:, 0, :, 0].sum(1)], 1))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("turned", lambda value: {"rotation": value}),
        ("grown", lambda value: {"scale": value}),
        ("moved", lambda value: {"shift": (value / 6, 0.0)}),
    ],
)
def test_each_value_changes_the_image_as_affine_does(kind, change):
    image = torch.rand(1, 4, 6)
    found = pose_paths(Corners(), image, 0, kind, torch.tensor([0.5, 1.5]))
    for changed, value in zip(found.inputs, (0.5, 1.5), strict=True):
        assert_close(changed, affine(image[None], **change(value))[0])


def test_paths_of_a_network_with_a_decoder():
    network = create_model("capsnet_digits", decoder=True).train()
    image = torch.rand(1, 8, 8)
    found = pose_paths(network, image, 3, "turned", torch.tensor([-20.0, 0.0, 20.0]))
    assert network.training
    network.eval()
    for k, value in enumerate((-20.0, 0.0, 20.0)):
        prediction = network(affine(image[None], rotation=value))
        assert_close(found.poses[k], prediction.capsules.poses[0, 3])
        assert_close(found.scores[k], prediction.evidence[0])
        assert_close(found.reconstructions[k], network.reconstruct(prediction.capsules, torch.tensor([3]))[0])
    assert not found.poses.requires_grad
