"""The tables of the pages in docs, which `make results` makes from results.csv.

python -m torchcaps.reproduce.report docs    # adds the results of the queue in $TORCHCAPS_RUNS to results.csv first
"""

import os
import re
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path

from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.reproduce.results import IN_PACKAGE, SMALL, Result, add_results, mean, read_results, seeds_in_words
from torchcaps.utils.files import write_text_whole

ABOUT = ("precision", "commit", "date", "hardware")
REORDERED = "2026-11-22"  # since when the order of the samples follows from the seed and the epoch
BLOCK = re.compile(r"(?s)(<!-- (small )?rows of ([\w/]+), made by `make results` -->\n).*?(<!-- end of rows -->\n)")


def table(part: str, results: Sequence[Result], small: bool = False) -> str:
    """Return, in Markdown, the rows of a paper or a table, published numbers and ours, with how ours were made.

    Columns without a value are left out. What all runs have in common stands below the table, with their command. Rows
    that were not run are folded.
    """
    names = [name for name in list_recipes() if name == part or name.startswith(f"{part}/")]
    versions = {name + SMALL * small for name in names}
    of_part = [result for result in results if result.recipe in versions]
    rows: list[dict[str, str]] = []
    not_run: list[dict[str, str]] = []
    for name in names:
        recipe, groups = load_recipe(name), _groups(name + SMALL * small, of_part)
        row = {"recipe": f"`{name}`", "row": recipe.title if "/" in part else recipe.row, "published": recipe.published}
        rows += [row | _of_seeds(name, group) for group in groups]
        if not groups and recipe.has_number and not small:
            not_run.append(row)
    text = ""
    if rows:
        others = sorted({column for row in rows for column in row if column.startswith("on ")})
        common = {column: rows[0][column] for column in ABOUT if len({row[column] for row in rows}) == 1}
        columns = ["recipe", "row", "parameters", "published", "ours", "by seed", *others, *ABOUT, "hours"]
        named = {"published": f"published{', full size' * small}", "ours": f"ours, {of_part[0].unit}"}
        text += _markdown([column for column in columns if column not in common], rows, named)
        options = ", with the options in the first column" if any(map(_options, of_part)) else ""
        command = f"torchcaps train RECIPE{SMALL * small} --seed_everything SEED"
        if (precision := common.get("precision", "32-true")) != "32-true":
            command += f" --trainer.precision {precision}"
            del common["precision"]
        shared = [f"commit {value}" if column == "commit" else value for column, value in common.items()]
        text += f"\n{'; '.join((f'`{command}`{options}', *shared))}.\n"
        if min(result.date for result in of_part) < REORDERED:
            text += f"The order of the samples changed on {REORDERED}: to repeat an earlier number takes its commit.\n"
    if not_run:
        summary = f"Rows that were not run, with their published numbers: {len(not_run)}"
        folded = _markdown(["recipe", "row", "published"], not_run, {})
        text += f"\n<details><summary>{summary}</summary>\n\n{folded}\n</details>\n"
    return text


def _markdown(columns: Sequence[str], rows: Sequence[dict[str, str]], named: dict[str, str]) -> str:
    """Return a table of the columns that have a value; some have another name in the head of the table."""
    filled = [column for column in columns if any(row.get(column) for row in rows)]
    head = [named.get(column, column) for column in filled]
    lines = [head, ["---"] * len(head), *([row.get(column, "") for column in filled] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _groups(recipe: str, results: Sequence[Result]) -> list[list[Result]]:
    """Return groups of the results of a recipe that differ only in their seeds and in the data of the test, by seed."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.recipe == recipe:
            groups.setdefault(_options(result), []).append(result)
    return [sorted(group, key=lambda result: result.seed) for group in groups.values()]


def _options(result: Result) -> str:
    """Return the options of a result's command that change what the recipe computes."""
    compiled = "--model.compile=true" if "--model.compile=true" in result.command else ""
    return " ".join(filter(None, (result.overrides, compiled)))


def _of_seeds(name: str, group: Sequence[Result]) -> dict[str, str]:
    """Return the cells of results that differ only in their seeds and in the data of the test."""
    values: dict[str, list[float]] = {}
    for result in group:
        values.setdefault(result.data, []).append(result.value)
    on_recipe_data = [result for result in group if not result.data]
    hours = sum(result.hours for result in on_recipe_data)
    cells = {
        "recipe": f"`{' '.join(filter(None, (name, _options(group[0]))))}`",
        "parameters": f"{group[0].parameters:,}",
        "ours": f"{mean(values[''])} %",
        "by seed": ", ".join(f"{value:.2f}" for value in values[""]),
        "hours": "" if isnan(hours) else f"{hours:.0f}" if hours >= 100 else f"{hours:.2g}",
    }
    cells |= {f"on {data.rpartition('.')[2]}": f"{mean(values[data])} %" for data in values if data}
    return cells | {column: _by_seed({run.seed: getattr(run, column) for run in on_recipe_data}) for column in ABOUT}


def _by_seed(values: dict[int, str]) -> str:
    """Return what all seeds have in common, or the value of each."""
    seeds: dict[str, list[int]] = {}
    for seed, value in values.items():
        seeds.setdefault(value, []).append(seed)
    if len(seeds) == 1:
        return next(iter(seeds))
    return "; ".join(f"{value} ({seeds_in_words(of)})" for value, of in seeds.items())


def with_tables(text: str, results: Sequence[Result]) -> str:
    """Return a page with the tables between its markers replaced by new ones."""
    return BLOCK.sub(lambda block: block[1] + table(block[3], results, small=bool(block[2])) + block[4], text)


def main(docs: Path) -> None:
    """Add the results of the queue to the package's results.csv, and update the tables."""
    new = read_results(Path(os.environ.get("TORCHCAPS_RUNS", "runs")) / "results.csv")
    results = add_results(IN_PACKAGE, new)
    values = {result.key: result.value for result in results}
    for result in new:
        if result.value != values[result.key]:
            row = " ".join(filter(None, (result.recipe, result.overrides, result.data)))
            print(f"{row}, seed {result.seed}: keeps {values[result.key]} %, not {result.value} %")
    for page in sorted(docs.glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        if BLOCK.search(text):
            write_text_whole(page, with_tables(text, results))
            print(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
