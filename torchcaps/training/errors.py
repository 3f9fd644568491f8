"""Error messages for values of a recipe that the parser refuses, in one line."""

import re
import typing

from torchcaps.recipes.values import ARGUMENTS, Path, spelled
from torchcaps.training.overrides import Override
from torchcaps.utils.checks import one_line


def innermost(error: BaseException) -> str:
    """Return the message of the first error in a chain of causes, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


def where(path: Path, recipe: str, overrides: typing.Sequence[Override]) -> str:
    """Return where a wrong value was given: an override, or a place in the recipe."""
    option = tuple(name for name in path if name not in (*ARGUMENTS, "class_path"))
    names = tuple(name for name in option if isinstance(name, str))
    around = [override for override in overrides if names[: len(override.path)] == override.path]
    within = [override for override in overrides if names and override.path[: len(names)] == names]
    for override in (*reversed(around), *reversed(within)):
        return override.text
    return f"{recipe}: {spelled(option)}" if option else recipe


def refused(error: BaseException) -> tuple[Path, str]:
    """Return where the value stands that the parser refuses, and what was expected.

    jsonargparse raises an error for each level that leads to the value, each the cause of the one before. If a value
    may be of several types, its message lists all of them, and the cause is the error of the first.
    """
    path: list[str] = []
    key, message, reason = "", "", innermost(error)
    cause: BaseException | None = error
    while cause is not None:
        outer, message = message, str(cause)
        match = re.match(r'(?:Type .* callable class: )?Parser key "([\w.]+)"', message)
        if match and match[1] != key:
            key = match[1]
            path += key.split(".")
        cause = cause.__cause__
    expected = re.findall(r"\n *- Expected a (.*)", outer) if re.search(r"Union subtypes\n", outer) else []
    if expected and len(expected) == len(re.findall(r"\n *- ", outer)):
        kinds = [kind.partition(". Got value: ")[0] for kind in expected]
        expected = [kind for kind in kinds if not kind.startswith("dot import path")] or kinds
        reason = f"Expected a {' or '.join(expected)}. Got value: {outer.rpartition('Given value: ')[2]}"
    reason = reason.partition(" Subclass types expect one of")[0]  # the rest is about jsonargparse's own forms
    reason = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", reason).replace("NoneType", "None").replace("typing.", "")
    return tuple(path), re.sub(r"Expected a (.*)\. Got value: ", r"expected \1, got ", reason)
