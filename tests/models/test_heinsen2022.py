"""The heads of Heinsen 2022: gradients, first values, children; `test_texts.py` has masks and padding."""

import torch
import torch.nn.functional as F
from torch import nn

from torchcaps.models import heinsen_texts


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
