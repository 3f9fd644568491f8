"""The decoder draws from the pose of one class."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchcaps import Capsules, MaskedDecoder


@pytest.mark.parametrize("pose", [(4,), (2, 2)])
def test_one_class_and_three_layers(pose):
    decoder = MaskedDecoder(3, 4, (2, 3, 5), (6, 7))
    poses, labels = torch.randn(4, 3, *pose), torch.tensor([2, 0, 1, 2])
    masked = torch.zeros(4, 12)
    for b, label in enumerate(labels.tolist()):
        masked[b, 4 * label : 4 * label + 4] = poses[b, label].flatten()
    first, _, second, _, third, _ = decoder.layers
    assert [layer.out_features for layer in (first, second, third)] == [6, 7, 30]
    hidden = nn.functional.linear(masked, first.weight, first.bias).clamp_min(0)
    hidden = nn.functional.linear(hidden, second.weight, second.bias).clamp_min(0)
    expected = 1 / (1 + (-nn.functional.linear(hidden, third.weight, third.bias)).exp())
    assert_close(decoder(Capsules(poses), labels), expected.view(4, 2, 3, 5))


def test_without_labels_the_most_active_class():
    decoder = MaskedDecoder(3, 2, (1, 2, 2), (5,))
    poses = torch.randn(6, 3, 2)
    longest = poses.norm(dim=2).argmax(1)
    assert_close(decoder(Capsules(poses)), decoder(Capsules(poses), longest))
    assert decoder(Capsules(poses[:0])).shape == (0, 1, 2, 2)
    scores = torch.randn(6, 3)
    assert_close(decoder(Capsules(poses, scores)), decoder(Capsules(poses), scores.argmax(1)))


def test_other_classes_have_no_gradient():
    decoder = MaskedDecoder(3, 2, (1, 2, 2))
    assert [layer.out_features for layer in decoder.layers if isinstance(layer, nn.Linear)] == [512, 1024, 4]
    poses = torch.randn(2, 3, 2, requires_grad=True)
    decoder(Capsules(poses), torch.tensor([1, 0])).sum().backward()
    assert [x.any().item() for x in poses.grad.flatten(0, 1)] == [False, True, False, True, False, False]
