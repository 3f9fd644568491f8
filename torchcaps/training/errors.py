"""Error messages for values of a recipe that the parser refuses, in one line."""

import re
import typing

from torchcaps.recipes.values import ARGUMENTS, Path, spelled
from torchcaps.training.overrides import Override
from torchcaps.utils.checks import one_line

UNION = re.compile(r"Subtypes: \[(.*)\]\n")


def innermost(error: BaseException) -> str:
    """Return the message of the first error in a chain of causes, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


def where(path: Path, recipe: str, overrides: typing.Sequence[Override]) -> str:
    """Return where a wrong value was given: an override, or a place in the recipe."""
    option = tuple(name for name in path if name not in (*ARGUMENTS, "class_path"))
    names = tuple(name for name in option if isinstance(name, str))
    for override in reversed(overrides):
        shared = min(len(names), len(override.path))
        if shared and names[:shared] == override.path[:shared]:
            return override.text
    return f"{recipe}: {spelled(option)}" if option else recipe


def refused(error: BaseException) -> tuple[Path, str]:
    """Return where the value stands that the parser refuses, and what was expected.

    jsonargparse raises an error for each level that leads to the value, each the cause of the one before. If a value
    may be of several types, its message lists all of them, and the cause is the error of the first.
    """
    path: list[str] = []
    reason = ""
    found: BaseException | None = error
    while found is not None:
        message = str(found)
        if key := re.match(r'(?:Type .* callable class: )?Parser key "([\w.]+)"', message):
            path += [name for name in key[1].split(".") if [name] != path[-1:]]
        types = UNION.findall(message)
        plain = types and not re.search(r"class '(?!int|float|bool|str|NoneType)|Callable|Iterable|list", types[-1])
        if plain and found.__cause__ is not None and found.__cause__.__cause__ is None:
            reason = f"expected {_in_words(types[-1])}, got {_value(found)}"
        found = found.__cause__
    return tuple(path), reason or _shorter(innermost(error))


def _in_words(types: str) -> str:
    """Return the types of a union, such as "int or None"."""
    words = re.findall(r"class '(?:\w+\.)*(\w+)'|Literal\[([^\]]*)\]", types)
    return " or ".join({"NoneType": "None"}.get(name, name) or choices for name, choices in words)


def _value(error: BaseException) -> str:
    return repr(str(error).rpartition("Given value: ")[2])


def _shorter(message: str) -> str:
    """Return a message of jsonargparse without what it says about its own forms of values."""
    message = message.partition(" Subclass types expect one of")[0]
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", message)
