"""Check the Triton kernels on a CUDA device, for whose compute capability no check has been made yet.

    python benchmarks/first_device.py --out build/first_device

Run it in a clone, with pytest and the package's extra "train" installed. It runs the tests that start kernels, all of
them on the device, and then `torchcaps bench`, which compares values and gradients with the reference in float64 and
measures time and memory. Each step has a log in the folder, and report.json says what was found, with device, versions
and commit. If everything passed, the last lines say what to add to the package, so that "auto" takes the kernels on
devices of this compute capability.

A step that passed is not run again for the same device, versions and commit, so a call may be interrupted, or run one
step at a time: `--steps kernels`.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("TRITON_INTERPRET", None)  # the package reads it when it is imported

import torch  # noqa: E402

from torchcaps.bench.layers import LAYERS  # noqa: E402
from torchcaps.bench.report import software_and_machine  # noqa: E402
from torchcaps.ops import backend  # noqa: E402

SAME = ("device", "capability", "driver", "cuda", "torch", "triton", "python", "commit")
UNKNOWN = "unknown"  # the commit of files that differ from every commit, or are in no clone


class Step(NamedTuple):
    """A command and how to judge it.

    Fields:
        command: the command.
        judge: function of the log and the output folder. It returns what the report keeps, and raises Failed.
    """

    command: Sequence[str]
    judge: Callable[[str, Path], dict[str, Any]]


class Failed(Exception):
    """Raised when a step has not passed; the message says why, in one line."""


def tests(file: str, *chosen: str) -> Step:
    """Return the step that runs tests of the reductions."""
    command = [sys.executable, "-m", "pytest", f"tests/ops/{file}", *chosen, "--rootdir", str(ROOT), "--tb=short"]
    command += ["-W", "default", "-p", "no:cacheprovider"]  # warnings of other versions of PyTorch are no errors here
    if importlib.util.find_spec("xdist"):
        command += ["-n", "8"]  # most time goes to the compiler
    return Step(command, judge_tests)


def judge_tests(log: str, out: Path) -> dict[str, Any]:
    """Return the summary of pytest: some tests passed and none was left out."""
    summary = (log.strip().splitlines() or ["no output"])[-1]
    if not re.search(r"\d+ passed", summary):
        raise Failed(f"no test passed: {summary}")
    if re.search(r"\d+ skipped", summary):
        raise Failed(f"tests were skipped: {summary}")
    return {"summary": summary}


def bench(out: Path) -> Step:
    """Return the step that measures the papers' layers."""
    command = [sys.executable, "-m", "torchcaps", "bench", "--device", "cuda", "--way", "tiled", "triton"]
    return Step([*command, "--layer", *LAYERS, "--out", str(out / "bench")], judge_bench)


def judge_bench(log: str, out: Path) -> dict[str, Any]:
    """Return the rows of all ways: each layer has numbers of the kernels, so their values agree."""
    rows = json.loads((out / "bench" / "bench.json").read_text(encoding="utf-8"))["rows"]
    ours = [row for row in rows if row["way"] == "triton"]
    wrong = [f"{row['layer']}: {row['note']}" for row in ours if row["seconds"] is None]
    missing = set(LAYERS) - {row["layer"] for row in ours}
    if wrong or missing:
        raise Failed("; ".join(dict.fromkeys([*wrong, *(f"{layer}: not measured" for layer in sorted(missing))])))
    kept = ("layer", "batch", "way", "pass", "bound_seconds", "seconds", "bytes", "note")
    return {"rows": [{name: row[name] for name in kept} for row in rows]}


def all_steps(out: Path) -> dict[str, Step]:
    """Return the steps of the check by name, in order."""
    return {
        "kernels": tests("test_kernels.py", "-m", ""),  # the slow ones, too
        "layers": tests("test_layers.py", "-m", "", "-k", "triton"),
        "operators": tests("test_operators.py", "-k", "triton"),
        "bench": bench(out),
    }


