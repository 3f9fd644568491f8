"""The tables of docs/results.md, which `make results` makes from results.csv, and its figure of training losses.

python -m torchcaps.reproduce.report docs    # adds the results of the queue in $TORCHCAPS_RUNS to results.csv first
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from math import isnan
from pathlib import Path

import pandas as pd

from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.reproduce.plan import Run, plan
from torchcaps.reproduce.results import (
    PUBLISHED_WITH_THE_PACKAGE,
    SMALL,
    Result,
    add_results,
    mean,
    read_results,
    summary,
)
from torchcaps.utils.extras import needs
from torchcaps.utils.files import write_text_whole

with needs("train"):
    from matplotlib.figure import Figure

    from torchcaps.explain.axes import in_style, write

BLOCK = re.compile(
    r"(<!-- (small )?rows of ([\w/]+), made by `make results` -->\n).*?(<!-- end of rows -->\n)", re.DOTALL
)


def rows_table(part: str, results: Sequence[Result]) -> str:
    """Return the rows of a paper or a table with published numbers and ours, and how ours were made, in Markdown."""
    lines = ["| recipe | row | published | ours |", "|---|---|---|---|"]
    for name in list_recipes():
        recipe = load_recipe(name)
        ours = _ours(name, results)
        if name == part or (name.startswith(f"{part}/") and (recipe.has_number or ours != "not run")):
            lines.append(f"| `{name}` | {recipe.row} | {recipe.published} | {ours} |")
    text = "\n".join(lines) + "\n"
    if groups := [group for group in _groups(part, results) if not group[0].is_small]:
        lines = ["| ours | command | commit | hardware | precision | date | hours |", "|---|---|---|---|---|---|---|"]
        text += "\n" + "\n".join([*lines, *map(_how, groups)]) + "\n"
    return text


def small_table(part: str, results: Sequence[Result]) -> str:
    """Return the results of the small versions of the recipes of a paper or a table, in Markdown."""
    groups = [group for group in _groups(part, results) if group[0].is_small]
    lines = [
        "| recipe | row | parameters | by seed | ours | published, full size | commit | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in list_recipes():
        lines += [_small_line(name, group) for group in groups if group[0].recipe == name + SMALL]
    every = [result for group in groups for result in group]
    hardware, precision = _distinct(every, "hardware", "; or "), _distinct(every, "precision")
    command = "`torchcaps train RECIPE --small --seed_everything SEED`, with the options in the first column"
    return "\n".join([*lines, "", f"{command}. {hardware}; {precision}."]) + "\n"


def _groups(part: str, results: Sequence[Result]) -> list[list[Result]]:
    """Return groups of results of a paper, a table or a recipe that differ only in their seeds."""
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
        *(f"{mean(values)} % {first.unit}", "" if first.data else recipe.published),
        *(_distinct(group, "commit"), _distinct(group, "date")),
    )
    return f"| {' | '.join(cells)} |"


def _how(group: Sequence[Result]) -> str:
    """Return a table line that says how results that differ only in their seeds were made."""
    first = group[0]
    command = re.sub(r"--seed_everything[= ]\d+", "--seed_everything SEED", first.command)
    seeds_of = ", ".join(str(result.seed) for result in group)
    number = f"{mean([result.value for result in group])} % {first.unit}{_tested_on(first)}, SEED {seeds_of}"
    hours = [f"{result.hours:.2f}" for result in group if not isnan(result.hours)]
    said = (_distinct(group, name) for name in ("commit", "hardware", "precision", "date"))
    return f"| {number} | `{command}` | {' | '.join(said)} | {', '.join(hours)} |"


def _distinct(group: Iterable[Result], name: str, between: str = ", ") -> str:
    """Return the values that a field has in these results, each once."""
    return between.join(dict.fromkeys(getattr(result, name) for result in group))


def _tested_on(result: Result) -> str:
    return f" on {result.data.rpartition('.')[2]}" if result.data else ""


def _ours(recipe: str, results: Sequence[Result]) -> str:
    others = {result.data for result in results if result.recipe == recipe and result.data}
    ours = [summary(results, recipe), *(f"{summary(results, recipe, data)} on {data}" for data in sorted(others))]
    return "; ".join(part for part in ours if part) or "not run"


def with_tables(text: str, results: Sequence[Result]) -> str:
    """Return a page with the tables between its markers replaced by new ones."""

    def made(block: re.Match[str]) -> str:
        return block[1] + (small_table if block[2] else rows_table)(block[3], results) + block[4]

    return BLOCK.sub(made, text)


def curve(folder: Path, name: str = "train/loss_step") -> pd.Series:
    """Return the logged values of a run by their steps. It may have several parts, one for each time it was resumed."""
    parts = sorted(
        folder.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.removeprefix("version_"))
    )
    rows = pd.concat([pd.DataFrame(columns=["step", name]), *map(pd.read_csv, parts)])
    return rows.dropna(subset=name).groupby("step")[name].last().astype(float)


@in_style
def curves_figure(root: Path, runs: Sequence[Run], window: int = 20) -> Figure | None:
    """Draw the training losses of the runs that have started. Return None if none has.

    Args:
        root: folder of all runs.
        runs: runs to draw.
        window: number of logged values that are averaged in each point.
    """
    curves = {str(run): curve(run.folder(root)) for run in runs}
    if all(values.empty for values in curves.values()):
        return None
    figure = Figure(figsize=(8, 4.5))
    axis = figure.add_subplot()
    for run, values in curves.items():
        if not values.empty:
            axis.plot(values.rolling(window, min_periods=1).mean(), label=run)
    axis.set(xlabel="step", ylabel="training loss", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.legend()
    axis.set_title(f"How the training loss falls: each point is a mean of {window} logged values", fontsize=11)
    return figure


def main(docs: Path) -> None:
    """Add the results of the queue to the package's results.csv, update the tables, and draw the training losses."""
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
