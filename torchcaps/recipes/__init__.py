"""Recipes: each published number is one YAML file, `<paper>/<row>.yaml`, or extends another."""

import os
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


def run_name(name: str) -> Path:
    """Where the runs of a recipe are, in the folder of all runs.

    Args:
        name: of a recipe in the package, which is also that of its runs; or the path of a YAML file, whose runs follow
            the path without its suffix: from the working folder if the file is there or in a folder of it, else from
            the root of the file system.
    """
    if not name.endswith((".yaml", ".yml")):
        return Path(name)
    path, here = Path(os.path.abspath(name)).with_suffix(""), Path.cwd()
    return path.relative_to(here if path.is_relative_to(here) else path.anchor)


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
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
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
