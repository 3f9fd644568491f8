"""Checks of arguments and parts of error messages that all modules share."""

import difflib
import re
from collections.abc import Iterable

MOST_NAMES = 10_000  # that are compared with a wrong one


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Check that an argument is one of its choices.

    Args:
        name: name of the argument.
        value: value of the argument.
        choices: allowed values, in the order in which the message lists them.

    Raises:
        ValueError: the value is not among the choices.
    """
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known names most like it, or all if none is like it."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names[:MOST_NAMES], n=3, cutoff=0.4)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; there are {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"


def whole_number(text: str) -> int | None:
    """Return the number that a text is, written in digits from 0 to 9, at most 18; None if it is no such text.

    `int` also takes spaces, underscores, signs and digits of other scripts, and refuses some texts that
    `str.isdigit` takes, such as "²", and numbers of more than 4300 digits.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def counted(count: int, one: str, several: str = "") -> str:
    """Return a number of things in words: "1 picture", "2 pictures"; `several` where an s does not make the plural."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def percent(share: float, digits: int = 2) -> str:
    """Return a share from 0 to 1 in words: "87.50 %"."""
    return f"{100 * share:.{digits}f} %"


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks, and without characters that would steer a terminal."""
    return printable(" ".join(str(error).split()))


def printable(text: str) -> str:
    """Return a text with escapes in place of characters that cannot be printed."""
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)
