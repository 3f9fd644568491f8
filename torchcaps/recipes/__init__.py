"""Recipes: each published number is one YAML file, `<paper>/<row>.yaml`, or extends another."""

from dataclasses import dataclass
from functools import cache
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
        bfloat16: how training in bfloat16 was compared with training in float32, if it was and made no difference.
    """

    paper: str = ""
    row: str = ""
    number: str = ""
    data: str = ""
    bfloat16: str = ""


def list_recipes() -> list[str]:
    """Names of all recipes in the package, sorted."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def find_recipe(name: str, folder: Path = Path()) -> list[Path]:
    """Files of a recipe, from the most general to its own; each overrides those before it.

    Args:
        name: of a recipe in the package, or the path of a YAML file.
        folder: that such a path starts from.

    Raises:
        ValueError: for an unknown name; the message has the nearest ones.
    """
    path = _locate(name, folder)
    files = [path]
    while (base := _read(path).get("extends")) is not None:
        path = _locate(str(base), path.parent)
        if path in files:
            raise ValueError(f"{name} extends itself, by way of {path}")
        files.insert(0, path)
    return files


@cache
def published(name: str) -> Published:
    """The head of a recipe."""
    head: dict[str, str] = {}
    for path in find_recipe(name):
        head |= _read(path).get("recipe", {})
    return Published(**head)


def _locate(name: str, folder: Path) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"no file {path}: give the path of a recipe, or a name from `torchcaps recipes`")
    else:
        path = FOLDER / f"{name}.yaml"
        if not path.is_file():
            raise ValueError(f"no recipe {name!r}{nearest(name, list_recipes())}")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: expected keys such as model, data and trainer")
    return content
