"""The example of a search is that of the documentation, and runs."""

import re
import shutil
import textwrap
from pathlib import Path

import pytest
from commands import call
from searches import table

pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "search.yaml"


def test_the_documentation_shows_the_example():
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"\n\n(    extends: quickstart\n(?:    .*\n)+)", page)
    comment, _, example = EXAMPLE.read_text(encoding="utf-8").partition("\n")
    assert comment.startswith("# Ten short trainings")
    assert textwrap.dedent(shown) == example


def test_the_example_runs(capfd):
    shutil.copy(EXAMPLE, "search.yaml")
    assert call("search", "search.yaml", "--trials", "1", "--trainer.limit_train_batches", "2") == 0
    (row,) = table(Path("runs/search/search_0"))
    assert (row["state"], row["epochs"]) == ("complete", "3")


@pytest.mark.slow
def test_the_example_finds_values_that_learn(capfd):
    shutil.copy(EXAMPLE, "search.yaml")
    assert call("search", "search.yaml") == 0
    rows = table(Path("runs/search/search_0"))
    assert len(rows) == 10
    assert max(float(row["val/accuracy"]) for row in rows if row["state"] == "complete") > 0.96
