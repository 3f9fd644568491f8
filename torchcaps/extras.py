"""Imports that an extra brings."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Name the extra to install when an import inside fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchcaps"):
            raise
        raise ImportError(f'{error.name} is missing: pip install "torchcaps[{extra}]"') from error
