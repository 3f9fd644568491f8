"""Tables of the user's own: CSV, TSV and JSON lines, read as rows of text with their line numbers."""

import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from torchcaps.data.files import DataError
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import counted, nearest, one_line
from torchcaps.utils.files import read_bytes, user_path

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TAB_SUFFIXES = (".tsv", ".tab")
A_NAME = 4, 40  # a value of so many words, or of more characters, is long for a name
QUOTED = re.compile(r'"(?:[^"]|"")*"')
MOST_NAMES = 50  # that a message proposes
BREAK = re.compile("\r\n|\r|\n")
EXPECTED_LINES = "a line with the names of the columns, and a line for each row"


class Row(NamedTuple):
    """A row: the number of its first line in the file, from 1, and its values by column, "" where there is none."""

    line: int
    values: dict[str, str]


class Table(NamedTuple):
    """A table that was read: its name for messages, its columns in their order, and one or more rows. `has_header` says
    whether the columns are the values of its first line."""

    name: str
    columns: list[str]
    rows: list[Row]
    has_header: bool = False

    def check_columns(self, wanted: dict[str, str], naming: str) -> None:
        """Check that there are columns, and that the first line names them where it should.

        Args:
            wanted: names of the columns by what the user sets to choose them, such as {"data.text": "text"}: first that
                of the texts, then that of the labels if there is one.
            naming: the option that names the columns of a table without a header line, such as "--data.columns".

        Raises:
            DataError: a column is missing. If the first line looks like a sample, the message gives the option as it
                must be typed.
        """
        hint = ""
        none = not set(wanted.values()) & set(self.columns)
        if self.has_header and none and len(self.columns) >= len(wanted):
            if len(self.columns) <= MOST_NAMES:
                naming += f" {_typed(self._proposed_names(list(wanted.values())))}"
            certain, possible = self._begins_with_sample()
            if certain:
                raise DataError(f"{self.name}: the first line looks like a sample: name the columns by {naming}")
            if possible:
                hint = f"; or, if the first line is a sample, name the columns by {naming}"
        for option, column in wanted.items():
            self.check_column(column, option, hint)

    def _begins_with_sample(self) -> tuple[bool, bool]:
        """Return whether the first line is a sample for certain, and whether it may be one.

        It is certain if it has a long text and, in another column, one of the labels. Either alone is not enough:
        questions of a survey are long names, files that were joined repeat names, and the column of an answer often has
        this answer where it was given.
        """
        others = [values for row in self.rows if (values := self._stripped(row)) != self.columns]
        column_values = [{values[i] for values in others} for i in range(len(self.columns))]
        words, characters = A_NAME
        long = {i for i, x in enumerate(self.columns) if len(x.split()) >= words or len(x) > characters}
        again = {i for i, x in enumerate(self.columns) if x and x in column_values[i]}
        labels = {i for i in again if "" not in column_values[i] and 2 <= len(column_values[i]) <= len(others) / 2}
        certain = any(labels - {i} for i in long)
        return certain, bool(long or again or any(map(_is_number, self.columns)))

    def _stripped(self, row: Row) -> list[str]:
        return [row.values[column].strip() for column in self.columns]

    def _proposed_names(self, wanted: list[str]) -> list[str]:
        """Return names for all columns: the wanted ones where texts and labels seem to be."""
        rows = [self.columns, *map(self._stripped, self.rows)]
        columns = list(zip(*rows, strict=True))
        # Texts are many and long.
        few = {i for i, values in enumerate(columns) if 2 * len(set(values)) <= len(rows)}
        places = sorted(range(len(columns)), key=lambda i: (i in few, -sum(map(len, columns[i]))))
        places[1:] = sorted(places[1:], key=lambda i: (len(set(columns[i])), sum(map(len, columns[i]))))  # labels few
        names = dict(zip(places, wanted, strict=False))
        others = [f"column{i + 1}" for i in range(len(columns))]
        return [names.get(i, f"{x}_" if x in wanted else x) for i, x in enumerate(others)]

    def check_column(self, column: str, option: str, more: str = "") -> None:
        """Check that there is a column.

        Args:
            column: name of the column.
            option: what the user sets to choose it, such as "data.text".
            more: another way out, for the end of the message.

        Raises:
            DataError: there is none; the message has the nearest names and all columns.
        """
        if column not in self.columns:
            columns = ", ".join(map(repr, self.columns[:20])) + (", ..." if len(self.columns) > 20 else "")
            hint = nearest(column, self.columns)
            hint = f"{hint} " if "did you mean" in hint else ": "
            raise DataError(
                f"{self.name}: no column {column!r}{hint}set {option} to one of its columns, {columns}{more}"
            )


