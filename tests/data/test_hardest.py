"""The hardest classes in a case worked out by hand; errors of one line for damaged files of predictions."""

from pathlib import Path

import pytest

from torchcaps.data import DataError, hardest_classes
from torchcaps.data.hardest import class_list, read_predictions
from torchcaps.data.imagenet import read_class_list

# Correct: cat 1 of 3, dog 2 of 2, eel 1 of 3, fox 0 of 1, gnu 2 of 4, hen 1 of 2. No image is an emu.
LABELS = [
    *("cat", "dog", "eel", "fox", "gnu", "hen"),
    *("cat", "dog", "eel", "gnu", "hen"),
    *("cat", "eel", "gnu", "gnu"),
]
TAKEN = [
    *("cat", "dog", "emu", "cat", "gnu", "hen"),
    *("eel", "dog", "eel", "cat", "fox"),
    *("emu", "fox", "gnu", "hen"),
]


def test_by_hand() -> None:
    found = hardest_classes(LABELS, TAKEN, 6)
    assert [(each.name, each.correct, each.images) for each in found] == [
        ("fox", 0, 1),
        ("cat", 1, 3),
        ("eel", 1, 3),
        ("gnu", 2, 4),
        ("hen", 1, 2),
        ("dog", 2, 2),
    ]
    assert [each.accuracy for each in found] == [0, 1 / 3, 1 / 3, 0.5, 0.5, 1]
    for count in range(1, 6):
        assert hardest_classes(LABELS, TAKEN, count) == found[:count]
    pairs = list(zip(LABELS, TAKEN, strict=True))[::-1]  # the order does not matter
    assert hardest_classes(*zip(*pairs, strict=True), 6) == found


def test_equal_accuracies_are_ordered_by_name() -> None:
    # 1 of 3 and 2 of 6 are equal, without rounding.
    labels = ["b"] * 3 + ["a"] * 6 + ["c"] * 3
    taken = ["b", "", "", "a", "a", "", "", "", "", "c", "", ""]
    assert [each.name for each in hardest_classes(labels, taken, 3)] == ["a", "b", "c"]


def test_the_list_is_a_class_list(tmp_path: Path) -> None:
    text = class_list(LABELS, TAKEN, 3)
    # 2 of 7 images are correct.
    assert text == (
        "# the 3 hardest of 6 classes: top-1 accuracy 0.00 to 0.33 (0.29 over all of their images)\nfox\ncat\neel\n"
    )
    (tmp_path / "list.txt").write_text(text)
    assert read_class_list(tmp_path / "list.txt") == ["fox", "cat", "eel"]


def test_so_many_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"classes .* 7\b"):
        hardest_classes(LABELS, TAKEN, 7)
    with pytest.raises(ValueError, match="shorter"):
        hardest_classes(LABELS, TAKEN[:-1], 1)


@pytest.mark.parametrize(
    "content",
    [
        b'label,prediction\ncat,dog\n3,"a, b"\n',
        b'\xef\xbb\xbflabel,prediction\r\ncat,dog\r\n3,"a, b"\r\n',
        b'image,prediction,score,label\n1.png,dog,0.5,cat\n\n2.png,"a, b",0.1,3\n',
    ],
)
def test_files_of_anybody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert read_predictions(tmp_path / "a.csv") == (["cat", "3"], ["dog", "a, b"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no column label: expected a first line with label and prediction, separated by a comma"),
        (b"label;prediction\na;b\n", "has no column label: expected a first line .*"),
        (b"label,predicted\na,b\n", "has no column prediction: expected a first line .*"),
        (b"label,prediction\n", "has no predictions: expected a line for each image"),
        (b"label,prediction\na,b\na\n", "line 3 has no label or no prediction"),
        (b"label,prediction\na,b\n,b\n", "line 3 has no label or no prediction"),
        (b"label,prediction\n\xe9t\xe9,b\n", "cannot be read: .*: expected a CSV file in UTF-8"),
        ("label,prediction\na,b\n".encode("utf-16"), "cannot be read: .*: expected a CSV file in UTF-8"),
        (b"label,prediction\n" + b"a" * 200_000 + b",b\n", "cannot be read: field larger .*: expected a CSV .*"),
        (None, "cannot be read: .*No such file or directory.*: expected a CSV file in UTF-8"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "a.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}: {problem}\Z"):
        read_predictions(path)


@pytest.mark.parametrize("name", ["a#b", " a", "a ", "a\nb"])
def test_names_that_a_list_cannot_have(name: str) -> None:
    with pytest.raises(ValueError, match="a class list cannot have the name"):
        class_list([name, "c"], ["c", "c"], 1)
