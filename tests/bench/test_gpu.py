"""`torchcaps.bench.gpu` judges, keeps and prints results as it should, and each of its measurements runs.

All run on the CPU in small sizes, with another way in the place of the kernels.
"""

import copy
import inspect
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from torchcaps.bench import Rates, Request, device, gpu, passes
from torchcaps.bench.items import Item, Ledger, run_command, work_through
from torchcaps.bench.layers import LAYERS
from torchcaps.bench.markdown import to_markdown
from torchcaps.bench.passes import NoNumber, capture, prepare
from torchcaps.ops.backend import HAS_TRITON

HERE = {"device": "cpu", "way": "tiled"}
STAMP = {"commit": "a", "device": "b", "capability": "9.0", "driver": "c", "torch": "d", "triton": "e"}


def printing(name: str, code: str, seconds: float = 0) -> Item:
    return Item(name, {"name": name}, [sys.executable, "-I", "-c", code], seconds=seconds)


def entries(file: Path) -> list[dict]:
    return json.loads(file.read_text(encoding="utf-8"))


def test_selftest(capsys):
    assert gpu.main(["selftest"]) == 0
    assert capsys.readouterr().out == "selftest: passed\n"


def test_selftest_sees_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "check_values", lambda errors, allowed: None)
    assert gpu.main(["selftest"]) == 1
    assert capsys.readouterr().out == "selftest: failed; not true: wrong values have no numbers\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("mode", gpu.MODES)
