"""The networks of Zhao & Huang 2019: options and forward passes."""

import math

import pytest
import torch
from torch import nn

from torchcaps import DynamicRouting, RoutingPool2d, VectorNormRouting, create_model
from torchcaps.functional import squash
from torchcaps.models import ResNetCapsNet
from torchcaps.models.cnn import BasicBlock, StandardizeEach


@pytest.mark.parametrize("pooling", ["max", "average", "routing"])
@pytest.mark.parametrize("size", [20, 33])
def test_the_cnn_pools_images_of_any_size(pooling, size):
    model = create_model("pooling_cnn", in_channels=1, channels=4, pooling=pooling, features=2, classes=3)
    assert model(torch.rand(2, 1, size, size)).evidence.shape == (2, 3)
    kinds = {"max": nn.AdaptiveMaxPool2d, "average": nn.AdaptiveAvgPool2d, "routing": RoutingPool2d}
    assert isinstance(model.features[-2], kinds[pooling])


def test_the_first_weights_of_the_cnn_are_those_of_glorot():
    network = create_model("pooling_cnn", in_channels=1)
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(layers) == 5
    for layer in layers:
        outs, ins, *kernel = layer.weight.shape
        limit = (6 / ((ins + outs) * math.prod(kernel))) ** 0.5  # their equation 16
        assert 0.95 * limit < layer.weight.abs().max() <= limit
        assert not layer.bias.any()


def test_the_first_weights_of_the_resnet_are_those_of_he():
    convolutions = [layer for layer in create_model("pooling_resnet").modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 19
    for layer in convolutions:
        expected = (2 / layer.weight[0].numel()) ** 0.5
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.15)


def test_published_sharpness():
    pools = {
        name: next(m for m in create_model(name).modules() if isinstance(m, VectorNormRouting))
        for name in ("pooling_cnn", "pooling_resnet", "resnet_capsnet")
    }
    assert {name: pool.sharpness for name, pool in pools.items()} == {
        "pooling_cnn": 0.5,
        "pooling_resnet": 5.0,
        "resnet_capsnet": 1.0,
    }
    assert pools["resnet_capsnet"].activation is squash


def test_arguments_reach_the_routing():
    pool = create_model("pooling_cnn", features=32, sharpness=3.0, iterations=2).features[-2]
    assert (pool.features, pool.routing.sharpness, pool.routing.iterations) == (32, 3.0, 2)
    pool = create_model("pooling_resnet", depth=8, features=8, sharpness=4.0, iterations=3).features[-2]
    assert (pool.features, pool.routing.sharpness, pool.routing.iterations) == (8, 4.0, 3)
    capsnet = create_model("resnet_capsnet", sharpness=2.0, iterations=4, primary_pose=16, decoder=False)
    routing = capsnet.class_capsules.routing
    assert (routing.sharpness, routing.iterations, capsnet.primary_pose) == (2.0, 4, 16)
    assert capsnet.decoder is None
    assert create_model("capsnet_affnist", iterations=2, decoder=False).class_capsules.routing.iterations == 2


@pytest.mark.parametrize(("channels", "standardized"), [(1, False), (3, True)])
def test_color_images_are_standardized(channels, standardized):
    for model in (
        create_model("pooling_cnn", in_channels=channels, channels=4, features=2),
        create_model("pooling_resnet", depth=8, in_channels=channels).eval(),
    ):
        images = torch.rand(2, channels, 20, 20)
        same = torch.allclose(model(images).evidence, model(0.5 * images + 0.3).evidence, atol=1e-5)
        assert same == standardized


def test_shortcut_of_option_a():
    block = BasicBlock(2, 6, stride=2, shortcut="padding").eval()
    for bn in (block.bn1, block.bn2):
        nn.init.zeros_(bn.weight)
    x = torch.rand(1, 2, 5, 5)
    out = block(x)
    assert out.shape == (1, 6, 3, 3)
    torch.testing.assert_close(out[:, 2:4], x[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 4:].any()
    assert isinstance(BasicBlock(4, 4, shortcut="padding").shortcut, nn.Identity)


def test_each_image_is_standardized_on_its_own():
    images = torch.rand(3, 3, 4, 5)
    out = StandardizeEach()(images * torch.tensor([1.0, 0.1, 0.5]).view(3, 1, 1, 1) + 0.2)
    torch.testing.assert_close(out.mean((1, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std((1, 2, 3), correction=0), torch.ones(3))
    assert not StandardizeEach()(torch.full((1, 3, 2, 2), 0.5)).any()


@pytest.mark.parametrize("routing", [None, VectorNormRouting(2, 5.0, squash), DynamicRouting(2)], ids=str)
def test_resnet_capsnet(routing):
    model = ResNetCapsNet(2, 20, 3, routing, depth=8, primary_pose=16, class_pose=4, decoder=(8,)).eval()
    images = torch.rand(2, 2, 20, 20)
    prediction = model(images, return_coefficients=True)
    assert prediction.evidence.shape == (2, 3)
    torch.testing.assert_close(prediction.evidence, prediction.capsules.poses.norm(dim=-1))
    children = model.primary_capsules(images).poses
    assert children.shape == (2, 4, 5, 5, 16)  # 64 channels are 4 types of 16, at a quarter of 20 x 20
    features = model.features(images)
    torch.testing.assert_close(children[1, 2, 3, 4], features[1, 32:48, 3, 4])
    coefficients = prediction.capsules.coefficients
    assert coefficients.shape == (2, 100, 3)
    over = 2 if model.class_capsules.routing.softmax == "parents" else 1
    torch.testing.assert_close(coefficients.sum(over), torch.ones_like(coefficients.sum(over)))
    assert model.reconstruct(prediction.capsules).shape == images.shape


def test_bad_input():
    with pytest.raises(ValueError, match=r"depth must be 6n \+ 2, as 20, 32, 44 and 56 are, got 18"):
        create_model("pooling_resnet", depth=18)
    with pytest.raises(ValueError, match="primary_pose .*24"):
        ResNetCapsNet(primary_pose=24)
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 1, 40, 40\), got \(2, 1, 28, 28\)"):
        create_model("resnet_capsnet")(torch.rand(2, 1, 28, 28))
    model = ResNetCapsNet(1, 8, depth=8, decoder=None)
    capsules = model(torch.rand(2, 1, 8, 8)).capsules
    with pytest.raises(RuntimeError, match="this ResNetCapsNet has no decoder"):
        model.reconstruct(capsules)
