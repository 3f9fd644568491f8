"""Which samples `torchcaps predict` finds in its arguments, and how it writes them."""

import csv
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from PIL import Image

from torchcaps.cli import parser
from torchcaps.cli.predict import STANDARD_INPUT, Sample, _check_table, _digest, _files, _samples, _Table, _texts
from torchcaps.data import DataError, ImageData, TextTable
from torchcaps.utils.files import CSVLines


def test_a_folder_is_searched_as_that_of_a_training(tmp_path):
    for place in ("a", "elsewhere", "a/@eaDir/x.png", "a/.thumbnails"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (3, 3)).save(tmp_path / place / "x.png")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    found = [str(tmp_path / "a" / "link" / "x.png"), str(tmp_path / "a" / "x.png")]
    assert [sample.name for sample in _files(str(tmp_path / "a"), ImageData.kind, "file")] == found


def test_a_table_names_pictures_as_that_of_a_training(tmp_path):
    for name in ("a.png", "more/b.jpg", "more/c.png", "c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (3, 3)).save(tmp_path / name)
    table = tmp_path / "t.csv"
    table.write_text("id\na\nb\nmore\\b.jpg\nmore/c\na.png\n")
    found = [str(tmp_path / name) for name in ("a.png", "more/b.jpg", "more/b.jpg", "more/c.png", "a.png")]
    assert [sample.value for sample in _files(str(table), ImageData.kind, "id")] == found
    for name in ("d", "more"):
        table.write_text(f"id\n{name}\n")
        with pytest.raises(
            ValueError, match=f"there is no file {tmp_path / name}: names in a table are looked for in its folder"
        ):
            list(_files(str(table), ImageData.kind, "id"))


def test_nothing_else_is_written_over(tmp_path):
    header, out = ["file", "prediction", "P(a)"], tmp_path / "p.csv"
    _check_table(out, header, ["pictures"])
    for content in (
        b"file,prediction,P(a)\nx,a,1\n",
        b"file,prediction,P(a)\r\n",
        b"file,prediction,P(c)\n",
    ):  # written before
        out.write_bytes(content)
        _check_table(out, header, ["pictures", str(tmp_path), "-", "x" * 9999])
        with pytest.raises(
            ValueError, match=r"^--out .*p.csv is one of the inputs, or what was trained on: give another path$"
        ):
            _check_table(out, header, [f"{tmp_path}/../{tmp_path.name}/p.csv"])
    for content in (b"", b"file,label\nx,a\n", b"\xff\xfe\x00", b'"', b"text,prediction,P(a)\n"):
        out.write_bytes(content)
        with pytest.raises(ValueError, match=r"p.csv is there already, and is no table of such predictions: give"):
            _check_table(out, header, ["pictures"])
        assert out.read_bytes() == content


def test_texts_end_where_lines_end(tmp_path, monkeypatch):
    content = "one\u2028line\rtwo \x85 two\r\n\n three\x0cthree \n".encode()
    (tmp_path / "a.txt").write_bytes(content)
    texts = ["one\u2028line", "two \x85 two", "three\x0cthree"]
    assert [sample.value for sample in _texts(str(tmp_path / "a.txt"), "text")] == texts
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert [sample.value for sample in _texts(STANDARD_INPUT, "text")] == texts


def test_texts_of_a_table_are_stripped_as_in_training(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n  a film ,1\n")
    assert [sample.value for sample in _texts(str(tmp_path / "a.csv"), "text")] == ["a film"]


def test_a_table_without_a_header_line(tmp_path):
    (tmp_path / "a").write_text("ham\tsee you, thanks\nspam\t call now \n")
    assert [sample.value for sample in _texts(str(tmp_path / "a"), "text", ["label", "text"])] == [
        "see you, thanks",
        "call now",
    ]
    rows = [f"{'ham' if i % 2 else 'spam'}\tsee you at the station, thanks {i}\n" for i in range(9)]
    (tmp_path / "a.csv").write_text("".join(rows))
    with pytest.raises(
        DataError, match=r'the first line looks like .*: name the columns by --columns "\[column1, text'
    ):
        list(_texts(str(tmp_path / "a.csv"), "text"))
    Image.new("L", (3, 3)).save(tmp_path / "x.png")
    (tmp_path / "b.csv").write_text("0,x.png\n")
    assert [sample.name for sample in _files(str(tmp_path / "b.csv"), ImageData.kind, "file", ["class", "file"])] == [
        str(tmp_path / "x.png")
    ]


def test_names_of_columns():
    options = parser().parse_args(["predict", "own/texts", "a", "--columns", "[label, text]"])
    assert options.columns == ["label", "text"]
    for wrong in ("text", "[]", "[1, text]", "[label", ""):
        with pytest.raises(ValueError, match=r'expected names of columns such as "\[label, text\]", got'):
            parser().parse_args(["predict", "own/texts", "a", "--columns", wrong])
    options = SimpleNamespace(columns=["text"], column=None, paths=[STANDARD_INPUT])
    with pytest.raises(ValueError, match="--columns is for tables, and - has a text in each line: give the path of"):
        list(_samples(options, SimpleNamespace(data=TextTable)))


def test_lines_in_another_encoding(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes("fine\nn\xf6\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"a\.txt line 2: is not text in UTF-8: save it .*iconv -f cp1252"):
        list(_texts(str(tmp_path / "a.txt"), "text"))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\xf6\n")))
    with pytest.raises(DataError, match="^standard input line 1: is not text in UTF-8"):
        list(_texts(STANDARD_INPUT, "text"))


def a_table(folder, names, monkeypatch):
    """The table of a prediction, without a network, of a folder of `save_pretrained` that is the working folder."""
    monkeypatch.chdir(folder)
    for name in ("config.json", "model.safetensors"):
        Path(name).write_text(name)
    options = SimpleNamespace(out=Path("p.csv"), skip_bad=False, batch_size=2)
    trained = SimpleNamespace(data=lambda: None, names=["a"], target="class", path=Path())
    return _Table(options, options.out, trained, [Sample(name, name) for name in names], 1, 1)


def test_what_is_written_beside_a_network_is_no_part_of_it(tmp_path, monkeypatch):
    a_table(tmp_path, [], monkeypatch)
    before = _digest(tmp_path)
    (tmp_path / ".p.csv.1-of-1.unfinished").touch()
    assert _digest(tmp_path) == before


def test_an_interruption_within_a_text_of_several_lines_costs_this_text_alone(tmp_path, monkeypatch):
    names = ["a\nb", "c" * 200_000, "d\ne"]
    table = a_table(tmp_path, names, monkeypatch)
    rows = [[name, "a", "1", "1"] for name in names]
    text = io.StringIO(newline="")
    csv.writer(CSVLines(text)).writerows(rows)
    unfinished = Path("rows")
    unfinished.write_text(table.about + text.getvalue()[: -len('e",a,1,1\n')], newline="")
    assert table._kept(unfinished) == (rows[:2], [])


def test_an_empty_line_ends_what_is_kept_of_an_interrupted_part(tmp_path, monkeypatch):
    table = a_table(tmp_path, ["a", "b"], monkeypatch)
    Path("rows").write_text(f"{table.about}a,a,1,1\n\nb,a,1,1\n", newline="")
    assert table._kept(Path("rows")) == ([["a", "a", "1", "1"]], [])


def test_a_part_is_written_by_one_process(tmp_path, monkeypatch):
    table = a_table(tmp_path, ["a"], monkeypatch)
    with FileLock(".p.csv.1-of-1.lock"), pytest.raises(ValueError, match=r"^another process is writing this part of p"):
        table.write(None)


def test_every_text_is_read_back_from_the_table():
    table = io.StringIO(newline="")
    rows = [["a\rb", "1"], ["c\nd", "2"], ["e\r\n", "3"], ["plain", '"']]
    csv.writer(CSVLines(table)).writerows(rows)
    assert list(csv.reader(io.StringIO(table.getvalue(), newline=""))) == rows
    assert table.getvalue().endswith('plain,""""\n')
