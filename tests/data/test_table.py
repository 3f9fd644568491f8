"""Tables: CSV, TSV and JSON lines are read as they are meant, and what is no table gets one line that says where."""

import csv
import io
import json
import os
import shlex

import pytest
import yaml

from torchcaps.data import DataError, read_table
from torchcaps.utils.files import write_csv_whole


def table(tmp_path, name: str, content: str | bytes):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_table(path)


def lines(found) -> list[tuple[int, tuple[str, ...]]]:
    return [(row.line, tuple(row.values.values())) for row in found.rows]


def test_csv_by_hand(tmp_path):
    found = table(tmp_path, "a.csv", '\ntext,label\n"one, two",a\n\n"he said ""no""\r\nand left",b\nplain,\nNA,1e5\n')
    assert found.columns == ["text", "label"]
    assert lines(found) == [
        (3, ("one, two", "a")),
        (5, ('he said "no"\r\nand left', "b")),
        (7, ("plain", "")),
        (8, ("NA", "1e5")),
    ]
    assert found.name == str(tmp_path / "a.csv")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_byte_order_marks(tmp_path, end):
    for mark in (b"", b"\xef\xbb\xbf"):
        found = table(tmp_path, "a.csv", mark + end.join(["text,label", "schön,1", "日本語,2"]).encode())
        assert found.columns == ["text", "label"]
        assert lines(found) == [(2, ("schön", "1")), (3, ("日本語", "2"))]


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("a;b\n1,5;2\n", ["a", "b"]),  # as spreadsheets write it where the decimal mark is a comma
        ("a\tb\n1\t2\n", ["a", "b"]),
        ('"a;b;c",d\n1,2\n', ["a;b;c", "d"]),
    ],
)
def test_which_separator(tmp_path, content, columns):
    assert table(tmp_path, "a.csv", content).columns == columns


def test_what_pythons_csv_module_writes_is_read_again(tmp_path):
    values = ['"', '""', 'a"b', "a\nb", "a,b", "a;b", "a\tb", "", " a ", "{", "nan", "x" * 200_000]
    for name, delimiter in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        written = io.StringIO()
        writer = csv.writer(written, delimiter=delimiter)
        writer.writerows([("text", "label"), *((value, "1") for value in values)])
        assert [row.values["text"] for row in table(tmp_path, name, written.getvalue()).rows] == values


def test_what_torchcaps_writes_is_read_again(tmp_path):
    values = ["a\rb", "\r", "a\nb", "a\r\nb", "plain", "a,b"]
    path = write_csv_whole(tmp_path / "a.csv", ("text", "label"), [(value, 1) for value in values])
    assert [row.values["text"] for row in read_table(path).rows] == values
    assert path.read_bytes().endswith(b'plain,1\n"a,b",1\n')


def test_quotes_in_tab_separated_lines(tmp_path):
    """Quotes that enclose a whole value are those of the table; others are text and never take in another row."""
    content = 'text\tlabel\n"Great" film\t1\n"Never closed\t0\n"all of it"\t1\nhe said "\t0\n"a ""b"""\t1\n'
    texts = [row.values["text"] for row in table(tmp_path, "a.tsv", content).rows]
    assert texts == ['"Great" film', '"Never closed', "all of it", 'he said "', 'a "b"']


def test_json_lines(tmp_path):
    rows = [{"text": "a\u2028b", "stars": 5, "x": None}, {"stars": 4.5, "text": "ü", "y": True, "x": [1, {"a": "ü"}]}]
    content = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    for name in ("a.jsonl", "a.ndjson", "a.json", "a.txt"):
        found = table(tmp_path, name, content)
        assert found.columns == ["text", "stars", "x"]
        assert found.rows[0] == (1, {"text": "a\u2028b", "stars": "5", "x": ""})
        assert found.rows[1] == (2, {"text": "ü", "stars": "4.5", "x": '[1, {"a": "ü"}]', "y": "true"})


def test_numbers_that_json_does_not_have_are_empty(tmp_path):
    content = '{"text": NaN, "label": Infinity}\n{"text": "NaN", "label": -Infinity}\n'
    found = table(tmp_path, "a.jsonl", content)
    assert [tuple(row.values.values()) for row in found.rows] == [("", ""), ("NaN", "")]


def test_long_values(tmp_path):
    limit = csv.field_size_limit()
    content = "text,label\n" + "x" * (limit + 1) + ",1\n"
    assert len(table(tmp_path, "a.csv", content).rows[0].values["text"]) == limit + 1
    assert csv.field_size_limit() == limit


