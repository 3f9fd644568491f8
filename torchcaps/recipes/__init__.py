"""Recipes: the papers' tables, a YAML file for each, `<paper>/<table>.yaml`, with a row for each published number.

A table file has the values of the whole table and the few that each row changes:

    paper, table    where the numbers were published
    base            all values of a training: model, data, trainer, seed_everything
    small           changes that make every row fit two CPU cores (`--small`)
    rows            by name: title, published number, dataset, changes of `base`, and `small` for this row alone

Any other file is a recipe by itself: these values at its top level, or a few of them and `extends: RECIPE` or
`extends: RECIPE --small`.

Later values override earlier ones: base, row, small, the row's small, a file that extends the row. Where a change names
another class (`class_path`), the arguments of the class before are dropped.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torchcaps.checks import nearest
from torchcaps.extras import needs

with needs("train"):
    import yaml

FOLDER = Path(__file__).parent
VALUES = ("seed_everything", "model", "data", "trainer")
HEAD = ("title", "published", "dataset", "bfloat16")
TABLE = ("paper", "table", "dataset", "bfloat16", "base", "small", "rows")


class Value(NamedTuple):
    """A value of a recipe.

    Args:
        value: a number, a string, a list, or None.
        source: where it stands: in which part of which file.
    """

    value: Any
    source: str


Tree = Value | dict[str, Any]  # dictionaries as in YAML, with a Value at each leaf


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
        dataset: the data set, in words.
        bfloat16: how training in bfloat16 was compared with training in float32, if it made no difference.
        is_small: whether these are the values for two CPU cores.
    """

    name: str
    files: tuple[Path, ...]
    values: Tree = field(repr=False)
    paper: str = ""
    table: str = ""
    title: str = ""
    published: str = ""
    dataset: str = ""
    bfloat16: str = ""
    is_small: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The values alone, nested as the trainer's parser takes them."""
        return _plain(self.values)

    @property
    def has_number(self) -> bool:
        """Whether the paper has a number for it, and not only a drawing or a word."""
        return self.published[:1].isdigit()

    @property
    def runs(self) -> Path:
        """Place of its runs in the folder of all runs. Runs of a YAML file follow its path: from the working folder if
        the file lies there or in a folder of it, else from the root of the file system."""
        path = Path(self.name)
        if _is_path(self.name):
            path, here = Path(os.path.abspath(self.name)).with_suffix(""), Path.cwd()
            path = path.relative_to(here if path.is_relative_to(here) else path.anchor)
        return path.with_name(f"{path.name}-small") if self.is_small else path

    def lines(self) -> Iterator[tuple[str, str]]:
        """The values as lines of YAML, each with its source; lines without a value have none."""
        return _lines(self.values)


def list_recipes() -> list[str]:
    """Names of all recipes in the package, in the order of the papers and of their tables."""
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


def _load(name: str, small: bool, folder: Path, before: tuple[Path, ...]) -> Recipe:
    if not _is_path(name):
        recipe = _row(name, small) or _single(name, small, FOLDER / f"{name}.yaml", before)
        if recipe is None:
            raise ValueError(f"no recipe {name!r}{_instead(name)}")
        return recipe
    path = folder / name
    recipe = _single(name, small, path, before)
    if recipe is None:
        raise ValueError(f"no file {path}: give the path of a recipe, or a name from `torchcaps recipes`")
    return recipe


def _row(name: str, small: bool) -> Recipe | None:
    table, _, row_name = name.rpartition("/")
    path = FOLDER / f"{table}.yaml"
    if ".." in path.parts or Path(name).is_absolute() or not table or not path.is_file():
        return None
    content = _read(path)
    row = content.get("rows", {}).get(row_name)
    if row is None:
        return None
    values = _merge(_with_source(content["base"], "base"), _with_source(_changes(row), "row"))
    if small:
        changes = _with_source(content["small"], "small")
        values = _merge(values, _merge(changes, _with_source(row.get("small", {}), "small, row")))
    head = {key: value for key, value in {**content, **row}.items() if key in ("paper", "table", *HEAD)}
    return Recipe(name, (path,), values, is_small=small, **head)


def _single(name: str, small: bool, path: Path, before: tuple[Path, ...]) -> Recipe | None:
    """A file that is a recipe by itself."""
    if not path.is_file() or (not _is_path(name) and (".." in Path(name).parts or Path(name).is_absolute())):
        return None
    if path.resolve() in before:
        raise ValueError(f"{path} extends itself, by way of {before[-1]}")
    content = _read(path)
    if "rows" in content:
        raise ValueError(f"{name} is a table: choose one of its rows, {', '.join(content['rows'])}")
    source = path.name if _is_path(name) else name
    values, head = _with_source(_changes(content), source), {}
    files: tuple[Path, ...] = (path,)
    extended = content.get("extends")
    if extended is not None:
        named, _, flag = str(extended).partition(" ")
        if flag not in ("", "--small"):
            raise ValueError(f"{path}: extends must be RECIPE or RECIPE --small, got {extended!r}")
        general = _load(named, small or bool(flag), path.parent, (*before, path.resolve()))
        values = _merge(general.values, values)
        head = {key: getattr(general, key) for key in ("paper", "table", *HEAD) if key != "published"}
        files = (*general.files, path)
    if small:
        if "small" not in content and extended is None:
            raise ValueError(f"{name} has no small version: leave out --small")
        values = _merge(values, _with_source(content.get("small", {}), f"{source}, small"))
    head |= {key: value for key, value in content.items() if key in HEAD}
    return Recipe(name, files, values, is_small=small, **head)


def _instead(name: str) -> str:
    """The name that a recipe has now, or the names nearest to an unknown one."""
    for line in (FOLDER / "former_names.txt").read_text(encoding="utf-8").splitlines():
        former, now = line.split(maxsplit=1)
        if former == name:
            return f": it is now called {now}"
    rows = [known for known in list_recipes() if known.startswith(f"{name.rstrip('/')}/")]
    if rows:
        return f": choose one of {', '.join(rows[:8])}{', ...' if len(rows) > 8 else ''}"
    return nearest(name, list_recipes())


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _changes(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key in VALUES}


def _with_source(values: Any, source: str) -> Tree:
    if isinstance(values, dict):
        return {key: _with_source(value, source) for key, value in values.items()}
    return Value(values, source)


def _plain(tree: Tree) -> Any:
    return {key: _plain(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.value


def _merge(values: Tree | None, changes: Tree) -> Tree:
    """Values with changes. Where changes name another class, they alone say what its arguments are."""
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    if "class_path" in changes and _plain(changes["class_path"]) != _plain(values.get("class_path", Value(None, ""))):
        return changes
    return {**values, **{key: _merge(values.get(key), change) for key, change in changes.items()}}


def _lines(values: Tree, indent: str = "") -> Iterator[tuple[str, str]]:
    assert isinstance(values, dict)
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:", ""
            yield from _lines(value, f"{indent}  ")
        else:
            text = yaml.safe_dump(value.value, default_flow_style=True, width=10**6, allow_unicode=True)
            yield f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}", value.source


@cache
def _cached(path: Path, changed: float) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: expected keys such as model, data and trainer")
    known = TABLE if "rows" in content else (*HEAD, "extends", "small", *VALUES)
    for key in content:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}, expected {', '.join(known)}")
    return content


def _read(path: Path) -> dict[str, Any]:
    return _cached(path, path.stat().st_mtime)
