"""Images laid over each other, and drawn from one class capsule each."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from torchcaps import create_model
from torchcaps.data import MultiMNIST
from torchcaps.explain.overlaps import overlaid, taken_apart


def test_gray_levels_are_added_and_clipped():
    a = torch.tensor([[0.5, 0.0, 1.0]])
    b = torch.tensor([[0.2, 0.3, 0.4]])
    assert_close(overlaid(a, b), torch.tensor([[0.7, 0.3, 1.0]]))
    with pytest.raises(ValueError, match=r"expected two images of one shape \(..., height, width\), got"):
        overlaid(a, b[:, :2])


def test_only_the_second_image_moves():
    a, b = torch.zeros(2, 1, 3, 4), torch.arange(1.0, 25).view(2, 1, 3, 4) / 24
    moved = overlaid(a, b, (1, -2))
    assert_close(moved[..., 1:, :2], b[..., :2, 2:])
    assert moved[..., 0, :].max() == 0
    assert moved[..., 2:].max() == 0
    assert_close(overlaid(b, a, (1, 1)), b)
    assert_close(overlaid(a, b, (-1, 0))[..., :2, :], b[..., 1:, :])
    assert overlaid(a, b, (3, 9)).max() == 0


def test_overlaid_as_in_multimnist(mnist_of_noise: Path):
    data = MultiMNIST(str(mnist_of_noise), parts=True)
    data.setup("test")
    images, labels, parts = data.part("test").__getitems__(list(range(10)))
    for image, label, part in zip(images, labels, parts, strict=True):
        a, b = part[label > 0]
        assert_close(overlaid(a, b), image)


def test_each_class_is_drawn_from_its_own_capsule():
    network = create_model("capsnet_digits", pretrained="digits").train()
    image = torch.rand(1, 8, 8)
    found = taken_apart(network, image, 3)
    assert network.training
    prediction = network.eval()(image[None])
    assert found.classes.tolist() == prediction.evidence[0].argsort(descending=True)[:3].tolist()
    assert found.drawn.shape == (3, 1, 8, 8)
    for label, drawn in zip(found.classes, found.drawn, strict=True):
        assert_close(drawn, network.reconstruct(prediction.capsules, label[None])[0])
    assert not found.drawn.requires_grad


def test_networks_that_cannot_draw():
    network = create_model("capsnet_digits", decoder=False)
    with pytest.raises(ValueError, match="has no decoder: build it with one"):
        taken_apart(network, torch.rand(1, 8, 8))
    network = create_model("capsnet_digits", decoder=True)
    with pytest.raises(ValueError, match="count must be at most 10, the number of class capsules, got 11"):
        taken_apart(network, torch.rand(1, 8, 8), 11)
    with pytest.raises(ValueError, match=r"expected an image of shape \(channels, height, width\)"):
        taken_apart(network, torch.rand(1, 1, 8, 8))
    with pytest.raises(TypeError, match="one capsule for each class, and a FeatureClassifier gives none"):
        taken_apart(create_model("pooling_cnn", in_channels=1), torch.rand(1, 20, 20))
