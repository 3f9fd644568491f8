"""Check the Triton kernels on a CUDA device, for whose compute capability no check has been made yet.

    python benchmarks/first_device.py --out build/first_device

Run it in a clone, with pytest and the package's extra "train" installed. It runs the tests that start kernels, on the
device, and then `torchcaps bench`, which compares values and gradients with the reference in float64 and measures time
and memory. Each step has a log in the folder; bench.json there names the device, the versions and the commit. If all
steps passed, the last line says what to add to the package, so that "auto" takes the kernels on devices of this compute
capability. `--steps kernels` runs a step alone. All combinations of the kernels' options are in `pytest
tests/ops/test_kernels.py -m slow`, which spends minutes in the compiler.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("TRITON_INTERPRET", None)  # the package reads it when it is imported

import torch  # noqa: E402

from torchcaps.bench.layers import LAYERS  # noqa: E402
from torchcaps.ops import backend  # noqa: E402


def all_steps(out: Path) -> dict[str, list[str]]:
    """Return the commands of the check by name, in order."""
    tests = [sys.executable, "-m", "pytest", "--rootdir", str(ROOT), "--tb=short", "-p", "no:cacheprovider"]
    tests += ["-W", "default"]  # warnings of other versions of PyTorch are no errors here
    tests += ["-n", "8"] if importlib.util.find_spec("xdist") else []  # most time goes to the compiler
    bench = [sys.executable, "-m", "torchcaps", "bench", "--device", "cuda", "--way", "tiled", "triton"]
    return {
        "kernels": [*tests, "tests/ops/test_kernels.py"],
        "layers": [*tests, "tests/ops/test_layers.py", "-m", "", "-k", "triton"],
        "operators": [*tests, "tests/ops/test_operators.py", "-k", "triton"],
        "bench": [*bench, "--layer", *LAYERS, "--out", str(out)],
    }


def why_not() -> str | None:
    """Return why the check cannot run on this machine, or None if it can."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device: run it on a machine with an NVIDIA GPU"
    reason = backend.why_no_triton(torch.device("cuda"))
    if reason is None and importlib.util.find_spec("pytest") is None:
        reason = 'the package pytest is not installed: pip install "torchcaps[train]" pytest'
    return reason


def problem_of(name: str, command: list[str], out: Path) -> str | None:
    """Run a step, with its output in a log; return why it has not passed, or None if it has."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic algorithms
    log = out / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment).returncode
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
    if status:
        return f"status {status}: {last}"
    if "bench" not in command:
        return None if " passed" in last and "skipped" not in last else f"not all tests ran: {last}"
    rows = json.loads((out / "bench.json").read_text(encoding="utf-8"))["rows"]
    ours = [row for row in rows if row["way"] == "triton"]
    wrong = [f"{row['layer']}: {row['note']}" for row in ours if row["seconds"] is None]
    wrong += [f"{layer}: not measured" for layer in sorted(set(LAYERS) - {row["layer"] for row in ours})]
    return "; ".join(dict.fromkeys(wrong)) or None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 0 if all steps passed, 1 if one did not, 2 if none can run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(all_steps(Path()))
    parser.add_argument("--out", type=Path, default=Path("build/first_device"), help="folder (default: %(default)s)")
    parser.add_argument("--steps", nargs="+", choices=names, default=names, help="steps to run (default: all)")
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason is not None:
        print(f"first_device: {reason}", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    problems = {}
    for name in options.steps:
        print(f"{name} ... (see {out / name}.log)", flush=True)
        problems[name] = problem_of(name, all_steps(out)[name], out)
        print(f"{name}: {'passed' if problems[name] is None else f'failed: {problems[name]}'}", flush=True)
    if any(problems.values()):
        return 1
    if set(problems) == set(names):
        checked = ", ".join(map(str, sorted({*backend.CHECKED, torch.cuda.get_device_capability()})))
        print('All passed. With this line in torchcaps/ops/backend.py "auto" takes the kernels on such devices:\n')
        print(f"CHECKED: frozenset[tuple[int, int]] = frozenset({{{checked}}})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
