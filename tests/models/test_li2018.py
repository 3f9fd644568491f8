"""The networks of Li et al. 2018: options and forward passes."""

from functools import cache

import pytest
import torch
from torch import nn

from torchcaps import FeedbackAgreement, create_model
from torchcaps.functional import margin_loss
from torchcaps.models.li2018 import EncapsulatedModule2d
from torchcaps.routing import Iteration


@cache
def shapes_of(name: str) -> nn.Module:
    """A model on the meta device: shapes without values."""
    with torch.device("meta"):
        return create_model(name)


def test_depths():
    """The paper counts the stem, each capConv and capFC as layers."""
    from torchcaps import CapsuleBlock2d

    for name, layers in (("encapnet_v1", 18), ("encapnet_v2", 101)):
        assert 2 + sum(isinstance(module, CapsuleBlock2d) for module in shapes_of(name).modules()) == layers


@pytest.mark.parametrize(
    ("coefficients", "skips"),  # each value of one occurs with at least two of the other
    [
        *(("own", "type1"), ("other", "type2"), ("both", "both"), ("both", None), (None, "both"), (None, None)),
        *(("own", "type2"), ("other", "type1")),
    ],
)
def test_encapnet_runs(coefficients, skips):
    model = create_model("encapnet_v1", capsules=2, depth=2, coefficients=coefficients, skips=skips, classes=3)
    prediction = model(torch.rand(2, 3, 32, 32))
    assert prediction.evidence.shape == (2, 3)
    assert prediction.capsules.poses.shape == (2, 3, 16)
    assert prediction.evidence.max() < 1
    kinds = [type(layer.shortcut) for module in model.layers for layer in (module.type1, *module.type2)]
    assert kinds.count(nn.Conv2d) == (4 if skips in ("type1", "both") else 0)


@pytest.mark.parametrize(("name", "size"), [("encapnet_v1", 128), ("encapnet_v2", 32)])
def test_sizes(name, size):
    model = create_model(name, capsules=2, image_size=size, classes=4).eval()
    assert model.class_capsules.in_capsules == 2 * 4 * 4
    assert model(torch.rand(1, 3, size, size)).evidence.shape == (1, 4)


def test_skips_over_layers_of_type_two():
    """A span of all layers adds the input of the first to the last alone; a span of one adds each layer's own input."""
    x, seen = torch.rand(2, 2, 4, 4, 2), []
    for span, starts in ((None, [None, None, 0]), (1, [0, 1, 2]), (2, [None, 0, 2])):
        module = EncapsulatedModule2d(2, 2, 2, depth=3, stride=1, coefficients=None, skips="type2", skip_span=span)
        seen.clear()
        for layer in module.type2:
            layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs))
        module(x)
        for (_, shortcut), start in zip(seen, starts, strict=True):
            assert (shortcut is None) == (start is None)
            assert start is None or shortcut.poses is seen[start][0].poses


def test_feedback_attaches_to_a_layer_that_routes():
    model = create_model("capnet_dynamic", types=2, grid=2)
    feedback = FeedbackAgreement(model, [("features.2", "features.3"), ("capsules", "class_capsules")], critic=False)
    _, divergence = feedback(torch.rand(3, 3, 32, 32))
    assert divergence.isfinite()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("capnet_dynamic", {"start": "zero"}),
        ("capnet_dynamic", {"start": "learned", "iterations": 2}),
        ("capnet_dynamic", {"start": "random", "iterations": 1}),
        ("capnet_em", {}),
    ],
)
def test_capnet_runs_and_learns(name, arguments):
    """The least loss counts: with EM routing the loss jumps, by rounding alone, and the last one of twenty steps is 0.4
    to 1.1 of the first. The least of sixty was 0.6 at most with 24 seeds."""
    model = create_model(name, types=3, grid=2, classes=4, **arguments)
    images, labels = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        prediction = model(images)
        loss = margin_loss(prediction.evidence, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert prediction.capsules.poses.shape == (8, 4, 16)
    torch.testing.assert_close(prediction.evidence, prediction.capsules.poses.norm(dim=-1))
    assert min(losses) < 0.8 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


def test_activity_of_children_counts_for_em_routing():
    model = create_model("capnet_em", types=2, grid=2).eval()
    images = torch.rand(2, 3, 16, 16)
    before = model(images).evidence
    with torch.no_grad():
        model.activity[1].weight[0] = 0  # the first type is absent everywhere
        model.activity[1].bias[0] = 0
    assert not torch.allclose(model(images).evidence, before)


def children_per_class(least_variance: float | None) -> torch.Tensor:
    """Effective number of children in each class capsule of each image, of 128, before any training.

    It is 1 / sum_i s_i^2 for the shares s_i of the children in the mass of the last M-step.
    """
    torch.manual_seed(0)
    arguments = {} if least_variance is None else {"least_variance": least_variance}
    model = create_model("capnet_em", types=8, grid=4, **arguments)
    seen: list[Iteration] = []
    with torch.no_grad(), model.class_capsules.routing.watched(seen.append):
        model(torch.rand(16, 3, 32, 32))
    shares = seen[-1].votes.shares()
    return 1 / (shares / shares.sum(1, keepdim=True)).square().sum(1)


def test_a_class_collapses_onto_one_child_without_a_floor_under_its_variances():
    """E-steps in 16 dimensions give a class to the child with the nearest vote, unless its variance is kept up."""
    assert children_per_class(None).median() < 1.5
    torch.testing.assert_close(children_per_class(None), children_per_class(1e-6))
    for floor in (1.0, 10.0):  # of the recipes on MNIST and on CIFAR-10
        assert children_per_class(floor).min() > 50


def test_the_least_variance_is_that_of_both_layers():
    model = create_model("capnet_em", types=2, grid=2, least_variance=0.5)
    seen: list[Iteration] = []
    with model.capsules.routing.watched(seen.append), model.class_capsules.routing.watched(seen.append):
        model(torch.full((2, 3, 16, 16), 0.5))
    assert len(seen) == 6
    assert all(step.parents.variances.min() == 0.5 for step in seen)


def test_capnet_of_bad_arguments():
    from torchcaps.models import CapNet

    with pytest.raises(ValueError, match=r"least_variance=0\.1 needs routing='em': dynamic routing has no variances"):
        CapNet("dynamic", least_variance=0.1)
    with pytest.raises(ValueError, match="start='learned' needs routing='dynamic'"):
        CapNet("em", start="learned")