@checked
def read_table(source: str | Path, columns: Sequence[str] | None = None) -> Table:
    """Read a table from a file.

    The text is UTF-8, with or without a byte order mark. How it is read depends on the ending of its name:

    - .jsonl, .ndjson, .json: JSON lines, an object in each. The columns are the names in the first line. Numbers, true
      and false become text as JSON spells them, null and NaN become "".
    - .tsv, .tab: columns separated by tabs. If every line has one value per column, quotes only count where they
      enclose a whole value, and any other quote is part of the text.
    - all others: JSON lines if the first character is {, else columns separated by tabs, commas or semicolons:
      by one that the first line has, and that gives every line as many values.

    A table that is not JSON begins with a line that names its columns, or `columns` names them. A value that has
    separators, quotes or line breaks in it is quoted ("...", with quotes doubled). Empty lines are left out.

    Args:
        source: path of the file.
        columns: names of the columns of a table without such a line: all lines are rows. A first line of these very
            names is still no row. JSON lines have names of their own.

    Raises:
        DataError: the source cannot be read, or is not such a table. The one line names the file and the line in it.
    """
    path, name, columns = user_path(source), str(source), columns or None
    suffix = path.suffix.lower()
    try:
        raw = read_bytes(path, most=None)
    except ValueError as error:
        raise DataError(f"{error}: give a CSV, TSV or JSON lines file") from None
    text = decoded(raw, name)
    del raw  # a copy
    if not text.strip():
        raise DataError(f"{name}: is empty: expected {EXPECTED_LINES}")
    looks_like_json = columns is None and suffix not in TAB_SUFFIXES and text.lstrip().startswith("{")
    if suffix in JSON_SUFFIXES or looks_like_json:
        return Table(name, *_json_lines(text, name))
    lines = _separated(text, name, suffix in TAB_SUFFIXES, columns)
    first = [value.strip() for value in lines[0][1]]
    has_header = columns is None
    if has_header or sorted(first) == sorted(columns or ()):
        lines, columns = lines[1:], first
    names = list(columns or ())
    if twice := [column for column, count in Counter(names).items() if column and count > 1]:
        sample = ", or, if the first line is a sample, name the columns by the option columns" if has_header else ""
        raise DataError(f"{name}: has two columns {twice[0]!r}: give each a name of its own{sample}")
    if not lines:
        raise DataError(f"{name}: has no rows after the line with the names of the columns: expected {EXPECTED_LINES}")
    rows = [Row(line, dict(zip(names, values, strict=True))) for line, values in lines]
    return Table(name, names, rows, has_header)


def decoded(raw: bytes, name: str) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        DataError: it is in another encoding, or no text.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "it seems to be UTF-16: save it as UTF-8, or convert it: iconv -f utf-16 -t utf-8 OLD > NEW"
    elif b"\0" in raw:
        hint = "it seems to be a spreadsheet or an archive: export or unpack it as text in UTF-8"
    else:
        try:
            raw.decode("cp1252")  # which has the letters of latin1, and quotes and dashes that latin1 does not have
            western = ", such as that of Windows in Western Europe: iconv -f cp1252 -t utf-8 OLD > NEW"
        except UnicodeDecodeError:
            western = ": iconv -f ENCODING -t utf-8 OLD > NEW"
        hint = f"save it as UTF-8, or convert it from its encoding{western}"
    raise DataError(f"{name} line {line}: is not text in UTF-8: {hint}")


def _delimiters(first: str) -> list[str]:
    """Return the delimiters that a first line has, the likeliest first; a comma if it has none."""
    outside = "".join(first.split('"')[::2])  # of quotes
    delimiters = sorted((x for x in ",;" if x in outside), key=outside.count, reverse=True)  # of equal counts the comma
    # Texts have commas and lone quotes, but hardly ever a tab.
    return ["\t"] * ("\t" in first) + delimiters or [","]


Values = tuple[int, list[str]]  # of a row, after the number of its first line


def _separated(text: str, name: str, tabs: bool, columns: Sequence[str] | None) -> list[Values]:
    """Return the lines that are not empty."""
    content = text.lstrip("\r\n")
    before = len(BREAK.findall(text[: len(text) - len(content)]))
    end = len(content.rstrip(" \r\n"))
    content = content[:end] + BREAK.split(content[end:], maxsplit=1)[0]  # last lines of spaces alone are empty
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # of Python, which is less than a book
    count = None if columns is None else len(columns)
    errors = []
    try:
        for delimiter in ["\t"] if tabs else _delimiters(BREAK.split(content, maxsplit=1)[0]):
            # Many programs write tabs without a rule for quotes, and a quote that is never closed would take in other
            # rows.
            if delimiter == "\t":
                with suppress(DataError):
                    return _rows(content, name, before, delimiter, csv.QUOTE_NONE, count)
            try:
                return _rows(content, name, before, delimiter, csv.QUOTE_MINIMAL, count)
            except DataError as error:
                errors.append(error)
    finally:
        csv.field_size_limit(limit)
    raise errors[0]


def _rows(content: str, name: str, before: int, delimiter: str, quoting: Any, count: int | None) -> list[Values]:
    """Return the lines that are not empty; `before` lines stand before the content. All have `count` values, None for
    as many as the first."""
    advice = 'separate values alike, put a value with a separator or a quote in quotes "...", and double these quotes'
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    expected = "the first line" if count is None else "there are names for"
    rows: list[Values] = []
    line = before + 1
    try:
        for values in reader:
            if quoting == csv.QUOTE_NONE:
                values = [_unquoted(value) for value in values]
            count = count or len(values)
            if values and len(values) != count:
                if not rows:
                    advice = f"name each column, or {advice}"
                wrong = f"has {counted(len(values), 'value')}, and {expected} {count:,}"
                raise DataError(f"{name} line {line}: {wrong}: {advice}")
            if values:
                rows.append((line, values))
            line = before + reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{name} line {line}: is no line of a table ({one_line(error)}): {advice}") from None
    return rows


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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _typed(names: list[str]) -> str:
    """Return a list of names as it is typed in a shell."""
    listed = f"[{', '.join(names)}]"
    with suppress(yaml.YAMLError):
        if yaml.safe_load(listed) == names and not set(listed) & set('"$`\\!'):
            return f'"{listed}"'
    return shlex.quote(json.dumps(names, ensure_ascii=False))
