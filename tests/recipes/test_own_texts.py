"""The recipe of one's own texts, from a table to a checkpoint that knows its classes, and what is said of bad ones."""

import csv
import shlex
from itertools import count
from pathlib import Path

import pooch
import pytest
import torch
from commands import call, error_of
from encoders import make_encoder

from torchcaps.deploy.predict import predict_texts
from torchcaps.runs import Run

RECIPE = ["train", "own/texts", "--data.text=body", "--data.label=stars"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return str(make_encoder(tmp_path_factory.mktemp("encoders") / "bert"))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    rows = [f'"{"very " * (i % 5)}{"good" if i % 3 else "bad"}, film {i}",{5 if i % 3 else 1}' for i in range(40)]
    Path("reviews.csv").write_text("\n".join(["body,stars", *rows]))


def test_a_table_is_trained_on(bert, monkeypatch, capfd):
    call_it = [*RECIPE, "--data.file=reviews.csv", f"--data.encoder={bert}", "--trainer.max_epochs=2"]
    assert call(*call_it) == 0
    (best,) = Path("runs").rglob("best.ckpt")
    trained = Run.find(best)
    assert trained.names == ["1", "5"]
    network = trained.values["model"]["network"]["init_args"]
    assert (network["classes"], network["layers"], network["width"]) == (2, 3, 8)
    (split,) = Path("runs").rglob("split.csv")
    assert len(split.read_text().splitlines()) == 41
    (mistakes,) = Path("runs").rglob("mistakes.csv")
    assert all(
        row["sample"].startswith("reviews.csv line ") for row in csv.DictReader(mistakes.read_text().splitlines())
    )
    assert call("test", "own/texts") == 0
    alone = Path("alone.ckpt").absolute()
    alone.write_bytes(best.read_bytes())
    with Path("reviews.csv").open("a") as file:
        file.write("\na new film,5")
    assert call("test", "alone.ckpt") == 0
    said = f"reviews.csv: left out 1 row that the split of {alone} does not have: line 42\n"
    assert said in capfd.readouterr().err
    texts = [f"{'very ' * i}good" for i in range(9)]
    whole = list(predict_texts(trained, texts))
    monkeypatch.setattr("torchcaps.deploy.predict.TEXTS_AT_ONCE", 4)
    for (index, row), (_, expected), place in zip(predict_texts(trained, texts, 3), whole, count(), strict=False):
        assert index == place
        torch.testing.assert_close(row, expected)
    assert place == 8


def test_a_table_without_a_header_line(bert, capfd):
    """It is trained on as the error says."""
    rows = [f"{'ham' if i % 2 else 'spam'}\tgood film, and a {'bad' if i % 2 else 'good'} one {i}" for i in range(40)]
    Path("messages").write_text("\r\n".join(rows))
    given = ["train", "own/texts", "--data.file=messages", f"--data.encoder={bert}", "--trainer.max_epochs=1"]
    said = error_of(capfd, *given)
    assert said.endswith(
        'messages: the first line looks like a sample: name the columns by --data.columns "[label, text]"'
    )
    assert call(*given, *shlex.split(said.partition(" by ")[2])) == 0
    (split,) = Path("runs").rglob("split.csv")
    assert len(split.read_text().splitlines()) == 41
    assert call("predict", "own/texts", "messages", "--columns", "[label, text]", "--out", "p.csv") == 0
    predicted = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert [row["text"] for row in predicted] == [row.partition("\t")[2] for row in rows]


def test_texts_with_several_labels_or_none(bert):
    """The recipe has mixup, which works with them too."""
    tags = ["", "film", "book", "film;book"]
    rows = [f'"a {tags[i % 4]} of {i}",{tags[i % 4]}' for i in range(60)]
    Path("tags.csv").write_text("\n".join(["text,tags", *rows]))
    given = ["--data.file=tags.csv", "--data.label=tags", "--data.separator=;", f"--data.encoder={bert}"]
    assert call("train", "own/texts", *given, "--trainer.max_epochs=1") == 0
    trained = Run.find("own/texts")
    assert (trained.target, trained.names, len(trained.thresholds)) == ("labels", ["book", "film"], 2)
    assert {"test/exact_match", "test/macro_f1", "val/exact_match"} <= trained.facts["metrics"].keys()
    assert call("predict", "own/texts", "tags.csv", "--out", "p.csv") == 0
    predicted = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert [*predicted[0]] == ["text", "prediction", "P(book)", "P(film)"]
    assert {row["prediction"] for row in predicted} <= {"", "book", "film", "book;film"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "data.file is missing: give --data.file FILE, a table (CSV, TSV or JSON lines) with a column of texts"),
        (["--data.file=none.csv"], "none.csv cannot be read: No such file or directory"),
        (["--data.file=bad.csv"], "bad.csv line 3: body is empty: mend such rows, or leave them out by"),
    ],
)
def test_bad_input(bert, capfd, given, said):
    Path("bad.csv").write_text("body,stars\na,1\n,2\nb,2\nc,2\n")
    assert said in error_of(capfd, *RECIPE, f"--data.encoder={bert}", *given)
    assert not list(Path().rglob("version_*"))
