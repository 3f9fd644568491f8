"""Tables of the user's own: CSV, TSV and JSON lines, read as rows of text with their line numbers."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torchcaps.data.files import DataError
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import nearest

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TAB_SUFFIXES = (".tsv", ".tab")
DELIMITERS = ",;\t"
QUOTED = re.compile(r'"(?:[^"]|"")*"')
MOST_CHARACTERS = 2**31 - 1  # in a field; the csv module refuses more than 131,072 by default
EXPECTED = "a line with the names of the columns, and a line for each row"


class Row(NamedTuple):
    """A row: the number of its first line in the file, from 1, and its values by column, "" where there is none."""

    line: int
    values: dict[str, str]


class Table(NamedTuple):
    """A table that was read: its name for messages, its columns in their order, and one or more rows."""

    name: str
    columns: list[str]
    rows: list[Row]

    def check_column(self, column: str, option: str) -> None:
        """Check that there is a column.

        Args:
            column: name of the column.
            option: what the user sets to choose it, such as "data.text".

        Raises:
            DataError: there is none; the message has the nearest names and all columns.
        """
        if column not in self.columns:
            columns = ", ".join(map(repr, self.columns[:20])) + (", ..." if len(self.columns) > 20 else "")
            hint = nearest(column, self.columns)
            hint = f"{hint} " if "did you mean" in hint else ": "
            raise DataError(f"{self.name}: no column {column!r}{hint}set {option} to one of its columns, {columns}")


@checked
def read_table(source: str | Path | io.TextIOBase, name: str | None = None) -> Table:
    """Read a table from a file or a text stream, such as standard input.

    The text is UTF-8, with or without a byte order mark. How it is read depends on the end of its name:

    - .jsonl, .ndjson, .json: JSON lines, an object in each. The columns are the names in the first line. Numbers, true
      and false become text as JSON spells them, null becomes "".
    - .tsv, .tab: columns separated by tabs. If every line has one value per column, quotes only count where they
      enclose a whole value, and any other quote is part of the text.
    - all others, and streams: JSON lines if the first character is {, else columns separated by commas, semicolons or
      tabs, whichever the first line has most of, outside of quotes.

    A table that is not JSON begins with a line that names its columns. A value that has separators, quotes or line
    breaks in it is quoted ("...", with quotes doubled). Empty lines are left out.

    Args:
        source: path of the file, or the stream.
        name: name of a stream in messages; None for "standard input".

    Raises:
        DataError: the source cannot be read, or is not such a table. The one line names the file and the line in it.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        name, suffix = str(source), path.suffix.lower()
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"{name}: there is no such file: give a CSV, TSV or JSON lines file") from None
        except (OSError, ValueError) as error:  # a ValueError for a name with a NUL
            raise DataError(f"{name!r}: cannot be read: {getattr(error, 'strerror', error)}") from None
    else:
        name, suffix = name or "standard input", ""
        # Bytes, if there are some: Python would decode them in the encoding of the user's system.
        content = source.buffer.read() if hasattr(source, "buffer") else source.read()
        raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    text = _decoded(raw, name)
    if not text.strip():
        raise DataError(f"{name}: is empty: expected {EXPECTED}")
    if suffix in JSON_SUFFIXES or (suffix not in TAB_SUFFIXES and text.lstrip().startswith("{")):
        columns, rows = _json_lines(text, name)
    else:
        columns, rows = _separated(text, name, "\t" if suffix in TAB_SUFFIXES else _delimiter(text))
    if not rows:
        raise DataError(f"{name}: has no rows after the line with the names of the columns: expected {EXPECTED}")
    return Table(name, columns, rows)


def _decoded(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        hint = "save it as UTF-8, or convert it: iconv -f latin1 -t utf-8 OLD > NEW"
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            hint = "it seems to be UTF-16: save it as UTF-8, or convert it: iconv -f utf-16 -t utf-8 OLD > NEW"
        elif raw.startswith(b"PK"):
            hint = "it seems to be a spreadsheet or an archive: export it as CSV in UTF-8"
        raise DataError(f"{name} line {line}: is not text in UTF-8: {hint}") from None


def _delimiter(text: str) -> str:
    """Return the delimiter that the first line has most of, outside of quotes; a comma if it has none."""
    first = text.lstrip().split("\n", 1)[0]
    outside = "".join(first.split('"')[::2])
    return max(DELIMITERS, key=outside.count)  # of equal counts the first


def _separated(text: str, name: str, delimiter: str) -> tuple[list[str], list[Row]]:
    if delimiter == "\t":
        # Many programs write tabs without a rule for quotes, and a quote that is never closed would take in other rows.
        with suppress(DataError):
            columns, rows = _rows(text, name, delimiter, csv.QUOTE_NONE)
            return list(map(_unquoted, columns)), [
                Row(line, {_unquoted(column): _unquoted(value) for column, value in values.items()})
                for line, values in rows
            ]
    return _rows(text, name, delimiter, csv.QUOTE_MINIMAL)


def _unquoted(value: str) -> str:
    return value[1:-1].replace('""', '"') if QUOTED.fullmatch(value) else value


def _rows(text: str, name: str, delimiter: str, quoting: Any) -> tuple[list[str], list[Row]]:
    columns: list[str] | None = None
    rows = []
    for line, values in _records(text, name, delimiter, quoting):
        if columns is None:
            columns = [value.strip() for value in values]
            twice = [column for column, count in Counter(columns).items() if column and count > 1]
            if twice:
                raise DataError(f"{name} line {line}: has two columns {twice[0]!r}: give each a name of its own")
            continue
        if len(values) != len(columns):
            shown = {"\t": "a tab"}.get(delimiter, repr(delimiter))
            raise DataError(
                f"{name} line {line}: has {_count(len(values), 'value')}, and the first line names "
                f"{_count(len(columns), 'column')}: separate values by {shown}, and put a value that has one in it in "
                'quotes "..."'
            )
        rows.append(Row(line, dict(zip(columns, values, strict=True))))
    return columns or [], rows


def _records(text: str, name: str, delimiter: str, quoting: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the values of each record that is not empty."""
    limit = csv.field_size_limit(MOST_CHARACTERS)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
        while True:
            line = reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                problem = str(error)
                if "end of data" in problem:
                    problem = "a quote is opened and never closed"
                elif "expected after" in problem:
                    problem = 'a quote within a quoted value is not doubled ("")'
                raise DataError(f"{name} line {line}: {problem}: correct the line") from None
            if values:
                yield line, values
    finally:
        csv.field_size_limit(limit)


def _json_lines(text: str, name: str) -> tuple[list[str], list[Row]]:
    columns: list[str] = []
    rows = []
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "its values are nested too deeply or too long")
            hint = ""
            if content.strip() in ("{", "["):
                hint = "; one value that spans many lines must be written with an object in each line"
            raise DataError(
                f"{name} line {line}: is not JSON ({reason}): expected an object in each line, such as "
                f'{{"text": "...", "label": "..."}}{hint}'
            ) from None
        if not isinstance(found, dict):
            raise DataError(f'{name} line {line}: is no object: expected a line such as {{"text": "...", ...}}')
        values = {key: _as_text(value) for key, value in found.items()}
        try:
            "".join((*values, *values.values())).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{name} line {line}: has half of a character (\\ud800 to \\udfff alone): remove it"
            ) from None
        columns = columns or list(values)
        rows.append(Row(line, dict.fromkeys(columns, "") | values))
    return columns, rows


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
