"""Models by name."""

import difflib
import fnmatch
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])
_builders: dict[str, Callable[..., nn.Module]] = {}


def register_model(builder: Builder) -> Builder:
    """Let `create_model` find a function that builds a model, under the function's name."""
    _builders[builder.__name__] = builder
    return builder


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


def nearest(name: str, names: list[str]) -> str:
    """The part of an error message that names what may have been meant."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join(sorted(names))}"
