"""Losses on activations, against numbers worked out by hand and against plain loops."""

import oracles
import pytest
import torch
from torch.testing import assert_close

from torchcaps import MarginLoss, Prediction, SpreadLoss
from torchcaps.functional import margin_loss, spread_loss
from torchcaps.nn.losses import input_of_loss


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
    weights = [0.5, 3.0, 0.0, 1.25]
    expected = oracles.margin_loss(scores.tolist(), labels.tolist(), weights)
    assert margin_loss(scores, labels, weight=torch.tensor(weights)).item() == pytest.approx(expected)
    expected = oracles.spread_loss(scores.tolist(), labels.tolist(), 0.7, weights)
    assert spread_loss(scores, labels, 0.7, torch.tensor(weights)).item() == pytest.approx(expected)
    for margin in (0.2, 0.9):
        expected = oracles.spread_loss(scores.tolist(), labels.tolist(), margin)
        assert spread_loss(scores, labels, margin).item() == pytest.approx(expected)
        assert spread_loss(scores, labels, torch.tensor(margin)).item() == pytest.approx(expected)
    assert_close(SpreadLoss()(scores, labels), spread_loss(scores, labels, 0.9))


WEIGHTS = torch.tensor([2.0, 1.0, 10.0])


def test_class_weights_by_hand():
    # Losses of 0.36 and 0.18 without weights, as above; the classes 2 and 0 weigh 10 and 2.
    lengths = torch.tensor([[0.1, 0.1, 0.3], [0.5, 0.3, 0.05]])
    expected = (10 * 0.36 + 2 * 0.18) / 2
    labels = torch.tensor([2, 0])
    assert margin_loss(lengths, labels, weight=WEIGHTS).item() == pytest.approx(expected)
    assert MarginLoss(weight=WEIGHTS)(lengths, labels).item() == pytest.approx(expected)
    # One class; two, whose mean weight is 6; one more than the other, (0.9 * 2 + 0.3 * 10) / 1.2 = 4; none.
    presence = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.9, 0.0, 0.3], [0.0, 0.0, 0.0]])
    for present, weight in zip(presence, (1, 6, 4, 1), strict=True):
        plain = margin_loss(lengths[1:], present[None])
        assert margin_loss(lengths[1:], present[None], weight=WEIGHTS).item() == pytest.approx(weight * plain.item())
    activations = torch.tensor([[0.7, 0.5, 0.1], [0.7, 0.5, 0.1]])
    # (0.5 - 0.2)^2 + 0 for class 0; (0.5 + 0.6)^2 + (0.5 + 0.4)^2 for class 2
    expected = (2 * 0.09 + 10 * (1.21 + 0.81)) / 2
    assert spread_loss(activations, torch.tensor([0, 2]), 0.5, WEIGHTS).item() == pytest.approx(expected)
    assert SpreadLoss(0.5, WEIGHTS)(activations, torch.tensor([0, 2])).item() == pytest.approx(expected)


@pytest.mark.parametrize("loss", [margin_loss, spread_loss])
def test_weights_of_all_one_change_no_bit(loss):
    scores, labels = torch.rand(50, 3, requires_grad=True), torch.arange(50) % 3
    both = [loss(scores, labels, **options) for options in ({}, {"weight": torch.ones(3)})]
    assert torch.equal(*both)
    assert torch.equal(*(torch.autograd.grad(one, scores)[0] for one in both))
    if loss is margin_loss:
        presence = torch.rand(50, 3)
        assert torch.equal(loss(scores, presence), loss(scores, presence, weight=torch.ones(3)))


def test_the_weighted_mean_is_that_of_cross_entropy_for_probabilities():
    """PyTorch divides by the number of samples where targets are probabilities."""
    scores, labels = torch.rand(6, 3), torch.tensor([2, 0, 1, 1, 2, 0])
    one_hot = torch.nn.functional.one_hot(labels, 3).float()
    for loss in (torch.nn.functional.cross_entropy, margin_loss, spread_loss):
        alone = torch.stack([loss(scores[i : i + 1], labels[i : i + 1]) for i in range(6)])
        targets = labels if loss is spread_loss else one_hot
        assert_close(loss(scores, targets, weight=WEIGHTS), (WEIGHTS[labels] * alone).mean())


@pytest.mark.parametrize("loss", [margin_loss, spread_loss])
def test_gradients_of_weighted_losses(loss):
    scores = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([0.5, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 1, 1])
    assert torch.autograd.gradcheck(lambda scores, weight: loss(scores, labels, weight=weight), (scores, weight))


@pytest.mark.parametrize("kind", [MarginLoss, SpreadLoss])
def test_class_weights_are_saved(kind):
    assert "weight" not in kind().state_dict()
    loss = kind(weight=WEIGHTS)
    other = kind(weight=torch.ones(3))
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other.weight, WEIGHTS)
    assert kind(weight=WEIGHTS).double().weight.dtype == torch.float64


@pytest.mark.parametrize("loss", [margin_loss, spread_loss])
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(2), r"weight must be a floating-point tensor of 3 numbers, one for each class, got .*\(2,\)"),
        (torch.ones(1, 3), r"of 3 numbers, one for each class, got a tensor of shape \(1, 3\)"),
        (torch.tensor([1, 1, 1]), r"a floating-point tensor of 3 numbers.*int64"),
        (torch.tensor([1.0, -1.0, 1.0]), r"weight must have finite numbers of at least 0, got \[1.0, -1.0, 1.0\]"),
        (torch.tensor([1.0, torch.nan, 1.0]), "finite numbers of at least 0, got .*nan"),
        (torch.ones(3, device="meta"), "the weights are on meta and the scores on cpu: move one of them"),
    ],
)
def test_class_weights_that_are_none(loss, weight, said):
    with pytest.raises(ValueError, match=said):
        loss(torch.rand(4, 3), torch.tensor([0, 2, 1, 1]), weight=weight)


@pytest.mark.parametrize("kind", [MarginLoss, SpreadLoss])
def test_wrong_class_weights_are_found_before_the_first_batch(kind):
    with pytest.raises(ValueError, match=r"a floating-point tensor of one number for each class, got .*\(1, 3\)"):
        kind(weight=torch.ones(1, 3))
    with pytest.raises(ValueError, match="finite numbers of at least 0, got"):
        kind(weight=torch.tensor([1.0, torch.inf]))


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
    assert input_of_loss(cross_entropy, scores) is input_of_loss(MarginLoss(), activations) is numbers
    assert input_of_loss(SpreadLoss(), activations) is numbers
    with pytest.raises(ValueError, match="MarginLoss reads activations, and the network gives scores: .*CrossEntropy"):
        input_of_loss(MarginLoss(), scores)
    with pytest.raises(ValueError, match="CrossEntropyLoss reads scores, and the network gives activations: .*Margin"):
        input_of_loss(cross_entropy, activations)
    cross_entropy.reads = "activations"
    assert input_of_loss(cross_entropy, activations) is numbers
