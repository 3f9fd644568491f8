"""The report on a training: its tables against hand-worked cases, its figures, and temperatures that fit."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchcaps import create_model
from torchcaps.data import Digits
from torchcaps.explain.results import confusion_figure, curves_figure, mistakes_figure, numbers_figure
from torchcaps.measures.calibration import best_temperature, calibrated_temperature, calibration_error
from torchcaps.measures.labels import best_thresholds, of_each_label
from torchcaps.measures.results import ClassResults, LabelResults, NumberResults, Predicted, _class_rows, accuracies
from torchcaps.training import Classifier
from torchcaps.training.curves import curves_of
from torchcaps.training.report import Report


def test_temperature_of_scores_that_are_too_sure():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    assert best_temperature(5 * logits, labels) == pytest.approx(5, rel=0.03)
    assert best_temperature(0.01 * logits, labels) == pytest.approx(0.01, rel=0.03)
    assert calibration_error(5 * logits, labels, 5.0) < 0.01 < calibration_error(5 * logits, labels)


def test_temperature_where_all_samples_are_right():
    """The likeliest class of each of 8 is then 9/10 likely: log 9 = 3 / T."""
    scores, labels = 3 * torch.eye(2).repeat(4, 1), torch.arange(8) % 2
    assert best_temperature(scores, labels) == pytest.approx(3 / math.log(9), rel=1e-3)


@pytest.mark.parametrize("mistakes", [0, 1, 8])
def test_29_samples_tell_no_temperature(mistakes):
    """Where all are right, so are those of every resample, and the best temperature is about the same."""
    labels = torch.arange(29) % 3
    scores = 0.8 * torch.eye(3)[torch.where(torch.arange(29) < mistakes, labels + 1, labels) % 3]
    assert calibrated_temperature(scores, labels) is None
    for few in (1, 2):
        assert calibrated_temperature(scores[:few], labels[:few]) is None
        assert calibrated_temperature(scores[:few], labels[1 : few + 1]) is None


def test_many_samples_tell_a_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    state = torch.get_rng_state()
    temperature = calibrated_temperature(3 * logits, labels)
    assert temperature == best_temperature(3 * logits, labels) == calibrated_temperature(3 * logits, labels)
    assert torch.equal(torch.get_rng_state(), state)
    right = torch.arange(5000) % 4
    assert calibrated_temperature(torch.eye(4)[right], right) == best_temperature(torch.eye(4)[right], right)


def calibrated(held_out: int) -> ClassResults:
    """Return the results of scores of which one in ten is wrong."""
    labels = torch.arange(1000) % 3
    scores = torch.eye(3)[torch.where(torch.arange(1000) % 10 == 0, labels + 1, labels) % 3]
    return ClassResults("abc", Predicted(labels, scores), Predicted(labels[:held_out], scores[:held_out]))


def test_calibration_is_said_where_it_is_known():
    results = calibrated(1000)
    assert results.line.startswith("temperature: 0.346; the calibration error on the test set is 0.0000 with it, ")
    assert set(results.facts) == {"temperature", "calibration_error"}
    results = calibrated(29)
    assert results.line == "temperature: 1; 29 validation samples are too few to choose another"
    assert not results.facts


def test_calibration_error_by_hand():
    # Two samples with probability 0.75 of which one is right, and two sure ones which are right.
    scores = torch.tensor([[0.75, 0.25], [0.75, 0.25], [1.0, 1e-30], [1.0, 1e-30]]).log()
    assert calibration_error(scores, torch.tensor([0, 1, 0, 0])) == pytest.approx(0.5 * 0.25)


def test_rows_of_the_classes_by_hand():
    labels, predicted = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 0])
    rows = list(_class_rows(labels, predicted, ["a", "b", "never"]))
    assert rows[0] == ("a", "0.6667", "0.6667", "0.6667", "3")
    assert rows[1] == ("b", "0.5000", "0.5000", "0.5000", "2")
    assert rows[2] == ("never", "0.0000", "0.0000", "0.0000", "0")
    assert rows[3] == ("mean of the classes", "0.5833", "0.5833", "0.5833", "5")  # of those that were tested


def test_accuracies_by_hand():
    """Of four samples of class 0 three are right, of two of class 2 one, and class 1 has none."""
    labels = torch.tensor([0, 0, 2, 0, 0, 2])
    scores = torch.eye(3)[[0, 0, 1, 1, 0, 2]] + torch.tensor([0.2, 0.1, 0.0])
    assert accuracies(labels, scores, 1) == pytest.approx((4 / 6, (3 / 4 + 1 / 2) / 2))
    assert accuracies(labels, scores, 2) == pytest.approx((5 / 6, (1 + 1 / 2) / 2))
    rows = list(_class_rows(labels, scores.argmax(1), ["a", "b", "c"]))
    assert rows[-1][2] == f"{(3 / 4 + 1 / 2) / 2:.4f}"
    equal = torch.zeros(6, 3)  # of a dead network: it says class 0
    assert accuracies(labels, equal, 1) == pytest.approx((4 / 6, 1 / 2))


def test_curves_take_whole_epochs(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train/loss_step,train/loss_epoch,val/loss,train/accuracy,lr-SGD\n"
        ",9,,,,,0.1\n0,9,2.5,,,\n0,10,,2.0,,0.5\n0,10,,,1.5,\n1,20,,1.0,,0.75\n1,20,,,1.25,\n"
    )
    assert curves_of(tmp_path) == {
        "loss": {"training": ([1, 2], [2.0, 1.0]), "validation": ([1, 2], [1.5, 1.25])},
        "accuracy": {"training": ([1, 2], [0.5, 0.75])},
    }
    assert curves_of(tmp_path / "none") == {}
    for damaged in (b"epoch,val/loss\nx,1\n", b"epoch,val/loss\n1,0.\0\n", b"\xff"):
        (tmp_path / "metrics.csv").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"metrics\.csv is (damaged \(|not a text)"):
            curves_of(tmp_path)


def test_curves_of_a_resumed_run_begin_with_those_before(tmp_path: Path):
    """A run that was stopped after its first epoch, and gone on with after its third, of which it had trained four."""
    (tmp_path / "metrics.000.csv").write_text("epoch,step,train/accuracy\n0,10,0.25\n")
    (tmp_path / "metrics.002.csv").write_text("epoch,step,lr-SGD\n,30,0.1\n")  # stopped before an epoch's end
    (tmp_path / "metrics.001.csv").write_text("epoch,step,train/accuracy\n1,20,0.5\n2,30,0.75\n3,40,0.1\n")
    (tmp_path / "metrics.csv").write_text("epoch,step,train/loss_step\n3,35,1.0\n")
    assert curves_of(tmp_path) == {"accuracy": {"training": ([1, 2, 3], [0.25, 0.5, 0.75])}}


def test_a_sample_that_an_idle_process_repeats_is_left_out(monkeypatch):
    network = create_model("pooling_cnn", in_channels=1, channels=2, features=2)
    model = Classifier(network, nn.CrossEntropyLoss(), 10)
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    batch = torch.rand(3, 1, 20, 20), torch.arange(3)
    report = Report()
    report._batches["test"] = []
    for own in (3, 2):
        monkeypatch.setattr(model, "_share", lambda stage, index, count, own=own: (own, 5))
        report._add("test", batch[1], model.test_step(batch, 0)["predicted"])
    labels, scores = report._of_all("test", model)
    assert labels.tolist() == [0, 1, 2, 0, 1]
    assert scores.shape == (5, 10)


def test_held_out_accuracy_counts_the_top_k(monkeypatch):
    network = create_model("pooling_cnn", in_channels=1, channels=2, features=2)
    model = Classifier(network, nn.CrossEntropyLoss(), 10, top_k=2)
    report, scores = Report(), torch.eye(10)[:4] + 0.5 * torch.eye(10)[1:5]
    for stage in ("validate", "test"):
        report._batches[stage] = []
        report._add(stage, torch.tensor([0, 2, 4, 4]), scores)  # the highest, the second, neither, the second
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    trainer = SimpleNamespace(is_global_zero=True, datamodule=Digits(), callback_metrics={})
    report.on_test_epoch_end(trainer, model)
    report.on_test_end(trainer, model)
    # Of the classes 0, 2 and 4 all, all and half of the samples are right.
    assert report.about["metrics"] == pytest.approx({"val/accuracy": 0.75, "val/balanced_accuracy": 2.5 / 3})


def test_a_network_may_have_more_classes_than_the_data():
    data = Digits()
    data.setup("test")
    labels, probabilities = data.test_set.labels, torch.eye(12)[torch.full((len(data.test_set),), 11)]
    results = ClassResults(data.names, Predicted(labels, probabilities), None)
    assert results.mistakes().rows[0][1] == "class 11"
    assert results.confusion().shape == (10, 10)


def test_figures_show_every_class_and_number():
    counts = torch.tensor([[3, 1], [0, 2]]).numpy()
    axis = confusion_figure(counts, ["cat", "a very long name of a class"]).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["cat", "a very long name …"]
    assert sorted(text.get_text() for text in axis.texts) == ["1", "2", "3"]
    many = confusion_figure(torch.eye(60).long().numpy(), [str(i) for i in range(60)])
    assert not many.axes[0].texts
    figure = curves_figure({"loss": {"training": ([1, 2], [2.0, 1.0])}, "accuracy": {"training": ([1], [0.5])}}, 2.0)
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "accuracy"]
    drawn = mistakes_figure([torch.rand(1, 4, 4)] * 7, ["cat\ntaken for dog"] * 7, "Images")
    assert len([axis for axis in drawn.axes if axis.axison]) == 7


def test_thresholds_by_hand():
    """Of ten samples the first five have the first label, whose probabilities are 0.3 and 0.2 where one is wrong."""
    labels = torch.tensor([1.0] * 5 + [0.0] * 5)[:, None]
    probabilities = torch.tensor([0.9, 0.4, 0.3, 0.3, 0.1, 0.2, 0.1, 0.05, 0.01, 0.0])[:, None]
    # Above 0.25 four of five are found, and nothing else: F1 = 8 / 9. At 0.5 it would be 2 / 6.
    assert best_thresholds(probabilities, labels).tolist() == pytest.approx([0.25])
    (of_label,) = of_each_label(probabilities, labels, torch.tensor([0.25]))
    assert of_label[:3] == pytest.approx((1, 0.8, 8 / 9))
    assert of_label.samples == 5
    assert best_thresholds(probabilities[1:], labels[1:]).tolist() == [0.5]  # four samples say too little


def test_equal_probabilities_have_one_threshold():
    labels = torch.tensor([1.0, 0.0] * 5)[:, None]
    assert best_thresholds(torch.full((10, 1), 0.3), labels).tolist() == pytest.approx([0.15])  # all are predicted


def test_no_threshold_is_below_a_probability_of_0():
    """To predict all would be best, but half of those with the label have a probability of 0."""
    labels = torch.tensor([1.0] * 8 + [0.0] * 5)[:, None]
    probabilities = torch.tensor([0.9] * 4 + [0.0] * 4 + [0.8, 0.7, 0.6, 0.5, 0.0])[:, None]
    (threshold,) = best_thresholds(probabilities, labels).tolist()
    assert threshold == pytest.approx(0.85)  # F1 = 8 / 12; above 0 it is 8 / 16


def test_results_of_several_labels():
    labels = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    probabilities = torch.tensor([[0.9, 0.2, 0], [0.2, 0.8, 0], [0.8, 0.4, 0], [0.6, 0.1, 0]])
    results = LabelResults(["a", "b", "never"], Predicted(labels, probabilities), None)
    # Right are the first two; the third lacks b, and the last one has nothing.
    assert results.metrics["exact_match"] == 0.5
    assert results.metrics["macro_f1"] == pytest.approx((2 * 2 / (2 * 2 + 1) + 2 / 3) / 2)  # over the labels that occur
    assert results.metrics["average_precision"] == 1
    assert results.rows[2] == ("never", "0.0000", "0.0000", "0.0000", "", "0.5000", "0")
    assert results.rows[3][0] == "mean of the labels"
    assert results.facts == {}  # the run has none of a validation
    lower = LabelResults(["a", "b", "never"], Predicted(labels, probabilities), None, [0.7, 0.3, 0.5])
    assert lower.metrics["exact_match"] == 1
    places, header, rows = results.mistakes()
    assert header == ("labels", "prediction")
    assert dict(zip(places, rows, strict=True)) == {3: ("no label", "a"), 2: ("a|b", "a")}


def test_results_of_numbers():
    numbers = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
    predicted = torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 3.0]])
    results = NumberResults(["x", "y"], Predicted(numbers, predicted), Predicted(numbers, numbers))
    assert results.metrics == pytest.approx({"r2": 1 - 9 / 8, "rmse/x": 3**0.5, "rmse/y": (4 / 3) ** 0.5})
    assert results.rows == [("x", "1.732", "1", "-0.125", "3"), ("y", "1.155", "0.6667", "", "3")]
    assert results.held_out_metrics["rmse/x"] == 0
    places, _, rows = results.mistakes()
    assert places[0] == 2  # the largest error, in deviations
    assert rows[0] == ("4, 1", "1, 3")
    figure = numbers_figure(*results.tested, results.names)
    assert [axis.get_title() for axis in figure.axes] == ["x", "y"]
    assert not any(axis.axison for axis in numbers_figure(*[torch.rand(3, 5)] * 2, list("abcde")).axes[5:])