def test_many_columns(tmp_path):
    """Time grows with their number, not with its square."""
    names = [f"c{i}" for i in range(200_000)]
    found = table(tmp_path, "a.csv", f"{','.join(names)}\n{','.join(names)}\n")
    assert found.rows[0].values["c199999"] == "c199999"
    with pytest.raises(DataError, match="no column 'c12345x'; did you mean c"):
        found.check_column("c12345x", "data.text")
    with pytest.raises(DataError, match="has two columns 'c7': give each a name of its own"):
        table(tmp_path, "a.csv", f"{','.join([*names, 'c7'])}\n")


@pytest.mark.parametrize("end", ["  ", "\n  \n \n", "\r\n   "])
def test_a_last_line_of_spaces_is_empty(tmp_path, end):
    found = table(tmp_path, "a.csv", f"text,label\n\na,1 \n{end}")
    assert lines(found) == [(3, ("a", "1 "))]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"text,label\n\n", "a.csv: has no rows after the line with the names of the columns"),
        ("a.csv", b"text,label\na,1\nsch\xf6n,2\n", "a.csv line 3: is not text in UTF-8: save it .*iconv -f cp1252"),
        ("a.csv", b"text\n\x93a\x94 \x96 b\n", "a.csv line 2: is not text in UTF-8: save it .*iconv -f cp1252"),
        ("a.csv", b"text\n\x8f\n", "a.csv line 2: is not text in UTF-8: save it .*encoding: iconv -f ENCODING"),
        (
            "a.csv",
            b"\xd0\xcf\x11\xe0\0\0",
            "a.csv line 1: is not text in UTF-8: it seems to be a spreadsheet or an arch",
        ),
        ("a.csv", "text,label\na,1\n".encode("utf-16"), "a.csv line 1: .*it seems to be UTF-16"),
        ("a.csv", b"text,label\na,b,1\n", "a.csv line 2: has 3 values, and the first line 2: separate values alike"),
        ("a.csv", b"text;label\nb;1\n\na\n", "line 4: has 1 value, and the first line 2: separate values alike"),
        ("a.csv", b'text,label\na,1\n"b,2\nc,3\n', r"a.csv line 3: is no line of a table \(unexpected end of data\)"),
        ("a.csv", b'text,label\n"a"b",1\n', r"a.csv line 2: is no line of a table \(',' expected after '\"'\)"),
        (
            "a.csv",
            b"text,label, text\na,1,2\n",
            "has two columns 'text': give each a name of its own, or, if the first line is a sample, name the columns",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            r"line 2: is no object in JSON \(Expecting value.* one in each line",
        ),
        ("a.json", b'[{"text": "a"}]', r"line 1: is no object in JSON \(it is an array: write one object per line\)"),
        ("a.json", b'\n[\n{"text": "a"}\n]', r"line 2: is no object in JSON \(it is an array: write one object per"),
        ("a.jsonl", b"[" * 100_000, "line 1: is no object"),
        ("a.jsonl", b'{"a": 1' + b"0" * 5000 + b"}", "line 1: is no object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: is no object in JSON .*surrogates not allowed"),
    ],
)
def test_what_is_no_table(tmp_path, name, content, said):
    with pytest.raises(DataError, match=said) as error:
        table(tmp_path, name, content)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(tmp_path)) + 250


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo.csv")  # nobody writes to it
    for name, said in (
        ("none.csv", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "fifo.csv", "it is not a regular file"),
        ("x" * 5000, "File name too long"),
        ("a\0.csv", "embedded null byte"),
    ):
        with pytest.raises(DataError, match=f"cannot be read: {said}: give a CSV, TSV or JSON lines file"):
            read_table(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert read_table("~/a.csv").columns == ["a"]


def test_a_column_that_is_not_there(tmp_path):
    found = table(tmp_path, "a.csv", "body,stars,date\na,1,2\n")
    found.check_column("stars", "data.label")
    with pytest.raises(DataError) as error:
        found.check_column("star", "data.label")
    assert str(error.value).removeprefix(f"{tmp_path}/") == (
        "a.csv: no column 'star'; did you mean stars? set data.label to one of its columns, 'body', 'stars', 'date'"
    )
    with pytest.raises(DataError, match="no column 'zzz': set data.text to one of its columns, 'body', 'stars', 'da"):
        found.check_column("zzz", "data.text")


# Tables without a header line


def messages(end: str = "\n") -> str:
    """Columns separated by tabs, with lone quotes, and as many commas as tabs in each line."""
    rows = [(f"ham\tsee you at the station, thanks {i}", f'spam\tWIN "a prize now, call {i}') for i in range(20)]
    return "".join(row + end for pair in rows for row in pair)


def news() -> str:
    return "".join(f'"{1 + i % 4}","Title {i}","Some news, of kind {1 + i % 4}."\n' for i in range(40))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["messages", "messages.csv", "messages.tsv"])
