"""Texts of one's own in a table: what is read, how it is split, and what is said about rows that cannot be used."""

import csv
import hashlib
from collections import Counter
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from encoders import make_encoder

from torchcaps.data import DataError, Encoder, TextTable, notes

ROWS = [
    ("a good film", "yes"),
    ("bad", "no"),
    ("very good", "yes"),
    ("not a film", "no"),
    ("good .", "yes"),
    (".", "no"),
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    transformers.logging.disable_progress_bar()
    return make_encoder(tmp_path_factory.mktemp("encoders") / "bert")


def write(path: Path, rows, columns=("text", "label")) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return str(path)


def many(count: int = 100) -> list[tuple[str, str]]:
    return [(f"text {i}", "yes" if i % 4 else "no") for i in range(count)]


def parts_of(data: TextTable) -> dict[str, str]:
    return {sample.text: part for part, samples in data.parts.items() for sample in samples}


# What is read


def test_a_table_becomes_batches(tmp_path, bert):
    file = write(tmp_path / "a.csv", [(stars, " " + text) for text, stars in ROWS], ["stars", "body"])
    data = TextTable(
        file, "body", "stars", encoder=str(bert), cache=str(tmp_path / "kept"), batch_size=2, group_by_length=True
    )
    assert data.network_arguments() == {"classes": 2, "layers": 3, "width": 8}
    assert data.resolved_arguments() == {"class_names": ["no", "yes"]}
    data.prepare_data()
    data.setup()
    assert [len(data.part(stage)) for stage in ("fit", "validate", "test")] == [2, 2, 2]
    texts, labels = data.read("fit")
    assert [(text, data.names[label]) for text, label in zip(texts, labels, strict=True)] == [
        row for row in ROWS if row[0] in texts
    ]
    assert labels.dtype == torch.int64
    (key, _) = data.keys("test")
    assert key.startswith(f"{file} line ")
    assert key.endswith(f": {data.read('test')[0][0]}")
    ((embeddings, mask), labels) = next(iter(data.test_dataloader()))
    assert embeddings.shape[:2] == mask.shape
    assert embeddings.shape[2:] == (3, 8)
    assert sorted(labels.tolist()) == [0, 1]


def test_tables_without_a_header_line(tmp_path):
    """A table with one is taken beside them."""
    (tmp_path / "a").write_text("".join(f"{label}\t{text}\n" for text, label in many(40)))
    data = TextTable(str(tmp_path / "a"), test_file=write(tmp_path / "test.csv", ROWS), columns=["label", "text"])
    assert data.names == ["no", "yes"]
    assert {part: len(samples) for part, samples in data.parts.items()} == {"train": 36, "val": 4, "test": 6}
    with pytest.raises(
        DataError,
        match="no column 'text'; did you mean text 0. set data.text to .* 'no', 'text 0'; or, if the first line is",
    ):
        TextTable(str(tmp_path / "a")).network_arguments()


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["10", "9", "2"], ["2", "9", "10"]),
        (["1.5", "-1", "0"], ["-1", "0", "1.5"]),
        (["10", "9", "b"], ["10", "9", "b"]),
        (["10", "nan", "9"], ["10", "9", "nan"]),
        (["Ü", "a", "B"], ["B", "a", "Ü"]),
    ],
)
def test_order_of_the_classes(tmp_path, labels, names):
    file = write(tmp_path / "a.csv", [(f"{label} {i}", label) for label in labels for i in range(3)])
    assert TextTable(file).names == names
    assert TextTable(file, class_names=labels).names == labels


def test_it_is_built_without_its_files():
    data = TextTable("none.csv", class_names=["a", "b"], encoder="none")
    assert (data.classes, data.names, data.resolved_arguments()) == (2, ["a", "b"], {"class_names": ["a", "b"]})
    assert (data.title, TextTable().title) == ("texts in none.csv", "TextTable")
    for use in (data.prepare_data, data.setup, data.network_arguments):
        with pytest.raises(DataError, match="none.csv cannot be read: No such file or directory"):
            use()
    for use in (
        TextTable().prepare_data,
        TextTable().setup,
        TextTable().network_arguments,
        TextTable().resolved_arguments,
    ):
        with pytest.raises(DataError, match="^data.file is missing: give --data.file FILE, a table"):
            use()


# The split


