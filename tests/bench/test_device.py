"""benchmarks/device.py, as far as it runs without a device."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from noise import write_idx_files

from torchcaps import cli
from torchcaps.bench import NETWORKS, WAYS
from torchcaps.bench.layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "device.py"

# Runs the script with stages of a line of Python each, given as JSON in its first argument.
STUBBED = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("device", {str(FILE)!r})
script = importlib.util.module_from_spec(spec)
sys.modules["device"] = script
spec.loader.exec_module(script)
codes = json.loads(sys.argv[1])
script.why_not, script.GRACE = lambda: None, 1
script.open_rows = lambda *arguments: script.Rows([], 0, [])
script.all_stages = lambda *arguments: [
    script.Stage(name, [sys.executable, "-I", "-c", code], 60, script.tests_passed) for name, code in codes.items()
]
sys.exit(script.main(sys.argv[2:]))
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the script removes it
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("device", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "device", module)  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stages(script, monkeypatch):
    """The script on a machine where it can run, with stages that run a line of Python each."""
    stages = {name: stage(script, name, "print('3 passed in 1s')") for name in ("kernels", "layers", "bench")}
    monkeypatch.setattr(script, "why_not", lambda: None)
    monkeypatch.setattr(script, "GRACE", 1)
    monkeypatch.setattr(script, "code_hash", lambda: "code")
    monkeypatch.setattr(script, "all_stages", lambda *arguments: list(stages.values()))
    return stages


def stage(script, name, code, limit=60.0, **options):
    return script.Stage(name, [sys.executable, "-I", "-c", code], limit, script.tests_passed, **options)


def run(script, out, *arguments):
    """Run the script; return its status and the records of the stages that were written."""
    status = script.main(["--out", str(out), "--seconds", "100000", *arguments])
    return status, json.loads((out / "device.json").read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device(tmp_path):
    command = [sys.executable, FILE, "--out", tmp_path / "new"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("device: PyTorch finds no CUDA device")
    assert not (tmp_path / "new").exists()


def test_all_passed(script, stages, monkeypatch, tmp_path, capsys):
    assert run(script, tmp_path, "--stages", "kernels")[0] == 0
    status, records = run(script, tmp_path)
    assert status == 0
    printed = capsys.readouterr().out
    assert "kernels: done before" in printed
    assert (tmp_path / "bench.log").read_text() == "3 passed in 1s\n"
    assert {record["status"] for record in records.values()} == {"done"}
    assert (tmp_path / "table.txt").read_text() in printed


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('FAILED a.py::b'); print('1 failed'); exit(1)", "status 1: 1 failed"),
        ("print('2 passed, 1 skipped in 3s')", "not all tests ran: 2 passed, 1 skipped in 3s"),
        ("print('== 4 deselected ==')", "not all tests ran: 4 deselected"),
        ("exit(5)", "status 5: no output"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL: no output"),
    ],
)
def test_a_failure(script, stages, tmp_path, code, why):
    """The other stages run all the same, and the next call runs it again."""
    stages["layers"] = stage(script, "layers", code)
    status, records = run(script, tmp_path)
    assert status == 1
    assert (records["layers"]["status"], records["layers"]["detail"]) == ("failed", why)
    assert records["bench"]["status"] == "done"
    stages["layers"] = stage(script, "layers", "print('1 passed')")
    status, records = run(script, tmp_path)
    assert (status, records["layers"]["status"]) == (0, "done")


def test_a_stage_that_hangs_is_stopped_with_what_it_has_started(script, stages, tmp_path):
    """It does not hear SIGTERM. Its log is kept, and a second call goes on with it."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    code = f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
    code += "print(child.pid, 'of one', flush=True); time.sleep(600)"
    stages["layers"] = stage(script, "layers", code, limit=2)
    status, records = run(script, tmp_path)
    assert status == 1
    assert records["layers"]["status"] == "cut"
    assert records["layers"]["detail"].startswith("stopped after 2 s: ")
    assert records["bench"]["status"] == "done"
    (pid,) = [line.split()[0] for line in (tmp_path / "layers.log").read_text().splitlines() if "of one" in line]
    for _ in range(100):  # the process that reaps it may be slow
        if not _runs(int(pid)):
            break
        time.sleep(0.1)
    assert not _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_starts_if_a_sensible_part_of_its_limit_is_left(script, stages, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "BEGAN", time.monotonic())
    stages["kernels"] = stage(script, "kernels", "print('1 passed')", limit=1000)
    stages["layers"] = stage(script, "layers", "print('1 passed')", limit=1000, least=0.01)
    assert script.main(["--out", str(tmp_path), "--seconds", "100"]) == 1
    printed = capsys.readouterr().out
    assert "kernels: not started" in printed
    assert f"\n{'kernels':<17} open" in printed
    assert f"\n{'layers':<17} done" in printed


