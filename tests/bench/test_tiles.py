"""benchmarks/tiles.py, as far as it runs without a device."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from torchcaps.ops import backend
from torchcaps.ops.triton import problem

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "tiles.py"
SPEC = importlib.util.spec_from_file_location("tiles", FILE)
tiles = importlib.util.module_from_spec(SPEC)
sys.modules["tiles"] = tiles
SPEC.loader.exec_module(tiles)

SETTINGS = {tiles.AS_NOW: {}, "PROGRAMS 2": {"PROGRAMS": 2}, "TILE 3": {"TILE": 3}}
RATES = tiles.Rates(1e9, 1e9)


def test_a_layer_in_tiny_form(tmp_path):
    command = [sys.executable, FILE, "--smoke", "--rounds", "1", "--layers", "32-to-32", "--out", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "tiles.json").read_text())["rows"]
    assert {(row["pass_"], row["settings"]) for row in rows} >= {
        (pass_, settings)
        for pass_ in ("forward", "forward+backward")
        for settings in ("as now", "ROW_TILE 4", "PROGRAMS 2")
    }
    assert all(row["seconds"] > 0 and row["seconds_as_now"] > 0 and not row["note"] for row in rows)
    assert len((tmp_path / "table.txt").read_text().splitlines()) == 1 + len(rows)


def measured(monkeypatch, run) -> dict[str, tiles.Row]:
    monkeypatch.setattr(tiles, "passes", lambda *arguments: [("forward", run, None)])
    return {row.settings: row for row in tiles.measure("head", "float32", True, SETTINGS, RATES, 1)}


def test_settings_with_other_values_get_no_number(monkeypatch):
    rows = measured(monkeypatch, lambda: {"poses": torch.tensor([1.0, problem.PROGRAMS])})
    assert rows[tiles.AS_NOW].seconds > 0
    assert rows["TILE 3"].seconds > 0
    assert rows["PROGRAMS 2"].seconds is None
    assert rows["PROGRAMS 2"].note.startswith("poses is off by ")
    assert "poses is off by" in tiles.table(list(rows.values()))


def test_settings_that_fail_leave_the_others(monkeypatch):
    def run() -> dict[str, torch.Tensor]:
        if problem.TILE == 3:
            raise RuntimeError("out of\nregisters")
        return {"poses": torch.ones(2)}

    rows = measured(monkeypatch, run)
    assert rows["TILE 3"].note == "RuntimeError: out of registers"
    assert rows["TILE 3"].seconds is None
    assert rows["PROGRAMS 2"].seconds > 0


def test_nothing_is_timed_without_values_to_compare_with(monkeypatch):
    def run() -> dict[str, torch.Tensor]:
        if problem.PROGRAMS != 2:
            raise RuntimeError("no")
        return {"poses": torch.ones(2)}

    assert not any(row.seconds for row in measured(monkeypatch, run).values())


def test_settings_are_put_back():
    before = problem.TILE, backend.MOST_WEIGHTS
    with tiles.changed({"TILE": 3}):
        assert problem.TILE == 3
        assert backend.MOST_WEIGHTS >= 1024  # poses of 32 are measured, too
    assert before == (problem.TILE, backend.MOST_WEIGHTS)


def test_the_best_of_each():
    def row(changed: dict[str, int], seconds: float | None, pass_: str = "forward+backward") -> tiles.Row:
        name = "".join(f"{name} {value}" for name, value in changed.items()) or tiles.AS_NOW
        return tiles.Row("head", "float32", pass_, name, changed, None, seconds)

    rows = [
        row({}, 3.0),
        row({"TILE": 3}, 2.0),
        row({"TILE": 5}, 1.0),
        row({"PROGRAMS": 2}, 4.0),  # slower than as it is
        row({"PER_WARP": 7}, 2.5),
        row({"ROW_TILE": 9}, None),
        row({"ROW_TILE": 9}, 0.1, "forward"),  # the shorter pass
    ]
    assert tiles.best_of_each(rows) == {"TILE": 5, "PER_WARP": 7}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_to_do(capsys):
    assert tiles.main([]) == 2
    assert capsys.readouterr().err == (
        "tiles: PyTorch finds no CUDA device: run it on a machine with an NVIDIA GPU, or with --smoke\n"
    )