def test_a_stratified_split_that_is_always_the_same(tmp_path):
    rows = many()
    data = TextTable(write(tmp_path / "a.csv", rows), val_share=0.2, test_share=0.1)
    count = {part: Counter(s.label for s in samples) for part, samples in data.parts.items()}
    assert count == {"train": {"yes": 52, "no": 18}, "val": {"yes": 15, "no": 5}, "test": {"yes": 8, "no": 2}}
    torch.manual_seed(1)
    again = TextTable(write(tmp_path / "b.csv", rows[::-1]), val_share=0.2, test_share=0.1)
    assert parts_of(again) == parts_of(data)


def test_equal_texts_are_in_one_part(tmp_path, capsys):
    rows = [(text + extra, label) for text, label in many(40) for extra in ("", " ", "  ")]
    rows += [("text  1", "no"), ("text 1", "no")]
    data = TextTable(write(tmp_path / "a.csv", rows), val_share=0.3, test_share=0.3)
    homes: dict[str, set[str]] = {}
    for part, samples in data.parts.items():
        for sample in samples:
            homes.setdefault(sample.key, set()).add(part)
    assert len(homes) == 40
    assert all(len(home) == 1 for home in homes.values())
    assert sum(len(samples) for samples in data.parts.values()) == 122
    data.prepare_data()
    assert f"{data.file}: has 1 text with different labels, such as 'text 1'" in capsys.readouterr().err


def test_small_classes_are_in_training(tmp_path, capsys):
    rows = [*many(40), ("one", "rare"), ("two", "rare"), ("three", "alone")]
    data = TextTable(write(tmp_path / "a.csv", rows))
    assert {s.text for s in data.parts["train"]} >= {"one", "two", "three"}
    data.prepare_data()
    assert capsys.readouterr().err == (
        f"torchcaps: {data.file}: classes with too few texts to be split are in training only: alone (1), rare (2)\n"
    )


def test_parts_in_files_of_their_own(tmp_path, capsys):
    file = write(tmp_path / "a.csv", many(40))
    test = write(tmp_path / "test.csv", [("new", "no"), ("text 3", "yes"), ("text 4", "no")])
    data = TextTable(file, test_file=test)
    assert {part: len(samples) for part, samples in data.parts.items()} == {"train": 36, "val": 4, "test": 3}
    data.prepare_data()
    train = {s.text for s in data.parts["train"]}
    both = len(train & {"text 3", "text 4"})
    assert capsys.readouterr().err == f"torchcaps: {test}: training has {both} of its 3 test texts too\n"
    data = TextTable(file, test_file=test, val_file=test)
    data.prepare_data()
    said = capsys.readouterr().err
    for line in ("training has 2 of its 3 validation", "validation has 3 of its 3 test"):
        assert f"torchcaps: {test}: {line} texts too\n" in said
    assert {part: len(samples) for part, samples in data.parts.items()} == {"train": 40, "val": 3, "test": 3}
    assert data.read("test")[1].tolist() == [0, 1, 0]


def test_test_texts_that_are_validation_texts_are_counted(tmp_path, capsys):
    """Also if one of the two parts is split off."""
    file = write(tmp_path / "a.csv", many(40))
    some = TextTable(file).parts["val"][0]  # without a split for validation it is in the test
    own = write(tmp_path / "own.csv", [(some.text, some.label), ("new", "no")])
    TextTable(file, test_file=own).prepare_data()
    assert f"{own}: validation has 1 of its 2 test texts too\n" in capsys.readouterr().err
    TextTable(file, val_file=own).prepare_data()
    assert f"{file}: validation has 1 of its 4 test texts too\n" in capsys.readouterr().err


def test_labels_that_differ_in_spelling_alone_are_named(tmp_path, capsys):
    labels = ["1", "1.0", "2", "nan", "NaN", "Good", "good"]
    data = TextTable(write(tmp_path / "a.csv", [(f"{label} {i}", label) for label in labels for i in range(3)]))
    data.prepare_data()
    assert capsys.readouterr().err == (
        f"torchcaps: {data.file}: labels that differ in spelling alone are classes of their own: '1' and '1.0', 'Good' "
        "and 'good', 'NaN' and 'nan'\n"
    )


