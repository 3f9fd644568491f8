"""Parts of a recipe, such as its network or its data, built one at a time."""

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from jsonargparse import ArgumentParser, Namespace

Part = TypeVar("Part")


def build_part(kind: type[Part], values: dict[str, Any] | Namespace) -> Part:
    """Build an object of its values in a recipe, `{"class_path": ..., "init_args": {...}}`.

    Args:
        kind: class that the object must have.
        values: its class and its arguments.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=kind)
    given = values.as_dict() if isinstance(values, Namespace) else values
    return parser.instantiate(parser.parse_object({"part": given})).part


def untrained(network: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a network whose trained weights are not to be read or downloaded."""
    arguments = network.get("init_args", {})
    return network | {"init_args": arguments | {"pretrained": False}} if "pretrained" in arguments else network


def plain_values(values: Any) -> Any:
    """Return values that the parser has read as JSON and YAML hold them, with functions by their names."""
    if isinstance(values, Namespace):
        values = values.as_dict()
    if isinstance(values, Mapping):
        return {name: plain_values(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain_values(value) for value in values]
    if values is None or isinstance(values, bool | int | float | str):
        return values
    return _shortest_name(values) if hasattr(values, "__qualname__") else str(values)


def _shortest_name(named: Any) -> str:
    """Return the name of a class or function with the outermost module that has it: torchcaps.squash."""
    parts = named.__module__.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    has = (module for module in modules if getattr(sys.modules.get(module), named.__qualname__, None) is named)
    return f"{next(has, named.__module__)}.{named.__qualname__}"
