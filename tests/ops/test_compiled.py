"""Compilation of the Triton kernels, without a GPU: the interpreter accepts code that the compiler does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchcaps.ops.backend import HAS_TRITON

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = ["80", "86", "90"]
# Recorded limits for the kernels of the papers' layers: registers and spilled bytes of a thread, shared memory of a
# program; and launches and memory of the layers. This file run with --write records them anew.
EXPECTED = Path(__file__).with_name("compiled.json")
LIMITS = ("registers", "spilled", "shared")

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or sys.platform != "linux", reason="needs the package triton, with the compiler for Linux"
)


def run_script(*arguments: str) -> str:
    """Run torchcaps.bench.compiled in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torchcaps.bench.compiled", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "capability", [pytest.param(x, marks=[] if x == "90" else pytest.mark.slow) for x in CAPABILITIES]
)
def test_reductions_compile(capability):
    """Each kind of reduction, pose, layout, number of parents and precision occurs once."""
    assert ", 0 did not" in run_script("--cases", "few", "--capability", capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_reductions_compile(capability):
    assert ", 0 did not" in run_script("--cases", "all", "--capability", capability)


def measured(capability: str) -> dict[str, dict[str, dict[str, int]]]:
    (found,) = json.loads(run_script("--json", "--capability", capability)).values()
    return {
        layer: {kernel: {name: row[name] for name in LIMITS} for kernel, row in kernels.items()}
        for layer, kernels in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_papers_layers_take_no_more_than_they_did(capability):
    if not EXPECTED.exists():
        pytest.fail(f"{EXPECTED.name} is missing: python {__file__} --write")
    expected, found = json.loads(EXPECTED.read_text())[f"sm_{capability}"], measured(capability)
    assert found.keys() == expected.keys()
    for layer, kernels in found.items():
        assert kernels.keys() == expected[layer].keys()
        for kernel, row in kernels.items():
            for name, limit in expected[layer][kernel].items():
                assert row[name] <= limit, f"{layer}, {kernel}: {name} {row[name]}, {limit} before"


@pytest.mark.slow
def test_no_more_launches_and_memory_than_before():
    """Launches of the package's and PyTorch's kernels in a training pass of a layer, and its peak memory."""
    expected = json.loads(EXPECTED.read_text())["host"]
    for layer, found in json.loads(run_script("--host", "--json").splitlines()[-1]).items():
        before = expected[layer]
        assert found["kernels"] + found["operators"] <= before["launches"], layer
        assert found["peak"] <= 1.02 * before["peak"], layer


def measured_host() -> dict[str, dict[str, int]]:
    found = json.loads(run_script("--host", "--json").splitlines()[-1])
    return {name: {"launches": row["kernels"] + row["operators"], "peak": row["peak"]} for name, row in found.items()}


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    table = {f"sm_{capability}": measured(capability) for capability in CAPABILITIES} | {"host": measured_host()}
    EXPECTED.write_text(json.dumps(table, indent=1) + "\n")