def test_fewer_texts_for_a_trial(tmp_path, bert):
    options = {"encoder": str(bert), "cache": str(tmp_path / "kept")}
    data = TextTable(write(tmp_path / "a.csv", many(60)), max_texts=3, test_share=0.2, **options)
    data.setup("test")
    lines = [int(key.partition("line ")[2].partition(":")[0]) for key in data.keys("test")]
    samples = data.parts["test"]
    assert len(data.test_set) == len(lines) == 3
    assert lines == [samples[0].line, samples[(len(samples) - 1) // 2].line, samples[-1].line]
    assert [many(60)[line - 2][1] for line in lines] == [data.names[label] for label in data.test_set.labels]


def test_no_validation(tmp_path, bert):
    data = TextTable(write(tmp_path / "a.csv", ROWS), val_share=0, encoder=str(bert), cache=str(tmp_path / "kept"))
    data.setup()
    assert (len(data.train_set), data.val_set, len(data.test_set)) == (4, None, 2)
    assert data.val_dataloader() == []


def test_a_split_is_written_and_read(tmp_path, capfd):
    file = write(tmp_path / "a.csv", [*many(40)])
    data = TextTable(file, val_share=0.25, test_share=0.25)
    split = data.write_split(tmp_path / "run")
    assert split == tmp_path / "run" / "split.csv"
    rows = list(csv.reader(split.read_text().splitlines()))
    assert rows[0] == ["hash", "part"]
    assert rows[1] == [hashlib.sha256(b"text 0").hexdigest()[:16], parts_of(data)["text 0"]]
    assert len(rows) == 41
    assert TextTable(file, split=str(split)).parts == data.parts  # whatever the shares are
    other = TextTable(write(tmp_path / "b.csv", many(41)[:0:-1]), split=str(split))  # one new, one gone, all moved
    assert parts_of(other) == {text: part for text, part in parts_of(data).items() if text != "text 0"}
    said = capfd.readouterr().err
    assert f"{other.file}: no longer has 1 text of the split of {split}\n" in said
    assert f"{other.file}: left out 1 row that the split of {split} does not have: line 2\n" in said
    with pytest.raises(
        DataError, match="split.csv: has none of the texts in .*c.csv: give the file and the data.group of its run, or"
    ):
        parts_of(TextTable(write(tmp_path / "c.csv", [("other", "yes"), ("texts", "no")]), split=str(split)))
    split.write_text(split.read_text().replace("test", "tset"))
    with pytest.raises(DataError, match=r"split.csv line \d+: the part is 'tset': expected train, val, test"):
        TextTable(file, split=str(split)).setup()
    with pytest.raises(DataError, match="a.csv: has the columns text, label: expected file and part, or hash and part"):
        TextTable(file, split=file).setup()


def test_test_texts_that_were_trained_on_are_counted(tmp_path, capsys):
    """Also if they are no longer in the table of the training."""
    file, test = write(tmp_path / "a.csv", many(40)), write(tmp_path / "test.csv", [("new", "no"), ("text 3", "yes")])
    split = TextTable(file, val_share=0, test_file=test).write_split(tmp_path / "run")
    write(tmp_path / "a.csv", [row for row in many(40) if row[0] != "text 3"])
    TextTable(file, val_share=0, test_file=test, split=str(split)).prepare_data()
    assert f"{test}: training has 1 of its 2 test texts too\n" in capsys.readouterr().err


# What cannot be used


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [("a", "1"), (" ", "2"), ("", "1")],
            "a.csv line 3: text is empty, line 4: text is empty: mend such rows, or leave",
        ),
        (
            [("a", "1"), ("b", " "), ("c", "2")],
            "a.csv line 3: label is empty: mend such rows, or leave them out",
        ),
        (
            [("a", "1"), ("b", "2"), ("c", "3")],
            "every row has another class in column 'label': set data.label .*, or add",
        ),
        (
            [("a", "1"), ("b", "2"), ("c", "2")],
            "the test part: a class needs 3 different texts .*: add some, or give a da",
        ),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, bert, rows, said):
    with pytest.raises(DataError, match=said):
        TextTable(write(tmp_path / "a.csv", rows), encoder=str(bert), cache=str(tmp_path / "kept")).setup()


def test_a_part_without_texts(tmp_path):
    file = write(tmp_path / "a.csv", many())
    with pytest.raises(DataError, match="the test part: set data.test_share above 0, or give a data.test_file$"):
        _ = TextTable(file, test_share=0).parts
    split = TextTable(file).write_split(tmp_path)
    split.write_text(split.read_text().replace(",train\n", ",val\n"))
    with pytest.raises(DataError, match="split.csv: has no text for the train part: choose another split$"):
        _ = TextTable(file, split=str(split)).parts


