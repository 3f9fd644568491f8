"""Error messages for values of a recipe that the parser refuses: one line with the value, what was expected, and where.

`Training` uses them in place of the parser's own messages, which are long and often name the wrong value.
"""

import importlib
import inspect
import types
import typing
from contextlib import suppress
from typing import Annotated, Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from torchcaps.checks import nearest, one_line
from torchcaps.data import LabeledData
from torchcaps.models.registry import import_path
from torchcaps.recipes import Recipe
from torchcaps.recipes.values import leaves
from torchcaps.training.classifier import Classifier
from torchcaps.training.trainer import Trainer


def innermost(error: BaseException) -> str:
    """Return the message of the first error in a chain of causes, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


def explain_parsing(error: Exception, parser: LightningArgumentParser, recipe: Recipe, overrides: list[str]) -> str:
    """Find the value that the parser refused, and return a message that says what was expected.

    Args:
        error: error raised by the parser.
        parser: parser of recipes.
        recipe: recipe without the overrides.
        overrides: command-line arguments such as `--trainer.max_epochs 5`.
    """
    reason = innermost(error)
    given, config = _first_refused(parser, recipe.config, overrides)
    if given is None:
        for path, value in leaves(config):
            if said := _misplaced(path, config) or _what_is_wrong(path, value, config):
                return f"{recipe.name}: {'.'.join(_without_arguments(path))}: {said}"
        return f"{recipe.name}: {reason}"
    name, _, value = given[0].partition("=")
    if not name.startswith("--"):
        return f"unexpected argument {name!r}: give values of the recipe as --NAME VALUE"
    path = tuple(name.removeprefix("--").removesuffix("+").split("."))
    said = _what_is_wrong(path, value or " ".join(given[1:]), config) or reason
    return f"{' '.join(given)}: {said}"


def _first_refused(
    parser: LightningArgumentParser, config: dict[str, Any], overrides: list[str]
) -> tuple[list[str] | None, dict[str, Any]]:
    """Return the first override that makes the parser fail, as option and value, and the values before it. The override
    is None if the parser fails without any."""
    before = config
    groups: list[list[str]] = []
    for token in overrides:
        if token.startswith("--") or not groups:
            groups.append([token])
        else:
            groups[-1].append(token)
    for count in range(len(groups) + 1):
        tokens = [token for group in groups[:count] for token in group]
        try:
            parsed = parser.parse_args(["--config", yaml.safe_dump(config), *tokens])
        except Exception:
            return (groups[count - 1] if count else None), before
        before = yaml.safe_load(parser.dump(parsed, skip_validation=True))
    return None, before


def _recipe(seed_everything: int | bool, model: Classifier, data: LabeledData, trainer: Trainer) -> None:
    """A function whose parameters are the top-level names of a recipe and their types."""


def _what_is_wrong(path: tuple[str, ...], value: Any, config: dict[str, Any]) -> str | None:
    """Return what is wrong with a value: an unknown name, an unknown class, or a wrong type. None if the signature that
    the value is an argument of does not show it."""
    if isinstance(value, str) and (full := import_path(value)):
        return f"classes and functions are named with their module: {full}"
    parameters, name = _parameters(path, config)
    if parameters is None:
        return None
    if name not in parameters:
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return None if open_ended else f"there is no {name!r}{nearest(name, parameters)}"
    annotation = parameters[name].annotation
    if _is_plain(annotation):
        return None if _allows(annotation, value) else f"expected {_spelled(annotation)}, got {value!r}"
    if not isinstance(value, str) or any(choice in (int, float, bool, str) for choice in _choices(annotation)):
        return None
    bases = [choice for choice in _choices(annotation) if inspect.isclass(choice) and choice is not type(None)]
    if value.isidentifier() and bases and not any(value in _names(base) for base in bases):
        kinds = " or ".join(base.__name__ for base in bases)
        return f"there is no {kinds} called {value!r}: correct the name, or add its module: MODULE.{value}"
    found = _imported({"class_path": value})
    if inspect.isfunction(found) and inspect.signature(found).return_annotation is inspect.Signature.empty:
        return f"the function {value} has no return annotation: annotate it with the class that it returns"
    return None


def _misplaced(path: tuple[str, ...], config: dict[str, Any]) -> str | None:
    """Return what is wrong if a value stands beside `class_path`, where the arguments of the class are not read."""
    part: Any = config
    for name in path:
        if isinstance(part, dict) and "class_path" in part and name not in ("class_path", "init_args", "dict_kwargs"):
            return f"arguments of a class stand in its init_args: {{init_args: {{{name}: ...}}}}"
        part = part[name]
    return None


def _without_arguments(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a path as an option on the command line has them."""
    return tuple(name for name in path if name not in ("init_args", "dict_kwargs", "class_path"))


