"""Packages whose modules are imported when their names are first used, so that programs start quickly.

The `__init__.py` of such a package has its imports below `if TYPE_CHECKING:`, for type checkers, and the functions that
`accessors` returns, which read them there.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any


@cache
def exports(package: str) -> dict[str, str]:
    """Return the names that a package exports, and the full name of the module that each is imported from."""
    spec: Any = sys.modules[package].__spec__
    for block in ast.parse(spec.loader.get_source(package)).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
            return {name.name: str(statement.module) for statement in imports for name in statement.names}
    raise ValueError(f"{package} has no imports below `if TYPE_CHECKING:`")


def find(package: str, name: str) -> Any:
    """Import what a package exports under a name, or the module of that name which its exports are from.

    Raises:
        AttributeError: there is none.
    """
    home, module = exports(package).get(name), f"{package}.{name}"
    if home == package or module in exports(package).values():
        return import_module(module)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    setattr(sys.modules[package], name, value)  # it is found only once
    return value


def accessors(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package."""
    names = vars(sys.modules[package])
    return partial(find, package), lambda: sorted({*names, *names["__all__"]})


def import_all(package: str) -> None:
    """Import all modules that the exports of a package are from."""
    for module in sorted({*exports(package).values()}):
        import_module(module)
