"""Models by name."""

import difflib
import fnmatch
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])
_builders: dict[str, Callable[..., nn.Module]] = {}


def register_model(builder: Builder) -> Builder:
    """Let `create_model` find a function that builds a model, under the function's name.

    The same function may be registered again, as when its module is reloaded or its cell of a notebook runs once more:
    the new one then takes the place of the old one.

    Raises:
        ValueError: another function has this name already; the message says where it is.
    """
    name = builder.__name__
    other = _builders.get(name)
    if other is not None and not _same(builder, other):
        raise ValueError(
            f"the model {name!r} of {_source(builder)} has the name of one that is registered already, "
            f"of {_source(other)}: give it another name"
        )
    _builders[name] = builder
    return builder


def _same(builder: Callable[..., nn.Module], other: Callable[..., nn.Module]) -> bool:
    """Whether two builders come from the same place: of one file, or of the cells of one session."""
    if builder.__qualname__ != other.__qualname__:
        return False
    return _file(builder) == _file(other) or builder.__module__ == other.__module__ == "__main__"


def _file(builder: Callable[..., nn.Module]) -> str:
    code = getattr(inspect.unwrap(builder), "__code__", None)
    return code.co_filename if code else builder.__module__


def _source(builder: Callable[..., nn.Module]) -> str:
    """The file of a builder and, for a function, its line."""
    code = getattr(inspect.unwrap(builder), "__code__", None)
    return f"{_file(builder)}, line {code.co_firstlineno}" if code else _file(builder)


def create_model(name: str, **arguments: Any) -> nn.Module:
    """Build a model by name; `arguments` go to its builder.

    Raises:
        ValueError: for an unknown name; the message has the nearest ones.
    """
    if name not in _builders:
        raise ValueError(f"no model {name!r}{nearest(name, list(_builders))}")
    return _builders[name](**arguments)


def list_models(pattern: str = "*") -> list[str]:
    """Names of all models that match a shell-style pattern, sorted."""
    return sorted(fnmatch.filter(_builders, pattern))


def describe_model(name: str) -> str:
    """The first line of the documentation of a model's builder."""
    return (_builders[name].__doc__ or "").strip().partition("\n")[0]


def import_path(name: str) -> str | None:
    """The name to import a model's builder by; None if there is no such model."""
    return f"{_builders[name].__module__}.{name}" if name in _builders else None


def nearest(name: str, names: list[str]) -> str:
    """The part of an error message that names what may have been meant."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join(sorted(names))}"
