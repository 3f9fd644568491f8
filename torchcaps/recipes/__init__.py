"""Recipes: each published number is one YAML file, `<paper>/<row>.yaml`, or extends another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcaps.extras import needs
from torchcaps.models.registry import nearest

with needs("train"):
    import yaml

FOLDER = Path(__file__).parent


@dataclass
class Published:
    """What a recipe reproduces: the head of its file.

    Args:
        paper: authors and year.
        row: where in the paper the number stands.
        number: the published number, with its unit.
        data: the data set.
    """

    paper: str = ""
    row: str = ""
    number: str = ""
    data: str = ""


def list_recipes() -> list[str]:
    """Names of all recipes in the package, sorted."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def find_recipe(name: str) -> list[Path]:
    """Files of a recipe, from the most general to its own; each overrides those before it.

    Args:
        name: of a recipe in the package, or the path of a YAML file.

    Raises:
        ValueError: for an unknown name; the message has the nearest ones.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        if path.parent != FOLDER and name.endswith((".yaml", ".yml")):
            raise ValueError(f"no file {name}: give the path of a recipe, or a name from `torchcaps recipes`")
        raise ValueError(f"no recipe {name!r}{nearest(name, list_recipes())}")
    base = _read(path).get("extends")
    return [path] if base is None else [*find_recipe(base), path]


def published(name: str) -> Published:
    """The head of a recipe."""
    head: dict[str, str] = {}
    for path in find_recipe(name):
        head |= _read(path).get("recipe", {})
    return Published(**head)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: expected keys such as model, data and trainer")
    return content
