"""Overrides, such as `--trainer.max_epochs 5`, which change values of a recipe."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from torchcaps.recipes.reading import read_yaml
from torchcaps.recipes.values import ARGUMENTS, Path, options_of
from torchcaps.training.names import OWNERS, Names, Refused, recipe_signature
from torchcaps.training.signatures import UNKNOWN, parameters
from torchcaps.utils.checks import one_line


class Override(NamedTuple):
    """A value that was given as an option.

    Args:
        path: names on the way to the value, without `init_args`.
        value: the value, as text: the parser reads it as its type demands.
        adds: whether it is added to a list (`--NAME+=VALUE`).
        tokens: the option as it was given on a command line, or could be.
    """

    path: tuple[str, ...]
    value: str
    adds: bool
    tokens: tuple[str, ...]

    @property
    def text(self) -> str:
        """The option as it was given, for messages."""
        return " ".join(self.tokens)


def overrides_of(values: Mapping[str, Any] | Sequence[Override]) -> list[Override]:
    """Return overrides of values by their dotted names, such as `{"trainer.max_epochs": 5}`; those that are overrides
    already stay as they are."""
    if not isinstance(values, Mapping):
        return list(values)
    return read_overrides(options_of(values))


def read_overrides(tokens: list[str]) -> list[Override]:
    """Read options of the forms `--NAME VALUE`, `--NAME=VALUE` and `--NAME+=VALUE`. Several numbers are a list.

    Raises:
        ValueError: a token is no such option; the message says how it is given.
    """
    overrides = []
    rest = list(tokens)
    while rest:
        given = [rest.pop(0)]
        name, equals, value = given[0].partition("=")
        if name in ("--config", "-c"):
            raise ValueError(
                f"{name} is no option: a file of values is a recipe of its own, which may extend another one"
            )
        if not re.fullmatch(r"--\w[\w.]*\+?", name) or ".." in name or name.endswith("."):
            raise ValueError(
                f"unexpected argument {name!r}: give values of the recipe as --NAME VALUE, and a VALUE with spaces in "
                "quotes"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{name} has no value: give it as {name} VALUE")
            given.append(rest.pop(0))
            if is_number(given[1]):
                numbers = list(itertools.takewhile(is_number, rest))
                del rest[: len(numbers)]
                given += numbers
            value = given[1] if len(given) == 2 else f"[{', '.join(given[1:])}]"
        path = name.removeprefix("--").removesuffix("+").split(".")
        overrides.append(Override(tuple(path), value, name.endswith("+"), tuple(given)))
    return overrides


def is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.I) is not None


def with_override(values: Any, override: Override, names: Names) -> Any:
    """Return the values of a recipe with one of them changed.

    The names of an override leave out `init_args`, and it changes the last item of a list. Where it names another
    class, the arguments that the new class also takes are kept.
    """
    return _changed(values, override.path, override, names, recipe_signature, ())


def _changed(
    values: Any, names_left: tuple[str, ...], override: Override, names: Names, annotation: Any, path: Path
) -> Any:
    """Return values that stand at `path` with a change of the value that `names_left` lead to from there."""
    if not names_left:
        return _added(values, override, path) if override.adds else _replaced(values, override, names, annotation, path)
    if isinstance(values, str):
        read = _structured(values, path)
        values = {"class_path": read} if isinstance(read, str) else read
    if isinstance(values, list):
        items = values or [{}]
        last = len(items) - 1
        return [*items[:-1], _changed(items[-1], names_left, override, names, annotation, (*path, last))]
    values = dict(values) if isinstance(values, dict) else {}
    name, left = names_left[0], names_left[1:]
    if name in (*ARGUMENTS, "class_path"):
        values[name] = _changed(values.get(name), left, override, names, UNKNOWN, (*path, name))
        return values
    owner: Any = names.owner(values, annotation, path)
    known = (parameters(owner) if owner is not None else None) or {}
    place = values
    if "class_path" in values and annotation not in OWNERS:
        place = values["init_args"] = dict(values.get("init_args") or {})
    annotation = known[name].annotation if name in known else UNKNOWN
    place[name] = _changed(place.get(name), left, override, names, annotation, (*path, name))
    return values


def _added(values: Any, override: Override, path: Path) -> list[Any]:
    """Return a list with one more item, or with the items of another list."""
    before = _structured(values, path) if isinstance(values, str) else values
    before = before if isinstance(before, list) else [] if before is None else [before]
    added = _structured(override.value, path)
    return [*before, *(added if isinstance(added, list) else [added])]


def _structured(text: str, path: Path) -> Any:
    """Return the list or the dictionary that a text is in YAML, or the text."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise Refused(path, f"{text} cannot be read: {one_line(error)}") from None


def _replaced(values: Any, override: Override, names: Names, annotation: Any, path: Path) -> Any:
    """Return the new value. If it is the name of a class, it takes over the arguments that the class also has."""
    before = values.get("init_args") if isinstance(values, dict) else None
    if not before or not re.fullmatch(r"[\w.]+", override.value) or override.value in ("null", "true", "false"):
        return override.value
    known = parameters(names.find(override.value, annotation, path)) or {}
    kept = {name: x for name, x in before.items() if name in known and _fits(x, known[name].annotation, names)}
    return {"class_path": override.value, "init_args": kept}


def _fits(value: Any, annotation: Any, names: Names) -> bool:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=Any if annotation is UNKNOWN else annotation)
    try:
        names.check(value, annotation)  # the parser imports what it names
        parser.parse_object({"value": value})
    except (ArgumentError, Refused):
        return False
    return True
