"""Which samples `torchcaps predict` finds in its arguments, and how it writes them."""

import csv
import io
from types import SimpleNamespace

from PIL import Image

from torchcaps.cli.predict import STANDARD_INPUT, _pictures, _texts
from torchcaps.utils.files import CSVLines


def test_a_folder_is_searched_as_that_of_a_training(tmp_path):
    for place in ("a", "elsewhere", "a/@eaDir/x.png", "a/.thumbnails"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (3, 3)).save(tmp_path / place / "x.png")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    found = [str(tmp_path / "a" / "link" / "x.png"), str(tmp_path / "a" / "x.png")]
    assert [sample.name for sample in _pictures(str(tmp_path / "a"), "file")] == found


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


def test_every_text_is_read_back_from_the_table():
    table = io.StringIO(newline="")
    rows = [["a\rb", "1"], ["c\nd", "2"], ["e\r\n", "3"], ["plain", '"']]
    csv.writer(CSVLines(table)).writerows(rows)
    assert list(csv.reader(io.StringIO(table.getvalue(), newline=""))) == rows
    assert table.getvalue().endswith('plain,""""\n')
