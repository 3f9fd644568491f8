"""Own data with several labels or with numbers: options, values of tables, splits, sets."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data import DataError, EncodedImages, ImageFolder
from torchcaps.data.targets import Target, target_of

SHARES = {"val": 0.15, "test": 0.15}
SEPARATED = {"label": "tags", "separator": "|"}


def target(**options) -> Target:
    defaults = {"label": "label", "separator": None, "labels": None, "numbers": None, "class_names": None}
    return target_of(**{**defaults, "balance": False, **options})


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Thirty pictures of 8 x 8 pixels, 0.png to 29.png."""
    (tmp_path / "pictures").mkdir()
    random = np.random.default_rng(0)
    for i in range(30):
        picture = random.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / "pictures" / f"{i}.png")
    return tmp_path / "pictures"


def data_of(pictures: Path, lines: list[str], **options) -> ImageFolder:
    path = pictures.parent / "t.csv"
    path.write_text("\n".join(lines) + "\n")
    return ImageFolder(str(pictures), table=str(path), **{"num_workers": 0, **options})


def error_of(pictures: Path, lines: list[str], **options) -> str:
    with pytest.raises(DataError) as caught:
        data_of(pictures, lines, **options).prepare_data()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tags(count: int = 30) -> list[str]:
    """Return a table in which every second picture has the label a, every third b and every fifth c."""
    labels = ["|".join(name for name, n in (("a", 2), ("b", 3), ("c", 5)) if i % n == 0) for i in range(count)]
    return ["file,tags", *(f"{i}.png,{label}" for i, label in enumerate(labels))]


def marks(count: int = 30) -> list[str]:
    """Return the same labels in a column for each."""
    words = [("1", "0"), ("TRUE", "false"), ("Yes", "no"), ("1.0", "0.0")]
    rows = [",".join(words[i % 4][i % n > 0] for n in (2, 3, 5)) for i in range(count)]
    return ["file,a,b,c", *(f"{i}.png,{row}" for i, row in enumerate(rows))]


def numbers(count: int = 30) -> list[str]:
    return ["file,x,y", *(f"{i}.png,{i / 4},{-(10**i)}e-20" for i in range(count))]


@pytest.mark.parametrize(("lines", "options"), [(tags(), SEPARATED), (marks(), {"labels": ["a", "b", "c"]})])
def test_pictures_with_several_labels(pictures, lines, options):
    data = data_of(pictures, lines, **options)
    assert (data.target, data.names, data.classes) == ("labels", ["a", "b", "c"], 3)
    assert data.network_arguments() == {"classes": 3, "in_channels": 1, "image_size": 8}
    assert data.resolved_arguments()["class_names"] == ["a", "b", "c"]
    data.setup()
    for stage in ("fit", "validate", "test"):
        files, labels = data.keys(stage), data._loaded(stage).labels
        indices = [int(Path(name).stem) for name in files]
        expected = torch.tensor([[i % n == 0 for n in (2, 3, 5)] for i in indices]).float()
        assert labels.dtype == torch.float32
        assert torch.equal(labels, expected)
        assert torch.equal(data._loaded(stage).__getitems__([0])[1], expected[:1])
    everything = torch.cat([data._loaded(stage).labels for stage in ("fit", "validate", "test")])
    assert (everything.sum(1) == 0).any()


def test_pictures_with_numbers(pictures):
    data = data_of(pictures, numbers(), numbers=["y", "x"])
    assert (data.target, data.names, data.classes) == ("numbers", ["y", "x"], 2)
    assert data.network_arguments() == {"numbers": 2, "in_channels": 1, "image_size": 8}
    data.setup()
    files = data.keys("fit")
    expected = torch.tensor([[-(10.0 ** (int(Path(x).stem) - 20)), int(Path(x).stem) / 4] for x in files])
    torch.testing.assert_close(data.train_set.labels, expected)
    assert Counter(data.parts.values()) == {"train": 22, "val": 4, "test": 4}
    assert EncodedImages(data_of(pictures, numbers(), numbers=["x"], channels=3)).target == "numbers"


