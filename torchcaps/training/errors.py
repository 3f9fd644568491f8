"""Error messages for values of a recipe that the parser refuses, in one line."""

import copy
import typing
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from torchcaps.recipes.values import ARGUMENTS, Path, spelled
from torchcaps.training.names import OWNERS, Names
from torchcaps.training.overrides import Override
from torchcaps.training.signatures import UNKNOWN, choices, classes, parameters
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


def misfit(values: Any, annotation: Any, path: Path, names: Names) -> tuple[Path, str] | None:
    """Return where the first value stands that the parser refuses, and why; None if it takes all of them.

    Args:
        values: values whose names are checked.
        annotation: annotation of the argument that takes them.
        path: where they stand.
        names: the names that they may have.
    """
    reason = None
    if annotation not in OWNERS and (reason := _reason(values, annotation)) is None:
        return None
    for inner, value, inner_annotation in _inside(values, annotation, path, names):
        if refused := misfit(value, inner_annotation, inner, names):
            return refused
    if (isinstance(values, str) and classes(annotation)) or (isinstance(values, dict) and "class_path" in values):
        kinds = [kind for kind in classes(annotation) if kind in choices(annotation)]  # without lists of them
        reason = (_reason(values, kinds[0]) if kinds else None) or reason
    elif reason is not None:
        reason = f"expected {_in_words(annotation)}, got {values}"
    return None if reason is None else (path, reason)


def _reason(values: Any, annotation: Any) -> str | None:
    """Return why the parser refuses a value, in its own words; None if it takes it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=Any if annotation is UNKNOWN else annotation)
    try:
        parser.parse_object({"value": copy.deepcopy(values)})  # it changes them
    except ArgumentError as error:
        return innermost(error)
    return None


def _inside(values: Any, annotation: Any, path: Path, names: Names) -> typing.Iterator[tuple[Path, Any, Any]]:
    """Yield the place, the value and the annotation of each value within a value."""
    inner = [part for choice in choices(annotation) for part in typing.get_args(choice)]
    if isinstance(values, dict) and (owner := names.owner(values, annotation, path)) is not None:
        known, is_named = parameters(owner) or {}, annotation not in OWNERS
        for name, value in ((values.get("init_args") or {}) if is_named else values).items():
            if name in known:
                yield (*path, *(["init_args"] if is_named else []), name), value, known[name].annotation
    elif isinstance(values, dict) and inner:
        yield from ((path, value, inner[-1]) for value in values.values())
    elif isinstance(values, list):
        item = annotation if classes(annotation) or not inner else inner[0]
        yield from (((*path, index), value, item) for index, value in enumerate(values))


def _in_words(annotation: Any) -> str:
    """Return what an annotation takes, such as "int or None"."""
    words: list[str] = []
    for choice in choices(annotation):
        origin, inner = typing.get_origin(choice), typing.get_args(choice)
        if choice is Tensor:  # no value of a recipe is one
            continue
        if origin is typing.Literal:
            words += map(repr, inner)
        elif origin in (list, tuple, Sequence) and inner:
            words.append(f"a list of {_in_words(inner[0])}" + " such as [a, b]" * (inner[0] is str))
        else:
            words.append(getattr(origin or choice, "__name__", str(choice)).replace("NoneType", "None"))
    return " or ".join(dict.fromkeys(words))
