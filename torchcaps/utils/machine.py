"""The code and the machine behind a measured number: commit and processor, as recorded with results."""

import platform
import re
import subprocess
from pathlib import Path

import torch

from torchcaps._version import __version__
from torchcaps.utils.checks import counted
from torchcaps.utils.private import newest_cuda


def commit() -> str:
    """Return the commit of this clone, with "-dirty" if files were changed; without a clone the package's version."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():  # else git would find a project around the installed package
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass  # git is not installed, or fails
    return f"torchcaps {__version__}"


def processor() -> str:
    """Return the name of the processor."""
    try:
        name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        name = None
    return name[1] if name else platform.processor() or platform.machine()


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver; where no file says it, that of the newest CUDA that it can run."""
    try:
        version = re.search(r"\b\d+\.\d[\d.]*", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        version = None
    return version[0] if version else f"CUDA {newest_cuda()}"


def hardware() -> str:
    """Return the GPU, or the processor and the number of threads, and the version of PyTorch."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor()}, {counted(threads, 'thread')}, torch {torch.__version__}"
