"""Makes the tables of docs/results.md from results.csv, and the curves of a queue's runs.

python -m torchcaps.reproduce.report docs    # `make results`: takes in what the queue in $TORCHCAPS_RUNS has finished
"""

import csv
import os
import re
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from statistics import fmean

from torchcaps.explain.pictures import write
from torchcaps.extras import needs
from torchcaps.files import write_text_whole
from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.reproduce.plan import Run, plan
from torchcaps.reproduce.results import PUBLISHED_WITH_THE_PACKAGE, Result, add_results, mean, read_results, summary

with needs("train"):
    from matplotlib.figure import Figure

BLOCK = re.compile(
    r"(<!-- (small )?rows of ([\w/]+), made by `make results` -->\n).*?(<!-- end of rows -->\n)", re.DOTALL
)


def rows_table(part: str, results: Sequence[Result]) -> str:
    """Rows of a paper or a table with published numbers and ours, and how each of ours came about, in Markdown."""
    lines = ["| recipe | row | published | ours |", "|---|---|---|---|"]
    for name in list_recipes():
        recipe = load_recipe(name)
        if name == part or (name.startswith(f"{part}/") and recipe.has_number):
            row = ": ".join(filter(None, (recipe.table, recipe.title)))
            lines.append(f"| `{name}` | {row} | {recipe.published} | {_ours(name, results)} |")
    text = "\n".join(lines) + "\n"
    if groups := [group for group in _groups(part, results) if not group[0].recipe.endswith(" --small")]:
        lines = ["| ours | command | commit | hardware | precision | date | hours |", "|---|---|---|---|---|---|---|"]
        text += "\n" + "\n".join([*lines, *map(_how, groups)]) + "\n"
    return text


def small_table(part: str, results: Sequence[Result]) -> str:
    """Results of the small versions of a paper's or a table's recipes, in Markdown."""
    groups = [group for group in _groups(part, results) if group[0].recipe.endswith(" --small")]
    lines = [
        "| recipe | row | parameters | by seed | ours | published, full size | commit | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in list_recipes():
        lines += [_small_line(name, group) for group in groups if group[0].recipe == f"{name} --small"]
    used = (", ".join(dict.fromkeys(getattr(group[0], key) for group in groups)) for key in ("hardware", "precision"))
    lines += [
        "",
        "`torchcaps train RECIPE --small --seed_everything SEED`, with the options in the first column. {}; {}.",
    ]
    return "\n".join(lines).format(*used) + "\n"


def _groups(part: str, results: Sequence[Result]) -> list[list[Result]]:
    """Results of a part that differ in their seeds alone."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.recipe.startswith((f"{part}/", f"{part} ")) or result.recipe == part:
            groups.setdefault((result.recipe, result.overrides, result.data), []).append(result)
    return list(groups.values())


def _small_line(name: str, group: Sequence[Result]) -> str:
    first, recipe, values = group[0], load_recipe(name), [result.value for result in group]
    what = f"`{' '.join(filter(None, (name, first.overrides)))}`{_tested_on(first)}"
    cells = (
        *(what, recipe.title, f"{first.parameters:,}", ", ".join(f"{value:.2f}" for value in values)),
        *(f"{mean(values)} % {first.unit}", recipe.published, first.commit, first.date),
    )
    return f"| {' | '.join(cells)} |"


def _how(group: Sequence[Result]) -> str:
    """How results that differ in their seeds came about."""
    first = group[0]
    command = re.sub(r"--seed_everything[= ]\d+", "--seed_everything SEED", first.command)
    seeds_of = ", ".join(str(result.seed) for result in group)
    number = f"{mean([result.value for result in group])} % {first.unit}{_tested_on(first)}, SEED {seeds_of}"
    hours = [f"{result.hours:.2f}" for result in group if not isnan(result.hours)]
    said = (
        ", ".join(dict.fromkeys(getattr(result, name) for result in group))
        for name in ("commit", "hardware", "precision", "date")
    )
    return f"| {number} | `{command}` | {' | '.join(said)} | {', '.join(hours)} |"


def _tested_on(result: Result) -> str:
    return f" on {result.data.rpartition('.')[2]}" if result.data else ""


def _ours(recipe: str, results: Sequence[Result]) -> str:
    others = {result.data for result in results if result.recipe == recipe and result.data}
    ours = [summary(results, recipe), *(f"{summary(results, recipe, data)} on {data}" for data in sorted(others))]
    return "; ".join(part for part in ours if part) or "not run"


def with_tables(text: str, results: Sequence[Result]) -> str:
    """Return a page with its tables made anew."""

    def made(block: re.Match[str]) -> str:
        return block[1] + (small_table if block[2] else rows_table)(block[3], results) + block[4]

    return BLOCK.sub(made, text)


def curve(folder: Path, name: str = "train/loss_step") -> tuple[list[int], list[float]]:
    """Steps and logged values of a run, over all its parts."""
    values: dict[int, float] = {}
    parts = sorted(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    for part in parts:
        if (part / "metrics.csv").exists():
            with (part / "metrics.csv").open(encoding="utf-8", newline="") as file:
                values |= {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def curves_figure(root: Path, runs: Sequence[Run], window: int = 20) -> Figure | None:
    """Draw the training losses of the runs that have begun; None if none has.

    Args:
        root: folder of all runs.
        runs: runs to draw.
        window: number of logged values of which each point is the mean.
    """
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
    """Take in the results of the queue, make the tables anew, and draw the curves."""
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
