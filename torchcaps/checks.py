"""Checks of arguments: every module says in the same words what is wrong and what is expected."""

import difflib
from collections.abc import Iterable


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Check that an argument is one of the values that it can have.

    Args:
        name: of the argument.
        value: given for it.
        choices: it must be one of these, in the order in which the message lists them.

    Raises:
        ValueError: it is none of them.
    """
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def nearest(name: str, names: Iterable[str]) -> str:
    """End of a message about an unknown name: the known names that look like it, or all of them."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join(names)}"
