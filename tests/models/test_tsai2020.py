"""The networks of Tsai et al. 2020: parameter counts, training steps and options."""

import pytest
import torch
from torch import nn

from torchcaps import (
    CapsuleLinear,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    Equilibrium,
    HeinsenRouting,
    InvertedAttentionRouting,
    PrimaryCapsules,
    create_model,
)
from torchcaps.models import CapsuleClassifier, inverted_attention_multimnist, narrow_cifar10
from torchcaps.models.cnn import Standardize

ATTENTION_C = InvertedAttentionRouting(2, activations=True)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "arguments", "parameters", "published"),
    [
        # Table 1
        ("inverted_attention_cifar10", {}, 561_297, "0.56"),
        ("inverted_attention_cifar10", {"backbone": "resnet"}, 1_828_817, "1.83"),
        ("inverted_attention_cifar100", {}, 1_462_989, "1.46"),
        ("inverted_attention_cifar100", {"backbone": "resnet"}, 2_799_629, "2.80"),
        ("dynamic_cifar", {}, 7_992_576, "7.99"),
        ("dynamic_cifar", {"classes": 100}, 31_585_536, "31.59"),
        # The paper has 12.45M and 36.04M, which do not follow from its text; their difference does.
        ("dynamic_cifar", {"backbone": "resnet"}, 6_616_128, "6.62"),
        ("dynamic_cifar", {"backbone": "resnet", "classes": 100}, 6_616_128 + 23_592_960, "30.21"),
        ("em_cifar", {}, 453_044, "0.45"),
        ("em_cifar", {"classes": 100}, 499_304, "0.50"),
        ("em_cifar", {"backbone": "resnet"}, 1_710_580, "1.71"),
        ("em_cifar", {"backbone": "resnet", "classes": 100}, 1_756_840, "1.76"),
        ("cnn_cifar", {}, 18_919_434, "18.92"),
        ("cnn_cifar", {"classes": 100}, 19_011_684, "19.01"),
        ("resnet18_cifar", {}, 11_173_962, "11.17"),
        ("resnet18_cifar", {"classes": 100}, 11_220_132, "11.22"),
        # Figure 5
        ("inverted_attention_multimnist", {}, 9_963_969, "9.96"),
        ("inverted_attention_multimnist", {"pose": (64,)}, 42_478_017, "42.48"),
        ("dynamic_multimnist", {}, 42_477_633, "42.48"),
        ("cnn_multimnist", {}, 19_553_162, "19.55"),
        ("cnn_multimnist", {"pooling": "linear"}, 42_490_762, "42.49"),
        # Options of Figure 4 that learn something: two betas for 2 * 32 parents, a score for each of 32 primary types;
        # first poses of 16 for 2 * 32 + 10 parents.
        ("inverted_attention_cifar10", {"layer_norm": False}, 561_297 - 3 * 32, "0.56"),
        ("inverted_attention_cifar10", {"activations": True}, 561_297 + 2 * 64 + 256 * 32, "0.57"),
        ("inverted_attention_cifar10", {"start": "learned"}, 561_297 + 16 * 74, "0.56"),
        ("inverted_attention_cifar10", {"iterations": 5, "schedule": "sequential"}, 561_297, "0.56"),
    ],
)
def test_parameter_counts(name, arguments, parameters, published):
    with torch.device("meta"):
        model = create_model(name, **arguments)
    assert count(model) == parameters
    assert f"{parameters / 1e6:.2f}" == published


@pytest.mark.parametrize(
    ("name", "arguments", "image", "classes"),
    [
        ("inverted_attention_cifar10", {"backbone": "resnet"}, (3, 32, 32), 10),
        ("inverted_attention_cifar10", {"activations": True, "start": "random"}, (3, 32, 32), 10),
        ("inverted_attention_cifar10", {"schedule": Equilibrium(max_iterations=3)}, (3, 32, 32), 10),
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
    traces = model.capsules.trace(model.primary_capsules(torch.rand(1, 3, 32, 32)))
    assert [tuple(t.parents.poses.shape[1:]) for t in traces] == [(32, 7, 7, 4, 4), (32, 5, 5, 4, 4), (10, 4, 4)]
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


@pytest.mark.slow
def test_compile_and_export():
    model = narrow_cifar10(InvertedAttentionRouting(3), types=2, channels=4)
    images = torch.rand(2, 3, 32, 32)
    expected = model(images)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(images)
    torch.testing.assert_close(compiled.evidence, expected.evidence)
    exported = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    three = torch.cat([images, images[:1]])
    torch.testing.assert_close(exported(three).evidence, model(three).evidence)


def test_bad_input():
    with pytest.raises(ValueError, match=r"backbone .*vgg\b"):
        create_model("inverted_attention_cifar10", backbone="vgg")
    with pytest.raises(ValueError, match=r"pooling .*max\b"):
        create_model("cnn_multimnist", pooling="max", channels=2, hidden=2)
    with pytest.raises(ValueError, match=r"start .*one\b"):
        create_model("inverted_attention_cifar10", start="one")
    with pytest.raises(ValueError, match=r"\(batch, 1, 36, 36\), got \(1, 1, 28, 28\)"):
        inverted_attention_multimnist(types=2, pose=(2, 2))(torch.rand(1, 1, 28, 28))
