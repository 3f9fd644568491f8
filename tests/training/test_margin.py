"""The margin of the spread loss over epochs."""

from types import SimpleNamespace

import pytest

from torchcaps import MarginLoss, SpreadLoss
from torchcaps.training import SpreadMargin


def test_by_hand():
    margin = SpreadMargin(0.2, 0.9, hold=20)
    expected = {0: 0.2, 20: 0.2, 55: 0.55, 90: 0.9, 109: 0.9}
    assert {epoch: margin.margin(epoch, 110) for epoch in expected} == pytest.approx(expected)
    assert margin.margin(0, 1) == 0.2  # too short to grow
    assert [margin.margin(epoch, 2) for epoch in range(2)] == pytest.approx([0.2, 0.9])
    assert [margin.margin(epoch, 3) for epoch in range(3)] == pytest.approx([0.2, 0.2, 0.9])


def test_it_reaches_the_loss():
    module = SimpleNamespace(loss=SpreadLoss())
    SpreadMargin(0.1, 0.5, hold=0).on_train_epoch_start(SimpleNamespace(max_epochs=4, current_epoch=3), module)
    assert module.loss.margin.item() == pytest.approx(0.5)
    assert module.loss.state_dict()["margin"].item() == pytest.approx(0.5)  # stored in checkpoints


def test_bad_input():
    with pytest.raises(ValueError, match="first must be at most last, got 0.9 and 0.2"):
        SpreadMargin(first=0.9, last=0.2)
    trainer = SimpleNamespace(max_epochs=4, current_epoch=0)
    with pytest.raises(TypeError, match="the loss is a MarginLoss"):
        SpreadMargin().on_train_epoch_start(trainer, SimpleNamespace(loss=MarginLoss()))
    with pytest.raises(ValueError, match=r"set trainer\.max_epochs"):
        SpreadMargin().on_train_epoch_start(
            SimpleNamespace(max_epochs=-1, current_epoch=0), SimpleNamespace(loss=SpreadLoss())
        )
