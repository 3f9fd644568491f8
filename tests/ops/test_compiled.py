"""Compilation of the Triton kernels, without a GPU: the interpreter accepts code that the compiler does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchcaps.ops.backend import HAS_TRITON

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = ["80", "86", "89", "90", "100", "120"]
UNKNOWN = 3  # status where the installed Triton does not know a capability

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or sys.platform != "linux", reason="needs the package triton, with the compiler for Linux"
)


def compile_kernels(which: str, capability: str) -> None:
    """Compile the kernels in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, ROOT / "tests" / "helpers" / "compiled_kernels.py", which, capability]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == UNKNOWN:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reductions_compile(capability):
    """Each kind of reduction, pose, layout, number of parents and precision occurs once, for one of the devices, and
    each kind of reduction once in half precision."""
    compile_kernels("few", capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_reductions_compile(capability):
    compile_kernels("all", capability)
