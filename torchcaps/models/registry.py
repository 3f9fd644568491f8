"""Registry of models: functions that build models, by name."""

import fnmatch
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from torchcaps.models.pretrained import find_weights, fitting_arguments, load_state
from torchcaps.utils.arguments import checked, shown_with_type
from torchcaps.utils.checks import nearest

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])
_builders: dict[str, Callable[..., nn.Module]] = {}


def register_model(builder: Builder) -> Builder:
    """Register a function that builds a model; `create_model` then finds it under the function's name.

    Its arguments are checked against their annotations, see :func:`torchcaps.utils.arguments.checked`.

    A function can be registered again, when its module is reloaded or its notebook cell runs again. The new one then
    replaces the old one.

    Raises:
        TypeError: if the builder is no function.
        ValueError: if another function is registered under this name; the message says where it is.
    """
    if not inspect.isfunction(builder):
        raise TypeError(
            f"register_model takes a function that builds a model, got {shown_with_type(builder)}: write one by def, "
            "whose name is that of the model"
        )
    name = builder.__name__
    other = _builders.get(name)
    if other is not None and _names(builder) != _names(other):
        raise ValueError(
            f"the model {name!r} of {_source(builder)} has the name of a registered model of {_source(other)}: give it "
            "another name"
        )
    builder = checked(builder)
    _builders[name] = builder
    return builder


def _names(builder: Callable[..., nn.Module]) -> tuple[str, str]:
    """Return what a function keeps when its module is reloaded, or its notebook cell runs again."""
    return builder.__module__, builder.__qualname__


def _source(builder: Any) -> str:
    code = inspect.unwrap(builder).__code__
    return f"{code.co_filename}, line {code.co_firstlineno}"


@checked
def create_model(name: str, pretrained: bool | str = False, **arguments: Any) -> nn.Module:
    """Build a model by its name; `arguments` are passed to its builder.

    Args:
        name: name of the model.
        pretrained: load trained weights that are part of the package: the name of the data set that they were trained
            on, or True if there is only one; `torchcaps models` lists them. The network then has the arguments that it
            was trained with, weights in float32, and is in evaluation mode. False leaves the weights random.
        arguments: arguments of the builder.

    Raises:
        ValueError: if the name is unknown (the message suggests the nearest ones), there are no such weights, or an
            argument contradicts them.
        TypeError: if the builder has no such argument or returns no module, or an argument has another type.
        ImportError: if safetensors, which reads the weights, is not installed.
    """
    if name not in _builders:
        raise ValueError(f"no model {name!r}{nearest(name, list(_builders))}")
    weights = None if pretrained is False else find_weights(name, pretrained)
    if weights is not None:
        arguments = fitting_arguments(weights, _builders[name], arguments)
    model = _builders[name](**arguments)
    if not isinstance(model, nn.Module):
        raise TypeError(f"the builder of {name!r} must return an nn.Module, got {shown_with_type(model)}")
    if weights is not None:
        load_state(model, weights.state, weights.path)
        model.eval()
    return model


@checked
def list_models(pattern: str = "*") -> list[str]:
    """Return the sorted names of all models that match a shell-style pattern."""
    return sorted(fnmatch.filter(_builders, pattern))


def describe_model(name: str) -> str:
    """Return the first line of the docstring of a model's builder."""
    return (_builders[name].__doc__ or "").strip().partition("\n")[0]


def import_path(name: str) -> str | None:
    """Return the dotted path of a model's builder, or None if there is no such model."""
    return f"{_builders[name].__module__}.{name}" if name in _builders else None