def test_bad_rows_are_left_out_if_asked_for(tmp_path, capsys):
    file = write(tmp_path / "a.csv", [*many(20), ("", "yes"), ("b", "")])
    data = TextTable(file, skip_bad=True)
    assert sum(len(samples) for samples in data.parts.values()) == 20
    said = f"torchcaps: {file}: left out 2 rows: line 22: text is empty, line 23: "
    assert capsys.readouterr().err == f"{said}label is empty\n"
    with pytest.raises(DataError, match="no row has a text and a label"):
        TextTable(write(tmp_path / "b.csv", [("", "a")]), skip_bad=True).setup()


def test_labels_that_are_not_there(tmp_path):
    file = write(tmp_path / "a.csv", ROWS, ["body", "stars"])
    test = write(tmp_path / "test.csv", [("a", "maybe")], ["body", "stars"])
    with pytest.raises(DataError, match="test.csv line 2: the label 'maybe' is not one of the classes"):
        TextTable(file, "body", "stars", test_file=test).read("test")
    test = write(tmp_path / "test.csv", [("a", "maybe"), ("b", "never"), ("c", "maybe")], ["body", "stars"])
    with pytest.raises(DataError, match=r"line 2: the label 'maybe' \(and 'never'\) is not one of the classes"):
        TextTable(file, "body", "stars", test_file=test).read("test")


@pytest.mark.parametrize("names", [["a"], [], ["a", "a"], ["a", ""], ["a", 1]])
def test_class_names(names):
    with pytest.raises(ValueError, match="class_names must be "):
        TextTable(class_names=names)


def test_shares():
    with pytest.raises(ValueError, match="must leave a part for training, got 0.5 and 0.5"):
        TextTable(val_share=0.5, test_share=0.5)


# Long texts, and an encoder that cannot be downloaded


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_long_texts_are_cut(tmp_path, kind, capsys):
    folder = str(make_encoder(tmp_path / kind, kind))
    capsys.readouterr()
    words = ["good", "bad", "film"] * 10
    fits = 10 if kind == "bert" else 11  # besides the special tokens
    whole, cut, same = " ".join(words[:fits]), " ".join(words), " ".join(words[: fits + 1])
    kept = tmp_path / "kept"
    embedded = Encoder(folder, cache=kept, truncate=True).embed([whole, cut, same])
    assert capsys.readouterr().err == ("torchcaps: cut 2 of 3 texts to the 12 tokens that the encoder takes\n")
    assert embedded.tokens.tolist() == [12] * 3
    states = embedded.padded([0, 1, 2])[0]
    torch.testing.assert_close(states[1], states[0])
    torch.testing.assert_close(states[2], states[0])
    assert Encoder(folder, cache=kept).embed([whole]).tokens.tolist() == [12]
    for text in (cut, same):  # what is kept of a cut text is not taken for the whole text
        with pytest.raises(DataError, match="takes texts of 1 to 12 tokens"):
            Encoder(folder, cache=kept).embed([text])
    again = Encoder(folder, cache=kept, truncate=True).embed([cut, same])
    assert again.padded([0, 1])[0].equal(states[1:])
    assert len(list(kept.rglob("*.safetensors"))) == 1
    assert capsys.readouterr().err == ""


def test_long_texts_of_a_model_that_counts_positions_from_its_padding(tmp_path, capsys):
    folder = make_encoder(tmp_path / "roberta")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=100)
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=14,
        pad_token_id=1,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=8,
        intermediate_size=8,
    )
    transformers.RobertaModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    capsys.readouterr()
    texts = ["good bad film " * 10, "good " * 10]
    assert Encoder(str(folder), cache=tmp_path, truncate=True).embed(texts).tokens.tolist() == [12, 12]
    assert "cut 1 of 2 texts to the 12 tokens that the encoder takes" in capsys.readouterr().err


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    asked = []

    def get_hf_file_metadata(url, timeout):
        asked.append(url)
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", get_hf_file_metadata)
    return asked


