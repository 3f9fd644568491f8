"""A report on a training: what each class came to, curves, confusions, mistakes, calibrated probabilities."""

import json
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from torchcaps._version import __version__
from torchcaps.data import ImageData, LabeledData
from torchcaps.measures.accuracy import balanced_accuracy, is_among
from torchcaps.measures.calibration import calibrated_temperature, calibration_error
from torchcaps.training.curves import curves_of
from torchcaps.utils.files import write_csv_whole, write_text_whole

MISTAKES = 24  # in the figure


class Report(Callback):
    """Write a report on a training into the folder `report` of its run; `torchcaps train` and `test` print its table.

    | file | |
    |---|---|
    | `classes.csv` | precision, recall, F1 and number of test samples of each class |
    | `confusion.csv`, `confusion.png` | how many samples of each class were taken for each class |
    | `curves.png` | loss and accuracy by epoch |
    | `mistakes.csv`, `mistakes.png` | test samples that were taken for another class, the surest first |
    | `summary.json` | metrics, temperature, versions and the command |

    The summary is also written into the checkpoint that was tested. Where there is a validation set, it contains the
    temperature that makes probabilities of the scores, unless its samples are too few to know it
    (:func:`torchcaps.measures.calibration.calibrated_temperature`), and how well they were calibrated on the test set
    before and after.

    It adds the balanced accuracy to the metrics, `test/balanced_accuracy` and `val/balanced_accuracy`: the mean recall
    of the classes that have samples there. Where classes are of unequal size, the accuracy says little.

    A data set of one's own writes `split.csv` into the folder of the run, with the part of every sample, for people and
    for other runs: the run itself reads the split in its checkpoint.

    Attributes:
        folder: folder of the run, which `Training` sets; None writes nothing.
        about: the initial content of `summary.json`, such as the name of the recipe; the test adds to it.
        rows: the table of the classes, after a test.
        calibration: what became of the temperature, as a line, after a test; empty without a validation set.
    """

    HEADER = ("class", "precision", "recall", "F1", "test samples")

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.about: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str, str, str]] = []
        self.calibration = ""
        self._batches: dict[str, list[Tensor]] = {}  # by stage: labels, then scores, in columns

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if pl_module.labels_per_image != 1:
            raise ValueError("Report is for samples of one class each: leave it out, or set labels_per_image to 1")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a fit
        if self.folder is not None and trainer.is_global_zero and hasattr(data, "write_split"):
            data.write_split(self.folder)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches["validate"] = []

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches["test"] = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if trainer.state.fn == "validate":
            self._add("validate", batch[1], outputs["evidence"])

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._add("test", batch[1], outputs["evidence"])

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model: Any = pl_module
        _, balanced = accuracies(*self._of_all("test", model), model.top_k)
        pl_module.log("test/balanced_accuracy", balanced, sync_dist=True)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        labels, scores = self._of_all("test", pl_module)
        held_out, held_out_scores = self._of_all("validate", pl_module)
        if not trainer.is_global_zero:
            return
        from sklearn.metrics import confusion_matrix  # slow to import, as figures are

        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a test
        temperature = self._calibrated(held_out, held_out_scores, labels, scores) if len(held_out) else None
        if len(held_out):
            model: Any = pl_module
            accuracy, balanced = accuracies(held_out, held_out_scores, model.top_k)
            metrics = {"val/accuracy": accuracy, "val/balanced_accuracy": balanced}
            self.about["metrics"] = {**self.about.get("metrics", {}), **metrics}
        counts = confusion_matrix(labels, scores.argmax(1), labels=range(len(data.names)))
        self.rows = list(_class_rows(labels, scores.argmax(1), data.names))
        if self.folder is None:
            return
        from torchcaps.explain.results import confusion_figure, curves_figure
        from torchcaps.measures.axes import write

        folder = self.folder / "report"
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
        self.about |= {
            "names": data.names,
            "metrics": {**self.about.get("metrics", {}), **metrics},
            "test_samples": len(labels),
        }
        write_csv_whole(folder / "classes.csv", self.HEADER, self.rows)
        table = [(name, *row) for name, row in zip(data.names, counts.tolist(), strict=True)]
        write_csv_whole(folder / "confusion.csv", ("true \\ predicted", *data.names), table)
        write(confusion_figure(counts, data.names), folder / "confusion.png")
        self._write_mistakes(folder, data, labels, (scores / (temperature or 1.0)).softmax(1))
        if curves := curves_of(self.folder):
            write(curves_figure(curves, self.about.get("epoch")), folder / "curves.png")
        write_text_whole(folder / "summary.json", json.dumps(self.about, indent=1, ensure_ascii=False) + "\n")

    def describe(self, recipe: str, arguments: Sequence[str]) -> None:
        """Set the first facts of the summary.

        Args:
            recipe: name of the recipe.
            arguments: arguments of the command that trained it.
        """
        self.about = {
            "recipe": recipe,
            "command": shlex.join(["torchcaps", "train", recipe, *arguments]),
            "torchcaps": __version__,
            "torch": str(torch.__version__),
            "date": datetime.now(UTC).date().isoformat(),
        }

    def _add(self, stage: str, labels: Tensor, scores: Tensor) -> None:
        labels = labels[: len(scores)]  # without a sample that an idle process repeats
        self._batches[stage].append(torch.cat([labels[None].double(), scores.double().T]).cpu())

    def _of_all(self, stage: str, model: Any) -> tuple[Tensor, Tensor]:
        """Return the labels (n,) and scores (n, classes) of a stage in all processes."""
        empty = torch.empty(1 + model.classes, 0, dtype=torch.float64)
        columns = model.of_all_processes(torch.cat([empty, *self._batches.get(stage, [])], 1))
        return columns[0].long(), columns[1:].T

    def _calibrated(self, held_out: Tensor, held_out_scores: Tensor, labels: Tensor, scores: Tensor) -> float | None:
        temperature = calibrated_temperature(held_out_scores, held_out)
        if temperature is None:
            self.calibration = f"temperature: 1; {len(held_out)} validation samples are too few to choose another"
            return None
        before, after = calibration_error(scores, labels), calibration_error(scores, labels, temperature)
        self.about["temperature"] = temperature
        self.about["calibration_error"] = {"on": "test", "before": before, "after": after}
        self.calibration = (
            f"temperature: {temperature:.3g}; the calibration error on the test set is {after:.4f} with it, "
            f"{before:.4f} without"
        )
        return temperature

    def _write_mistakes(self, folder: Path, data: LabeledData, labels: Tensor, probabilities: Tensor) -> None:
        sure, predicted = probabilities.max(1)
        places = (predicted != labels).nonzero().squeeze(1)
        wrong = places[sure[places].argsort(descending=True, stable=True)].tolist()
        keys, names = data.keys("test"), [*data.names]
        names += [f"class {label}" for label in range(len(names), probabilities.shape[1])]  # of the network alone
        rows = [(keys[i], names[int(labels[i])], names[int(predicted[i])], f"{float(sure[i]):.4f}") for i in wrong]
        write_csv_whole(folder / "mistakes.csv", ("sample", "class", "prediction", "probability"), rows)
        if isinstance(data, ImageData) and data.test_set is not None and wrong:
            from torchcaps.explain.results import mistakes_figure
            from torchcaps.measures.axes import write

            images = [data.center(data.test_set[i][0][None])[0] for i in wrong[:MISTAKES]]
            titles = [f"{name}\ntaken for {guess}" for _, name, guess, _ in rows[:MISTAKES]]
            write(mistakes_figure(images, titles), folder / "mistakes.png")


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
