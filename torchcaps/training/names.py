"""Which classes and functions a recipe may name without `--allow_code`, so that a recipe from elsewhere runs no code.

All names in the values of a recipe are checked here before the parser sees them: it imports what they name.
"""

import difflib
import importlib
import inspect
import re
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from torchcaps.data import LabeledData
from torchcaps.models.registry import import_path
from torchcaps.recipes.reading import read_yaml
from torchcaps.recipes.values import ARGUMENTS, Path
from torchcaps.training.classifier import Classifier
from torchcaps.training.overrides import Override
from torchcaps.training.signatures import (
    NAMEABLE_CLASSES,
    PARTS,
    UNKNOWN,
    choices,
    classes,
    family,
    handed_on,
    is_open,
    is_plain,
    parameters,
)
from torchcaps.training.trainer import Trainer
from torchcaps.utils.checks import nearest, one_line
from torchcaps.utils.lazy import import_all

PACKAGES = ("torchcaps", "torch", "lightning", "torchmetrics")
NAMED = ("torchcaps.data", "torchcaps.training")  # whose classes are known without their module


def is_dotted(text: str) -> bool:
    """Return whether a text is a name with its module, as the parser takes it: `\\w` of a pattern is narrower."""
    return "." in text and all(part.isidentifier() for part in text.split("."))


class Refused(ValueError):
    """A value of a recipe cannot be used.

    Args:
        path: where it stands.
        message: what is wrong with it.
    """

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


def recipe_signature(seed_everything: int | bool, model: Classifier, data: LabeledData, trainer: Trainer) -> None:
    """A function whose parameters are the names at the top level of a recipe, with their types."""


OWNERS = (recipe_signature, Trainer, Classifier)  # whose arguments are given without their name


class Names:
    """The names in a recipe.

    Args:
        allow_code: whether it may name classes and functions of any package, which then run.
    """

    def __init__(self, allow_code: bool) -> None:
        self.allow_code = allow_code

    def changed(self, values: Any, override: Override) -> Any:
        """Return the values of a recipe with one of them changed; `check` must follow.

        The names of an override leave out `init_args`, and it changes the last item of a list. Where it names another
        class, the arguments that the new class also takes are kept.

        Raises:
            Refused: a name on the way to the value is not allowed or not known.
        """
        return _changed(values, override.path, override, self, recipe_signature, ())

    def check(self, values: Any, annotation: Any = recipe_signature, path: Path = ()) -> None:
        """Check all names in values: those of classes and functions, and those of arguments.

        Args:
            values: the values, for example of a whole recipe.
            annotation: annotation of the argument that takes them.
            path: where they stand.

        Raises:
            Refused: a name is not allowed, is not known, or cannot be imported.
        """
        if isinstance(values, str):  # the parser reads texts as YAML too
            values = _read(values, annotation, path)
        if not isinstance(values, str | int | float | list | dict | None):  # the parser would look into a set
            raise Refused(path, f"must be a text, a number, a list or a dictionary, got a {type(values).__name__}")
        expected = classes(annotation)
        if isinstance(values, list):
            for index, value in enumerate(values):
                self.check(value, annotation, (*path, index))
        elif isinstance(values, dict):
            self._check_part(values, annotation, path)
        elif isinstance(values, str):
            must_be_a_class = bool(expected) and str not in choices(annotation)
            # Where texts of any kind are taken, the parser imports those that look like the name of a class.
            may_be_imported = is_dotted(values) and not is_plain(annotation)
            if must_be_a_class or (may_be_imported and not self.allow_code):
                self.find(values, annotation, path)
        elif annotation in OWNERS:
            raise Refused(path, f"must have values of its own, {{NAME: VALUE}}, got {values!r}")
        elif expected and not _may_be_plain(annotation, values):
            raise Refused(path, _expected(expected, values))

    def _check_part(self, values: dict[Any, Any], annotation: Any, path: Path) -> None:
        """Check a dictionary: the top of a recipe, a class with its arguments, or any other."""
        arguments, inner = values, path
        owner = self.owner(values, annotation, path)
        if "class_path" in values and annotation not in OWNERS:
            for name in values:
                if name not in (*ARGUMENTS, "class_path"):
                    close = difflib.get_close_matches(str(name), ARGUMENTS, n=1)
                    message = (
                        f"there is no {name!r} beside a class_path; did you mean {close[0]}?"
                        if close
                        else f"arguments of a class stand in its init_args: {{init_args: {{{name}: ...}}}}"
                    )
                    raise Refused((*path, name), message)
            arguments, inner = values.get("init_args") or {}, (*path, "init_args")
            self.check(values.get("dict_kwargs"), UNKNOWN, (*path, "dict_kwargs"))
        elif owner is None and (expected := classes(annotation)):
            raise Refused(path, _expected(expected, values))
        if not isinstance(arguments, dict):
            raise Refused(inner, f"must have values of its own, {{NAME: VALUE}}, got {arguments!r}")
        known = None if owner is None else parameters(owner)
        for name, value in arguments.items():
            if not isinstance(name, str):
                raise Refused(inner, f"names must be texts, got {name!r}: write it in quotes if it is one")
            if known is not None and name not in known and not is_open(known) and name not in handed_on(owner):
                raise Refused((*inner, name), f"there is no {name!r}{nearest(name, known)}")
            has = known[name].annotation if known and name in known else UNKNOWN
            self.check(value, has, (*inner, name))

    def owner(self, values: dict[Any, Any], annotation: Any, path: Path) -> Any:
        """Return the class or function whose arguments a dictionary has, or None if it has those of none."""
        if annotation in OWNERS:
            return annotation
        return self.find(values["class_path"], annotation, (*path, "class_path")) if "class_path" in values else None

    def find(self, name: Any, annotation: Any, path: Path = ()) -> Any:
        """Import the class or function that has a name, after a check that it is allowed.

        Args:
            name: name with its module; of a class that is imported already, its own name is enough.
            annotation: annotation of the argument that takes it.
            path: where the name stands.
        """
        if not isinstance(name, str) or not name:
            raise Refused(path, f"must be the name of a class or a function, got {name!r}")
        if "." not in name:
            return _known_class(name, annotation, path)
        if not is_dotted(name):
            raise Refused(path, f"there is no {name!r}: correct the name")
        package, *others = name.split(".")
        if self.allow_code or (package in PACKAGES and not any(part.startswith("_") for part in others)):
            try:
                named = import_name(name)
            except Exception as error:  # modules may raise any exception
                raise Refused(path, f"{name} cannot be imported ({type(error).__name__}: {one_line(error)})") from error
            if self.allow_code or _is_allowed(named):
                return named
        packages = f"{', '.join(PACKAGES[:-1])} and {PACKAGES[-1]}"
        allow = "allow its code to run, by --allow_code or allow_code=True"
        raise Refused(path, f"{name} is no class of {packages}: correct the name, or {allow}")


