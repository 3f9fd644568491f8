"""Recipes: the papers' tables, a YAML file for each, `<paper>/<table>.yaml`, with a row for each published number.

A table file has the values of the whole table and the few that each row changes:

    paper, table    where the numbers were published
    base            all values of a training: model, data, trainer, seed_everything
    small           changes that make every row fit two CPU cores (`--small`)
    rows            by name: title, published number, dataset, changes of `base`, and `small` for this row alone

Any other file is a recipe by itself: these values at its top level, or a few of them and `extends: RECIPE` or
`extends: RECIPE --small`. It may also have a head `search`, for `torchcaps search` (torchcaps/search/plan.py).

Later values override earlier ones: base, row, small, the row's small, a file that extends the row. Where a change names
another class (`class_path`), the arguments of the class before are dropped.
"""

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torchcaps.utils.checks import nearest, one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import read_text

with needs("train"):
    import yaml

    from torchcaps.recipes.reading import read_yaml
    from torchcaps.recipes.values import Tree, merge, plain, with_source

FOLDER = Path(__file__).parent
SECTIONS = ("seed_everything", "model", "data", "trainer")
MOST_FILES = 20  # that extend each other
HEAD = ("title", "published", "dataset", "bfloat16")
TABLE = ("paper", "table", "dataset", "bfloat16", "base", "small", "rows")