def test_without_a_network_the_hub_is_asked_once(no_hub, monkeypatch):
    tries, download = [], huggingface_hub.hf_hub_download

    def hf_hub_download(*arguments, **options):
        tries.append(options["local_files_only"])
        return download(*arguments, **{**options, "local_files_only": True})

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    with pytest.raises(
        DataError, match=r"cannot be downloaded \(ConnectionError: the Hub does not answer\): go online"
    ):
        Encoder("someone/tiny")
    assert no_hub == ["https://huggingface.co/someone/tiny/resolve/main/config.json"]
    assert tries == [True]  # otherwise it would ask six times, for half a minute


# Groups and near copies


def of_patients(count: int = 60) -> list[tuple[str, str, str]]:
    """Texts of twelve patients, each of one class."""
    return [(f"text {i}", "ab"[i % 12 % 2], f"p{i % 12}") for i in range(count)]


def test_no_group_of_texts_is_in_two_parts(tmp_path, capfd, monkeypatch):
    file = write(tmp_path / "a.csv", of_patients(), ("text", "label", "patient"))
    leaking = TextTable(file).parts
    TextTable(file).prepare_data()
    said = f"{file}: rows with the same patient (12 values) may belong together, as those of one patient: validation"
    assert said in capfd.readouterr().err
    monkeypatch.setattr(notes, "_said", set())
    TextTable(file, group="none").prepare_data()
    assert "belong" not in capfd.readouterr().err
    assert {x.line % 12 for x in leaking["train"]} & {x.line % 12 for x in leaking["test"]}
    data = TextTable(file, group="patient")
    groups = [{sample.group for sample in data.parts[part]} for part in ("train", "val", "test")]
    assert sum(map(len, groups)) == 12
    assert all({sample.label for sample in samples} == {"a", "b"} for samples in data.parts.values())
    data.prepare_data()
    assert f"{file}: 12 groups: 8 in training, 2 in validation, 2 in test" in capfd.readouterr().err
    kept = str(data.write_split(tmp_path / "run"))
    assert TextTable(file, group="patient", split=kept).parts == data.parts
    kept = str(TextTable(file).write_split(tmp_path / "run"))
    with pytest.raises(DataError, match="has none of the texts in"):  # its hashes have no groups
        TextTable(file, group="patient", split=kept).parts  # noqa: B018


def test_the_same_text_of_two_groups_may_be_in_two_parts(tmp_path, capfd):
    rows = [("thank you", label, group) for _, label, group in of_patients(24)]
    file = write(tmp_path / "a.csv", of_patients() + rows, ("text", "label", "patient"))
    data = TextTable(file, group="patient")
    data.prepare_data()
    assert "training has 4 of its 14 test texts too" in capfd.readouterr().err
    kept = str(data.write_split(tmp_path / "run"))
    assert TextTable(file, group="patient", split=kept).parts == data.parts


def test_groups_of_texts_that_cannot_be_used(tmp_path):
    columns = ("text", "label", "patient")
    file = write(tmp_path / "a.csv", of_patients(), columns)
    other = write(tmp_path / "b.csv", [("new", "a", "p1"), ("more", "b", "q")], columns)
    with pytest.raises(
        DataError, match=r"groups are in several parts: p1 \((train|val), test\): leave such rows out of one"
    ):
        TextTable(file, group="patient", test_file=other).parts  # noqa: B018
    with pytest.raises(DataError, match="no column 'who'.* set data.group to one of its columns"):
        TextTable(file, group="who").parts  # noqa: B018
    empty = write(tmp_path / "c.csv", [*of_patients(), ("new", "a", " ")], columns)
    with pytest.raises(DataError, match="line 62: patient is empty: mend such rows, or leave them out by"):
        TextTable(empty, group="patient").parts  # noqa: B018
    assert len(TextTable(empty, group="patient", skip_bad=True)._samples) == 60


def test_texts_with_the_same_words_are_in_one_part(tmp_path, capfd):
    rows = [row for text, label in many(50) for row in ((text.title(), label), (f"{text} ...", label))]
    parts = parts_of(TextTable(write(tmp_path / "a.csv", rows)))
    assert all(parts[f"Text {i}"] == parts[f"text {i} ..."] for i in range(50))
    mixed = parts_of(TextTable(write(tmp_path / "c.csv", rows[::-1])))
    assert mixed == parts
    other = write(tmp_path / "b.csv", [("TEXT 1!", "yes"), ("text 2 ...", "yes"), ("new", "no")])
    data = TextTable(str(tmp_path / "a.csv"), test_file=other, val_share=0.0)
    data.prepare_data()
    said = capfd.readouterr().err
    assert f"{other}: training has 1 of its 3 test texts too" in said
    assert f"{other}: training has near copies of 1 of its 3 test texts, such as line 2" in said


