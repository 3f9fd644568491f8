"""Loss, accuracy and Dice coefficient of a run by epoch, from the tables of metrics in its folder."""

import csv
import io
from pathlib import Path

from torchcaps.utils.checks import one_line
from torchcaps.utils.files import read_text

CURVES = {
    "loss": ("train/loss_epoch", "val/loss"),
    "accuracy": ("train/accuracy", "val/accuracy"),
    "Dice": ("train/dice", "val/dice"),
}
Curves = dict[str, dict[str, tuple[list[float], list[float]]]]  # by quantity and part: epochs, and values


def metrics_of(folder: Path) -> list[Path]:
    """Return the tables of metrics in the folder of a run: first those of the runs that it has resumed, in order."""
    return [*sorted(folder.glob("metrics.*.csv")), *folder.glob("metrics.csv")]


def curves_of(folder: Path) -> Curves:
    """Return the curves of a run, from its first epoch although it was resumed, for `curves_figure`."""
    points: dict[str, dict[int, float]] = {}  # values by epoch, of each name
    for path in metrics_of(folder):
        table = csv.DictReader(io.StringIO(read_text(path, most=None), newline=""))
        try:
            rows = [row for row in table if row.get("epoch")]  # a learning rate has none
            first = min((int(row["epoch"]) for row in rows), default=0)
            for name in set().union(*CURVES.values()) if rows else ():
                before = {epoch: value for epoch, value in points.get(name, {}).items() if epoch <= first}
                points[name] = before | {int(row["epoch"]) + 1: float(row[name]) for row in rows if row.get(name)}
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{path} is damaged ({one_line(error)}): remove it, with its curves") from None
    curves: Curves = {}
    for quantity, names in CURVES.items():
        for part, name in zip(("training", "validation"), names, strict=True):
            if values := points.get(name):
                curves.setdefault(quantity, {})[part] = (list(values), list(values.values()))
    return curves
