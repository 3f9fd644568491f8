"""Error messages for values of a recipe that the parser refuses: one line with the value, what was expected, and where.

`Training` uses them in place of the parser's own messages, which are long and often name the wrong value.
"""

import collections.abc
import importlib
import inspect
import os
import re
import types
import typing
from contextlib import suppress
from typing import Annotated, Any

import yaml
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser

from torchcaps.data import LabeledData
from torchcaps.models.registry import import_path
from torchcaps.recipes import Recipe
from torchcaps.recipes.modules import OwnModules
from torchcaps.recipes.values import Path, leaves, spelled
from torchcaps.training.classifier import Classifier
from torchcaps.training.names import KINDS, check_name, refused_names, why_refused
from torchcaps.training.trainer import Trainer
from torchcaps.utils.checks import nearest, one_line

ARGUMENTS = ("init_args", "dict_kwargs", "class_path")  # levels that an option on the command line leaves out
OTHER_FILE = ("--config", "-c")  # options of the parser


def innermost(error: BaseException) -> str:
    """Return the message of the first error in a chain of causes, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


def check_options(overrides: list[str]) -> None:
    """Check that all overrides are options, and that none reads another file of values.

    Raises:
        ValueError: one of them is not; the message says how it is given.
    """
    first = [group[0] for group in _groups(overrides)]
    for given in (*first, *(token for token in overrides if re.match("-[a-z]", token))):
        name = given.partition("=")[0]
        if name in OTHER_FILE:
            raise ValueError(
                f"{name} is no option: a file of values is a recipe of its own, which may extend another one"
            )
        if not re.fullmatch(r"--\w[\w.]*\+?", name):
            raise ValueError(f"unexpected argument {name!r}: give values of the recipe as --NAME VALUE")


def explain_parsing(
    error: Exception, parser: LightningArgumentParser, recipe: Recipe, overrides: list[str], own_modules: OwnModules
) -> str | None:
    """Find the value that the parser refused, and return a message that says what was expected.

    Args:
        error: error raised by the parser.
        parser: parser of recipes.
        recipe: recipe without the overrides.
        overrides: command-line arguments such as `--trainer.max_epochs 5`.
        own_modules: modules in the recipe's folder.

    Returns:
        The message, or None if this is an error of another kind, such as one of the user's own modules.
    """
    given, config, error = _first_refused(parser, recipe.config, overrides, error)
    where = " ".join(given) if given else recipe.name
    parts = [_as_part(given)] if given else list(leaves(config))
    for path, value in parts:
        for _, name in leaves(_read(value) if given and isinstance(value, str) else value):
            if said := why_refused(name):
                return f"{where}{'' if given else f': {_option(path)}'}: {said}"
    if said := own_modules.why_not(error, where):
        return said
    if not isinstance(error, ArgumentError | TypeError | ValueError):
        return None
    for path, value in parts:
        if said := (None if given else _misplaced(path, config)) or _what_is_wrong(path, value, config):
            return f"{where}: {said}" if given else f"{where}: {_option(path)}: {said}"
    if names := refused_names():  # in a file that the value names
        return f"{where}: {why_refused(names[0])}"
    key = re.search(r'Parser key "([\w.]+)"', str(error))
    reason = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", innermost(error))
    return f"{where}{f': {key[1]}' if key and not given else ''}: {reason}"


def _groups(overrides: list[str]) -> list[list[str]]:
    """Return each option with its values."""
    groups: list[list[str]] = []
    for token in overrides:
        if token.startswith("--") or not groups:
            groups.append([token])
        else:
            groups[-1].append(token)
    return groups


def _as_part(given: list[str]) -> tuple[Path, str]:
    """Return the path and the value of an override."""
    name, _, value = given[0].partition("=")
    return tuple(name.removeprefix("--").removesuffix("+").split(".")), value or " ".join(given[1:])


def _first_refused(
    parser: LightningArgumentParser, config: dict[str, Any], overrides: list[str], error: Exception
) -> tuple[list[str] | None, dict[str, Any], Exception]:
    """Return the first override that makes the parser fail, as option and value, the values before it, and its error.
    The override is None if the parser fails without any."""
    before = config
    groups = _groups(overrides)
    for count in range(len(groups) + 1):
        tokens = [token for group in groups[:count] for token in group]
        try:
            parsed = parser.parse_args(["--config", yaml.safe_dump(config), *tokens])
        except Exception as refused:
            return (groups[count - 1] if count else None), before, refused
        before = yaml.safe_load(parser.dump(parsed, skip_validation=True))
    return None, before, error


def _recipe(seed_everything: int | bool, model: Classifier, data: LabeledData, trainer: Trainer) -> None:
    """A function whose parameters are the top-level names of a recipe and their types."""


def _what_is_wrong(path: Path, value: Any, config: dict[str, Any]) -> str | None:
    """Return what is wrong with a value: an unknown name, an unknown class, or a wrong type. None if the signature that
    the value is an argument of does not show it."""
    if isinstance(value, str) and (full := import_path(value)):
        return f"classes and functions are named with their module: {full}"
    annotation, said = _annotation(path, config)
    if said or annotation is inspect.Parameter.empty:
        return said
    if _is_plain(annotation):
        return None if _allows(annotation, value) else f"expected {_spelled(annotation)}, got {value!r}"
    choices = _choices(annotation)
    bases = [base for choice in choices for base in _classes(choice)]
    read = _read(value) if isinstance(value, str) else value
    if not bases or any(isinstance(read, choice) for choice in choices if choice in (int, float, bool)):
        return None
    kinds = " or ".join(dict.fromkeys(base.__name__ for base in bases))
    several = any(_is_list(choice) for choice in choices) and not isinstance(path[-1], int)
    for part in read if isinstance(read, list) and several else [read]:
        is_name = isinstance(part, str) and part
        is_spec = isinstance(part, dict) and (len(path) < 2 or "class_path" in part or "init_args" in part)
        if not is_name and not is_spec and (str not in choices or isinstance(part, list)):
            return f"expected {kinds}, as {{class_path: MODULE.NAME}}, got {value!r}"
        if is_name and str not in choices and (said := _not_found(part, annotation, bases, kinds)):
            return said
    return None


def _not_found(name: str, annotation: Any, bases: list[type], kinds: str) -> str | None:
    """Return why a name does not lead to a class or function, or None if it does."""
    if name.isidentifier() and not any(name == found.__name__ for base in bases for found in _family(base)):
        return f"there is no {kinds} called {name!r}: correct the name, or add its module: MODULE.{name}"
    found = _imported(name, annotation)
    if found is None and not os.path.isfile(name):
        return f"there is no {name!r}: correct the name"
    if inspect.isfunction(found) and inspect.signature(found).return_annotation is inspect.Signature.empty:
        return f"the function {name} has no return annotation: annotate it with the class that it returns"
    return None


def _misplaced(path: Path, config: dict[str, Any]) -> str | None:
    """Return what is wrong if a value stands beside `class_path`, where the arguments of the class are not read."""
    part: Any = config
    for name in path:
        if isinstance(part, dict) and "class_path" in part and name not in ARGUMENTS:
            return f"arguments of a class stand in its init_args: {{init_args: {{{name}: ...}}}}"
        if isinstance(part, dict) and "init_args" in part and "class_path" not in part:
            return "class_path is missing, the name of the class whose arguments are in init_args"
        part = part[name]
    return None


def _option(path: Path) -> str:
    """Return a path as an option on the command line has it."""
    return spelled(tuple(name for name in path if name not in ARGUMENTS))


def _annotation(path: Path, config: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the annotation of the argument at a path, or what is wrong if there is no argument of its last name.

    It is `inspect.Parameter.empty` if the class or function that has the argument is not known.
    """
    unknown = inspect.Parameter.empty
    path = tuple(name for name in path if name not in ARGUMENTS)
    owner: Any = _recipe
    values: Any = config
    annotation: Any = unknown
    for number, name in enumerate(path):
        if isinstance(values, list) and values:  # an option without a position is of the last one
            values = values[name if isinstance(name, int) else -1]
            owner = _imported(values, annotation)
        if isinstance(name, int):
            continue
        parameters = None if owner is None else _parameters(owner)
        if parameters is None:
            return unknown, None
        if name not in parameters:
            last = number == len(path) - 1 or isinstance(path[number + 1], int)
            open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            return unknown, f"there is no {name!r}{nearest(name, parameters)}" if last and not open_ended else None
        annotation = parameters[name].annotation
        values = _arguments(values).get(name)
        owner = {"trainer": Trainer, "model": Classifier}.get(name) if owner is _recipe else None
        owner = owner or _imported(values, annotation)
    return annotation, None


