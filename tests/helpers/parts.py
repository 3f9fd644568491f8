"""The tests in parts of about equal time, by a table of measured seconds: `make test-slow PART=3/10`."""

import argparse
import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

TABLE = Path(__file__).with_name("seconds.csv")
UNKNOWN = 3.0  # seconds of a test that is not in the table


def function_of(test: str) -> str:
    """Return the id of a test without its case."""
    return test.partition("[")[0]


def measured(path: Path = TABLE) -> dict[str, float]:
    """Return the seconds that one case of each test function takes on one core."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}


def write_measured(seconds: Mapping[str, float], path: Path = TABLE) -> None:
    """Write the means of test functions, given the seconds of tests by their ids. Other rows stay as they are."""
    rows = measured(path) if path.exists() else {}
    cases = Counter(map(function_of, seconds))
    totals: Counter[str] = Counter()
    for test, taken in seconds.items():
        totals[function_of(test)] += taken
    rows |= {test: totals[test] / cases[test] for test in cases}
    lines = (f"{test},{rows[test]:.2g}\n" for test in sorted(rows))
    path.write_text("test,seconds\n" + "".join(lines), encoding="utf-8", newline="\n")


def read_part(text: str) -> tuple[int, int]:
    """Return the part and the number of parts of a text such as "3/10".

    Raises:
        argparse.ArgumentTypeError: it is not a part.
    """
    numbers = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
    part, parts = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"a part is such as 3/10, from 1/10 to 10/10, got {text!r}")
    return part, parts


def parts_of(tests: Sequence[str], parts: int, seconds: Mapping[str, float]) -> list[int]:
    """Return the part of each test, from 1. Neighbors stay together: they share what they prepare."""
    times = [seconds.get(function_of(test), UNKNOWN) for test in tests]
    ends = list(accumulate(times))
    whole = ends[-1] if ends else 0.0
    return [1 + min(int(parts * (end - time / 2) / whole), parts - 1) for end, time in zip(ends, times, strict=True)]