def _parameters(path: tuple[str, ...], config: dict[str, Any]) -> tuple[dict[str, inspect.Parameter] | None, str]:
    """Return the parameters among which the last name of a path must be, or None if they are unknown, and this name.

    They are the parameters of the class or function that the recipe names at the path's parent.
    """
    path = _without_arguments(path)
    owner: Any = _recipe
    values: Any = config
    for name in path[:-1]:
        values = values.get("init_args", values).get(name) if isinstance(values, dict) else None
        owner = {"trainer": Trainer, "model": Classifier}.get(name) if owner is _recipe else None
        owner = owner or _imported(values)
        if owner is None:
            return None, path[-1]
    try:
        parameters = dict(inspect.signature(owner, eval_str=True).parameters)
    except (TypeError, ValueError, NameError):
        return None, path[-1]
    for base in getattr(owner, "__mro__", ())[1:]:  # **options of a class are those of its base
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            parameters = {key: p for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
            inherited = inspect.signature(base, eval_str=True).parameters
            parameters |= {key: p for key, p in inherited.items() if key not in parameters}
    return parameters, path[-1]


def _imported(values: Any) -> Any:
    """Return the class or function that the `class_path` of a part of a recipe names, or None if there is none."""
    module, _, name = str(values.get("class_path", "")).rpartition(".") if isinstance(values, dict) else ("", "", "")
    try:
        return getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        return None


def _names(base: type) -> set[str]:
    """Return the names of a class and of all its subclasses, which a recipe may name without their modules."""
    return {base.__name__}.union(*map(_names, type.__subclasses__(base)))


def _choices(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [choice for part in typing.get_args(annotation) for choice in _choices(part)]
    return _choices(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is Annotated else [annotation]


def _is_plain(annotation: Any) -> bool:
    """Return whether an annotation is made of numbers, strings, None and literals. Only the parser can judge others."""
    plain = (int, float, bool, str, type(None))
    return all(choice in plain or typing.get_origin(choice) is typing.Literal for choice in _choices(annotation))


def _allows(annotation: Any, value: Any) -> bool:
    """Return whether a value fits a plain annotation. Strings are read as YAML, as on the command line."""
    read = _read(value) if isinstance(value, str) else value
    for choice in _choices(annotation):
        if typing.get_origin(choice) is typing.Literal:
            allowed = str(value) in map(str, typing.get_args(choice))
        elif choice in (int, float):
            allowed = isinstance(read, (int, choice)) and not isinstance(read, bool)
        else:
            allowed = choice is str or isinstance(read, choice)
        if allowed:
            return True
    return False


def _read(text: str) -> Any:
    """Read a text as the parser does: a number, or else YAML."""
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return text


def _spelled(annotation: Any) -> str:
    """Return a plain annotation in words, such as "int or None"."""
    words: list[str] = []
    for choice in _choices(annotation):
        literal = typing.get_origin(choice) is typing.Literal
        words += map(str, typing.get_args(choice)) if literal else [getattr(choice, "__name__", str(choice))]
    words = ["None" if word == "NoneType" else word for word in dict.fromkeys(words)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
