"""The networks of Heinsen 2019: initial values, baselines.

`test_texts.py` has masks and padding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchcaps import (
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    VectorNormRouting,
    create_model,
)
from torchcaps.models import heinsen_smallnorb, heinsen_sst
from torchcaps.models.heinsen2019 import with_coordinates


def networks(**arguments):
    """Small networks and their inputs, with random parameters: initially all betas and all scores are zero."""
    torch.manual_seed(0)
    images = heinsen_smallnorb(classes=3, parts=4, channels=6, **arguments), (torch.rand(2, 2, 45, 50),)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    words = heinsen_sst(3, layers=2, width=7, features=5, pose=3, parts=4, **arguments), (torch.randn(2, 4, 2, 7), mask)
    for model, _ in (images, words):
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
    return images, words


def test_shapes_and_gradients():
    for model, inputs in networks():
        prediction = model(*inputs, return_coefficients=True)
        capsules = prediction.capsules
        assert prediction.scores.shape == (2, 3)
        assert torch.equal(prediction.scores, capsules.scores)
        assert capsules.poses.shape[2:] == ((4, 4) if len(inputs) == 1 else (3,))
        torch.testing.assert_close(capsules.coefficients.sum(2), torch.ones(2, 4))
        F.cross_entropy(prediction.scores, torch.tensor([0, 2])).backward()
        for name, p in model.named_parameters():
            assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "routing",
    [
        HeinsenRouting(2, model="kmeans"),
        EMRouting(2),
        DynamicRouting(2),
        InvertedAttentionRouting(2),
        InvertedAttentionRouting(2, activations=True),
        VectorNormRouting(2),
    ],
    ids=str,
)
def test_other_routings(routing):
    for model, inputs in networks(routing=routing):
        prediction = model(*inputs)
        assert prediction.scores.shape == (2, 3)
        assert prediction.scores.isfinite().all()
        prediction.scores.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())  # or several devices could not train it together
        if not routing.gives_scores:  # classes share a classifier
            poses = prediction.capsules.poses.flatten(2)
            torch.testing.assert_close(prediction.scores, model.classifier(poses).squeeze(-1))


def test_first_values():
    images, words = heinsen_smallnorb(), heinsen_sst()
    assert not words.depth.any()
    for model in (images, words):
        for layer, d in zip(model.capsules.layers, (4, 4) if model is images else (64, 2), strict=True):
            assert not any(p.any() for p in (layer.bias, *layer.routing.parameters()))
            assert layer.weight.std().item() == pytest.approx(1 / d, rel=0.1)
    for layer in (*images.features[4::3], words.detector[0]):
        fan_in = layer.weight[0].numel()
        assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)
        assert not layer.bias.any()


def test_coordinates():
    images = torch.rand(2, 3, 3, 5)
    x = with_coordinates(images)
    assert torch.equal(x[:, :3], images)
    assert x[1, 3].tolist() == [[-1] * 5, [0] * 5, [1] * 5]
    assert x[0, 4].tolist() == [[-1, -0.5, 0, 0.5, 1]] * 3
    assert with_coordinates(torch.zeros(1, 1, 1, 1, dtype=torch.float64)).flatten().tolist() == [0, -1, -1]
    torch.testing.assert_close(with_coordinates(torch.rand(1, 2, 96, 1))[0, 2, :, 0], torch.linspace(-1, 1, 96))


def test_the_papers_children():
    model = heinsen_smallnorb().eval()
    children = model.primary_capsules(torch.rand(1, 2, 96, 96))
    assert children.poses.shape == (1, 64, 9, 9, 4, 4)  # 5184
    assert children.scores.shape == (1, 64, 9, 9)


# Baselines


def test_the_mean_of_embeddings():
    network = create_model("mean_pooled_sst", classes=3, layers=2, width=5).double()
    embeddings = torch.randn(3, 4, 2, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0.5, 0, 0]])
    expected = [embeddings[0].mean(0), embeddings[1, :2].mean(0), (2 * embeddings[2, 0] + embeddings[2, 1]) / 3]
    expected = network.classifier(torch.stack(expected).flatten(1))
    embeddings[mask == 0] = torch.nan
    torch.testing.assert_close(network(embeddings, mask).scores, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(network(embeddings[:1]).scores, expected[:1])
    torch.testing.assert_close(network(embeddings[1:], mask[1:] * 0).scores, network.classifier.bias.expand(2, 3))
    network(embeddings, mask).scores.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    assert network(embeddings.half(), mask.half()).scores.dtype == torch.float64
    half, large = network.half(), torch.full((1, 30, 2, 5), 3000.0, dtype=torch.float16)
    torch.testing.assert_close(half(large, torch.ones(1, 30)).scores, half(large).scores, rtol=1e-2, atol=1)
    network.double()
    with pytest.raises(ValueError, match="with the encoder's layers and width"):
        network(embeddings[:, :, :1])


def test_the_average_of_places():
    network = create_model("average_pooled_smallnorb", channels=4).eval()
    images = torch.rand(2, 2, 40, 50)
    norm, _, _, linear = network.classifier
    maps = norm(network.features(images))
    assert maps.shape == (2, 4, 2, 3)
    torch.testing.assert_close(network(images).scores, linear(maps.mean((2, 3))))
    with pytest.raises(ValueError, match="height and width at least 29"):
        network(images[..., :20])
    capsule_features = heinsen_smallnorb(channels=4).features
    assert [p.shape for p in network.features.parameters()] == [p.shape for p in capsule_features.parameters()]
