"""The parts of the slow tests: each test is in one of them, and they take equally long."""

import argparse
import re
from pathlib import Path

import pytest
from parts import UNKNOWN, function_of, measured, parts_of, read_part, write_measured

TESTS = [f"a.py::quick[{i}]" for i in range(40)] + ["a.py::long", "b.py::new"] + [f"b.py::middle[{i}]" for i in "xyz"]
SECONDS = {"a.py::quick": 0.5, "a.py::long": 10.0, "b.py::middle": 4.0}


def test_parts_take_equally_long_and_keep_neighbors_together():
    parts = parts_of(TESTS, 3, SECONDS)
    assert parts == sorted(parts)
    assert set(parts) == {1, 2, 3}
    times = [0.0] * 3
    for test, part in zip(TESTS, parts, strict=True):
        times[part - 1] += SECONDS.get(function_of(test), UNKNOWN)
    assert sum(times) == 45
    assert max(times) - min(times) <= 10  # the longest test


def test_each_test_has_one_part_whatever_their_number():
    for count in (1, 2, 10, 200):
        parts = parts_of(TESTS, count, SECONDS)
        assert len(parts) == len(TESTS)
        assert set(parts) <= set(range(1, count + 1))
    assert parts_of([], 3, SECONDS) == []


def test_the_table_has_the_mean_of_the_cases_and_keeps_other_rows(tmp_path):
    path = tmp_path / "seconds.csv"
    write_measured({"a.py::f[1]": 1.0, "a.py::f[2]": 3.0, "a.py::g": 0.25}, path)
    write_measured({"a.py::g": 7.0, "b.py::h[a[0]]": 1.0}, path)
    assert measured(path) == {"a.py::f": 2.0, "a.py::g": 7.0, "b.py::h": 1.0}


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/³", "1/3/5", ""])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        read_part(text)


def test_parts_are_read():
    assert read_part("3/10") == (3, 10)


def test_the_table_names_tests_that_exist():
    root = Path(__file__).parents[1]
    for test in measured():
        file, *_, name = test.split("::")
        assert re.search(rf"def {name}\(", (root / file).read_text(encoding="utf-8")), test
