"""Files that are there whole or not at all."""

from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` make a file beside `path`, and put it there when it is done; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".unfinished{path.suffix}")
    try:
        write(unfinished)
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
