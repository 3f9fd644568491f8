"""Values of a recipe, nested as in YAML, each with the place where it is written."""

import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import yaml

ARGUMENTS = ("init_args", "dict_kwargs")  # of the class or function that stands beside them as class_path


class Value(NamedTuple):
    """A value and its source.

    Args:
        value: a number, a string, a list, or None.
        source: part of a table, such as "base" or "row", or name of a file.
    """

    value: Any
    source: str


Tree = Value | dict[str, Any]  # a dictionary for each level, with a Value at each leaf
Path = tuple[str | int, ...]  # names of values within values, and positions in lists


def with_source(values: Any, source: str) -> Tree:
    """Give all values the same source."""
    if isinstance(values, dict):
        return {key: with_source(value, source) for key, value in values.items()}
    return Value(values, source)


def plain(tree: Tree) -> Any:
    """Return the values without their sources."""
    return {key: plain(value) for key, value in tree.items()} if isinstance(tree, dict) else deepcopy(tree.value)


def merge(values: Tree | None, changes: Tree) -> Tree:
    """Change some of the values. Where changes name another class (`class_path`), the arguments of the class before are
    dropped."""
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    if "class_path" in changes and ("class_path" not in values or _class(changes) != _class(values)):
        return changes
    return {**values, **{key: merge(values.get(key), change) for key, change in changes.items()}}


def name_of(part: Any) -> str:
    """Return the name of the class or function in the values of a part, without its module."""
    return str(part["class_path"] if isinstance(part, dict) else part).rpartition(".")[2]


def options_of(values: Mapping[str, Any]) -> list[str]:
    """Return values by their dotted names as options of a command. Those of a dictionary, unless it names a class, are
    values of their own."""
    options: list[str] = []
    for name, value in values.items():
        if not isinstance(name, str) or name.startswith("-"):
            raise ValueError(f"values are given by their names, such as trainer.max_epochs, got {name!r}")
        if isinstance(value, dict) and value and "class_path" not in value:
            options += options_of({f"{name}.{inner}": x for inner, x in value.items()})
        elif isinstance(value, str | os.PathLike):
            options.append(f"--{name}={os.fspath(value)}")
        else:
            options.append(f"--{name}={json.dumps(value.item() if hasattr(value, 'item') else value)}")  # of NumPy
    return options


def own_arguments(data: Any) -> dict[str, Any]:
    """Return the arguments of data of one's own in the values of a recipe, which anybody may have written: those of the
    images that an encoder encodes, or of the data itself; {} if it has none."""
    arguments = _arguments(data)
    return _arguments(arguments["images"]) if isinstance(arguments.get("images"), dict) else arguments


def leaves(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Return the path and the value of each leaf of nested dictionaries, and of lists that have dictionaries."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    elif isinstance(values, list) and any(isinstance(value, dict | list) for value in values):
        for index, value in enumerate(values):
            yield from leaves(value, (*path, index))
    else:
        yield path, values


def spelled(path: Path) -> str:
    """Return a path as text, such as `trainer.callbacks[0].init_args.first`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def lines(values: Tree, indent: str = "") -> Iterator[tuple[str, str]]:
    """Return lines of YAML, each with the source of its value; lines that only open a level have none."""
    assert isinstance(values, dict)
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:", ""
            yield from lines(value, f"{indent}  ")
        else:
            text = yaml.safe_dump([value.value], default_flow_style=True, width=10**6, allow_unicode=True)
            yield f"{indent}{key}: {text.strip()[1:-1]}", value.source


def _arguments(values: Any) -> dict[str, Any]:
    arguments = values.get("init_args") if isinstance(values, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def _class(values: dict[str, Any]) -> Any:
    return plain(values["class_path"])
