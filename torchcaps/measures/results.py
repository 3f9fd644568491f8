"""What a test came to, of each kind of target: metrics, a table, facts that a checkpoint keeps, and mistakes."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcaps.measures.accuracy import balanced_accuracy, is_among
from torchcaps.measures.calibration import calibrated_temperature, calibration_error
from torchcaps.measures.labels import DEFAULT, OfLabel, best_thresholds, exact_match, of_each_label
from torchcaps.measures.masks import OfClass, dice_of, mean_of, of_each_class
from torchcaps.measures.numbers import OfNumber, of_each_number

MOST = 1000  # samples with the largest errors in numbers


class Predicted(NamedTuple):
    """Samples of a validation or of a test.

    Fields:
        targets: what is to be predicted: classes `(n,)`, labels `(n, labels)`, numbers `(n, numbers)`, or how many
            pixels of each class a mask has, `(n, classes)`.
        values: what is predicted: scores `(n, classes)`, probabilities `(n, labels)`, numbers `(n, numbers)`, or how
            many pixels are predicted to be of each class, and how many of these are, `(n, 2 * classes)`.
    """

    targets: Tensor
    values: Tensor


class Mistakes(NamedTuple):
    """Test samples that are taken for something else, the worst first.

    Fields:
        places: their places in the test.
        header, rows: of each what it is, what it was taken for, and perhaps more.
    """

    places: Sequence[int]
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Results:
    """Results of a test.

    Args:
        names: names of the classes, labels or numbers.
        tested: the samples of the test.
        held_out: those of the validation; None if there are none.

    Attributes:
        header, rows: the table of the results.
        line: what else is printed, or "".
        metrics: of the test, by name.
        held_out_metrics: of the validation, by name.
        facts: what the checkpoint keeps.
    """

    header: tuple[str, ...]
    file: str  # name of the table
    title = "Images that are taken for another class"  # of the figure of mistakes

    def __init__(self, names: Sequence[str], tested: Predicted, held_out: Predicted | None) -> None:
        self.names, self.tested, self.held_out = names, tested, held_out
        self.rows: list[tuple[str, ...]] = []
        self.line = ""
        self.metrics: dict[str, float] = {}
        self.held_out_metrics: dict[str, float] = {}
        self.facts: dict[str, Any] = {}

    def mistakes(self) -> Mistakes:
        """Return the samples of the test that the network takes for something else."""
        raise NotImplementedError


class ClassResults(Results):
    """Results of a test of classes; `top_k` is that of the :class:`torchcaps.training.Classifier`."""

    file = "classes"
    header = ("class", "precision", "recall", "F1", "test samples")

    def __init__(self, names: Sequence[str], tested: Predicted, held_out: Predicted | None, top_k: int = 1) -> None:
        super().__init__(names, tested, held_out)
        self.metrics = {"balanced_accuracy": accuracies(*tested, top_k)[1]}
        self.rows = list(_class_rows(tested.targets, tested.values.argmax(1), names))
        self.temperature = 1.0
        if held_out is not None:
            accuracy, balanced = accuracies(*held_out, top_k)
            self.held_out_metrics = {"accuracy": accuracy, "balanced_accuracy": balanced}
            self._calibrate(held_out)

    def _calibrate(self, held_out: Predicted) -> None:
        temperature = calibrated_temperature(held_out.values, held_out.targets)
        if temperature is None:
            count = len(held_out.targets)
            self.line = f"temperature: 1; {count} validation samples are too few to choose another"
            return
        labels, scores = self.tested
        before, after = calibration_error(scores, labels), calibration_error(scores, labels, temperature)
        self.temperature = temperature
        self.facts = {
            "temperature": temperature,
            "calibration_error": {"on": "test", "before": before, "after": after},
        }
        self.line = (
            f"temperature: {temperature:.3g}; the calibration error on the test set is {after:.4f} with it, "
            f"{before:.4f} without"
        )

    def confusion(self) -> np.ndarray:
        """Return how many samples of each class (row) were taken for each class (column)."""
        from sklearn.metrics import confusion_matrix  # slow to import

        counts: np.ndarray = confusion_matrix(
            self.tested.targets, self.tested.values.argmax(1), labels=range(len(self.names))
        )
        return counts

    def mistakes(self) -> Mistakes:
        labels, scores = self.tested
        sure, predicted = (scores / self.temperature).softmax(1).max(1)
        wrong = (predicted != labels).nonzero().squeeze(1)
        places = wrong[sure[wrong].argsort(descending=True, stable=True)].tolist()
        names = [*self.names]
        names += [f"class {label}" for label in range(len(names), scores.shape[1])]  # of the network alone
        rows = [(names[int(labels[i])], names[int(predicted[i])], f"{float(sure[i]):.4f}") for i in places]
        return Mistakes(places, ("class", "prediction", "probability"), rows)


class LabelResults(Results):
    """Results of a test of several labels.

    A label is predicted where its probability is above its threshold: `thresholds`, or those with the highest F1 on the
    validation samples, or 0.5.
    """

    file = "labels"
    header = ("label", "precision", "recall", "F1", "average precision", "threshold", "test samples")
    title = "Images that are taken for others"

    def __init__(
        self,
        names: Sequence[str],
        tested: Predicted,
        held_out: Predicted | None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        super().__init__(names, tested, held_out)
        self.thresholds = torch.full((len(names),), DEFAULT, dtype=torch.float64)
        if held_out is not None:
            self.thresholds = best_thresholds(held_out.values, held_out.targets)
            self.held_out_metrics = self._metrics(held_out, self._measures(held_out))
        elif thresholds is not None:
            self.thresholds = torch.tensor(thresholds, dtype=torch.float64)
        self.facts = {} if held_out is None else {"thresholds": self.thresholds.tolist()}
        measures = self._measures(tested)
        self.metrics = self._metrics(tested, measures)
        for name, of_label, threshold in zip(names, measures, self.thresholds.tolist(), strict=True):
            values = (*of_label[:4], threshold)
            self.rows.append((name, *("" if x != x else f"{x:.4f}" for x in values), str(of_label.samples)))
        if tested_ones := [x for x in measures if x.samples]:
            means = (sum(values) / len(tested_ones) for values in list(zip(*tested_ones, strict=True))[:4])
            self.rows.append(("mean of the labels", *(f"{x:.4f}" for x in means), "", str(len(tested.targets))))

    def _measures(self, samples: Predicted) -> list[OfLabel]:
        return of_each_label(samples.values, samples.targets, self.thresholds)

    def _metrics(self, samples: Predicted, of_all: Sequence[OfLabel]) -> dict[str, float]:
        metrics = {"exact_match": exact_match(samples.values > self.thresholds, samples.targets)}
        if measures := [x for x in of_all if x.samples]:
            metrics["macro_f1"] = sum(x.f1 for x in measures) / len(measures)
            metrics["average_precision"] = sum(x.average_precision for x in measures) / len(measures)
        return metrics

    def mistakes(self) -> Mistakes:
        labels, probabilities = self.tested
        predicted = probabilities > self.thresholds
        differs = predicted != (labels > 0)
        wrong = differs.any(1).nonzero().squeeze(1)
        # The surest first: whose probability is farthest on the wrong side of its threshold.
        off = ((probabilities - self.thresholds).abs() * differs).amax(1)[wrong]
        places = wrong[off.argsort(descending=True, stable=True)].tolist()
        rows = [(self._named(labels[i] > 0), self._named(predicted[i])) for i in places]
        return Mistakes(places, ("labels", "prediction"), rows)

    def _named(self, present: Tensor) -> str:
        return "|".join(self.names[k] for k in present.nonzero().squeeze(1).tolist()) or "no label"


class NumberResults(Results):
    """Results of a test of numbers."""

    file = "numbers"
    header = ("number", "RMSE", "mean absolute error", "R2", "test samples")
    title = "Images with the largest errors"

    def __init__(self, names: Sequence[str], tested: Predicted, held_out: Predicted | None) -> None:
        super().__init__(names, tested, held_out)
        measures = of_each_number(tested.values, tested.targets)
        self.metrics = self._metrics(measures)
        if held_out is not None:
            self.held_out_metrics = self._metrics(of_each_number(held_out.values, held_out.targets))
        for name, values in zip(names, measures, strict=True):
            self.rows.append((name, *("" if x != x else f"{x:.4g}" for x in values), str(len(tested.targets))))

    def _metrics(self, measures: Sequence[OfNumber]) -> dict[str, float]:
        known = [x.r2 for x in measures if x.r2 == x.r2]
        metrics = {"r2": sum(known) / len(known)} if known else {}
        return metrics | {f"rmse/{name}": x.rmse for name, x in zip(self.names, measures, strict=True)}

    def mistakes(self) -> Mistakes:
        numbers, predicted = self.tested
        errors = (predicted - numbers) / numbers.std(0, correction=0).clamp_min(1e-12)
        places = errors.abs().amax(1).argsort(descending=True, stable=True)[:MOST].tolist()
        return Mistakes(places, ("numbers", "prediction"), [(_shown(numbers[i]), _shown(predicted[i])) for i in places])


class MaskResults(Results):
    """Results of a test of a class of each pixel."""

    file = "masks"
    header = ("class", "Dice", "IoU", "Dice of an image", "share of the pixels", "test images")
    title = "Images with the lowest Dice coefficients"

    def __init__(self, names: Sequence[str], tested: Predicted, held_out: Predicted | None) -> None:
        super().__init__(names, tested, held_out)
        measures = of_each_class(self._counts(tested))
        self.metrics = self._metrics(measures)
        if held_out is not None:
            of_held_out = of_each_class(self._counts(held_out))
            self.held_out_metrics = {"dice": mean_of([x.dice for x in of_held_out]), **self._metrics(of_held_out)}
        self.dice, iou, of_images, *_ = map(mean_of, zip(*measures, strict=True))
        means = OfClass(self.dice, iou, of_images, 1.0, len(tested.targets))
        for name, values in zip([*names, "mean of the classes"], [*measures, means], strict=True):
            shares = ["" if x != x else f"{x:.4f}" for x in values[:4]]
            self.rows.append((name, *shares, str(values.images)))

    def _counts(self, samples: Predicted) -> Tensor:
        return torch.cat(samples, 1).unflatten(1, (3, len(self.names)))

    def _metrics(self, measures: Sequence[OfClass]) -> dict[str, float]:
        means = {"iou": mean_of([x.iou for x in measures]), "dice_of_images": mean_of([x.of_images for x in measures])}
        return means | {
            f"dice/{name}": x.dice for name, x in zip(self.names, measures, strict=True) if x.dice == x.dice
        }

    def mistakes(self) -> Mistakes:
        dice = dice_of(self._counts(self.tested))
        means = dice.nanmean(1)
        places = means.argsort(stable=True)[:MOST].tolist()
        rows = []
        for place in places:
            of_classes = zip(dice[place].tolist(), self.names, strict=True)
            worst, name = (
                min((x, name) for x, name in of_classes if x == x) if means[place] == means[place] else (0, "")
            )
            rows.append((f"{means[place]:.4f}", f"{name} {worst:.4f}"))
        return Mistakes(places, ("Dice", "lowest of a class"), rows)


def _shown(numbers: Tensor) -> str:
    return ", ".join(f"{x:.6g}" for x in numbers.tolist())


def accuracies(labels: Tensor, scores: Tensor, top_k: int) -> tuple[float, float]:
    """Return the share of samples whose class is among the `top_k` highest scores, and the mean of this share over the
    classes that have samples: the balanced accuracy."""
    right = is_among(scores, labels, top_k)
    return float(right.double().mean()), balanced_accuracy(right, labels)


def _class_rows(labels: Tensor, predicted: Tensor, names: Sequence[str]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the row of each class, and a last one of the means over the classes that were tested."""
    from sklearn.metrics import precision_recall_fscore_support

    measures = precision_recall_fscore_support(labels, predicted, labels=range(len(names)), zero_division=0)
    for name, precision, recall, f1, count in zip(names, *measures, strict=True):
        yield name, f"{precision:.4f}", f"{recall:.4f}", f"{f1:.4f}", str(int(count))
    counts = measures[3]
    precision, recall, f1 = (f"{values[counts > 0].mean():.4f}" for values in measures[:3])
    yield "mean of the classes", precision, recall, f1, str(int(counts.sum()))
