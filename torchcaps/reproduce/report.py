"""The tables of the pages in docs, which `make results` makes from results.csv, and a figure of the runs under way.

python -m torchcaps.reproduce.report docs    # adds the results of the queue in $TORCHCAPS_RUNS to results.csv first
"""

import os
import re
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path

import pandas as pd

from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.reproduce.plan import Run, plan
from torchcaps.reproduce.results import IN_PACKAGE, SMALL, Result, add_results, mean, read_results
from torchcaps.utils.extras import needs
from torchcaps.utils.files import write_text_whole

with needs("train"):
    from matplotlib.figure import Figure

    from torchcaps.explain.axes import in_style, write

ABOUT = ("precision", "commit", "date")
COLUMNS = ("recipe", "row", "parameters", "published", "ours", "by seed", *ABOUT, "hours")
WINDOW = 20  # logged losses that are averaged in each point of the figure
BLOCK = re.compile(r"(?s)(<!-- (small )?rows of ([\w/]+), made by `make results` -->\n).*?(<!-- end of rows -->\n)")


def table(part: str, results: Sequence[Result], small: bool = False) -> str:
    """Return, in Markdown, the rows of a paper or a table, published numbers and ours, with how ours were made.

    Columns without a value are left out. What all runs have in common stands below the table, with their hardware.
    """
    rows: list[dict[str, str]] = []
    hardware: list[str] = []
    for name in list_recipes():
        if name != part and not name.startswith(f"{part}/"):
            continue
        recipe, groups = load_recipe(name), _groups(name + SMALL * small, results)
        row = {"recipe": f"`{name}`", "row": recipe.title if "/" in part else recipe.row, "published": recipe.published}
        rows += [row | _of_seeds(name, group) for group in groups]
        hardware += [result.hardware for group in groups for result in group]
        if not groups and recipe.has_number and not small:
            rows.append(row | {"ours": "not run"})
    rows.sort(key=lambda row: row.get("data", ""))  # stable: rows tested on other data come last
    run = [row for row in rows if "commit" in row]
    common = [column for column in ABOUT if len({row[column] for row in run}) == 1]
    columns = [column for column in COLUMNS if column not in common and any(row.get(column) for row in rows)]
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if run:
        options = ", with the options in the first column" if any(row["options"] for row in run) else ""
        command = f"`torchcaps train RECIPE{SMALL * small} --seed_everything SEED`{options}"
        shared = [f"commit {run[0][column]}" if column == "commit" else run[0][column] for column in common]
        text += f"\n{'; '.join((command, *shared))}. {'; or '.join(dict.fromkeys(hardware))}.\n"
    return text.replace("| published |", "| published, full size |") if small else text


def _groups(recipe: str, results: Sequence[Result]) -> list[list[Result]]:
    """Return groups of the results of a recipe that differ only in their seeds."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.recipe == recipe:
            groups.setdefault((result.overrides, result.data), []).append(result)
    return list(groups.values())


def _of_seeds(name: str, group: Sequence[Result]) -> dict[str, str]:
    """Return the cells of results that differ only in their seeds."""
    first, values = group[0], [result.value for result in group]
    tested_on = f" on {first.data.rpartition('.')[2]}" if first.data else ""
    cells = {
        "recipe": f"`{' '.join(filter(None, (name, first.overrides)))}`{tested_on}",
        "options": first.overrides,
        "data": first.data,
        "parameters": f"{first.parameters:,}",
        "ours": f"{mean(values)} % {first.unit}",
        "by seed": ", ".join(f"{value:.2f}" for value in values),
        "hours": ", ".join(f"{result.hours:.2g}" for result in group if not isnan(result.hours)),
    }
    if first.data:
        cells["published"] = ""  # that number is of the recipe's own data
    return cells | {column: ", ".join(dict.fromkeys(getattr(run, column) for run in group)) for column in ABOUT}


def with_tables(text: str, results: Sequence[Result]) -> str:
    """Return a page with the tables between its markers replaced by new ones."""
    return BLOCK.sub(lambda block: block[1] + table(block[3], results, small=bool(block[2])) + block[4], text)


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
