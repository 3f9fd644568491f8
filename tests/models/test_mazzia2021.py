"""Efficient-CapsNet: shapes, what it refuses."""

import pytest
import torch
from torch import nn

from torchcaps import DynamicRouting
from torchcaps.models import EfficientCapsNet


@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 4), (1, 27, 2)])
def test_shapes(channels, size, classes):
    network = EfficientCapsNet(channels, size, classes, decoder=(8,))
    images = torch.rand(2, channels, size, size)
    _, capsules, activations = network(images)
    assert activations.shape == (2, classes)
    assert capsules.poses.shape == (2, classes, 16)
    assert ((activations > 0) & (activations < 1)).all()
    assert network.reconstruct(capsules).shape == images.shape


def test_each_primary_capsule_sees_its_own_channels():
    network = EfficientCapsNet(decoder=None).eval()
    network.class_capsules.routing.coefficient_bias.data.normal_()
    features = torch.randn(1, 128, 9, 9)
    before = network.primary(features).poses
    features[:, 8:16] += 1  # the channels of capsule 1
    changed = (network.primary(features).poses != before).flatten(2).any(2).squeeze(0)
    assert changed.tolist() == [i == 1 for i in range(16)]


def test_a_convolution_has_its_batch_norm_after_its_relu():
    conv, relu, norm = EfficientCapsNet(decoder=None).features[:3]
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(relu, nn.ReLU)
    assert (norm.eps, norm.momentum) == (1e-3, 0.01)


def test_first_vote_weights_of_the_authors_code():
    weight = EfficientCapsNet(decoder=None).class_capsules.weight
    assert weight.std().item() == pytest.approx((2 / (8 * 10 * 16)) ** 0.5, rel=0.02)
    assert weight.abs().max() <= 2.01 * (2 / (8 * 10 * 16)) ** 0.5 / 0.8796


def test_another_routing():
    network = EfficientCapsNet(routing=DynamicRouting(2), decoder=None)
    assert network(torch.rand(2, 1, 28, 28)).activations.shape == (2, 10)