def test_without_a_gpu(mode, tmp_path, capsys):
    assert gpu.main([mode, "--out", str(tmp_path / "new")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert "no CUDA device" in line
    assert "selftest and rows" in line
    assert not (tmp_path / "new").exists()


def test_a_mode_from_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "stamp", lambda given: STAMP | {"commit": given})
    items = [gpu.own("three", "tiny", 0, **HERE, parents=3), gpu.own("none", "tiny", 0, **HERE, parents=0)]
    monkeypatch.setitem(gpu.MODES, "check", lambda out: [*items, gpu.own("later", "tiny", 61, **HERE, parents=4)])
    arguments = ["check", "--out", str(tmp_path), "--commit", "1234", "--minutes", "1"]
    assert gpu.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["three ...", "none ...", f"none: failed: {entries(tmp_path / 'check.json')[1]['error']}"]
    assert lines[3] == "check: 1 left, the same command continues: later"
    assert "--retry" in lines[4]
    assert gpu.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[0] == "three: known"
    assert gpu.main(["rows", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "commit 1234" in printed
    assert "| three | right with 3 parents |" in printed


def test_rows_of_nothing(tmp_path, capsys):
    assert gpu.main(["rows", "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no measurements" in err
    assert str(tmp_path) in err


class TestItems:
    def work(self, tmp_path, items, minutes=1.0, retry=False):
        said = []
        ledger = Ledger(tmp_path / "some.json", STAMP)
        return *work_through(items, ledger, os.environ, minutes, retry, said.append), said

    def test_goes_on_after_an_interruption(self, tmp_path):
        """Killed in the second item, it keeps the result of the first, and does not measure it again."""
        log = tmp_path / "log"
        code = f"open({str(log)!r}, 'a').write('1\\n'); print('{{}}')"
        script = f"""
import os, sys
from torchcaps.bench.items import Item, Ledger, work_through
from pathlib import Path
items = [
    Item("first", {{"name": "first"}}, [sys.executable, "-I", "-c", {code!r}], seconds=0),
    Item("second", {{"name": "second"}}, [sys.executable, "-I", "-c", "import time; time.sleep(5)"], seconds=0),
]
work_through(items, Ledger(Path({str(tmp_path / "some.json")!r}), {STAMP!r}), os.environ, 1, False, lambda text: None)
"""
        with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
            for _ in range(600):
                if (tmp_path / "some.json").is_file():
                    break
                time.sleep(0.05)
            process.kill()
        assert [entry["item"] for entry in entries(tmp_path / "some.json")] == ["first"]
        items = [printing("first", code), printing("second", code)]
        assert self.work(tmp_path, items)[:2] == (0, [])
        assert [entry["item"] for entry in entries(tmp_path / "some.json")] == ["first", "second"]
        assert log.read_text() == "1\n1\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "some.json"]

    def test_a_write_that_fails_loses_nothing(self, tmp_path, monkeypatch):
        self.work(tmp_path, [printing("first", "print({})")])
        before = (tmp_path / "some.json").read_bytes()

        def no_space(path, *arguments, **options):
            raise OSError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", no_space)
            with pytest.raises(OSError, match="no space"):
                self.work(tmp_path, [printing("second", "print({})")])
        assert (tmp_path / "some.json").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["some.json"]

    def test_numbers_that_are_none_are_not_kept(self, tmp_path):
        failed, _, said = self.work(tmp_path, [printing("nan", "print('{\"x\": NaN}')")])
        assert failed == 1
        assert "not JSON compliant" in said[-1]

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("raise ValueError('first\\nlast')", "last"),
            ('print(\'{"error": "values disagree: all"}\')', "values disagree: all"),
            ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (9: out of memory)"),
            ("print('hello')", "status 0, and no answer"),
        ],
    )
    def test_a_failure_is_one_line(self, tmp_path, code, reason):
        failed, left, said = self.work(tmp_path, [printing("it", code)])
        assert (failed, left) == (1, [])
        assert said == ["it ...", f"it: failed: {reason}"]
        (entry,) = entries(tmp_path / "some.json")
        assert entry["error"] == reason
        assert "result" not in entry
        assert self.work(tmp_path, [printing("it", code)])[2] == [f"it: {reason}"]
        assert self.work(tmp_path, [printing("it", "print({})")], retry=True)[:2] == (0, [])
        (entry,) = entries(tmp_path / "some.json")
        assert entry["result"] == {}
        assert "error" not in entry

    def test_no_command(self, tmp_path):
        failed, _, said = self.work(tmp_path, [Item("it", {}, ["/there/is/none"], seconds=0)])
        assert failed == 1
        assert "FileNotFoundError" in said[-1]

    def test_another_commit_device_or_argument_is_another_measurement(self, tmp_path):
        item = printing("it", "print({})")
        ledger = Ledger(tmp_path / "some.json", STAMP)
        ledger.keep(item, result={})
        assert Ledger(ledger.path, STAMP | {"torch": "newer"}).find(item)
        assert not Ledger(ledger.path, STAMP | {"commit": "b"}).find(item)
        assert not Ledger(ledger.path, STAMP | {"device": "c"}).find(item)
        assert not ledger.find(replace(item, arguments={"name": "other"}))

    def test_what_its_processes_start_ends_with_them(self, tmp_path):
        alive = tmp_path / "alive"
        child = f"import time; time.sleep(1); open({str(alive)!r}, 'w')"
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', {child!r}])"
        with pytest.raises(subprocess.TimeoutExpired):
            run_command([sys.executable, "-I", "-c", code], os.environ, 0.4)
        time.sleep(1)
        assert not alive.exists()


class TestMeasured:
    """Each kind of measurement runs once, so that none fails for a wrong name when it runs on a GPU."""

    def test_environment(self):
        assert device.environment(**HERE)["torch"] == torch.__version__

    def test_twice(self, monkeypatch):
        assert device.twice(**HERE, smoke=True)["said"].startswith("bit-equal: ")

        def noisy(way, case, backward):
            run = prepare(way, case, backward)
            return lambda: {name: x + 1e-6 * torch.rand_like(x) for name, x in run().items()}

        monkeypatch.setattr(device, "prepare", noisy)
        with pytest.raises(NoNumber, match="inverted-attention-conv: poses has other digits"):
            device.twice(**HERE, smoke=True)

    @pytest.mark.parametrize("parents", gpu.PARENTS)
    def test_tiny(self, parents, monkeypatch):
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")  # monkeypatch restores it afterwards
        assert device.tiny(**HERE, parents=parents)["said"] == f"right with {parents} parents"

    @pytest.mark.parametrize("layer", ["digit-capsules", "heinsen"])
    @pytest.mark.parametrize("how", ["graph", "compiled"])
    def test_training(self, layer, how, monkeypatch):
        def warm_up(run):
            for _ in range(passes.WARM_UP):
                run()
            return run

        monkeypatch.setattr(device, "capture", warm_up)
        monkeypatch.setattr(torch, "compile", lambda module, **options: module)
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
        assert device.training(**HERE, layer=layer, how=how, smoke=True)["said"].startswith("bit-equal to eager")

    @pytest.mark.parametrize("how", ["graph", "compiled"])
    def test_training_that_misses_a_step(self, how, monkeypatch):
        monkeypatch.setattr(device, "capture", lambda run: run)  # takes no warm-up steps
        monkeypatch.setattr(torch, "compile", lambda module, **options: copy.deepcopy(module))
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
        with pytest.raises(NoNumber, match="values disagree"):
            device.training(**HERE, layer="digit-capsules", how=how, smoke=True)

    def test_rates(self, monkeypatch):
        monkeypatch.setattr(device, "matrix_rate", lambda device, dtype: 2.0)
        monkeypatch.setattr(device, "copy_rate", lambda device: 3.0)
        found = device.rates(**HERE)
        assert found == {
            "copy_bytes_per_second": 3.0,
            "matrix_flops_per_second": {"float32": 2.0, "bfloat16": 2.0},
        }

    def test_launches(self):
        assert 0 < device.launches(**HERE, count=3)["launches"]["PyTorch, one number"] < 1

    @pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
    def test_launch_of_an_empty_kernel(self):
        assert device.launches("cpu", "triton", count=3)["launches"]["Triton, nothing"] > 0

    def test_kernels(self):
        found = device.kernels(**HERE, layer="digit-capsules", batch=None, smoke=True)["kernels"]
        for table in found.values():
            assert len(table) > 3
            assert all(count >= 1 and took >= 0 for _, count, took in table)
            assert [took for *_, took in table] == sorted((took for *_, took in table), reverse=True)

    def test_no_kernels(self, monkeypatch):
        monkeypatch.setattr(device, "kernel_times", lambda run, device: [])
        with pytest.raises(NoNumber, match="saw no kernel"):
            device.kernels(**HERE, layer="heinsen", batch=None, smoke=True)

    @pytest.mark.parametrize(
        ("layer", "dtype"),
        [
            pytest.param(layer, dtype, marks=[] if (i, j) in [(0, 0), (1, 1)] else pytest.mark.slow)
            for i, layer in enumerate(LAYERS)
            for j, dtype in enumerate(("float32", "bfloat16"))
        ],
    )
    def test_layers(self, layer, dtype, monkeypatch):
        monkeypatch.setattr(device, "measure_rates", lambda device, dtype: Rates(1e9, 1e9))
        request = Request(layer, batch=3, smoke=True, dtype=dtype, autocast=dtype == "bfloat16")
        rows = device.layers(["reference", "tiled"], 2, asdict(request))["rows"]
        assert [(row["way"], row["note"]) for row in rows] == [(w, None) for w in ("reference", "tiled") for _ in "fb"]
        assert all(row["seconds"] > 0 and row["bytes"] >= 0 and row["batch"] == 3 for row in rows)
        json.dumps(rows, allow_nan=False)

    def test_autocast(self):
        """Children in half precision, parameters and their gradients in float32."""
        case = Request("heinsen", smoke=True, dtype="bfloat16", autocast=True).build()
        found = prepare("tiled", case, True)()
        halves = {name for name, x in found.items() if x.dtype == torch.bfloat16}
        assert halves == {"poses", "scores", "gradient of poses", "gradient of scores"}
        with case.precision():
            assert torch.is_autocast_enabled("cpu")
        with case.to("cpu", torch.float64).precision():
            assert not torch.is_autocast_enabled("cpu")

    def test_a_graph_without_a_gpu_has_no_number(self, monkeypatch):
        monkeypatch.setattr(device, "measure_rates", lambda device, dtype: Rates(1e9, 1e9))
        found = device.layers(["tiled", "tiled-graph"], 1, asdict(Request("heinsen", smoke=True)))["rows"]
        if not torch.cuda.is_available():
            assert [row["seconds"] is None for row in found] == [False, False, True, True]
            assert all(row["note"] for row in found[2:])

    def test_huge(self):
        found = device.huge("tiled", asdict(Request("heinsen", factor=3, smoke=True)))
        assert found["said"].startswith("right: ")

    def test_huge_and_wrong(self, monkeypatch):
        def wrong(way, case, backward):
            run = prepare(way, case, backward)
            if way != "reference":
                return run
            return lambda: {name: torch.cat([x[:-1], 1.001 * x[-1:]]) for name, x in run().items()}

        monkeypatch.setattr(device, "prepare", wrong)
        with pytest.raises(NoNumber, match="values disagree"):
            device.huge("reference", asdict(Request("heinsen", smoke=True)))

    def test_one_pass(self):
        assert device.one_pass(**HERE, layer="em-conv", smoke=True) == {}

    @pytest.mark.slow
    def test_in_a_process_of_its_own(self, tmp_path):
        arguments = {"kind": "one_pass", **HERE, "layer": "heinsen", "smoke": True}
        good = gpu.own("good", "one_pass", 0, **HERE, layer="heinsen", smoke=True)
        assert good.arguments == arguments
        bad = gpu.own("bad", "one_pass", 0, **HERE, layer="hinsen", smoke=True)
        ledger = Ledger(tmp_path / "some.json", STAMP)
        environment = gpu.children_environment(tmp_path)
        assert work_through([good, bad], ledger, environment, 1, False, lambda text: None) == (1, [])
        first, second = entries(ledger.path)
        assert first["result"] == {}
        assert second["error"] == "KeyError: 'hinsen'"
        assert "Traceback" in second["said"]


def test_the_capture_of_a_graph(monkeypatch):
    """The order of the calls; the calls themselves need a GPU."""
    log = []

    class Stream:
        def wait_stream(self, other):
            log.append("wait")

    class Context:
        def __init__(self, thing):
            self.name = type(thing).__name__

        def __enter__(self):
            log.append(f"in {self.name}")

        def __exit__(self, kind, *rest):
            log.append(f"out of {self.name}")
            if kind is not None and self.name == "CUDAGraph":
                raise RuntimeError("operation failed due to a previous error during capture")

    class CUDAGraph:
        def replay(self):
            log.append("replay")

    fakes = {"Stream": Stream, "current_stream": Stream, "stream": Context, "CUDAGraph": CUDAGraph, "graph": Context}
    for name, fake in fakes.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    replay = capture(lambda: log.append("run") or len(log))
    runs = ["run"] * passes.WARM_UP
    assert log == ["wait", "in Stream", *runs, "out of Stream", "wait", "in CUDAGraph", "run", "out of CUDAGraph"]
    assert replay() == replay()
    assert log[-2:] == ["replay", "replay"]
    broken = iter([1, 2, 3])
    with pytest.raises(StopIteration):  # and not the error that the end of the capture raises
        capture(lambda: next(broken))


class TestPlan:
    def test_arguments_are_those_of_the_kinds(self, tmp_path, monkeypatch):
        """The arguments of all items fit the functions that will be called; nothing is called here."""
        monkeypatch.setattr(gpu, "find_tool", lambda name: f"/tools/{name}")
        known = set()
        for mode in gpu.MODES:
            items = gpu.MODES[mode](tmp_path)
            assert len({item.name for item in items}) == len(items)
            for item in items:
                key = json.dumps([mode, item.arguments])
                assert key not in known
                known.add(key)
                assert json.loads(key)[1] == item.arguments  # as when it is read from a file
                if "kind" in item.arguments:
                    task = json.loads(item.command[-1])
                    inspect.signature(device.KINDS[task.pop("kind")]).bind(**task)
                    if "request" in task:
                        Request(**task["request"])
                assert item.seconds <= 120

    def test_missing_tools_are_named(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(gpu.shutil, "which", lambda name, path: None)
        assert not any("tool" in item.arguments for item in gpu.check(tmp_path))
        assert gpu.profile(tmp_path) == []
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["compute-sanitizer", "ncu"]

    def test_sanitizer(self):
        def done(status, summary):
            return subprocess.CompletedProcess([], status, '{"said": "right"}\n' + summary, "")

        fine = "========= ERROR SUMMARY: 0 errors"
        assert gpu.read_sanitizer(done(0, fine)) == {"said": "right; ERROR SUMMARY: 0 errors"}
        with pytest.raises(NoNumber, match="RACECHECK SUMMARY: 2 hazards"):
            gpu.read_sanitizer(done(9, "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"))
        with pytest.raises(NoNumber, match="no summary"):
            gpu.read_sanitizer(done(0, ""))

    def test_pytest(self):
        done = subprocess.CompletedProcess([], 1, "x\nFAILED tests/a.py::b\n1 failed, 2 passed in 3s\n", "")
        with pytest.raises(NoNumber, match="^1 failed, 2 passed in 3s; FAILED tests/a.py::b$"):
            gpu.read_tests(done)

    def test_ncu(self, tmp_path, monkeypatch):
        monkeypatch.setattr(gpu, "find_tool", lambda name: "/tools/ncu")
        item = gpu.profile(tmp_path)[0]
        said = '==PROF== Connected\n{}\n==PROF== Disconnected\n"ID","Kernel Name"\n"0","_sums"\n'
        assert item.read(subprocess.CompletedProcess([], 0, said, "")) == {
            "said": "profile-inverted-attention-conv.csv"
        }
        assert (tmp_path / "profile-inverted-attention-conv.csv").read_text() == '"ID","Kernel Name"\n"0","_sums"\n'
        with pytest.raises(NoNumber, match="saw no kernel"):
            item.read(subprocess.CompletedProcess([], 0, "{}\n==WARNING== No kernels were profiled.\n", ""))

    def test_commit_of_a_copy(self, monkeypatch):
        monkeypatch.setattr(
            gpu, "software_and_machine", lambda device: dict.fromkeys(("device", "torch", "triton", "python"))
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(gpu, "commit", lambda: "torchcaps 0.1.0")
        monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
        monkeypatch.delenv("TORCHCAPS_COMMIT", raising=False)
        assert gpu.stamp(None)["commit"] == "unknown"
        monkeypatch.setenv("TORCHCAPS_COMMIT", "1234567")
        assert gpu.stamp(None)["commit"] == "1234567"
        assert gpu.stamp("7654321")["commit"] == "7654321"
        monkeypatch.setattr(gpu, "commit", lambda: "89abcde")
        assert gpu.stamp(None)["commit"] == "89abcde"

    def test_the_environment_of_processes(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        found = gpu.children_environment(tmp_path)
        assert "TRITON_INTERPRET" not in found
        assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert found["PYTHONUNBUFFERED"] == "1"
        assert Path(found["TRITON_CACHE_DIR"]).is_relative_to(tmp_path)


class TestMarkdown:
    def entry(self, **result):
        stamp = STAMP | {"date": "2026-11-22T10:00:00+00:00"}
        return {"item": "some", "arguments": {"request": asdict(Request("heinsen"))}, **stamp, "result": result}

    def test_failures_and_what_is_said(self):
        good = self.entry(said="3 passed")
        bad = {**self.entry(), "error": "values disagree: poses is off by 1.0e-01, allowed 1.0e-06"}
        del bad["result"]
        text = to_markdown([good, bad])
        assert text.splitlines()[0] == "b, capability 9.0, driver c, torch d, triton e, commit a, 2026-11-22"
        assert "| some | 3 passed |" in text
        assert "| some | failed: values disagree |" in text
        assert "1.0e-01" not in text

    def test_ceilings(self):
        rates = {"copy_bytes_per_second": 4.3e12, "matrix_flops_per_second": {"float32": 5.1e13}}
        text = to_markdown([self.entry(**rates), self.entry(launches={"Triton, nothing": 4e-6})])
        assert "| copy, bytes read and written | 4.30 TB/s |" in text
        assert "| matrix product, float32 | 51 TFLOP/s |" in text
        assert "| Triton, nothing | 4 µs |" in text

    def test_kernels(self):
        table = [("_sums", 2, 60.0), *((f"kernel{k}", 1, 1.0) for k in range(20))]
        text = to_markdown([self.entry(kernels={"forward": table})])
        assert "| `_sums` | 2 | 60 µs | 75% |" in text
        assert "| others | 9 | 9 µs | 11% |" in text
        assert "| all | 22 | 80 µs |  |" in text
