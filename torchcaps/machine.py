"""What a measured number depends on beside its command: the code and the machine."""

import platform
import re
import subprocess
from pathlib import Path

import torchcaps


def commit() -> str:
    """The commit of this clone, marked where it was changed; else the version of the package."""
    root = Path(torchcaps.__file__).parents[1]
    if (root / ".git").exists():  # not that of some project around an installed package
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass  # no git here
    return f"torchcaps {torchcaps.__version__}"


def processor() -> str:
    """What the processor is called."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
