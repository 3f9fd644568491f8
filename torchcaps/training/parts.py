"""Parts of a recipe, such as its network or its data, built one at a time."""

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
