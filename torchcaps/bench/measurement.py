"""Measure time and memory of a layer or a network in several ways, side by side; ways with wrong values get none."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.bench.cases import Case
from torchcaps.bench.memory import free_bytes, measure_peak, peak_bytes
from torchcaps.bench.passes import (
    STORES_VOTES,
    NoNumber,
    by_samples,
    check_values,
    first_line,
    prepare,
    relative_errors,
    tolerances,
)
from torchcaps.bench.request import Request

PASSES = ("forward", "forward+backward")
OURS = ("reference", "tiled", "native", "triton")
SLACK = 5  # factor on allowed errors of ways that are not ours, which compute in another order

Run = Callable[[], dict[str, Tensor]]
Progress = Callable[[str], None]


class Rates(NamedTuple):
    """Rates of the machine: floating-point operations, and bytes read or written, per second."""

    matrix: float
    copy: float


@dataclass
class Row:
    """Time and memory of one way in one pass. Where a number is None, `note` says why.

    Attributes:
        layer: name of the layer or network.
        factor: children in multiples of the paper's.
        children: number of children of a sample.
        iterations: number of routing iterations.
        batch: number of samples.
        way: one of `WAYS`.
        pass_: one of `PASSES`.
        bound_seconds: least time that the arithmetic or the copies can take.
        seconds: median time.
        rounds: time in each round.
        ratio: seconds / the baseline's.
        bytes: peak memory.
        bytes_ratio: bytes / the baseline's.
        errors: error of each result, relative to float64.
        note: why numbers are missing, or what was checked.
    """

    layer: str
    factor: int
    children: int
    iterations: int
    batch: int
    way: str
    pass_: str
    bound_seconds: float
    seconds: float | None = None
    rounds: list[float] = field(default_factory=list)
    ratio: float | None = None
    bytes: int | None = None
    bytes_ratio: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    note: str | None = None

    def json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        row = {name.rstrip("_"): value for name, value in asdict(self).items()}
        row["errors"] = {name: e if math.isfinite(e) else None for name, e in self.errors.items()}
        return row


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """Measure a large matrix product, the faster of float32 and `dtype`, and a large copy; the best of six each."""
    return Rates(max(matrix_rate(device, kind) for kind in {torch.float32, dtype}), copy_rate(device))


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Measure floating-point operations per second of a large matrix product."""
    n = 8192 if device == "cuda" else 1536
    a = torch.randn(n, n, device=device).to(dtype)
    taken = time_side_by_side({"product": functools.partial(torch.mm, a, a)}, 6, device)
    return 2 * n**3 / min(taken["product"])


def copy_rate(device: str) -> float:
    """Measure bytes read and written per second of a large copy."""
    size = 2**30 if device == "cuda" else 2**28
    source = torch.zeros(size // 4, device=device)
    taken = time_side_by_side({"copy": functools.partial(torch.empty_like(source).copy_, source)}, 6, device)
    return 2 * size / min(taken["copy"])


def time_side_by_side(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round. They take turns, so that disturbances affect all alike."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds_of(run, device))
    return taken


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Time one run: by the clock, or on CUDA between two events, once the device is idle."""
    if device != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(request: Request, ways: Sequence[str], rounds: int, rates: Rates, progress: Progress) -> list[Row]:
    """Measure a layer or network; return a row per way and pass.

    A way has numbers only if its values and gradients agree with the reference in float64: for these children or,
    where the reference in float64 does not fit, for as many as the paper's.

    Args:
        request: what to measure.
        ways: names of the ways.
        rounds: number of timed runs of each.
        rates: rates of the machine, for the bound.
        progress: function that is given a line of progress.
    """
    torch.compiler.reset()
    # On CUDA, PyTorch counts the memory of a pass in this process. On the CPU fresh processes measure it.
    here = request.device == "cuda"
    case = request.build()
    works = [case.work(backward) for backward in (False, True)]
    bounds = [max(w.flops / rates.matrix, w.bytes / rates.copy) for w in works]
    children, iterations = case.children, case.iterations
    title = f"{request.layer}, {children} children, {iterations} iteration{'s' if iterations > 1 else ''}"
    progress(f"{title}: the reference in float64")
    checked, truth, allowed = _truth(request, case)
    rows: list[Row] = []
    runs: list[dict[str, Run]] = [{}, {}]
    for way in ways:
        new = [
            Row(request.layer, request.factor, children, iterations, case.batch, way, name, bound)
            for name, bound in zip(PASSES, bounds, strict=True)
        ]
        rows += new
        try:
            _check_fits(way, case, request.device)
            peaks: list[int] = []
            for backward, name in enumerate(() if here else PASSES):
                progress(f"{title}: {way}, {name}: memory")
                # Memory first: if there is too little, a fresh process is killed and not this one.
                peaks.append(measure_peak(request, way, bool(backward)))
            progress(f"{title}: {way}: values")
            prepared = [prepare(way, case, backward) for backward in (False, True)]
            for row, run in zip(new, prepared, strict=True):
                found = run()  # also the warm-up
                if checked is not case:
                    found = prepare(way, checked, row.pass_ == PASSES[1])()
                    row.note = f"values checked for {checked.children} children"
                row.errors = relative_errors(found, truth)
            errors = {name: e for row in new for name, e in row.errors.items()}
            check_values(errors, {name: e if way in OURS else SLACK * e for name, e in allowed.items()})
            if here:
                peaks = [peak_bytes(run, request.device) for run in prepared]
        except Exception as error:  # whatever it is, the other ways are measured
            for row in new:
                row.note = str(error) if isinstance(error, NoNumber) else first_line(error)
            continue
        for row, peak, ready, run in zip(new, peaks, runs, prepared, strict=True):
            row.bytes, ready[way] = peak, run
    for name, ready in zip(PASSES, runs, strict=True):
        progress(f"{title}: {name}: time")
        taken = time_side_by_side(ready, rounds, request.device)
        for row in rows:
            if row.pass_ == name and row.way in taken:
                row.rounds, row.seconds = taken[row.way], statistics.median(taken[row.way])
    baselines = {row.pass_: row for row in rows if row.way == "baseline"}
    for row in rows:
        baseline = baselines.get(row.pass_)
        if row.seconds is not None and baseline and baseline.seconds:
            row.ratio = row.seconds / baseline.seconds
        if row.bytes is not None and baseline and baseline.bytes:
            row.bytes_ratio = row.bytes / baseline.bytes
    return rows


def show_bytes(n: float) -> str:
    """Return bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _truth(request: Request, case: Case) -> tuple[Case, dict[str, Tensor], dict[str, float]]:
    """A case that fits into memory, its results in float64, and the errors allowed for each."""
    free, needed = free_bytes(request.device), case.bytes_needed(baseline=False)
    if 2 * needed / case.batch > free and request.factor > 1:
        fewer = replace(request, factor=1)
        return _truth(fewer, fewer.build())
    truth = by_samples(case.to(request.device, torch.float64))
    eager = prepare("reference", case, True)() if needed < free else by_samples(case)
    return case, truth, tolerances(relative_errors(eager, truth), getattr(torch, request.dtype))


def _check_fits(way: str, case: Case, device: str) -> None:
    if way in STORES_VOTES:
        needed, free = case.bytes_needed(way == "baseline"), free_bytes(device)
        if needed > free:
            raise NoNumber(f"not run: needs about {show_bytes(needed)}, {show_bytes(free)} are free")