@dataclass(frozen=True)
class Recipe:
    """All values of a training, and the published number that it reproduces.

    Args:
        name: `<paper>/<table>/<row>`, or the path of a YAML file.
        files: the files that its values stand in, from the most general to its own.
        values: each with its source.
        paper: authors and year.
        table: table, figure or section of the paper.
        title: the row of the table, in words.
        published: the published number with its unit; empty where there is none.
        unit: what the numbers of its table count, "test error", "test accuracy" or, of masks, "test Dice".
        dataset: the data set, in words.
        bfloat16: evidence that bfloat16 trains as well as float32; empty where there is none.
        is_small: whether these are the values for two CPU cores.
        search: the head `search`, which `torchcaps search` reads; None if the recipe has none.
    """

    name: str
    files: tuple[Path, ...]
    values: Tree = field(repr=False)
    paper: str = ""
    table: str = ""
    title: str = ""
    published: str = ""
    unit: str = "test accuracy"
    dataset: str = ""
    bfloat16: str = ""
    is_small: bool = False
    search: Tree | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The values without their sources, as the parser of recipes takes them."""
        return plain(self.values)

    @property
    def has_number(self) -> bool:
        """Whether the paper has a number for it, not only a curve or a word."""
        return self.published[:1].isdigit()

    @property
    def published_in_short(self) -> str:
        """The published number without what stands behind it in parentheses, for lists of one line each."""
        return self.published.partition(" (")[0]

    @property
    def row(self) -> str:
        """The table and the row, in words."""
        return f"{self.table}: {self.title}" if self.table else self.title

    @property
    def folder(self) -> Path:
        """Folder of its runs in the folder of all runs.

        It has the name of the recipe. Runs of a YAML file follow its path without the suffix: from the working folder
        if the file lies there or in a folder of it, else from the root of the file system. A file whose name ends in
        `-small` keeps the suffix: `mine-small` is the folder of the small version of `mine.yaml`.
        """
        path = Path(self.name)
        if _is_path(self.name):
            path, here = Path(os.path.abspath(self.name)), Path.cwd()
            path = path.relative_to(here if path.is_relative_to(here) else path.anchor)
            path = path if path.stem.endswith("-small") else path.with_suffix("")
        return path.with_name(f"{path.name}-small") if self.is_small else path


def list_recipes() -> list[str]:
    """Return the names of all recipes in the package, in the order of the papers and of their tables."""
    names = []
    for path in sorted(FOLDER.rglob("*.yaml")):
        name = path.relative_to(FOLDER).with_suffix("").as_posix()
        content = _read(path)
        names += [f"{name}/{row}" for row in content["rows"]] if "rows" in content else [name]
    return names


def load_recipe(name: str, small: bool = False) -> Recipe:
    """Merge the values of a recipe.

    Args:
        name: `<paper>/<table>/<row>`, or the path of a YAML file.
        small: whether to take the values for two CPU cores.

    Raises:
        ValueError: the recipe is unknown (the message has the nearest names), is not a recipe, or has no small version.
    """
    return _load(name, small, Path(), ())


def is_recipe(name: str) -> bool:
    """Return whether a name is that of a recipe in the package, or the path of a YAML file."""
    return _is_path(name) or name in list_recipes()


class _NoRecipe(ValueError):
    """There is no recipe of this name."""


def _load(name: str, small: bool, folder: Path, extending: tuple[Path, ...]) -> Recipe:
    """Load a recipe.

    Args:
        name, small: see `load_recipe`.
        folder: folder that the path of a file starts from.
        extending: files that extend this recipe.
    """
    if _is_path(name):
        path = folder / name
        if not os.path.isfile(path):  # Path.is_file raises an error for a name that is too long
            raise _NoRecipe(f"no file {path}: give the path of a recipe, or a name from `torchcaps recipes`")
        return _file(name, path, small, extending)
    if not Path(name).is_absolute() and ".." not in Path(name).parts:
        path = FOLDER / f"{name}.yaml"
        if os.path.isfile(path) and "rows" not in _read(path):
            return _file(name, path, small, extending)
        path = FOLDER / f"{Path(name).parent}.yaml"
        if os.path.isfile(path) and Path(name).name in _read(path).get("rows", {}):
            return _row(name, path, small)
    raise _NoRecipe(f"no recipe {name!r}{_instead(name)}")


def _row(name: str, path: Path, small: bool) -> Recipe:
    """Load a row of a table."""
    table = _read(path)
    row = table["rows"][Path(name).name]
    values = merge(with_source(table["base"], "base"), with_source(_changes(row), "row"))
    if small:
        changes = merge(with_source(table["small"], "small"), with_source(row.get("small", {}), "small, row"))
        values = merge(values, changes)
    head = {key: value for key, value in {**table, **row}.items() if key in ("paper", "table", *HEAD)}
    errors = any("test error" in other.get("published", "") for other in table["rows"].values())
    masks = table["base"].get("model", {}).get("predicts") == "masks"
    unit = "test error" if errors else "test Dice" if masks else "test accuracy"
    return Recipe(name, (path,), values, unit=unit, is_small=small, **head)


def _file(name: str, path: Path, small: bool, extending: tuple[Path, ...]) -> Recipe:
    """Load a file that is a recipe by itself, or extends another one."""
    if path.resolve() in extending:
        raise ValueError(f"{path} extends itself, by way of {extending[-1]}")
    if len(extending) > MOST_FILES:
        raise ValueError(f"{path} is one of more than {MOST_FILES} files that extend each other")
    content = _read(path)
    if "rows" in content:
        raise ValueError(f"{path} is a table: only those of the package can be named by <paper>/<table>/<row>")
    source = path.name if _is_path(name) else name
    values, head = with_source(_changes(content), source), {}
    files: tuple[Path, ...] = (path,)
    extended = content.get("extends")
    if extended is not None:
        text = extended if isinstance(extended, str) else ""
        general, flag = text.removesuffix(" --small"), text.endswith(" --small")
        if not general or (" " in general and not _is_path(general)):  # a path may have spaces
            raise ValueError(f"{path}: extends must be RECIPE or RECIPE --small, got {extended!r}")
        try:
            recipe = _load(general, small or flag, path.parent, (*extending, path.resolve()))
        except _NoRecipe as error:
            raise ValueError(f"{path} extends {general}: {error}") from error
        values, files = merge(recipe.values, values), (*recipe.files, path)
        head = {key: getattr(recipe, key) for key in ("paper", "table", "unit", "search", *HEAD) if key != "published"}
    elif small:
        raise ValueError(f"{name} has no small version: leave out --small")
    head |= {key: value for key, value in content.items() if key in HEAD}
    if "search" in content:
        head["search"] = with_source(content["search"], source)
    return Recipe(name, files, values, is_small=small, **head)


def _instead(name: str) -> str:
    """Return the end of a message: the rows of a table, the folder that a path names, or the nearest names."""
    name = name.rstrip("/")
    rows = [known for known in list_recipes() if known.startswith(f"{name}/")]
    if rows:
        return f": choose one of {', '.join(rows[:8])}{', ...' if len(rows) > 8 else ''}"
    if os.path.isdir(folder := os.path.dirname(name)):  # a run, whose nearest recipe would mean another run
        inside = sorted(x.name for x in os.scandir(folder) if x.is_dir() and not x.name.startswith("."))
        has = f": it has {', '.join(inside[:8])}{', ...' if len(inside) > 8 else ''}" if inside else ""
        return f", and {folder} has no {os.path.basename(name)!r}{has}"
    return nearest(name, list_recipes())


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _changes(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key in SECTIONS}


def _read(path: Path) -> dict[str, Any]:
    """Read a table or a recipe."""
    about = path.stat()
    return _parse(path.resolve(), path, about.st_mtime_ns, about.st_size)


@cache
def _parse(file: Path, path: Path, changed: int, size: int) -> dict[str, Any]:
    """Read a file, named `path` in messages. It is read again when its time or its size has changed."""
    text = read_text(path)
    try:
        content = read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a recipe: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: expected keys such as model, data and trainer")
    known = TABLE if "rows" in content else (*HEAD, "extends", "search", *SECTIONS)
    for key in content:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}, expected {', '.join(known)}")
    for key in HEAD:
        if not isinstance(content.get(key, ""), str):
            raise ValueError(f"{path}: {key} must be a text, got {content[key]!r}")
    for key in (*SECTIONS[1:], "small"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{path}: {key} must have values of its own, {{NAME: VALUE}}, got {content[key]!r}")
    return content
