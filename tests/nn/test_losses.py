"""Losses on activations, against numbers worked out by hand and against plain loops."""

import oracles
import pytest
import torch
from torch.testing import assert_close

from torchcaps import MarginLoss, Prediction, SpreadLoss
from torchcaps.functional import margin_loss, spread_loss
from torchcaps.nn.losses import read_by


def test_margin_loss_by_hand():
    lengths = torch.tensor([[0.5, 0.3, 0.05]])
    # expected: (0.9 - 0.5)^2 + 0.5 (0.3 - 0.1)^2 + 0
    assert margin_loss(lengths, torch.tensor([0])).item() == pytest.approx(0.18)
    # expected: (0.8 - 0.5)^2 + 0.25 (0.3 - 0.2)^2
    assert margin_loss(lengths, torch.tensor([0]), 0.8, 0.2, 0.25).item() == pytest.approx(0.0925)
    assert MarginLoss(0.8, 0.2, 0.25)(lengths, torch.tensor([0])).item() == pytest.approx(0.0925)
    # Targets of 0.5 give half of the loss of a present class and half of that of an absent one.
    half = torch.tensor([[0.5, 0.5, 0.0]])
    assert margin_loss(lengths, half).item() == pytest.approx(0.5 * (0.16 + 0.36) + 0.25 * (0.16 + 0.04))


def test_spread_loss_by_hand():
    activations = torch.tensor([[0.7, 0.5, 0.1]])
    # expected: (0.5 - 0.2)^2 + 0
    assert spread_loss(activations, torch.tensor([0]), 0.5).item() == pytest.approx(0.09)
    assert SpreadLoss(0.5)(activations, torch.tensor([0])).item() == pytest.approx(0.09)


def test_plain_loops():
    scores, labels = torch.rand(6, 4), torch.tensor([3, 0, 1, 1, 2, 0])
    assert margin_loss(scores, labels).item() == pytest.approx(oracles.margin_loss(scores.tolist(), labels.tolist()))
    one_hot = torch.nn.functional.one_hot(labels, 4)
    assert_close(margin_loss(scores, one_hot), margin_loss(scores, labels))
    assert_close(MarginLoss()(scores, labels), margin_loss(scores, labels))
    for margin in (0.2, 0.9):
        expected = oracles.spread_loss(scores.tolist(), labels.tolist(), margin)
        assert spread_loss(scores, labels, margin).item() == pytest.approx(expected)
        assert spread_loss(scores, labels, torch.tensor(margin)).item() == pytest.approx(expected)
    assert_close(SpreadLoss()(scores, labels), spread_loss(scores, labels, 0.9))


def test_the_margin_is_saved():
    loss = SpreadLoss(0.2)
    loss.margin.fill_(0.7)
    other = SpreadLoss()
    other.load_state_dict(loss.state_dict())
    assert other.margin.item() == pytest.approx(0.7)
    assert repr(other) == "SpreadLoss(margin=0.7)"
    meta = other.to("meta")
    assert repr(meta) == "SpreadLoss(margin=?)"
    again = meta.to_empty(device="cpu")
    again.reset_parameters()
    assert again.margin.item() == pytest.approx(0.9)
    loss.reset_parameters()
    assert loss.margin.item() == pytest.approx(0.2)


def test_long_lengths_are_refused_only_where_they_are_equal():
    """Those of a LayerNorm are equal. A single class has no other to be equal to."""
    labels = torch.tensor([0, 1])
    for lengths in ([[1.2, 1.2004], [1.2, 1.2]], [[4.0, 4.05], [4.0, 4.0]]):
        with pytest.raises(ValueError, match=r"^all lengths are about [14]\.\d*, as after a LayerNorm"):
            margin_loss(torch.tensor(lengths), labels)
    for lengths in ([[1.2, 1.205], [1.2, 1.2]], [[4.0, 4.2], [4.0, 4.0]], [[0.9, 0.9], [0.9, 0.9]]):
        assert margin_loss(torch.tensor(lengths), labels).isfinite()
    assert margin_loss(torch.full((2, 1), 1.2), torch.zeros(2).long()) == 0


def test_what_a_loss_reads():
    numbers = torch.rand(2, 3)
    scores, activations = Prediction(numbers), Prediction(activations=numbers)
    cross_entropy = torch.nn.CrossEntropyLoss()
    assert read_by(cross_entropy, scores) is read_by(MarginLoss(), activations) is numbers
    assert read_by(SpreadLoss(), activations) is numbers
    with pytest.raises(ValueError, match="MarginLoss reads activations, and the network gives scores: .*CrossEntropy"):
        read_by(MarginLoss(), scores)
    with pytest.raises(ValueError, match="CrossEntropyLoss reads scores, and the network gives activations: .*Margin"):
        read_by(cross_entropy, activations)
    cross_entropy.reads = "activations"
    assert read_by(cross_entropy, activations) is numbers