@pytest.mark.parametrize("change", ["code", "machine"])
def test_what_was_done_for_other_code_or_on_another_machine_is_open(script, stages, monkeypatch, tmp_path, change):
    run(script, tmp_path, "--stages", "kernels", "layers")
    monkeypatch.setattr(script, "code_hash" if change == "code" else "hardware", lambda: "another")
    status, records = run(script, tmp_path, "--stages", "layers")
    assert status == 0
    assert [name for name, record in records.items() if record[change] == "another"] == ["layers"]
    table = (tmp_path / "table.txt").read_text()
    assert f"\n{'kernels':<17} open" in table
    assert f"\n{'layers':<17} done" in table


def test_several_processes_side_by_side(script, stages, tmp_path):
    """One of three fails: so has the stage. All wrote into one log."""
    code = "import os, sys; name = os.path.join(sys.argv[1], 'first'); print('1 passed'); os.mkdir(name)"
    parallel = stage(script, "layers", code, copies=3)
    parallel.command.append(str(tmp_path))
    stages["layers"] = parallel
    status, records = run(script, tmp_path)
    assert (status, records["layers"]["status"]) == (1, "failed")
    assert (tmp_path / "layers.log").read_text().count("1 passed") == 3


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_whole_files_and_the_table(tmp_path, how):
    """The stage under way counts as cut, the one before it as done, and the same command goes on."""
    codes = {"first": "print('1 passed')", "second": "import time; print('half', flush=True); time.sleep(600)"}
    command = [sys.executable, "-c", STUBBED, json.dumps(codes), "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("second ..."):
            break
    while not (log := tmp_path / "second.log").exists() or "half" not in log.read_text():
        time.sleep(0.05)
    stage_pid = _child(process.pid)
    process.send_signal(how)
    printed = process.communicate()[0]
    assert process.returncode == (128 + how if how == signal.SIGTERM else -how)
    if how == signal.SIGKILL:
        os.kill(stage_pid, how)  # nobody else ends it
    assert not list(tmp_path.glob(".*unfinished*"))
    table = (tmp_path / "table.txt").read_text()
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["first", "done"], ["second", "cut"]]
    if how == signal.SIGTERM:
        assert printed.endswith(table)
        assert not _runs(stage_pid)
        return
    codes["second"] = "print('2 passed')"
    command[3] = json.dumps(codes)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "first: done before" in done.stdout
    assert "second: done: 2 passed" in done.stdout


def _child(pid: int) -> int:
    (child,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.read_text().rpartition(")")[2].split()[1] == str(pid)
    ]
    return child


@pytest.mark.parametrize("text", ["[1]", '{"kernels": {"unknown": 1}}', "{"])
def test_records_that_cannot_be_read(script, stages, tmp_path, capsys, text):
    (tmp_path / "device.json").write_text(text)
    assert script.main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("device: ")
    assert line.endswith("to begin again")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_wrong_seconds(script, seconds, capsys):
    with pytest.raises(SystemExit) as error:
        script.main([f"--seconds={seconds}"])
    assert error.value.code == 2
    assert "--seconds" in capsys.readouterr().err


