"""Bad input: a line on stderr that says what was wrong, what was expected and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager


class BadInput(Exception):
    """The user's input cannot be used; the message is for the user."""


@contextmanager
def bad_data() -> Iterator[None]:
    """Within this context errors in data, or values that do not fit the network or the loss, are bad input."""
    from torchcaps.data import DataError

    try:
        yield
    except (DataError, ValueError) as error:
        raise BadInput(str(error)) from error