@pytest.mark.parametrize("group_by_length", [False, True])
def test_a_balanced_epoch(tmp_path, bert, group_by_length):
    rows = [(("a good film . " * 3)[: 3 + i], "yes" if i % 10 else "no") for i in range(30)]
    options = {"encoder": str(bert), "cache": str(tmp_path / "kept"), "group_by_length": group_by_length}
    data = TextTable(write(tmp_path / "a.csv", rows), balance=True, batch_size=4, **options)
    data.setup("fit")
    assert data.train_set.labels.bincount().tolist() == [1, 21]
    batches = [(mask.sum(1), labels) for (_, mask), labels in data.train_dataloader()]
    assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [11, 11]


# Several labels


def tagged(count: int = 60) -> list[tuple[str, str]]:
    return [(f"text {i}", ";".join(name for name, n in (("10", 2), ("9", 3)) if i % n == 0)) for i in range(count)]


def test_texts_with_several_labels(tmp_path, bert):
    options = {"encoder": str(bert), "cache": str(tmp_path / "kept"), "num_workers": 0}
    data = TextTable(write(tmp_path / "a.csv", tagged()), separator=";", **options)
    assert (data.target, data.names, data.classes) == ("labels", ["9", "10"], 2)
    assert data.network_arguments()["classes"] == 2
    marks = [(text, "10" in label, "9" in label) for text, label in tagged()]
    columns = TextTable(write(tmp_path / "b.csv", marks, ("text", "10", "9")), labels=["9", "10"], **options)
    for stage in ("fit", "validate", "test"):
        texts, labels = data.read(stage)
        places = [int(text.split()[1]) for text in texts]
        assert torch.equal(labels, torch.tensor([[i % 3 == 0, i % 2 == 0] for i in places]).float())
        assert columns.read(stage)[0] == texts
        assert torch.equal(columns.read(stage)[1], labels)
    data.setup("test")
    assert torch.equal(next(iter(data.test_dataloader()))[1], labels[:20])
    assert TextTable("gone.csv", separator=";", class_names=["9", "10"]).names == ["9", "10"]


def test_equal_texts_with_several_labels_are_in_one_part(tmp_path, capsys):
    rows = tagged() + [(f"Text {i}!", "9") for i in range(60)]
    parts = parts_of(data := TextTable(write(tmp_path / "a.csv", rows), separator=";"))
    assert all(parts[f"text {i}"] == parts[f"Text {i}!"] for i in range(60))
    assert set(parts.values()) == {"train", "val", "test"}
    assert parts_of(TextTable(write(tmp_path / "b.csv", rows[::-1]), separator=";")) == parts
    data.prepare_data()
    assert capsys.readouterr().err == ""
    small = [*rows, ("once", "x;9"), ("again", "x"), ("again", "9;x")]
    TextTable(write(tmp_path / "c.csv", small), separator=";").prepare_data()
    said = capsys.readouterr().err
    assert "labels with too few texts to be split are in training only: x (2)\n" in said
    assert "has 1 text with different labels, such as 'again'\n" in said


def test_a_label_that_only_another_file_has(tmp_path):
    test = write(tmp_path / "test.csv", [("new", "9"), ("newer", "10;11;12")])
    data = TextTable(write(tmp_path / "a.csv", tagged()), separator=";", test_file=test)
    with pytest.raises(DataError, match=r"test.csv line 3: the label '11' \(and '12'\) is not one of the labels"):
        data.read("test")


def test_classes_of_texts_that_look_like_several_labels_are_said(tmp_path, capsys):
    rows = [(text, label or "none") for text, label in tagged()]
    TextTable(write(tmp_path / "a.csv", rows)).prepare_data()
    said = "classes in column 'label' look like several labels, such as '10;9': if so, give --data.separator ';'\n"
    assert said in capsys.readouterr().err


def test_groups_of_texts_with_several_labels(tmp_path, capsys):
    rows = [(text, label, f"p{i // 4}") for i, (text, label) in enumerate(tagged())]
    data = TextTable(write(tmp_path / "a.csv", rows, ("text", "label", "who")), separator=";", group="who")
    assert len({(x.group, part) for part, samples in data.parts.items() for x in samples}) == 15
    data.prepare_data()
    assert "15 groups: " in capsys.readouterr().err
