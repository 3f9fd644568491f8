"""benchmarks/first_device.py, as far as it runs without a device."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchcaps import cli
from torchcaps.ops import backend

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "first_device.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the script removes it
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("first_device", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def device(script, monkeypatch):
    """The script on a machine where it can run, with two steps that run a line of Python each."""
    steps = {name: [sys.executable, "-I", "-c", "print('3 passed in 1s')"] for name in ("first", "second")}
    monkeypatch.setattr(script, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(script, "all_steps", lambda out: steps)
    return steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device(tmp_path):
    command = [sys.executable, FILE, "--out", tmp_path / "new"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("first_device: PyTorch finds no CUDA device")
    assert not (tmp_path / "new").exists()


def test_all_passed(script, device, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(backend, "CHECKED", frozenset({(8, 0)}))
    assert script.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("= frozenset({(8, 0), (9, 0)})")
    assert (tmp_path / "second.log").read_text() == "3 passed in 1s\n"
    assert script.main(["--out", str(tmp_path), "--steps", "first"]) == 0
    assert "CHECKED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('FAILED a.py::b'); print('1 failed'); exit(1)", "status 1: 1 failed"),
        ("print('2 passed, 1 skipped in 3s')", "not all tests ran: 2 passed, 1 skipped in 3s"),
        ("print('4 deselected')", "not all tests ran: 4 deselected"),
        ("exit(5)", "status 5: no output"),
    ],
)
def test_a_failure(script, device, tmp_path, capsys, code, why):
    device["second"][-1] = code
    assert script.main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"second: failed: {why}" in printed
    assert "CHECKED" not in printed


def test_rows_of_the_benchmark_that_have_no_numbers(script, tmp_path):
    row = {"way": "triton", "layer": "x", "seconds": None, "note": "wrong"}
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [row]}))
    problem = script.problem_of("bench", [sys.executable, "-c", "", "bench"], tmp_path)
    assert problem.startswith("x: wrong; ")
    assert problem.endswith(": not measured")


def test_the_commands(script, tmp_path):
    """The tests are there, and `torchcaps bench` takes the arguments."""
    for name, command in script.all_steps(tmp_path).items():
        if name == "bench":
            assert cli.parser().parse_args(command[3:]).device == "cuda"
        else:
            (file,) = [argument for argument in command if argument.startswith("tests/")]
            assert (ROOT / file).is_file()
