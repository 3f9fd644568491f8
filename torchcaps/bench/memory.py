"""Peak memory of one pass, in a process of its own so that no measurement sees another's."""

import ctypes
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchcaps.bench.passes import NoNumber, first_line, prepare
from torchcaps.bench.request import Request


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """How far memory rises above what was there before while something runs.

    On CUDA what PyTorch allocates, else the resident memory of this process: at its highest, which Linux can start
    anew; where it cannot be started anew, only what goes beyond this process's highest so far counts.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if sys.platform == "linux":
        # What was freed may still be resident, would be used again and not be counted.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before, highest = _resident("VmRSS"), lambda: _resident("VmHWM")
    except OSError:
        before, highest = _highest_ever(), _highest_ever
    run()
    return max(0, highest() - before)


def measure_peak(request: Request, way: str, backward: bool) -> int:
    """Peak bytes of one pass beyond parameters, children and the gradients of their parents, in a fresh process.

    Raises:
        NoNumber: it failed; the message is a line that says how.
    """
    code = "from torchcaps.bench.memory import main; main()"
    task = json.dumps({"request": asdict(request), "way": way, "backward": backward})
    if request.device == "cuda":
        torch.cuda.empty_cache()  # leave the device to it
    run = subprocess.run([sys.executable, "-c", code, task], capture_output=True, text=True)
    return answer_of(run)["bytes"]


def answer_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line of JSON that a process has printed.

    Raises:
        NoNumber: it failed; the message is a line that says how.
    """
    if run.returncode < 0:
        raise NoNumber(f"killed by signal {-run.returncode} (9: out of memory)")
    said = [line for line in run.stdout.splitlines() if line.startswith("{")]  # tools around it may speak later
    if run.returncode > 0 or not said:
        raise NoNumber(run.stderr.strip().rpartition("\n")[2] or f"status {run.returncode}, and no answer")
    answer = json.loads(said[-1])
    if "error" in answer:
        raise NoNumber(answer["error"])
    return answer


def main() -> None:
    """What the fresh process runs."""
    task = json.loads(sys.argv[1])
    request, way, backward = Request(**task["request"]), task["way"], task["backward"]
    try:
        case = request.build()
        run = prepare(way, case, backward)
        if way == "compiled-reference":
            run()  # compiled for these sizes alone
        else:
            prepare(way, Request(**{**task["request"], "smoke": True, "factor": 1}).build(), backward)()
        print(json.dumps({"bytes": peak_bytes(run, request.device)}))
    except Exception as error:
        print(json.dumps({"error": first_line(error)}))


def free_bytes(device: str) -> int:
    """Memory that can still be had."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else sys.maxsize  # unknown elsewhere: try


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def _highest_ever() -> int:
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
