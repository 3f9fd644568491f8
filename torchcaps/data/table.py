"""Tables of the user's own: CSV, TSV and JSON lines, read as rows of text with their line numbers."""

import csv
import io
import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torchcaps.data.files import DataError
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import counted, nearest, one_line
from torchcaps.utils.files import read_bytes, user_path

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TAB_SUFFIXES = (".tsv", ".tab")
DELIMITERS = ",;\t"
QUOTED = re.compile(r'"(?:[^"]|"")*"')
BREAK = re.compile("\r\n|\r|\n")
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
def read_table(source: str | Path) -> Table:
    """Read a table from a file.

    The text is UTF-8, with or without a byte order mark. How it is read depends on the end of its name:

    - .jsonl, .ndjson, .json: JSON lines, an object in each. The columns are the names in the first line. Numbers, true
      and false become text as JSON spells them, null and NaN become "".
    - .tsv, .tab: columns separated by tabs. If every line has one value per column, quotes only count where they
      enclose a whole value, and any other quote is part of the text.
    - all others: JSON lines if the first character is {, else columns separated by commas, semicolons or
      tabs, whichever the first line has most of, outside of quotes.

    A table that is not JSON begins with a line that names its columns. A value that has separators, quotes or line
    breaks in it is quoted ("...", with quotes doubled). Empty lines are left out.

    Args:
        source: path of the file.

    Raises:
        DataError: the source cannot be read, or is not such a table. The one line names the file and the line in it.
    """
    path, name = user_path(source), str(source)
    suffix = path.suffix.lower()
    try:
        raw = read_bytes(path, most=None)
    except ValueError as error:
        raise DataError(f"{error}: give a CSV, TSV or JSON lines file") from None
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
    content = text.lstrip("\r\n")
    before = len(BREAK.findall(text[: len(text) - len(content)]))
    end = len(content.rstrip(" \r\n"))
    content = content[:end] + BREAK.split(content[end:], maxsplit=1)[0]  # last lines of spaces alone are empty
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # of Python, which is less than a book
    try:
        if delimiter == "\t":
            # Many programs write tabs without a rule for quotes, and a quote that is never closed would take in other
            # rows.
            with suppress(DataError):
                return _rows(content, name, before, delimiter, csv.QUOTE_NONE)
        return _rows(content, name, before, delimiter, csv.QUOTE_MINIMAL)
    finally:
        csv.field_size_limit(limit)


def _rows(content: str, name: str, before: int, delimiter: str, quoting: Any) -> tuple[list[str], list[Row]]:
    """Return the columns, and the rows of the lines that are not empty; `before` lines stand before the content."""
    advice = 'separate values alike, put a value with a separator or a quote in quotes "...", and double these quotes'
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    columns: list[str] = []
    rows: list[Row] = []
    line = before + 1
    try:
        for values in reader:
            if quoting == csv.QUOTE_NONE:
                values = [_unquoted(value) for value in values]
            if not columns:
                columns = [value.strip() for value in values]
            elif values and len(values) != len(columns):
                wrong = f"has {counted(len(values), 'value')}, and the first line {len(columns):,}"
                raise DataError(f"{name} line {line}: {wrong}: {advice}")
            elif values:
                rows.append(Row(line, dict(zip(columns, values, strict=True))))
            line = before + reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{name} line {line}: is no line of a table ({one_line(error)}): {advice}") from None
    if twice := [column for column, count in Counter(columns).items() if column and count > 1]:
        raise DataError(f"{name}: has two columns {twice[0]!r}: give each a name of its own")
    return columns, rows


def _unquoted(value: str) -> str:
    return value[1:-1].replace('""', '"') if QUOTED.fullmatch(value) else value


def _json_lines(text: str, name: str) -> tuple[list[str], list[Row]]:
    columns: list[str] = []
    rows = []
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            # NaN is what some programs write where there is no value.
            values = {key: _as_text(value) for key, value in json.loads(content, parse_constant=lambda _: None).items()}
            "".join((*values, *values.values())).encode()  # half of a character cannot be encoded
        except (ValueError, RecursionError, AttributeError) as error:
            is_array = content.lstrip().startswith("[")
            reason = "it is an array: write one object per line" if is_array else one_line(error)[:100]
            raise DataError(
                f"{name} line {line}: is no object in JSON ({reason}): expected one in each line, such "
                'as {"text": "...", "label": "..."}'
            ) from None
        columns = columns or list(values)
        rows.append(Row(line, dict.fromkeys(columns, "") | values))
    return columns, rows


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)