def test_rows_of_the_benchmark_that_have_no_numbers(script, tmp_path):
    row = {"way": "triton", "layer": "x", "seconds": None, "note": "wrong"}
    rows = [row, {**row, "way": "tiled"}, {**row, "way": "compiled", "seconds": 1.0}]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
    ways = ["triton", "compiled"]
    assert script.not_measured(tmp_path, ["x", "y"], ways, "") == "x, triton: wrong; y: not measured"
    assert script.not_measured(tmp_path / "missing", ["y"], ways, "") == "y: not measured"


@pytest.mark.parametrize("smoke", [False, True])
def test_the_commands(script, tmp_path, smoke):
    """The tests are there, and `torchcaps` takes the arguments."""
    rows = script.Rows(["zhao2019/table1/fashion-mnist-max"], 1, [])
    stages = script.all_stages(tmp_path, smoke, rows, "false")
    assert len({each.name for each in stages}) == len(stages)
    for each in stages:
        if each.command[1] == "-c":
            compile(each.command[2], each.name, "exec")
        elif each.command[2] == "torchcaps":
            options = cli.parser().parse_args(each.command[3:])
            if each.name == "training":
                assert options.rows == rows.ready
            else:
                assert options.device == ("cpu" if smoke else "cuda")
                assert options.graphs == ("graphs" in each.name and not smoke)
                assert options.dtype == ("bfloat16" if "bfloat16" in each.name else "float32")
                assert options.out == tmp_path / each.name
                assert set(options.layer) <= set(NETWORKS if "networks" in each.name else LAYERS)
                assert set(options.way) <= set(WAYS)
                # What is captured by PyTorch cannot be captured again.
                assert not (options.graphs and "compiled-graphs" in options.way)
        else:
            (file,) = [argument for argument in each.command if argument.startswith(("tests/", "benchmarks/"))]
            assert (ROOT / file).is_file()


def test_rows_whose_data_is_missing_are_open(script, tmp_path, monkeypatch):
    """So is data with other hashes than the published ones, and an encoder, which nothing downloads."""
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / name)
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    names = ["zhao2019/table1/fashion-mnist-max", "heinsen2022/texts/sst2"]
    assert script.open_rows(tmp_path, names, "false") == script.Rows([], 0, names)
    write_idx_files(tmp_path / "fashion-mnist")
    script.problem_of.cache_clear()
    assert script.open_rows(tmp_path, names, "false") == script.Rows(names[:1], 3, names[1:])
    assert script.open_rows(tmp_path, names, "true") == script.Rows([], 0, names)


@pytest.mark.parametrize("passed", [True, False])
def test_resident_steps_train_rows_if_they_are_right(script, stages, tmp_path, passed):
    stages["resident"] = stage(script, "resident", f"print('{'1 passed' if passed else '1 failed'}')")
    show = stage(script, "training", "import sys; print(*sys.argv[1:], 'passed')")
    stages["training"] = replace(show, command=[*show.command, "--resident", "--threads"])
    for name in ("resident", "training"):
        _, records = run(script, tmp_path, "--stages", name)
    assert records["training"]["detail"] == ("--resident --threads passed" if passed else "--threads passed")


def test_no_row_is_left_to_train(script, stages, monkeypatch, tmp_path, capsys):
    stages["training"] = stage(script, "training", "print('never run')", closed="no row is left whose data is there")
    monkeypatch.setattr(script, "open_rows", lambda *arguments: script.Rows([], 0, ["a/b/c", "d/e/f"]))
    status, records = run(script, tmp_path)
    assert (status, records["training"]["status"]) == (0, "open")
    assert capsys.readouterr().out.count("open: data missing: 2 rows: a/b/c, d/e/f\n") == 1
    assert not (tmp_path / "training.log").exists()