def _known_class(name: str, annotation: Any, path: Path) -> type:
    """Return the class that a name without a module means, among the imported ones that the annotation takes."""
    for package in NAMED:
        import_all(package)
    known = {kind.__name__: kind for base in classes(annotation) for kind in family(base)}
    if name in known:
        return known[name]
    if full := import_path(name):
        raise Refused(path, f"classes and functions are named with their module: {full}")
    kinds = _kinds(classes(annotation)) or "class"
    advice = f"{nearest(name, known)}; a class of another module is named with it: MODULE.{name}"
    raise Refused(path, f"there is no {kinds} called {name!r}{advice}")


def _read(text: str, annotation: Any, path: Path) -> Any:
    """Return a text as the parser reads it for an annotation: as YAML, if it is YAML."""
    is_text = set(choices(annotation)) <= {str, type(None)}
    if is_text and text.startswith(("*", "!")) and not text.startswith("!!"):
        return text  # a name of a folder or a column, and no alias or tag
    try:
        read = read_yaml(text)
    except yaml.YAMLError as error:
        if text.lstrip().startswith(("{", "[")) and not is_plain(annotation):
            raise Refused(path, f"{text} is not valid YAML: {one_line(error)}") from None
        return text
    except ValueError as error:
        raise Refused(path, str(error)) from None
    if is_plain(annotation):
        return text
    # The parser may read what it has read once more: a text within quotes within quotes.
    return _read(read, annotation, path) if isinstance(read, str) and read != text else read


def _may_be_plain(annotation: Any, value: Any) -> bool:
    """Return whether a value that is no text and no object may fit an annotation. The parser decides."""
    takes = [choice for choice in choices(annotation) if is_plain(choice)]
    return type(None) in takes if value is None else any(choice is not type(None) for choice in takes)


def import_name(name: str) -> Any:
    """Return the class or function that has a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        outer, _, inner = module.rpartition(".")
        if error.name != module or not outer:
            raise
        owner = getattr(importlib.import_module(outer), inner)
    return getattr(owner, attribute)


def _is_allowed(named: Any) -> bool:
    """Return whether a recipe may name a class or function. Where it was defined counts: `torch.os.system` is of os."""
    home = str(getattr(named, "__module__", "")).partition(".")[0]
    if inspect.isclass(named):
        return home in PACKAGES and issubclass(named, NAMEABLE_CLASSES)
    if not inspect.isfunction(named) or home != PACKAGES[0]:
        return False
    try:
        returned = inspect.signature(named, eval_str=True).return_annotation
    except (TypeError, NameError):
        return False
    return inspect.isclass(returned) and issubclass(returned, (*PARTS, Tensor))


def _kinds(expected: list[type]) -> str:
    return " or ".join(kind.__name__ for kind in expected)


def _expected(expected: list[type], value: Any) -> str:
    return f"expected {_kinds(expected)}, as {{class_path: MODULE.NAME}}, got {value!r}"


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
        place = values["init_args"] = _arguments(values, path)
    annotation = known[name].annotation if name in known else UNKNOWN
    place[name] = _changed(place.get(name), left, override, names, annotation, (*path, name))
    return values


def _arguments(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a copy of the arguments of a class."""
    arguments = values.get("init_args") or {}
    if not isinstance(arguments, dict):
        raise Refused((*path, "init_args"), f"must have values of its own, {{NAME: VALUE}}, got {arguments!r}")
    return dict(arguments)


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
    before = _arguments(values, path) if isinstance(values, dict) else None
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
