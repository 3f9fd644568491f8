"""How much memory is left."""

import re
import sys
from pathlib import Path

import torch


def free_bytes(device: torch.device | str) -> int:
    """Return the bytes that are still free on a device."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        return bytes_of("/proc/meminfo", "MemAvailable")
    except OSError:
        return sys.maxsize  # unknown on other systems: try


def bytes_of(file: str, field: str) -> int:
    """Return the bytes of a line such as `VmRSS:  1234 kB`."""
    line = re.search(rf"{field}:\s*(\d+) kB", Path(file).read_text(encoding="ascii"))
    if line is None:
        raise OSError(f"{file} has no {field}")
    return int(line[1]) * 1024