@pytest.mark.parametrize("options", [SEPARATED, {"labels": ["a", "b"]}, {"numbers": ["a", "b"]}])
def test_what_was_found_needs_no_table(options):
    data = ImageFolder("gone", table="gone.csv", class_names=["a", "b"], channels=3, size=16, **options)
    assert (data.names, data.classes) == (["a", "b"], 2)
    assert 2 in data.network_arguments().values()


def test_spaces_and_empty_parts_of_labels_do_not_count():
    separated = target(separator="|")
    found = [separated.read({"label": text}) for text in ("b| a", "|a|", "", " | ", "a|a|b")]
    assert found == [("a", "b"), ("a",), (), (), ("a", "b")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"separator": "|", "numbers": ["x"]}, "separator and numbers are different targets: set one of them"),
        ({"labels": ["a", "b"], "numbers": ["x"]}, "labels and numbers are different targets: set one of them"),
        ({"separator": ""}, "separator must be a text that is not empty, such as '|'"),
        ({"numbers": ["x", "x"]}, "numbers must be different columns, got"),
        ({"labels": ["x"]}, "labels must be two or more columns, .*: for one of yes and no set label to it"),
        (
            {"labels": ["a", "b"], "class_names": ["b", "a"]},
            "class_names must be those of data.labels, .*got .*: set it to null",
        ),
        ({"numbers": ["a", "b"], "class_names": ["a"]}, "class_names must be those of data.numbers, .*got"),
        ({"separator": "|", "class_names": ["a", "a"]}, "class_names must be two or more different names"),
        (
            {"separator": "|", "balance": True},
            "balance is for one class per sample, and the target is labels: set it to",
        ),
        ({"numbers": ["x"], "balance": True}, "balance is for one class per sample, and the target is numbers: set it"),
    ],
)
def test_options_that_do_not_fit(options, said):
    with pytest.raises(ValueError, match=said):
        target(**options)


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (
            [*marks(9), "9,1,x,0"],
            {"labels": ["a", "b"]},
            "line 11: b is 'x': write 1 or 0",
        ),
        (
            [*marks(9), "9,,0,0"],
            {"labels": ["a", "b"]},
            "line 11: a is empty: write 1 or 0",
        ),
        (marks(), {"labels": ["a", "d"]}, "no column 'd': set data.labels to one of its columns"),
        (marks(), {"labels": []}, 'data.labels is missing: give --data.labels "[NAME, ...]", names of columns of'),
        (["file,tags", "0,a", "1,"], SEPARATED, "column 'tags' has 1 label with the separator '|': at least two"),
        (
            ["file,tags", "0,a|b", "0,a"],
            SEPARATED,
            "line 3: 0 has other labels in line 2: give each picture one row with",
        ),
        (
            tags(),
            {"label": "tag", "separator": "|"},
            "no column 'tag'; did you mean tags? set data.label to one of its columns",
        ),
        (
            [*numbers(9), '9,"12,5",1'],
            {"numbers": ["x"]},
            "line 11: x is '12,5': write a number such as 12.5",
        ),
        ([*numbers(9), "9,1,"], {"numbers": ["x", "y"]}, "line 11: y is empty: write a number such as 12.5"),
        ([*numbers(9), "9,NaN,1"], {"numbers": ["x"]}, "line 11: x is 'NaN': write a number such as 12.5"),
        ([*numbers(9), "9,1,-1e39"], {"numbers": ["x", "y"]}, "line 11: y is '-1e39': write a number such as 12.5"),
        (
            [*numbers(9), "8,1,2"],
            {"numbers": ["x"]},
            "line 11: 8 has other numbers in line 10: give each picture one row",
        ),
        (
            ["file,x", *(f'{i},"{i},5"' for i in range(9))],
            {"numbers": ["x"], "skip_bad": True},
            "t.csv line 2: x is '0,5': write a number such as 12.5, line 3: x",
        ),
        (numbers(7), {"numbers": ["x"]}, "has numbers of 7 pictures: at least 8 are needed"),
        ([f"{x},7" for x in numbers()], {"numbers": ["7"]}, "all numbers in column '7' are 7: set data.numbers to col"),
        (numbers(), {"numbers": []}, 'data.numbers is missing: give --data.numbers "[NAME, ...]", names of columns of'),
        (numbers(), {"numbers": ["z"]}, "no column 'z': set data.numbers to one of its columns"),
        (numbers(), {"numbers": ["x"], "test_share": 0.0}, "has no picture to test on: set data.test_share above 0"),
        (tags(), {**SEPARATED, "class_names": ["a", "b"]}, "has a label 'c', which is none of a, b"),
    ],
)
def test_tables_that_cannot_be_used(pictures, lines, options, said):
    with pytest.raises(DataError) as caught:
        data_of(pictures, lines, **options).setup()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [SEPARATED, {"labels": ["a", "b"]}, {"numbers": ["x"]}])
