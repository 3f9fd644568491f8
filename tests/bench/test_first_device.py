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
ABOUT = dict.fromkeys(("device", "driver", "cuda", "torch", "triton", "python"), "1")
ABOUT |= {"capability": [9, 0], "commit": "0123456"}


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
    steps = {name: python(script, "print('3 passed in 1s')") for name in ("first", "second")}
    monkeypatch.setattr(script, "why_not", lambda: None)
    monkeypatch.setattr(script, "describe", lambda commit: ABOUT | {"commit": commit or ABOUT["commit"]})
    monkeypatch.setattr(script, "all_steps", lambda out: steps)
    return steps


def python(script, code):
    return script.Step([sys.executable, "-I", "-c", code], script.judge_tests)


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
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["commit"] == ABOUT["commit"]
    assert report["steps"]["first"]["summary"] == "3 passed in 1s"
    assert (tmp_path / "second.log").read_text() == "3 passed in 1s\n"


def test_what_passed_is_not_run_again(script, device, tmp_path, capsys):
    assert script.main(["--out", str(tmp_path), "--steps", "first"]) == 1
    assert "not passed: second" in capsys.readouterr().out
    assert script.main(["--out", str(tmp_path)]) == 0
    assert "first: passed before" in capsys.readouterr().out
    for commit in ("7654321", "unknown", "unknown"):
        assert script.main(["--out", str(tmp_path), "--commit", commit]) == 0
        assert "passed before" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('FAILED a.py::b'); print('1 failed'); exit(1)", "status 1; 1 failed; FAILED a.py::b"),
        ("print('2 passed, 1 skipped in 3s')", "tests were skipped: 2 passed, 1 skipped in 3s"),
        ("print('4 deselected')", "no test passed: 4 deselected"),
        ("exit(5)", "status 5; no output"),
        ("import time; time.sleep(60)", "not done after 0.01 minutes"),
    ],
)
def test_a_failure(script, device, tmp_path, capsys, code, why):
    device["second"] = python(script, code)
    assert script.main(["--out", str(tmp_path), "--minutes", "0.01" if "sleep" in code else "1"]) == 1
    printed = capsys.readouterr().out
    assert f"second: failed: {why}" in printed
    assert "CHECKED" not in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["passed"]
    assert report["steps"]["second"]["why"] == why


def test_the_commands(script, tmp_path):
    """The tests are there, and `torchcaps bench` takes the arguments."""
    for name, step in script.all_steps(tmp_path).items():
        if name == "bench":
            assert cli.parser().parse_args(step.command[3:]).device == "cuda"
        else:
            assert (ROOT / step.command[3]).is_file()
