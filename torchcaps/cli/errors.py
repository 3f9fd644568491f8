"""Errors of commands: one line on stderr that says what was wrong, what was expected and what to do."""

import sys


def is_for_users(error: Exception) -> bool:
    """Return whether the message of an error is for the user: input, data, files or numbers that cannot be used."""
    files = sys.modules.get("torchcaps.data.files")  # if it is not imported, no error is of its kind
    of_data = () if files is None else (files.DataError,)
    return isinstance(error, (ValueError, ImportError, OSError, FloatingPointError, *of_data))