def test_targets_need_a_table(pictures, options):
    with pytest.raises(DataError, match=r"data.table is missing: give --data.table FILE, a table with columns of pict"):
        ImageFolder(str(pictures), **options)


def test_rows_that_cannot_be_used_are_left_out_if_asked(pictures, capfd):
    data = data_of(pictures, [*numbers(25), "25,nan,1", "26,,2"], numbers=["x"], skip_bad=True)
    assert len(data.parts) == 25
    assert "left out 2 rows: line 27: x is 'nan': write" in capfd.readouterr().err


def test_where_all_rows_are_bad_none_can_be_left_out(pictures):
    said = error_of(pictures, ["file,x", "0,a", "1,b"], numbers=["x"])
    assert said.endswith("line 3: x is 'b': write a number such as 12.5: mend such rows")
    assert "set data.picture to the column" in error_of(pictures, ["file,x", "a,1", "b,2"], numbers=["x"])


def test_a_picture_may_stand_twice_with_the_same_labels(pictures):
    data = data_of(pictures, [*tags(), "2.png,a", "6.png,b | a"], **SEPARATED)
    assert len(data.parts) == 30


# Notes


def test_classes_that_look_like_several_labels_are_said(pictures, capfd):
    lines = ["file,tags", *(f"{i},{['a', 'b', 'c', 'a|b', 'b|c'][i % 5]}" for i in range(30))]
    data_of(pictures, lines, label="tags").prepare_data()
    said = "classes in column 'tags' look like several labels, such as 'a|b': if so, give --data.separator '|'\n"
    assert said in capfd.readouterr().err
    data_of(pictures, lines, **SEPARATED).prepare_data()
    assert "look like" not in capfd.readouterr().err
    data_of(pictures, [*lines[:-1], "29,c;a"], label="tags", separator=";").prepare_data()
    assert "labels in column 'tags' look like several labels, such as 'a|b'" in capfd.readouterr().err
    said = error_of(pictures, lines, label="tags", separator=";")
    assert "no value in column 'tags' has the separator ';', and some look like several labels: give --data" in said


@pytest.mark.parametrize(
    "values",
    [
        "Smith, John;Doe, Jane;Roe, Richard",
        "good;bad",
        "a|b;c|d",
        "Food, Beverage;Food;Retail",
        "Food, Bar;Food;Bar;Doe, Jane;Roe, Max",
        "1,5;2,5;3,5",
    ],
)
def test_classes_with_separators_of_their_own_are_no_labels(pictures, values, capfd):
    lines = [f'{i},"{values.split(";")[i % len(values.split(";"))]}"' for i in range(30)]
    data_of(pictures, ["file,label", *lines]).prepare_data()
    assert "look like" not in capfd.readouterr().err


