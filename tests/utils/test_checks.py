"""Parts of messages that all modules share."""

import re
from pathlib import Path

import pytest

from torchcaps.utils.checks import counted, percent

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 pictures"), (1, "1 picture"), (2, "2 pictures"), (1234567, "1,234,567 pictures")]
)
def test_a_number_of_things_in_words(count, words):
    assert counted(count, "picture") == words


def test_a_plural_without_an_s_is_given():
    assert [counted(count, "class", "classes") for count in (1, 3)] == ["1 class", "3 classes"]


def test_a_share_in_words():
    assert [percent(0.875), percent(0.875, 1), percent(1.0, 0), percent(0.0)] == [
        "87.50 %",
        "87.5 %",
        "100 %",
        "0.00 %",
    ]


@pytest.mark.parametrize("folder", ["torchcaps", "docs", "examples", "benchmarks"])
def test_percent_has_a_space_everywhere(folder):
    """In texts, and in what code prints."""
    written = re.compile(r":[^{}\s]*%\}|\d(?<!u00a0)%(?=[\s).,;:|]|$)")
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".js", ".yaml")]
    lines = [(path, line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    assert not [f"{path.relative_to(ROOT)}: {line}" for path, line in lines if written.search(line)]
