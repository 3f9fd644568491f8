"""How sharp coefficients are after each iteration."""

import math

import pytest
import torch
from networks import Network
from torch import nn

from torchcaps import CapsuleLinear, Capsules, DynamicRouting, RoutingPool2d, create_model
from torchcaps.explain import sharpening


def test_coefficients_start_uniform_and_are_those_of_the_layer() -> None:
    network = create_model("capsnet_digits", pretrained="digits").train()
    images = torch.rand(3, 1, 8, 8)
    (found,) = sharpening(network, [images[:2], images[2:]]).values()
    assert (found.over, found.size) == ("parents", 10)
    assert found.effective[0] == pytest.approx(10)
    network.eval()
    last = network(images, return_coefficients=True).capsules.coefficients.detach()
    entropy = -(last * last.log()).sum(-1)
    assert found.effective[2] == pytest.approx(float(entropy.exp().mean()), rel=1e-5)
    assert found.entropy[2] == pytest.approx(float(entropy.mean()), rel=1e-5)
    assert found.effective[2] < found.effective[1] < found.effective[0]


def test_padding_and_children() -> None:
    layer = CapsuleLinear(4, 2, 3, 3, DynamicRouting(2, softmax="children"))
    gated = Network(lambda net, poses, scores: net.layer(Capsules(poses, scores)), layer=layer)
    scores = torch.tensor([[torch.inf, torch.inf, torch.inf, -torch.inf]])
    (found,) = sharpening(gated, [(torch.randn(1, 4, 3), scores)]).values()
    assert (found.over, found.size) == ("children", 4)
    assert found.effective[0] == pytest.approx(3)


def test_a_pool_is_spread_over_its_positions() -> None:
    network = create_model("pooling_resnet_small", sharpness=50.0)
    (found,) = sharpening(network, [torch.rand(2, 3, 32, 32)]).values()
    assert (found.over, found.size) == ("children", 64)
    assert found.effective[0] == pytest.approx(64)
    assert found.effective[1] < 60


def test_the_entropy_of_an_average_over_windows_of_unequal_sizes_is_even() -> None:
    pool = RoutingPool2d(4, 0.0, kernel_size=3, stride=2, padding=1)
    (found,) = sharpening(nn.Sequential(pool), [torch.rand(2, 4, 6, 6)]).values()
    assert found.even == pytest.approx((math.log(4) + 4 * math.log(6) + 4 * math.log(9)) / 9)
    assert found.entropy[0] == pytest.approx(found.even)


def test_uniform_coefficients_leave_something_to_a_leak() -> None:
    layer = CapsuleLinear(4, 2, 3, 3, DynamicRouting(2, leaky=True))
    network = Network(lambda net, poses: net.layer(net.layer(poses).poses.repeat(1, 2, 1)), layer=layer)
    (found,) = sharpening(network, [torch.randn(5, 4, 3)]).values()
    assert found.effective.shape == (2,)  # though the layer runs twice
    assert found.uniform == pytest.approx(math.exp(2 / 3 * math.log(3)))
    assert found.effective[0] == pytest.approx(found.uniform)