def test_different_classes_may_be_several_labels(pictures):
    said = error_of(pictures, ["file,label", "0,a|b", "1,b|c", "2,a|c"])
    assert "set data.label to the column of the classes, or data.separator to '|' if its values are several" in said


def test_a_label_of_every_picture_is_said(pictures, capfd):
    lines = [f"{line}|z" if i else line for i, line in enumerate(tags())]
    data_of(pictures, lines, **SEPARATED).prepare_data()
    assert "every picture has the label 'z': a network that always predicts it is right" in capfd.readouterr().err


def test_a_label_that_no_picture_has_is_said(pictures, capfd):
    lines = [f"{line},{'none' if i == 0 else '0'}" for i, line in enumerate(marks())]
    data = data_of(pictures, lines, labels=["a", "none", "b"])
    data.prepare_data()
    data.setup("fit")
    assert data.train_set.labels[:, 1].sum() == 0
    said = "labels that no training picture has, so that a network cannot learn them: none\n"
    assert said in capfd.readouterr().err


def test_labels_without_training_or_test_pictures_are_said(pictures, capfd):
    lines = [*tags(28), "28.png,rare", "29.png,rare"]
    data = data_of(pictures, lines, **SEPARATED)
    data.prepare_data()
    assert "labels that have too few pictures to be tested: rare (2)\n" in capfd.readouterr().err
    (split := pictures.parent / "split.csv").write_text(
        "file,part\n"
        + "".join(f"{path},{'test' if path == '29.png' else 'train'}\n" for path in data.parts if path != "28.png")
    )
    data_of(pictures, lines, **SEPARATED, split=str(split)).prepare_data()
    assert "labels that no training picture has, so that a network cannot learn them: rare" in capfd.readouterr().err


def test_augmentations_that_move_are_said_for_numbers(pictures, capfd):
    options = {"augmentations": ["color", "shift", "flip"]}
    data_of(pictures, numbers(), numbers=["x"], augmentations=["erase"]).prepare_data()
    data_of(pictures, tags(), **SEPARATED, **options).prepare_data()
    assert "augmentations" not in capfd.readouterr().err
    data_of(pictures, numbers(), numbers=["x"], **options).prepare_data()
    said = "data.augmentations has shift, flip, which may change what the numbers measure: then leave it out"
    assert said in capfd.readouterr().err


def test_of_good_numbers_nothing_is_said(pictures, capfd):
    data_of(pictures, numbers(), numbers=["x"]).prepare_data()
    assert capfd.readouterr().err == ""


def test_pictures_with_numbers_that_seem_to_belong_together(pictures, capfd):
    for path in [*pictures.iterdir()]:
        path.rename(pictures / f"p{int(path.stem) // 3}_{int(path.stem) % 3}.png")
    lines = ["file,x", *(f"p{i // 3}_{i % 3},{i}" for i in range(30))]
    data_of(pictures, lines, numbers=["x"]).prepare_data()
    assert "pictures seem to belong together, such as p0_0.png, p0_2.png" in capfd.readouterr().err


# Splits


def several(count: int = 4000) -> list[tuple[str, ...]]:
    """Return labels of samples: ten, from one of two samples to one of two hundred, independent of each other."""
    draws, shares = random.Random(0), [0.5 * 0.6**k for k in range(10)]
    return [tuple(f"l{k}" for k, share in enumerate(shares) if draws.random() < share) for _ in range(count)]


