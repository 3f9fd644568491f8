"""Time and memory of whatever can be run, and the rates of the machine."""

import ctypes
import gc
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from torchcaps.utils.memory import bytes_of


class Rates(NamedTuple):
    """Rates of the machine: floating-point operations, and bytes read or written, per second."""

    matrix: float
    copy: float


def measure_rates(device: str, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Measure a large matrix product, the faster of float32 and `dtype`, and a large copy; the best of six each."""
    n, size = (8192, 2**30) if device == "cuda" else (1536, 2**28)
    matrices = [torch.randn(n, n, device=device).to(kind) for kind in {torch.float32, dtype}]
    products = {str(a.dtype): partial(torch.mm, a, a) for a in matrices}
    source = torch.zeros(size // 4, device=device)
    with exact_float32():
        taken = time_side_by_side(
            {**products, "copy": partial(torch.empty_like(source).copy_, source)}, 6, device, clock
        )
    copy = min(taken.pop("copy"))
    return Rates(2 * n**3 / min(map(min, taken.values())), 2 * size / copy)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Multiply and convolve in float32 on a GPU. PyTorch convolves in TF32 there, which has three digits."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def time_side_by_side(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round. They take turns, so that disturbances affect all alike.

    Args:
        runs: what to run, by name.
        rounds: number of rounds.
        device: "cpu" or "cuda".
        clock: clock in seconds, on a CPU.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(_seconds(run, device, clock))
    return taken


def _seconds(run: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    """Time one run: by the clock, or on CUDA between two events, once the device is idle."""
    if device != "cuda":
        begun = clock()
        run()
        return clock() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """Capture a run in a CUDA graph, and return the replay: the device's work without the host's."""

    def replay() -> object:
        graph.replay()
        return run  # with the tensors whose addresses the graph has

    with torch.cuda.stream(torch.cuda.Stream()):
        run()  # what a first run sets up is not captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return replay


def launches(run: Callable[[], object]) -> int | None:
    """Return how many kernels and graphs the host launches on a CUDA device in a run; None if no profiler can tell."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return count_launches(event.name() for event in profiled.profiler.kineto_results.events()) or None


def count_launches(names: Iterable[str]) -> int:
    """Count calls of CUDA that launch a kernel, such as cudaLaunchKernel and cuLaunchKernelEx, or a graph."""
    return sum(name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")) for name in names)


def peak_allocated(run: Callable[[], object], device: str = "cpu") -> int:
    """Return the most bytes that PyTorch holds at once on a device during a run, beyond those held before."""
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [
        event
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def peak_resident(run: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process rises at most while something runs.

    Linux can reset the recorded peak; where it cannot be reset, only what exceeds the highest peak so far counts.
    """
    gc.collect()
    if sys.platform == "linux":
        # Freed memory may still be resident: it would be used again and not be counted.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before, can_reset = bytes_of("/proc/self/status", "VmRSS"), True
    except OSError:
        before, can_reset = _highest_ever(), False
    run()
    return max(0, (bytes_of("/proc/self/status", "VmHWM") if can_reset else _highest_ever()) - before)


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a process of its own, so that no measurement sees the memory of another.

    Raises:
        MemoryError: the process was killed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise MemoryError("the process was killed, as it is when memory runs out") from None


def show_bytes(n: float) -> str:
    """Return bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _highest_ever() -> int:
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
