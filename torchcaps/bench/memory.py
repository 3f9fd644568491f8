"""Peak memory of a pass: in a process of its own, so that no measurement sees another's, or by PyTorch's profiler."""

import ctypes
import gc
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from torchcaps.bench.passes import NoNumber, first_line, prepare
from torchcaps.bench.request import Request


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """Return by how many bytes memory rises at most while something runs.

    On CUDA it is the memory that PyTorch allocates. On the CPU it is the resident memory of this process, whose
    recorded peak Linux can reset; where it cannot be reset, only what exceeds the process's highest peak so far counts.
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
        # Freed memory may still be resident: it would be used again and not be counted.
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


def peak_allocated(run: Callable[[], object]) -> int:
    """Return the most bytes that PyTorch's CPU allocator holds at once during a run, beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [
        event
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def measure_peak(request: Request, way: str, backward: bool) -> int:
    """Measure, in a fresh process, the peak bytes of a pass beyond parameters, children and gradients of the parents.

    Raises:
        NoNumber: the process failed; the message is a line that says why.
    """
    code = "from torchcaps.bench.memory import main; main()"
    task = json.dumps({"request": asdict(request), "way": way, "backward": backward})
    if request.device == "cuda":
        torch.cuda.empty_cache()  # leave the memory of the device to the process
    run = subprocess.run([sys.executable, "-c", code, task], capture_output=True, text=True)
    return answer_of(run)["bytes"]


def answer_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the last line of JSON that a process has printed.

    Raises:
        NoNumber: the process failed; the message is a line that says why.
    """
    if run.returncode < 0:
        raise NoNumber(f"killed by signal {-run.returncode} (9: out of memory)")
    answers = [
        line for line in run.stdout.splitlines() if line.startswith("{")
    ]  # tools around the process may print other lines
    if run.returncode > 0 or not answers:
        raise NoNumber(run.stderr.strip().rpartition("\n")[2] or f"status {run.returncode}, and no answer")
    answer = json.loads(answers[-1])
    if "error" in answer:
        raise NoNumber(answer["error"])
    return answer


def main() -> None:
    """Measure what the command line asks for, in the fresh process; print bytes or an error as a line of JSON."""
    task = json.loads(sys.argv[1])
    request, way, backward = Request(**task["request"]), task["way"], task["backward"]
    try:
        case = request.build()
        run = prepare(way, case, backward)
        if way == "compiled-reference":
            run()  # warms up in full size, for which alone it is compiled
        else:
            prepare(way, Request(**{**task["request"], "smoke": True, "factor": 1}).build(), backward)()
        print(json.dumps({"bytes": peak_bytes(run, request.device)}))
    except Exception as error:
        print(json.dumps({"error": first_line(error)}))


def free_bytes(device: str) -> int:
    """Return the bytes that are still free on a device."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else sys.maxsize  # unknown on other systems: try


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def _highest_ever() -> int:
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
