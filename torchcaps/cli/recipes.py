"""List the papers' tables with published numbers and ours, or show the values of one recipe."""

import argparse
from pathlib import Path

from torchcaps.cli.arguments import add_runs, complete_recipe
from torchcaps.cli.table import print_table
from torchcaps.utils.checks import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps recipes`."""
    recipe = parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="show its values and where each comes from; a paper or a table lists its rows",
    )
    recipe.completer = complete_recipe  # type: ignore[attr-defined]
    parser.add_argument("--small", action="store_true", help="the versions for two CPU cores")
    add_runs(parser)


def run(options: argparse.Namespace) -> None:
    """Print the tables, or one recipe."""
    from torchcaps.recipes import list_recipes

    names = list_recipes()
    rows = [name for name in names if not options.recipe or name.startswith(f"{options.recipe.rstrip('/')}/")]
    if rows:
        _list(options, rows)
    else:
        _show(options)


def _list(options: argparse.Namespace, names: list[str]) -> None:
    from torchcaps.recipes import load_recipe
    from torchcaps.reproduce.results import SMALL, summary

    results = _results(options)
    rows = []
    for name in names:
        recipe = load_recipe(name)
        ours = summary(results, name + SMALL if options.small else name, in_short=True)
        rows.append((name, recipe.published_in_short, ours))
    print_table(("recipe", "published", "ours, small" if options.small else "ours"), rows)


def _show(options: argparse.Namespace) -> None:
    from torchcaps.recipes import load_recipe
    from torchcaps.recipes.values import lines
    from torchcaps.reproduce.results import SMALL, summary

    recipe = load_recipe(options.recipe, options.small)
    title = ", ".join(part for part in (recipe.paper, recipe.table, recipe.title) if part)
    print(f"# {printable(title or recipe.name)}")
    ours = summary(_results(options), recipe.name + SMALL if recipe.is_small else recipe.name)
    for what, text in (("data", recipe.dataset), ("published", recipe.published), ("ours", ours)):
        if text:
            print(f"# {what}: {printable(text)}")
    print(f"# values of: {', '.join(map(str, recipe.files))}")
    print(f"# runs: {Path(options.runs) / recipe.folder}")
    shown = list(lines(recipe.values))
    if recipe.search is not None:
        shown = [*lines({"search": recipe.search}), *shown]
    width = max((len(line) for line, source in shown if source and len(line) < 80), default=0)
    for line, source in shown:
        print(f"{line:{width}}  # {source}" if source else line)


def _results(options: argparse.Namespace) -> list:
    from torchcaps.reproduce.results import known_results

    return known_results(Path(options.runs))
