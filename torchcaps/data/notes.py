"""Notes and progress on stderr."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import Progress

RARE = 10  # the largest class has at least so many times the samples of a rare one
MOST_BAD = 20  # files and rows that cannot be used, and are named in a line

_said: set[str] = set()
_heard: ContextVar[list[str] | None] = ContextVar("heard", default=None)


def say(line: str, once: str | None = None) -> None:
    """Print a note, once in a process. Of several processes only the first prints it.

    Args:
        line: the note.
        once: what is said once, by whichever line comes first; None for the line itself.
    """
    if (heard := _heard.get()) is not None:
        heard.append(line)
    elif (once or line) not in _said and not getattr(rank_zero_only, "rank", 0):
        _said.add(once or line)
        print(f"torchcaps: {line}", file=sys.stderr)


@contextmanager
def hear() -> Iterator[list[str]]:
    """Within this context, notes of this thread are not printed but appended to the list that it gives, each time."""
    notes: list[str] = []
    token = _heard.set(notes)
    try:
        yield notes
    finally:
        _heard.reset(token)


def say_rare(counts: Mapping[str, int], remedies: Sequence[str]) -> None:
    """Say which classes have far fewer training samples than the largest, and what helps.

    Args:
        counts: number of training samples by the name of the class.
        remedies: options of the command that help.
    """
    largest = max(counts, key=lambda name: counts[name])
    rare = [f"{name} ({count:,})" for name, count in counts.items() if 0 < RARE * count <= counts[largest]]
    if rare and remedies:
        say(
            f"rare classes in training: {listed(rare)}, beside {largest} ({counts[largest]:,}); a network may never "
            f"predict them: give {' or '.join(remedies)}"
        )


def progress_bar() -> Progress:
    """Return a progress bar on stderr, which a terminal shows until the work is done. Elsewhere nothing is shown."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def together(errors: Sequence[tuple[str, str]]) -> str:
    """Return the message of the first of some errors, and the names of the others; each is a name and its message."""
    (_, first), *others = errors
    names = [name for name, _ in others]
    return first + (f" (and {len(names):,} more: {listed(names, MOST_BAD)})" if names else "")


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names with commas, only the first of many."""
    return ", ".join(names[:most]) + (f", ... ({len(names):,})" if len(names) > most else "")
