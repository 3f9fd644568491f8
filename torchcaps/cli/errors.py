"""Errors of commands: one line on stderr that says what was wrong, what was expected and what to do."""

import sys

FOR_USERS = (ValueError, ImportError, OSError, FloatingPointError)
OF_MODULES = {  # further ones, where their modules are imported: else no error is of their kind
    "torchcaps.data.files": "DataError",
    "lightning.pytorch.utilities.exceptions": "MisconfigurationException",
}


def is_for_users(error: Exception) -> bool:
    """Return whether the message of an error is for the user: input, data, files or numbers that cannot be used."""
    others = (getattr(sys.modules[module], name) for module, name in OF_MODULES.items() if module in sys.modules)
    return isinstance(error, (*FOR_USERS, *others))
