"""The heads of Heinsen 2022: parameter counts and gradients; `test_texts.py` has masks and padding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchcaps import create_model
from torchcaps.models import heinsen_texts


def by_arithmetic(layers, width, hidden, pose, classes):
    """The number of parameters, matrix by matrix."""

    def routing(children, parents, d, h):
        rows = children or 1
        betas = 2 * children * parents if children else 2 * (d + 1) * parents
        activation = rows * d + rows
        vote = parents * d + d * h + parents * h
        prediction = h * d + parents * d + parents * d
        similarity = 2 * rows * parents
        return activation + vote + prediction + similarity + betas

    depth = 2 * layers * width
    return (
        depth
        + routing(None, hidden, width, pose)
        + routing(hidden, hidden, pose, pose)
        + routing(hidden, classes, pose, 1)
    )


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        # SST-5; SST-2 and IMDb
        ("heinsen_texts", {}, 5_068_422),
        ("heinsen_texts", {"classes": 2}, 5_058_435),
        # ImageNet, CIFAR-10, CIFAR-100. With BEiT-large, about 304.4 million, these are the 312.8, 309.5 and 309.8
        # million that paperswithcode.com lists.
        ("heinsen_images", {}, 8_380_777),
        ("heinsen_images", {"classes": 10}, 5_085_067),
        ("heinsen_images", {"classes": 100}, 5_384_677),
        ("heinsen_texts", {"layers": 7, "width": 384, "hidden": 16, "pose": 64}, by_arithmetic(7, 384, 16, 64, 5)),
    ],
)
def test_parameter_counts(name, arguments, parameters):
    with torch.device("meta"):
        network = create_model(name, **arguments)
    assert sum(p.numel() for p in network.parameters()) == parameters
    sizes = {"layers": 25, "width": 1024, "hidden": 64, "pose": 1024, "classes": 5 if "texts" in name else 1000}
    assert by_arithmetic(**(sizes | arguments)) == parameters


def head(dtype=torch.float64):
    torch.manual_seed(0)
    network = heinsen_texts(3, layers=2, width=7, hidden=4, pose=5).to(dtype)
    for p in network.parameters():
        nn.init.normal_(p, std=0.5)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    return network, torch.randn(2, 4, 2, 7, dtype=dtype), mask


def test_shapes_and_gradients():
    network, states, mask = head()
    prediction = network(states.requires_grad_(), mask)
    assert prediction.scores.shape == (2, 3)
    assert prediction.capsules.poses.shape == (2, 3, 1)
    assert torch.equal(prediction.scores, prediction.capsules.poses[..., 0])
    assert prediction.scores.std() > 1e-2
    F.cross_entropy(prediction.scores, torch.tensor([0, 2])).backward()
    for name, p in network.named_parameters():
        assert p.grad.abs().max() > 0, name
    assert states.grad[mask].abs().amin(1).min() > 0
    assert not states.grad[~mask].any()


def test_the_gradient_is_exact():
    network, states, mask = head()
    soft = mask.double() * 0.7 + 0.1
    torch.autograd.gradcheck(
        lambda x, m: network(x, m).scores, (states.requires_grad_(), soft.requires_grad_()), fast_mode=True
    )


def test_first_values():
    network = heinsen_texts(layers=2, width=6, hidden=3, pose=4)
    assert torch.equal(network.depth_scale, torch.ones(2, 6))
    assert not network.depth_offset.any()
    nn.init.normal_(network.depth_scale)
    nn.init.normal_(network.depth_offset)
    network.reset_parameters()
    assert torch.equal(network.depth_scale - network.depth_offset, torch.ones(2, 6))


@torch.no_grad()
def test_the_children_are_normalized_states_of_each_layer():
    network, states, _ = head()
    children = network.primary_capsules(states)
    assert children.scores is None
    assert children.poses.shape == (2, 8, 7)
    normal = (states[1, 2, 1] - states[1, 2, 1].mean()) / (states[1, 2, 1].var(correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(children.poses[1, 5], normal * network.depth_scale[1] + network.depth_offset[1])


@torch.no_grad()
def test_a_freshly_made_head_of_the_published_size():
    torch.manual_seed(0)
    scores = heinsen_texts()(torch.randn(2, 3, 25, 1024)).scores
    assert scores.shape == (2, 5)
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", ["layers", "width", "classes", "hidden", "pose"])
def test_sizes_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got 0"):
        heinsen_texts(**{name: 0})
