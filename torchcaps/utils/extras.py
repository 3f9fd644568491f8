"""Errors for missing optional dependencies, the extras of the package such as `torchcaps[train]`."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Within this context, a failed import raises an ImportError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchcaps"):
            raise
        raise ImportError(f'{error.name} is missing: pip install "torchcaps[{extra}]"') from error
