"""The tables of docs/results.md, made of results.csv, and the curves of a queue's runs.

python -m torchcaps.reproduce.report docs    # `make results`: takes in what the queue in $TORCHCAPS_RUNS has finished
"""

import csv
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from torchcaps.explain.pictures import write
from torchcaps.extras import needs
from torchcaps.files import write_text_whole
from torchcaps.recipes import list_recipes, published
from torchcaps.reproduce.plan import Run, plan
from torchcaps.reproduce.results import PUBLISHED_WITH_THE_PACKAGE, Result, add_results, read_results, summary

with needs("train"):
    from matplotlib.figure import Figure

BLOCK = re.compile(r"(<!-- rows of (\w+), made by `make results` -->\n).*?(<!-- end of rows -->\n)", re.DOTALL)


def rows_table(paper: str, results: Sequence[Result]) -> str:
    """A paper's rows with published numbers and ours, and how each of ours came about, in Markdown."""
    lines = ["| recipe | row | published | ours |", "|---|---|---|---|"]
    for name in list_recipes():
        head = published(name)
        if name.startswith(f"{paper}/") and head.number[:1].isdigit():
            lines.append(f"| `{name}` | {head.row} | {head.number} | {_ours(name, results)} |")
    text = "\n".join(lines) + "\n"
    runs = [result for result in results if result.recipe.startswith(f"{paper}/")]
    if runs:
        lines = ["| ours | command | commit | hardware | precision | date | hours |", "|---|---|---|---|---|---|---|"]
        for result in runs:
            of = f" of {result.data}" if result.data else ""
            lines.append(
                f"| {result.value:.2f} % {result.unit}{of} | `{result.command}` | {result.commit} | "
                f"{result.hardware} | {result.precision} | {result.date} | {result.hours:.1f} |"
            )
        text += "\n" + "\n".join(lines) + "\n"
    return text


def _ours(recipe: str, results: Sequence[Result]) -> str:
    others = {result.data for result in results if result.recipe == recipe and result.data}
    ours = [summary(results, recipe), *(f"{summary(results, recipe, data)} on {data}" for data in sorted(others))]
    return "; ".join(part for part in ours if part) or "not run"


def with_tables(text: str, results: Sequence[Result]) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(lambda block: block[1] + rows_table(block[2], results) + block[3], text)


def curve(folder: Path, name: str = "train/loss_step") -> tuple[list[int], list[float]]:
    """What was logged of a run, over all its parts: steps and values."""
    values: dict[int, float] = {}
    parts = sorted(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    for part in parts:
        if (part / "metrics.csv").exists():
            with (part / "metrics.csv").open(encoding="utf-8", newline="") as file:
                values |= {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def curves_figure(root: Path, runs: Sequence[Run], window: int = 20) -> Figure | None:
    """Training losses of the runs that have begun, each the mean of the last so many logged; None if none has."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.add_subplot()
    for run in runs:
        steps, values = curve(run.folder(root))
        if steps:
            smooth = [fmean(values[max(i - window, 0) : i]) for i in range(1, len(values) + 1)]
            axis.plot(steps, smooth, linewidth=1, label=str(run))
    if not axis.lines:
        return None
    axis.set(xlabel="step", ylabel="training loss", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def main(docs: Path) -> None:
    """Take in new results, make the tables anew, and draw the curves."""
    root = Path(os.environ.get("TORCHCAPS_RUNS", "runs"))
    results = add_results(PUBLISHED_WITH_THE_PACKAGE, read_results(root / "results.csv"))
    page = docs / "results.md"
    text = with_tables(page.read_text(encoding="utf-8"), results)
    write_text_whole(page, text)
    print(f"{page}: {len(results)} results")
    if figure := curves_figure(root, plan()):
        print(f"figure: {write(figure, docs / 'figures' / 'reproduced.png')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
