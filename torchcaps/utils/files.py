"""Small files that anybody may have written, files that are written completely or not at all, and numbered folders."""

import csv
import json
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from torchcaps.utils.checks import one_line, printable, whole_number

MOST_BYTES = 4_000_000  # of a small file
DEEPEST = 50  # levels of values in each other
Kind = TypeVar("Kind")
JSON_KINDS: dict[type, str] = {dict: "an object", list: "an array", str: "a text"}  # in JSON's words


def read_bytes(path: Path, most: int | None = MOST_BYTES) -> bytes:
    """Return the content of a file that anybody may have written, of at most so many bytes.

    Raises:
        ValueError: it is missing, larger, not a regular file (such as a FIFO, for whose writer this does not wait), or
            cannot be read. The one line begins with its name.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is not a regular file")
            content = file.read(-1 if most is None else most + 1)
    except (OSError, ValueError) as error:  # a ValueError also for a name with a NUL
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{printable(str(path))} cannot be read: {reason}") from None
    if most is not None and len(content) > most:
        raise ValueError(f"{path} cannot be read: it is larger than {most:,} bytes")
    return content


def read_text(path: Path, most: int | None = MOST_BYTES) -> str:
    """Return a text file in UTF-8; the errors are those of `read_bytes`, and for other bytes a ValueError."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 (byte {error.start})") from None


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """Return the value in a small JSON file that anybody may have written; see `read_text` and `parse_json`."""
    return parse_json(read_text(path), str(path), kind)


def parse_json(text: object, name: str, kind: type[Kind]) -> Kind:
    """Return the value of a text in JSON that anybody may have written.

    Args:
        text: the text. Anything else is an error, too: a checkpoint may have it in a text's place.
        name: where the text comes from, for the message.
        kind: type of the value, such as dict.

    Raises:
        ValueError: it is not such a text, or its values are nested too deeply. The one line begins with the name.
    """
    try:
        if not isinstance(text, str):
            raise ValueError(f"expected a text, got a {type(text).__name__}")
        if len(text) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES:,} characters")
        value = json.loads(text)
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        reason = "its values are nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise ValueError(f"{name} cannot be read as JSON: {reason}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{name} cannot be used: expected {JSON_KINDS[kind]} in JSON, got {json.dumps(value)[:60]}")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = [x for values in inner for x in values]
    if level:
        raise RecursionError


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        file = next((place for place in (folder, *folder.parents) if os.path.isfile(place)), None)
        reason = f"{file} is a file, and must be a folder" if file else error.strerror
        raise type(error)(f"cannot make the folder {folder}: {reason}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within this context, no other process within it for the same path changes the file. The lock lies beside it."""
    from filelock import FileLock

    make_folder(path.parent)
    with FileLock(path.with_suffix(".lock")):
        yield


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Within this context, an error of a write is one line that names `path`: that of a full disk names no file."""
    if os.path.exists(path) and not os.path.isfile(path):  # a new file would replace /dev/null
        raise OSError(f"cannot write {path}: it is not a regular file")
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch raises a RuntimeError after it; a DataError, which also is one, is about what was read.
        cause = error.__context__ if type(error) is RuntimeError else error
        if not isinstance(cause, OSError):
            raise
        if isinstance(cause.filename, str) and path.absolute().parent not in Path(cause.filename).absolute().parents:
            raise  # it is about another file
        raise type(cause)(f"cannot write {path}: {cause.strerror or one_line(cause)}") from None


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Call `write` on a hidden file beside `path`; rename it to `path` when it is on the disk. Folders are created."""
    make_folder(path.parent)
    # A killed process leaves it. Processes on other machines, and in other containers, may have the same number.
    process = f"{platform.node()}.{os.getpid()}"
    unfinished = path.with_name(f".{path.stem}.{process}.unfinished{path.suffix}")
    try:
        with name_file_in_errors(path):
            write(unfinished)
            with unfinished.open("r+b") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)
    return path


def write_text_whole(path: Path, text: str) -> Path:
    """Write a text in UTF-8 with `write_whole`. Lines end in "\\n" on every system."""
    return write_whole(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8", newline="\n"))


class CSVLines:
    """A file for a `csv.writer`, whose rows end in "\\n".

    With `lineterminator="\\n"`, Python 3.11 and 3.12 would leave a lone "\\r" without quotes, which ends a row when the
    file is read.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> int:
        return self._file.write(row.removesuffix("\r\n") + "\n")


def write_csv_whole(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a table as CSV with `write_whole`."""

    def write(unfinished: Path) -> None:
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(CSVLines(file))
            writer.writerow(header)
            writer.writerows(rows)

    return write_whole(path, write)


@contextmanager
def write_files_whole(path: Path) -> Iterator[Path]:
    """Give the path of the same name in a hidden folder beside `path`. When the context ends without an error, the file
    there, and those whose names begin with its name, are moved to their place; otherwise nothing is left."""
    make_folder(path.parent)
    with (
        name_file_in_errors(path),
        tempfile.TemporaryDirectory(dir=path.parent.absolute(), prefix=f".{path.stem}.") as folder,
    ):
        yield Path(folder) / path.name
        files = [file for file in Path(folder).iterdir() if file.name.startswith(path.name)]
        for file in sorted(files, reverse=True):  # the file itself is the last one
            with file.open("r+b") as written:
                os.fsync(written.fileno())
            file.replace(path.with_name(file.name))
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network file systems cannot do this for folders
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def user_path(name: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave, with the user's home for a leading ~."""
    return Path(os.path.expanduser(name))  # Path.expanduser raises a RuntimeError for a user who does not exist


def take_folder(parent: Path, kind: str) -> Path:
    """Create `parent/kind_N` with the next free number N. Several processes at once get different folders."""
    make_folder(parent)
    taken = [path.name.removeprefix(f"{kind}_") for path in parent.glob(f"{kind}_*")]
    number = max((number for number in map(whole_number, taken) if number is not None), default=-1) + 1
    while True:
        folder = parent / f"{kind}_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
