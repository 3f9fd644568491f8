"""benchmarks/sizes.py draws cells, gives no number to a way that is wrong, and sums up what it measured."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from torchcaps.bench import Rates
from torchcaps.bench.ways import by_samples, prepare
from torchcaps.ops.backend import NATIVE_MISSING

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "sizes.py"
KINDS = ["dynamic", "dynamic over children", "EM", "VB", "Heinsen", "inverted attention"]

needs_native = pytest.mark.skipif(NATIVE_MISSING is not None, reason=f"needs the native kernels: {NATIVE_MISSING}")


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("sizes", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sizes", module)  # its dataclasses look for it
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "measure_rates", lambda *arguments: Rates(matrix=1e12, copy=1e12))
    monkeypatch.setattr(module, "TURN", 0)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.fixture
def tiny(script, monkeypatch):
    """Two cells instead of drawn ones."""
    cells = [script.Cell("dynamic", 1, 8, 3, 5, 4, 2), script.Cell("EM", 2, 3, 4, 5, 4, 2)]
    monkeypatch.setattr(script, "draw", lambda *arguments: iter(cells))
    return script


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_code_and_the_layer_agree_in_float64(script, kind, rows):
    assert list(script.KINDS) == KINDS
    case = script.Cell(kind, rows, 4, 5, 7, 3, 2).build().to("cpu", torch.float64)
    expected = prepare("reference", case, True)()
    assert_close(prepare("baseline", case, True)(), expected)
    assert_close(by_samples(case), expected)  # for cells whose votes do not fit


@pytest.mark.parametrize("small", [False, True])
def test_drawn_cells(script, small):
    cells = list(script.draw(3, 50, small, 1e7))
    assert cells == list(script.draw(3, 50, small, 1e7)) != list(script.draw(4, 50, small, 1e7))
    assert len(set(cells)) == 50
    assert {cell.routing for cell in cells} == set(KINDS)
    for cell in cells:
        assert 1 <= cell.rows <= 8
        assert 2 <= min(cell.depth, cell.width) <= max(cell.depth, cell.width) <= 64 // cell.rows
        assert 2 <= cell.parents <= 100
        assert 32 <= cell.children <= 2048
        assert 1 <= cell.batch <= 128
        assert cell.bytes == 4 * cell.batch * cell.children * cell.parents * cell.rows * cell.width <= 1e7
        assert not small or 1000 <= cell.votes <= 100_000


@needs_native
def test_two_cells(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny, "COUNTED", 0)
    tiny.main(["--rounds", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "dynamic, 8 to 3, 5 children, 4 parents, batch 2\n" in printed
    assert "EM, 2x3 to 2x4, 5 children, 4 parents, batch 2\n" in printed
    for line in (
        "forward, depth 8 or more: 1 cell,",
        "forward, depth below 8: 1 cell,",
        "native is slower than plain in",
    ):
        assert line in printed
    values = json.loads((tmp_path / "sizes.json").read_text())
    assert {"device", "native", "threads", "torch", "commit", "options"} < values.keys()
    assert [row["pass"] for row in values["rows"]] == 2 * ["forward", "forward+backward"]
    for row in values["rows"]:
        assert row["notes"] == {}
        assert row["seconds"].keys() == {"native", "auto", "reference", "plain"}
        assert all(seconds > 0 for seconds in row["seconds"].values())
    assert (tmp_path / "sizes.png").stat().st_size > 1000


@needs_native
def test_short_passes_are_not_compared_with_the_bound(tiny, capsys, monkeypatch):
    monkeypatch.setattr(tiny, "COUNTED", 1000)
    tiny.main(["--rounds", "1"])
    assert "median" not in capsys.readouterr().out


@needs_native
def test_a_way_that_is_wrong_or_does_not_fit_has_no_number(tiny, capsys, monkeypatch):
    right = tiny.KINDS["dynamic"]

    def wrong(*arguments):
        (poses,) = right.plain(*arguments)
        return (poses * 1.001,)

    monkeypatch.setitem(tiny.KINDS, "dynamic", right._replace(plain=wrong))
    (cell, _) = tiny.draw()
    rows = tiny.layer_rows(cell, False, 1, time.perf_counter)
    for row in rows:
        assert "plain" not in row.seconds
        assert "poses is off by 1.0e-03" in row.notes["plain"]
        assert row.seconds.keys() == {"native", "auto", "reference"}
    monkeypatch.setattr(tiny, "free_bytes", lambda device: 0)
    for row in tiny.layer_rows(cell, False, 1, time.perf_counter):
        assert row.seconds.keys() == {"native", "auto"}
        assert row.notes.keys() == {"reference", "plain"}
        assert row.notes["reference"].startswith("not run")


@needs_native
def test_a_head(script):
    (row,) = script.head_rows("VB", 1, time.perf_counter, batch=2)
    assert row.seconds.keys() == {"native", "auto", "reference"}
    assert row.bound is None
    assert row.times_bound is None
