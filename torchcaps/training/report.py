"""A report on a training: its results, curves and mistakes in the folder of its run, and facts for its checkpoint."""

import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from torchcaps._version import __version__
from torchcaps.data import ImageData
from torchcaps.measures.results import ClassResults, LabelResults, MaskResults, NumberResults, Predicted, Results
from torchcaps.training.curves import curves_of
from torchcaps.utils.files import write_csv_whole, write_text_whole

MISTAKES = 24  # in the figure
DRAWN = 6  # images in that of masks


class Report(Callback):
    """Write a report on a training into the folder `report` of its run; `torchcaps train` and `test` print its table.

    | file | |
    |---|---|
    | `classes.csv` | precision, recall, F1 and number of test samples of each class |
    | `confusion.csv`, `confusion.png` | how many samples of each class were taken for each class |
    | `labels.csv` | of several labels: the same of each label, its average precision and its threshold |
    | `numbers.csv`, `numbers.png` | of numbers: their errors, and each test sample in a picture |
    | `masks.csv`, `masks.png` | of masks: Dice and IoU of each class; the images that are predicted worst |
    | `curves.png` | loss and accuracy by epoch |
    | `mistakes.csv`, `mistakes.png` | test samples taken for others, the surest first; of numbers the largest errors |
    | `summary.json` | metrics, temperature or thresholds, versions and the command |

    The summary is also written into the checkpoint that was tested. Where there is a validation set, it contains the
    temperature that makes probabilities of the scores, unless its samples are too few to know it
    (:func:`torchcaps.measures.calibration.calibrated_temperature`), and how well they were calibrated on the test set
    before and after; of several labels it contains the threshold of each one
    (:func:`torchcaps.measures.labels.best_thresholds`).

    It adds metrics, `test/...` and, of the validation, `val/...`:

    - classes: `balanced_accuracy`, the mean recall of the classes that have samples there. Where classes are of unequal
      size, the accuracy says little.
    - several labels: `exact_match`, the share of samples with exactly their labels, and `macro_f1` and
      `average_precision`, means over the labels that have samples there.
    - numbers: `r2`, the mean coefficient of determination, and `rmse/NAME` of each number, in its units.
    - masks: `dice/NAME` of each class, `iou`, the mean over the classes, and `dice_of_images`, the mean over images
      and classes, see :class:`torchcaps.measures.masks.OfClass`.

    A data set of one's own writes `split.csv` into the folder of the run, with the part of every sample, for people and
    for other runs: the run itself reads the split in its checkpoint.

    Attributes:
        folder: folder of the run, which `Training` sets; None writes nothing.
        about: the initial content of `summary.json`, such as the name of the recipe; the test adds to it.
        thresholds: probability above which each label is predicted, where the test has no validation samples before it.
        results: what the test came to, after it.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.about: dict[str, Any] = {}
        self.thresholds: Sequence[float] | None = None
        self.results: Results | None = None
        self._batches: dict[str, list[Tensor]] = {}  # by stage: targets, then what is predicted, in columns

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if pl_module.labels_per_image not in (1, None):
            raise ValueError(
                "Report is for samples of one class each, or of any number of labels: leave it out, or set "
                "labels_per_image to 1 or null"
            )

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
            self._add("validate", batch[1], outputs["predicted"])

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._add("test", batch[1], outputs["predicted"])

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model: Any = pl_module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a test
        tested, of_validation = self._of_all("test", model), self._of_all("validate", model)
        held_out, names = of_validation if len(of_validation.targets) else None, data.names
        if model.target == "masks":
            self.results = MaskResults(names, tested, held_out)
        elif model.target == "numbers":
            self.results = NumberResults(names, tested, held_out)
        elif model.target == "labels":
            self.results = LabelResults(names, tested, held_out, self.thresholds)
        else:
            self.results = ClassResults(names, tested, held_out, model.top_k)
        for name, value in self.results.metrics.items():
            pl_module.log(f"test/{name}", value, sync_dist=True)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or self.results is None:
            return
        model: Any = pl_module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        metrics = {f"val/{name}": value for name, value in self.results.held_out_metrics.items()}
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
        self.about |= self.results.facts | {
            "names": data.names,
            "metrics": {**self.about.get("metrics", {}), **metrics},
            "test_samples": len(self.results.tested.targets),
        }
        if self.folder is None:
            return
        from torchcaps.explain.results import confusion_figure, curves_figure, mistakes_figure, numbers_figure
        from torchcaps.explain.segmentation import masks_figure
        from torchcaps.measures.axes import write  # slow to import, as figures are

        folder, results = self.folder / "report", self.results
        write_csv_whole(folder / f"{results.file}.csv", results.header, results.rows)
        if isinstance(results, ClassResults):
            counts = results.confusion()
            table = [(name, *row) for name, row in zip(data.names, counts.tolist(), strict=True)]
            write_csv_whole(folder / "confusion.csv", ("true \\ predicted", *data.names), table)
            write(confusion_figure(counts, data.names), folder / "confusion.png")
        if isinstance(results, NumberResults):
            write(numbers_figure(*results.tested, data.names), folder / "numbers.png")
        places, header, rows = results.mistakes()
        keys = data.keys("test")
        table = [(keys[i], *row) for i, row in zip(places, rows, strict=True)]
        write_csv_whole(folder / "mistakes.csv", ("sample", *header), table)
        if isinstance(results, MaskResults) and places:
            images, masks = data.samples("test", places[:DRAWN])
            write(masks_figure(model.network, images, masks, data.names), folder / "masks.png")
        elif isinstance(data, ImageData) and data.test_set is not None and rows:
            images = [data.center(data.test_set[i][0][None])[0] for i in places[:MISTAKES]]
            titles = ["\ntaken for ".join(row[:2]) for row in rows[:MISTAKES]]
            write(mistakes_figure(images, titles, results.title), folder / "mistakes.png")
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

    def _add(self, stage: str, targets: Tensor, predicted: Tensor) -> None:
        if predicted.dim() == 3:  # pixels in the masks, and of what is predicted
            targets, predicted = predicted[:, 0], predicted[:, 1:].flatten(1)
        targets = targets[: len(predicted)]  # without a sample that an idle process repeats
        rows = targets.T if targets.dim() == 2 else targets[None]
        self._batches[stage].append(torch.cat([rows.double(), predicted.double().T]).cpu())

    def _of_all(self, stage: str, model: Any) -> Predicted:
        """Return the samples of a stage in all processes."""
        rows = 1 if model.target == "class" else model.classes
        values = 2 * model.classes if model.target == "masks" else model.classes
        empty = torch.empty(rows + values, 0, dtype=torch.float64)
        columns = model.of_all_processes(torch.cat([empty, *self._batches.get(stage, [])], 1))
        targets = columns[0].long() if model.target == "class" else columns[:rows].T
        return Predicted(targets, columns[rows:].T)
