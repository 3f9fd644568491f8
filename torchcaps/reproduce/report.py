"""The tables of the pages in docs, which `make results` makes from results.csv, and a figure of the runs under way.

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
from torchcaps.reproduce.results import IN_PACKAGE, SMALL, Result, add_results, mean, read_results, summary
from torchcaps.utils.extras import needs
from torchcaps.utils.files import write_text_whole

with needs("train"):
    from matplotlib.figure import Figure

    from torchcaps.explain.axes import in_style, write

WINDOW = 20  # logged losses that are averaged in each point of the figure
BLOCK = re.compile(r"(?s)(<!-- (small )?rows of ([\w/]+), made by `make results` -->\n).*?(<!-- end of rows -->\n)")


def rows_table(part: str, results: Sequence[Result]) -> str:
    """Return the rows of a paper or a table with published numbers and ours, and how ours were made, in Markdown."""
    rows = []
    for name in list_recipes():
        recipe = load_recipe(name)
        ours = _ours(name, results)
        if name == part or (name.startswith(f"{part}/") and (recipe.has_number or ours != "not run")):
            rows.append((f"`{name}`", recipe.row, recipe.published, ours))
    text = _markdown(("recipe", "row", "published", "ours"), rows)
    if groups := [group for group in _groups(part, results) if not group[0].recipe.endswith(SMALL)]:
        columns = ("ours", "command", "commit", "hardware", "precision", "date", "hours")
        text += "\n" + _markdown(columns, map(_how, groups))
    return text


def small_table(part: str, results: Sequence[Result]) -> str:
    """Return the results of the small versions of the recipes of a paper or a table, in Markdown."""
    groups = [group for group in _groups(part, results) if group[0].recipe.endswith(SMALL)]
    columns = ("recipe", "row", "parameters", "by seed", "ours", "published, full size", "commit", "date")
    names = list_recipes()
    rows = [_small_row(name, group) for name in names for group in groups if group[0].recipe == name + SMALL]
    every = [result for group in groups for result in group]
    hardware, precision = _distinct(every, "hardware", "; or "), _distinct(every, "precision")
    command = "`torchcaps train RECIPE --small --seed_everything SEED`, with the options in the first column"
    return f"{_markdown(columns, rows)}\n{command}. {hardware}; {precision}.\n"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]]) + "\n"


def _groups(part: str, results: Sequence[Result]) -> list[list[Result]]:
    """Return groups of results of a paper, a table or a recipe that differ only in their seeds."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.recipe.startswith((f"{part}/", f"{part} ")) or result.recipe == part:
            groups.setdefault((result.recipe, result.overrides, result.data), []).append(result)
    return list(groups.values())


def _small_row(name: str, group: Sequence[Result]) -> tuple[str, ...]:
    first, recipe, values = group[0], load_recipe(name), [result.value for result in group]
    what = f"`{' '.join(filter(None, (name, first.overrides)))}`{_tested_on(first)}"
    of_seeds = ", ".join(f"{value:.2f}" for value in values)
    ours, published = f"{mean(values)} % {first.unit}", "" if first.data else recipe.published
    about = (_distinct(group, "commit"), _distinct(group, "date"))
    return what, recipe.title, f"{first.parameters:,}", of_seeds, ours, published, *about


def _how(group: Sequence[Result]) -> tuple[str, ...]:
    """Return cells that say how results that differ only in their seeds were made."""
    first = group[0]
    command = re.sub(r"--seed_everything[= ]\d+", "--seed_everything SEED", first.command)
    seeds_of = ", ".join(str(result.seed) for result in group)
    number = f"{mean([result.value for result in group])} % {first.unit}{_tested_on(first)}, SEED {seeds_of}"
    hours = [f"{result.hours:.2f}" for result in group if not isnan(result.hours)]
    about = (_distinct(group, name) for name in ("commit", "hardware", "precision", "date"))
    return number, f"`{command}`", *about, ", ".join(hours)


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
    tables = {None: rows_table, "small ": small_table}
    return BLOCK.sub(lambda block: block[1] + tables[block[2]](block[3], results) + block[4], text)


def curve(folder: Path, name: str = "train/loss_step") -> pd.Series:
    """Return the logged values of a run by their steps. It may have several parts, one for each time it was resumed."""
    parts = sorted(folder.glob("version_*/metrics.csv"), key=lambda path: (len(str(path)), path))  # by number
    rows = pd.concat([pd.DataFrame(columns=["step", name]), *map(pd.read_csv, parts)])
    return rows.dropna(subset=name).groupby("step")[name].last().astype(float)


@in_style
def curves_figure(root: Path, runs: Sequence[Run]) -> Figure | None:
    """Draw the training losses of those of the runs in a folder that have started. Return None if none has."""
    curves = {run: values for run in runs if not (values := curve(run.folder(root))).empty}
    if not curves:
        return None
    figure = Figure(figsize=(8, 4.5))
    axis = figure.add_subplot()
    for run, values in curves.items():
        axis.plot(values.rolling(WINDOW, min_periods=1).mean(), label=str(run))
    axis.set(xlabel="step", ylabel="training loss", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.legend()
    axis.set_title(f"How the training loss falls: each point is a mean of {WINDOW} logged values", fontsize=11)
    return figure


def main(docs: Path) -> None:
    """Add the results of the queue to the package's results.csv, update the tables, and draw the training losses of the
    queue's runs into its folder."""
    root = Path(os.environ.get("TORCHCAPS_RUNS", "runs"))
    results = add_results(IN_PACKAGE, read_results(root / "results.csv"))
    for page in sorted(docs.glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        if BLOCK.search(text):
            write_text_whole(page, with_tables(text, results))
            print(page)
    if figure := curves_figure(root, plan()):
        print(f"figure: {write(figure, root / 'losses.png')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
