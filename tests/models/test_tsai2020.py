"""The networks of Tsai et al. 2020: training steps and options."""

import pytest
import torch
from torch import nn

from torchcaps import (
    CapsuleLinear,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    PrimaryCapsules,
    create_model,
)
from torchcaps.explain import record
from torchcaps.models import CapsuleClassifier, inverted_attention_multimnist, narrow_cifar10
from torchcaps.models.cnn import Standardize

ATTENTION_C = InvertedAttentionRouting(2, activations=True)


@pytest.mark.parametrize(
    ("name", "arguments", "image", "classes"),
    [
        ("inverted_attention_cifar10", {"backbone": "resnet"}, (3, 32, 32), 10),
        ("inverted_attention_cifar10", {"activations": True, "start": "random"}, (3, 32, 32), 10),
        ("inverted_attention_cifar10", {"schedule": "sequential"}, (3, 32, 32), 10),
        ("inverted_attention_cifar100", {}, (3, 32, 32), 100),
        ("dynamic_cifar", {"backbone": "resnet"}, (3, 32, 32), 10),
        ("em_cifar", {}, (3, 32, 32), 10),
        ("cnn_cifar", {}, (3, 32, 32), 10),
        ("resnet18_cifar", {"classes": 100}, (3, 32, 32), 100),
        ("inverted_attention_multimnist", {"types": 2, "pose": (2, 3)}, (1, 36, 36), 10),
        ("inverted_attention_multimnist", {"types": 2, "pose": (5,)}, (1, 36, 36), 10),
        ("dynamic_multimnist", {"types": 2, "pose": (4,)}, (1, 36, 36), 10),
        ("cnn_multimnist", {"channels": 4, "hidden": 6}, (1, 36, 36), 10),
        ("cnn_multimnist", {"channels": 4, "hidden": 6, "pooling": "linear"}, (1, 36, 36), 10),
    ],
)
def test_models_train(name, arguments, image, classes):
    model = create_model(name, **arguments)
    prediction = model(torch.rand(2, *image))
    assert prediction.evidence.shape == (2, classes)
    prediction.evidence.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())  # or several devices could not train it together


def test_the_papers_maps():
    model = create_model("inverted_attention_cifar10")
    _, runs = record(model, torch.rand(1, 3, 32, 32))
    assert [tuple(run.parents.shape[1:]) for run in runs] == [(32, 7, 7, 4, 4), (32, 5, 5, 4, 4), (10, 4, 4)]
    with torch.device("meta"):
        model = create_model("em_cifar", backbone="resnet")
    assert model.primary_capsules(torch.rand(1, 3, 32, 32, device="meta")).poses.shape == (1, 32, 16, 16, 4, 4)


def test_what_counts_cannot_tell():
    with torch.device("meta"):
        assert create_model("inverted_attention_cifar100").capsules.schedule == "concurrent"
        assert create_model("em_cifar").capsules.layers[-1].coordinates
        assert [type(m).__name__ for m in create_model("cnn_multimnist").features] == [
            *("Conv2d", "ReLU"),
            *("Conv2d", "ReLU", "BatchNorm2d"),
            *("Conv2d", "ReLU", "BatchNorm2d"),
            *("AvgPool2d", "Flatten", "Linear"),
        ]
    model = create_model("dynamic_multimnist", types=2, pose=(4,))
    images = torch.rand(2, 1, 36, 36)
    assert (model.primary_capsules(100 * images).poses.norm(dim=-1) < 1).all()
    prediction = model(images)
    expected = model.classifier(prediction.capsules.poses).squeeze(-1)  # logits, with one classifier for all classes
    torch.testing.assert_close(prediction.evidence, expected)


@pytest.mark.parametrize(
    "routing", [None, InvertedAttentionRouting(2), DynamicRouting(2), EMRouting(2), HeinsenRouting(2), ATTENTION_C]
)
def test_narrow_networks_take_any_routing(routing):
    model = narrow_cifar10(routing, types=2, channels=4)
    assert model(torch.rand(2, 3, 32, 32)).evidence.shape == (2, 10)


def test_without_a_classifier_scores_are_activations():
    def build(routing):
        capsules = CapsuleStack(CapsuleLinear(2 * 4 * 4, 3, 4, 4, routing=routing))
        return CapsuleClassifier(nn.Identity(), PrimaryCapsules(1, 2, 4), capsules)

    prediction = build(DynamicRouting(2))(torch.rand(2, 1, 4, 4))
    torch.testing.assert_close(prediction.evidence, prediction.capsules.poses.norm(dim=-1))
    prediction = build(ATTENTION_C)(torch.rand(2, 1, 4, 4))
    torch.testing.assert_close(prediction.evidence, prediction.capsules.scores.sigmoid())
    with pytest.raises(ValueError, match="InvertedAttentionRouting does not say how present a class is"):
        build(InvertedAttentionRouting(2))


def test_coefficients_of_the_class_capsules():
    model = narrow_cifar10(InvertedAttentionRouting(2), types=2, channels=4)
    images = torch.rand(2, 3, 32, 32)
    prediction = model(images, return_coefficients=True)
    assert prediction.capsules.coefficients.shape == (2, 2 * 5 * 5, 10)
    torch.testing.assert_close(prediction.evidence, model(images).evidence)


def test_images_are_standardized():
    images = torch.tensor([0.5, 1.0]).view(1, 2, 1, 1).expand(3, 2, 4, 4)
    out = Standardize([0.25, 0.5], [0.5, 0.25])(images)
    torch.testing.assert_close(out[1, :, 0, 0], torch.tensor([0.5, 2.0]))
    assert not Standardize([0.0], [1.0]).state_dict()


def test_bad_input():
    with pytest.raises(ValueError, match=r"\(batch, 1, 36, 36\), got \(1, 1, 28, 28\)"):
        inverted_attention_multimnist(types=2, pose=(2, 2))(torch.rand(1, 1, 28, 28))


def test_matrix_class_capsules_in_a_replica_of_data_parallel():
    capsules = CapsuleStack(CapsuleLinear(2 * 3 * 3, 3, (2, 2), (2, 2), DynamicRouting(2)))
    network = CapsuleClassifier(nn.Identity(), PrimaryCapsules(1, 2, (2, 2), 2), capsules)
    images = torch.rand(2, 1, 4, 4)
    expected = network(images).activations
    for module in network.modules():
        module._is_replica = True
    found = network(images)
    assert found.capsules.pose_dims is None  # a number cannot be gathered
    torch.testing.assert_close(found.activations, expected)
