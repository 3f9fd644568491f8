"""Exported programs, compiled by AOTInductor, run where torchcaps was never imported."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchcaps import CapsuleHead
from torchcaps.deploy import export

LOAD = """
import sys, torch
images, expected = torch.load(sys.argv[2], weights_only=True)
compiled = torch._inductor.aoti_load_package(sys.argv[1])
for batch in (1, 2, 5):
    torch.testing.assert_close(compiled(images[:batch]), expected[:batch])
assert "torchcaps" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of PyTorch itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_compiled_program_runs_without_torchcaps(tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), CapsuleHead(16, classes=5)).eval()
    images = torch.rand(5, 1, 16, 16)
    export(network, images[:2], tmp_path / "network.pt2", to="torch")
    program = torch.export.load(tmp_path / "network.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2"))
    with torch.no_grad():
        torch.save((images, network(images)), tmp_path / "expected.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "compiled.pt2"), str(tmp_path / "expected.pt")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
