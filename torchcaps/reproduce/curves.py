"""The figure of the training losses of a queue's runs, in docs/results.md; `make results` draws it."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from torchcaps.reproduce.plan import Run
from torchcaps.utils.extras import needs

with needs("train"):
    from matplotlib.figure import Figure

    from torchcaps.explain.axes import in_style


def curve(folder: Path, name: str = "train/loss_step") -> tuple[list[int], list[float]]:
    """Return the steps and the logged values of a run. It may have several parts, one for each time it was resumed."""
    values: dict[int, float] = {}
    parts = sorted(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    for part in parts:
        if (part / "metrics.csv").exists():
            with (part / "metrics.csv").open(encoding="utf-8", newline="") as file:
                values |= {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


@in_style
def curves_figure(root: Path, runs: Sequence[Run], window: int = 20) -> Figure | None:
    """Draw the training losses of the runs that have started. Return None if none has.

    Args:
        root: folder of all runs.
        runs: runs to draw.
        window: number of logged values that are averaged in each point.
    """
    figure = Figure(figsize=(8, 4.5))
    axis = figure.add_subplot()
    for run in runs:
        steps, values = curve(run.folder(root))
        if steps:
            smooth = [fmean(values[max(i - window, 0) : i]) for i in range(1, len(values) + 1)]
            axis.plot(steps, smooth, label=str(run))
    if not axis.lines:
        return None
    axis.set(xlabel="step", ylabel="training loss", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.legend()
    axis.set_title(f"How the training loss falls: each point is a mean of {window} logged values", fontsize=11)
    return figure
