"""Overrides, such as `--trainer.max_epochs 5`, as they are given."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchcaps.recipes.values import options_of


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
        option = [rest.pop(0)]
        name, equals, value = option[0].partition("=")
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
            option.append(rest.pop(0))
            if is_number(option[1]):
                numbers = list(itertools.takewhile(is_number, rest))
                del rest[: len(numbers)]
                option += numbers
            value = option[1] if len(option) == 2 else f"[{', '.join(option[1:])}]"
        path = name.removeprefix("--").removesuffix("+").split(".")
        overrides.append(Override(tuple(path), value, name.endswith("+"), tuple(option)))
    return overrides


def is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.I) is not None
