"""The heads of Heinsen 2022: parameter counts, masks and padding, any number of positions, gradients, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from algorithms import randomize
from torch import nn
from torch.export import Dim

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


@pytest.mark.parametrize("name", ["heinsen_texts", "heinsen_sst"])
def test_the_gradient_of_a_mask_is_finite(name):
    sizes = {"hidden": 4, "pose": 5} if name == "heinsen_texts" else {}
    network = randomize(create_model(name, classes=3, layers=2, width=7, **sizes))
    x, mask = torch.randn(2, 3, 2, 7, requires_grad=True), torch.tensor([[1, 1, 0.5], [1, 0, 0.0]])
    network(x, mask.requires_grad_()).scores.sum().backward()
    assert mask.grad.isfinite().all()
    assert mask.grad.nonzero().tolist() == [[0, 2]]
    assert x.grad.isfinite().all()


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
    torch.autograd.gradcheck(lambda x, m: network(x, m).scores, (states.requires_grad_(), soft.requires_grad_()))


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


# Padding


@pytest.mark.parametrize("place", ["right", "left", "between"])
@pytest.mark.parametrize("garbage", [1e3, float("nan"), float("inf")])
def test_padding_changes_nothing(place, garbage):
    network, states, mask = head()
    places = {"right": slice(0, 4), "left": slice(4, 8), "between": slice(1, 8, 2)}[place]
    padded = garbage * torch.randn(2, 8, 2, 7, dtype=torch.float64)
    padded[:, places] = states
    padded_mask = torch.zeros(2, 8, dtype=torch.bool)
    padded_mask[:, places] = mask

    results = []
    for x, m in ((states, mask), (padded, padded_mask)):
        x.requires_grad_()
        network.zero_grad()
        scores = network(x, m).scores
        scores.pow(3).sum().backward()
        results.append((scores, *(p.grad.clone() for p in network.parameters())))
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(padded.grad[:, places], states.grad, rtol=1e-11, atol=1e-11)
    assert not padded.grad[~padded_mask].any()
    # The first text alone, without its padding and without a mask.
    torch.testing.assert_close(network(states[:1, :3]).scores, results[1][0][:1], rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_masks():
    network, states, mask = head()
    expected = network(states, mask).scores
    for other in (mask.long(), mask.float(), mask.double(), mask.half()):
        torch.testing.assert_close(network(states, other).scores, expected, rtol=0, atol=0)
    torch.testing.assert_close(network(states).scores, network(states, torch.ones(2, 4)).scores)
    assert not torch.allclose(network(states).scores[0], expected[0])
    scores = network.primary_capsules(states, mask).scores
    assert scores.tolist() == [[math.inf] * 6 + [-math.inf] * 2, [math.inf] * 8]
    nothing = network(states, torch.zeros(2, 4)).scores  # all children absent
    assert nothing.isfinite().all()
    torch.testing.assert_close(nothing[0], nothing[1])
    assert network(states[:0], mask[:0]).scores.shape == (0, 3)


@torch.no_grad()
def test_soft_masks():
    network, states, _ = head()
    mask = torch.tensor([[1, 0.5, 0.01, 0], [0.9, 0.8, 0.3, 1]], dtype=torch.float64)
    torch.testing.assert_close(network.primary_capsules(states, mask).scores.sigmoid(), mask.repeat_interleave(2, 1))
    # A token that occurs twice, with 0.3 and 0.7 of its mask, counts as once with its whole mask.
    twice = network(torch.cat([states, states], 1), torch.cat([0.3 * mask, 0.7 * mask], 1)).scores
    torch.testing.assert_close(twice, network(states, mask).scores, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_any_number_of_positions_in_any_order():
    network, states, _ = head()
    scores = network(states).scores
    torch.testing.assert_close(network(states.flip(1)).scores, scores)
    assert not torch.allclose(network(states.flip(2)).scores, scores)  # layers are told apart
    for positions in (1, 2, 9, 300):
        assert network(torch.randn(2, positions, 2, 7, dtype=torch.float64)).scores.shape == (2, 3)


@torch.no_grad()
def test_states_in_half_precision():
    network, states, mask = head(torch.float32)
    half = states.half()
    torch.testing.assert_close(network(half, mask).scores, network(half.float(), mask).scores)
    with torch.autocast("cpu", torch.bfloat16):
        scores = network(half, mask).scores
    torch.testing.assert_close(scores.float(), network(half, mask).scores, rtol=0.1, atol=0.1)


# Compilation and errors


@torch.no_grad()
def test_compile():
    network, *inputs = head(torch.float32)
    compiled = torch.compile(network.eval(), fullgraph=True, backend="eager")(*inputs)
    torch.testing.assert_close(compiled.scores, network(*inputs).scores)


@pytest.mark.slow
def test_export_takes_any_batch_size_and_length():
    network, states, mask = head(torch.float32)
    sizes = {0: Dim("batch"), 1: Dim("positions")}
    exported = torch.export.export(network.eval(), (states, mask), dynamic_shapes=(sizes, sizes)).module()
    for positions in (3, 9):
        states, mask = torch.randn(3, positions, 2, 7), torch.rand(3, positions) > 0.3
        torch.testing.assert_close(exported(states, mask).scores, network(states, mask).scores)


def test_bad_input():
    network, states, mask = head()
    for bad, shape in ((states[0], r"\(4, 2, 7\)"), (states.mT, r"\(2, 4, 7, 2\)"), (states[:, :0], r"\(2, 0, 2, 7\)")):
        with pytest.raises(ValueError, match=r"expected embeddings of shape \(batch, tokens, 2, 7\), .*got " + shape):
            network(bad, mask)
    for bad, shape in ((mask[0], r"\(4,\)"), (mask.T, r"\(4, 2\)"), (mask[..., None], r"\(2, 4, 1\)")):
        with pytest.raises(ValueError, match=r"expected a mask of shape \(batch, tokens\) = \(2, 4\), got " + shape):
            network(states, bad)
    for bad in (-0.1, 1.1, math.nan, 7):
        with pytest.raises(ValueError, match="a mask must be from 0"):
            network(states, torch.full((2, 4), bad))
    for name in ("layers", "width", "classes", "hidden", "pose"):
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got 0"):
            heinsen_texts(**{name: 0})
