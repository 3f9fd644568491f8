"""Errors for missing optional dependencies, the extras of the package such as `torchcaps[train]`."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Within this context, a failed import raises an ImportError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchcaps"):
            raise
        raise ImportError(_missing(error.name, extra)) from error


def check_installed(extra: str, *packages: str) -> None:
    """Raise an ImportError that names the extra to install if one of its packages is missing. It imports none."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(_missing(package, extra))


def _missing(package: str, extra: str) -> str:
    return f'{package} is missing: pip install "torchcaps[{extra}]"'