def _arguments(values: Any) -> dict[str, Any]:
    """Return the arguments of a class in a recipe."""
    found = values.get("init_args", values) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def _parameters(owner: Any) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a class or function, or None if they are unknown."""
    try:
        parameters = dict(inspect.signature(owner, eval_str=True).parameters)
        for base in getattr(owner, "__mro__", ())[1:]:  # **options of a class are those of its base
            if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                parameters = {key: p for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
                inherited = inspect.signature(base, eval_str=True).parameters
                parameters |= {key: p for key, p in inherited.items() if key not in parameters}
    except (TypeError, ValueError, NameError):
        return None
    return parameters


def _imported(values: Any, annotation: Any) -> Any:
    """Return the class or function that a part of a recipe names for an annotation, or None if there is none."""
    name = values.get("class_path") if isinstance(values, dict) else values
    if not isinstance(name, str):
        return None
    known = [found for choice in _choices(annotation) for base in _classes(choice) for found in _family(base)]
    if short := [found for found in known if found.__name__ == name]:
        return short[0]
    try:
        return check_name(name, _import)
    except (ImportError, AttributeError, ValueError):
        return None


def _import(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute) if module else None


def _family(base: type) -> set[type]:
    """Return a class and all its subclasses, which a recipe may name without their modules."""
    return {base}.union(*map(_family, type.__subclasses__(base)))


def _choices(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [choice for part in typing.get_args(annotation) for choice in _choices(part)]
    return _choices(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is Annotated else [annotation]


def _classes(annotation: Any) -> list[type]:
    """Return the classes that a recipe may name for an annotation: itself, its items, or what a function returns."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is collections.abc.Callable:
        return [base for choice in _choices(arguments[-1]) for base in _classes(choice)]
    if _is_list(annotation):
        return [base for part in arguments for choice in _choices(part) for base in _classes(choice)]
    known = inspect.isclass(annotation) and annotation not in (int, float, bool, str, object, type(None))
    return [annotation] if known and issubclass(annotation, KINDS) else []


def _is_list(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return inspect.isclass(origin) and issubclass(origin, collections.abc.Iterable) and not issubclass(origin, dict)


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
