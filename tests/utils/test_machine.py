"""What is said of the machine."""

from pathlib import Path

import pytest

from torchcaps.utils import machine


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: 12.2.0\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build\n", "570.86"),
        ("nothing", "CUDA 12040"),
        (None, "CUDA 12040"),
    ],
)
def test_the_driver(monkeypatch, text, version):
    def read_text(path, **options):
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(machine, "newest_cuda", lambda: 12040)
    assert machine.nvidia_driver() == version