def test_every_part_has_the_same_share_of_every_label():
    labels, separated = several(), target(separator="|")
    keys = [str(i) for i in range(len(labels))]
    parts = separated.split(keys, labels, None, SHARES)
    totals = separated.counts(labels)
    for part, share in (("train", 0.7), *SHARES.items()):
        of_part = [label for label, of in zip(labels, parts, strict=True) if of == part]
        assert len(of_part) == pytest.approx(share * len(labels), abs=10)
        counts = separated.counts(of_part)
        for name, total in totals.items():
            assert abs(counts[name] - share * total) < 2 + 0.015 * total
        for size, total in Counter(map(len, labels)).items():  # none, one, two ...
            assert abs(sum(len(x) == size for x in of_part) - share * total) < 4 + 0.03 * total


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_a_split_depends_on_no_order(kind, groups):
    labels = several(300) if kind == "labels" else [(float(i),) for i in range(300)]
    of = target(separator="|") if kind == "labels" else target(numbers=["x"])
    rows = [(str(i), label, f"g{i % 40}") for i, label in enumerate(labels)]
    mixed = random.Random(1).sample(rows, len(rows))
    first, second = (
        dict(zip(keys, of.split(keys, labels, list(members) if groups else None, SHARES), strict=True))
        for keys, labels, members in (zip(*rows, strict=True), zip(*mixed, strict=True))
    )
    assert first == second
    assert set(first.values()) == {"train", "val", "test"}
    if groups:
        parts = {}
        for key, _, group in rows:
            assert parts.setdefault(group, first[key]) == first[key]


def test_with_groups_every_label_is_trained_and_tested():
    labels, separated = several(), target(separator="|")
    groups = [f"patient {i // 8}" for i in range(len(labels))]
    parts = separated.split([], labels, groups, SHARES)
    totals = separated.counts(labels)
    for part, share in (("train", 0.7), *SHARES.items()):
        counts = separated.counts(label for label, of in zip(labels, parts, strict=True) if of == part)
        assert all(abs(counts[name] - share * total) < 3 + 0.1 * total for name, total in totals.items())


def test_pictures_of_a_group_with_several_labels_stay_together(pictures, capfd):
    lines = [f"{line},{'who' if i == 0 else f'p{i % 7}'}" for i, line in enumerate(tags())]
    data = data_of(pictures, lines, **SEPARATED, group="who")
    data.prepare_data()
    parts = {}
    for path, part in data.parts.items():
        assert parts.setdefault((int(Path(path).stem) + 1) % 7, part) == part
    assert "7 groups: " in capfd.readouterr().err
    data_of(pictures, [line.replace("who", "patient") for line in lines], **SEPARATED).prepare_data()
    assert "give --data.group patient" in capfd.readouterr().err


def test_a_split_is_kept(pictures, tmp_path):
    data = data_of(pictures, tags(), **SEPARATED)
    split = data.write_split(tmp_path / "run")
    assert data_of(pictures, tags(), **SEPARATED, split=str(split), test_share=0.4).parts == data.parts


def test_a_table_without_any_label_is_refused(pictures):
    lines = ["file,a,b", *(f"{i}.png,0,0" for i in range(30))]
    said = error_of(pictures, lines, labels=["a", "b"])
    assert "no picture has a label: set data.labels to columns in which some have a 1" in said


def test_empty_values_may_be_no_label(pictures):
    """Without a separator they are errors, and the line says that the others look like several labels."""
    said = error_of(pictures, tags(), label="tags")
    assert "look like several labels, such as 'a|b|c': if so, give --data.separator '|'; " in said
    assert "line 3: tags is empty" in said.partition("; ")[2]


def test_pictures_are_alike_where_their_numbers_are(pictures, capfd):
    """Thirty pictures that are nearly the same are copies only if their numbers are the same."""
    base = np.random.default_rng(0).integers(0, 200, (8, 8))
    for place in range(30):
        Image.fromarray((base + place).astype(np.uint8)).save(pictures / f"{place}.png")
    for numbers_of, said in ((lambda place: place, False), (lambda place: place // 29, True)):
        lines = ["file,x", *(f"{place}.png,{numbers_of(place)}" for place in range(30))]
        data_of(pictures, lines, numbers=["x"]).setup()
        assert ("near copies" in capfd.readouterr().err) == said