def why_not() -> str | None:
    """Return why the check cannot run on this machine, or None if it can."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device: run it on a machine with an NVIDIA GPU"
    reason = backend.why_no_triton(torch.device("cuda"))
    if reason is not None:
        return reason
    for package in ("pytest", "rich"):
        if importlib.util.find_spec(package) is None:
            return f'the package {package} is not installed: pip install "torchcaps[train]" pytest'
    return None


def describe(commit: str | None) -> dict[str, Any]:
    """Return device, compute capability, versions and commit."""
    found = software_and_machine("cuda")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = UNKNOWN
    known = commit or os.environ.get("TORCHCAPS_COMMIT") or found["commit"]
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": found["device"],
        "capability": list(torch.cuda.get_device_capability()),
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": found["torch"],
        "triton": found["triton"],
        "python": found["python"],
        "commit": known if re.fullmatch("[0-9a-f]{7,40}", known) else UNKNOWN,
    }


def known_steps(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the steps of a report on the same device, versions and commit that passed."""
    if about["commit"] == UNKNOWN or not file.is_file():
        return {}
    before = json.loads(file.read_text(encoding="utf-8"))
    if any(before.get(name) != about[name] for name in SAME):
        return {}
    return {name: step for name, step in before["steps"].items() if step["passed"]}


def run_step(name: str, step: Step, out: Path, minutes: float) -> dict[str, Any]:
    """Run a step; return its outcome."""
    begun, log = time.monotonic(), out / f"{name}.log"
    outcome: dict[str, Any] = {"passed": False, "command": list(step.command[1:])}
    try:
        status = run_command(step.command, log, out, minutes)
        text = log.read_text(encoding="utf-8", errors="replace")
        if status:
            lines = text.strip().splitlines() or ["no output"]
            failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:2]
            raise Failed("; ".join([f"status {status}", lines[-1], *failed]))
        outcome |= {**step.judge(text, out), "passed": True}
    except subprocess.TimeoutExpired:
        outcome["why"] = f"not done after {minutes:g} minutes"
    except (Failed, OSError) as error:
        outcome["why"] = str(error)
    return outcome | {"seconds": round(time.monotonic() - begun, 1)}


def run_command(command: Sequence[str], log: Path, out: Path, minutes: float) -> int:
    """Run a command with its output in a file; return its status. It and its children end when the time is up."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(out / "triton"),  # what is compiled once serves the next call
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic algorithms need it
    }
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, process_group=0
        ) as process,
    ):
        try:
            return process.wait(60 * minutes)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 0 if all steps passed, 1 if one did not or was left out, 2 if none can run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(all_steps(Path()))
    parser.add_argument("--out", type=Path, default=Path("build/first_device"), help="folder (default: %(default)s)")
    parser.add_argument("--steps", nargs="+", choices=names, default=names, help="steps to run (default: all)")
    parser.add_argument("--minutes", type=float, default=60, help="limit of a step (default: %(default)s)")
    parser.add_argument("--commit", help="commit of a copy without .git (default: $TORCHCAPS_COMMIT)")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be positive, got {options.minutes:g}")
    reason = why_not()
    if reason is not None:
        print(f"first_device: {reason}", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file, about = out / "report.json", describe(options.commit)
    print(", ".join(f"{name} {about[name]}" for name in SAME), flush=True)
    done, steps = known_steps(file, about), all_steps(out)
    for name in options.steps:
        if name in done:
            print(f"{name}: passed before", flush=True)
            continue
        print(f"{name} ... (see {out / name}.log)", flush=True)
        done[name] = run_step(name, steps[name], out, options.minutes)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        passed = all(done.get(step, {}).get("passed", False) for step in steps)
        report = {**about, "date": date, "passed": passed, "steps": done}
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        outcome = done[name]
        print(f"{name}: {'passed' if outcome['passed'] else 'failed: ' + outcome['why']}", flush=True)
    print(f"report: {file}")
    open_steps = [name for name in steps if not done.get(name, {}).get("passed", False)]
    if open_steps:
        print(f"not passed: {', '.join(open_steps)}")
        return 1
    checked = ", ".join(map(str, sorted({*backend.CHECKED, tuple(about["capability"])})))
    print('All passed. The line in torchcaps/ops/backend.py by which "auto" takes the kernels on such devices is:\n')
    print(f"CHECKED: frozenset[tuple[int, int]] = frozenset({{{checked}}})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
