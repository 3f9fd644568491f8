"""Splits of own data: shares of every class, small classes, and independence of the order."""

from collections import Counter

import pytest

from torchcaps.data.splits import split_by_class


def samples(counts: dict[str, int]) -> tuple[list[str], list[str]]:
    classes = [name for name, count in counts.items() for _ in range(count)]
    return [f"{name}/{i}" for i, name in enumerate(classes)], classes


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, (1, 0, 0)),
        (2, (2, 0, 0)),
        (3, (1, 1, 1)),
        (4, (2, 1, 1)),
        (20, (14, 3, 3)),
        (100, (70, 15, 15)),
    ],
)
def test_every_class_has_its_shares(count, expected):
    keys, classes = samples({"a": count, "b": 40})
    parts = split_by_class(keys, classes, {"val": 0.15, "test": 0.15})
    found = Counter(part for part, name in zip(parts, classes, strict=True) if name == "a")
    assert (found["train"], found["val"], found["test"]) == expected


def test_no_share_is_no_part():
    keys, classes = samples({"a": 10})
    assert Counter(split_by_class(keys, classes, {"val": 0.0, "test": 0.2})) == {"train": 8, "test": 2}
    assert set(split_by_class(keys, classes, {})) == {"train"}