def test_named_columns_of_tabs(tmp_path, name, end):
    (tmp_path / name).write_bytes(messages(end).encode())
    found = read_table(tmp_path / name, ["label", "text"])
    assert found.columns == ["label", "text"]
    assert lines(found)[:2] == [
        (1, ("ham", "see you at the station, thanks 0")),
        (2, ("spam", 'WIN "a prize now, call 0')),
    ]
    assert len(found.rows) == 40


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_named_columns_of_quoted_values(tmp_path, separator):
    (tmp_path / "news.csv").write_text(news().replace('","', f'"{separator}"'))
    found = read_table(tmp_path / "news.csv", ("label", "title", "text"))
    assert lines(found)[0] == (1, ("1", "Title 0", "Some news, of kind 1."))
    assert len(found.rows) == 40


def test_a_separator_gives_every_line_as_many_values(tmp_path):
    """The first line has more of the other one."""
    content = "pos;a good, even very good, film\nneg;never again\n"
    (tmp_path / "a.csv").write_text(content)
    assert lines(read_table(tmp_path / "a.csv", ["label", "text"]))[1] == (2, ("neg", "never again"))


def test_names_that_the_first_line_has_too(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,1\n")
    assert lines(read_table(tmp_path / "a.csv", ["label", "text"])) == [(2, ("a", "1"))]
    assert read_table(tmp_path / "a.csv", ["label", "text"]).columns == ["text", "label"]


def test_names_of_fewer_columns(tmp_path):
    (tmp_path / "messages").write_text(messages())
    with pytest.raises(DataError, match="messages line 1: has 2 values, and there are names for 1: name each column"):
        read_table(tmp_path / "messages", ["text"])
    with pytest.raises(DataError, match="has two columns 'a': give each a name of its own$"):
        read_table(tmp_path / "messages", ["a", "a"])


WANTED = {"data.text": "text", "data.label": "label"}


@pytest.mark.parametrize(
    ("content", "wanted", "names"),
    [
        (messages(), WANTED, '"[label, text]"'),
        (news(), WANTED, '"[label, text, column3]"'),
        (news(), {"data.text": "column3", "data.label": "stars"}, '"[stars, column3, column3_]"'),
        (news(), {"--column": "text"}, '"[column1, text, column3]"'),
        (news(), {"data.text": "it's $x", "data.label": "no"}, """'["no", "it'"'"'s $x", "column3"]'"""),
    ],
)
def test_a_first_line_that_is_a_sample(tmp_path, content, wanted, names):
    """What the message says to type names the columns, with which the table can be used."""
    found = table(tmp_path, "a", content)
    with pytest.raises(DataError) as error:
        found.check_columns(wanted, "--data.columns")
    said = "the first line looks like a sample: name the columns by"
    assert str(error.value) == f"{tmp_path / 'a'}: {said} --data.columns {names}"
    typed = yaml.safe_load(shlex.split(names)[0])
    named = read_table(tmp_path / "a", typed)
    named.check_columns(wanted, "--data.columns")
    assert len(named.rows) == len(found.rows) + 1


QUESTION = "How old are you, if we may ask?"


@pytest.mark.parametrize(
    "content",
    [
        "body,stars\na,1\nb,2\n",
        f'"{QUESTION}",kind\n1,a\n2,b\n3,a\n4,b\n',  # a survey
        f'"{QUESTION}",red,blue\n7,red,\n8,,blue\n9,red,blue\n9,red,\n',  # the answers that were given
        f'"{QUESTION}",if any\n1,none\n2,nothing\n3,if any\n4,yes\n',  # an answer in words of one's own
        f'"{QUESTION}",kind\n1,a\n3,a\n"{QUESTION}",kind\n2,b\n4,b\n5,a\n6,b\n',  # two files that were joined
        "0,1\n0,a good film that we all liked\n1,a bad one\n0,more\n1,less\n",  # numbers as names
    ],
)
def test_a_first_line_of_unusual_names_is_not_called_a_sample(tmp_path, content):
    with pytest.raises(DataError, match="no column 'text': set data.text to one of its columns, ") as error:
        table(tmp_path, "a.csv", content).check_columns(WANTED, "--data.columns")
    assert "looks like" not in str(error.value)
    assert ("; or, if the first line is a sample, name the" in str(error.value)) == (not content.startswith("body"))


def test_a_table_with_one_of_the_columns_has_a_header(tmp_path):
    with pytest.raises(DataError) as error:
        table(tmp_path, "a.csv", "text,0\na,0\nb,1\n").check_columns(WANTED, "--data.columns")
    assert str(error.value).endswith("a.csv: no column 'label': set data.label to one of its columns, 'text', '0'")
