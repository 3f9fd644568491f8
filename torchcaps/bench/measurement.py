"""Measure time and memory of a layer or a network in several ways, side by side; ways with wrong values get none."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchcaps.bench.cases import Case
from torchcaps.bench.layers import LAYERS, Layer
from torchcaps.bench.networks import NETWORKS, Network
from torchcaps.bench.resources import (
    Rates,
    exact_float32,
    graphed,
    in_fresh_process,
    launches,
    peak_allocated,
    peak_resident,
    show_bytes,
    time_side_by_side,
)
from torchcaps.bench.ways import COMPILED, STORES_VOTES, NoNumber, by_samples, check_values, prepare, relative_errors
from torchcaps.utils.checks import counted
from torchcaps.utils.memory import free_bytes

MEASURED: dict[str, Layer | Network] = {**LAYERS, **NETWORKS}
PASSES = ("forward", "forward+backward")
EXACT = 1e-9  # error of the reference in float64 that is allowed where a way is checked in float64


@dataclass(frozen=True)
class Request:
    """What to measure; another process can build the same.

    Attributes:
        layer: name in `MEASURED`.
        factor: children in multiples of the paper's.
        batch: batch size, or None for the paper's.
        iterations: number of routing iterations, or None for the paper's.
        smoke: whether to take small sizes.
        device: "cpu" or "cuda".
        dtype: precision, the name of a torch.dtype.
        graphs: whether to time replays of CUDA graphs.
    """

    layer: str
    factor: int = 1
    batch: int | None = None
    iterations: int | None = None
    smoke: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    graphs: bool = False

    def build(self) -> Case:
        """Build module and inputs, with the same numbers at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            case = MEASURED[self.layer].build(self.factor, self.batch, self.iterations, self.smoke)
        return case.to(self.device, getattr(torch, self.dtype))


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
        launches: number of kernels and graphs that the host launches on a CUDA device, if it is known.
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
    launches: int | None = None
    bytes: int | None = None
    bytes_ratio: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    note: str | None = None

    @property
    def backward(self) -> bool:
        """Whether the pass goes backward, too."""
        return self.pass_ == PASSES[1]

    def json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        row = {name.rstrip("_"): value for name, value in asdict(self).items()}
        row["errors"] = {name: e if math.isfinite(e) else None for name, e in self.errors.items()}
        return row


@exact_float32()
def measure(
    request: Request, ways: Sequence[str], rounds: int, rates: Rates, progress: Callable[[str], None]
) -> list[Row]:
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
    case = request.build()
    children, iterations = case.children, case.iterations
    works = [case.work(backward) for backward in (False, True)]
    bounds = [max(work.flops / rates.matrix, work.bytes / rates.copy) for work in works]
    title = f"{request.layer}, {counted(children, 'child', 'children')}, {counted(iterations, 'iteration')}"
    progress(f"{title}: the reference in float64")
    checked, truth, eager = _truth(request, case)
    rows: list[Row] = []
    runs: dict[str, dict[str, Callable[[], object]]] = {name: {} for name in PASSES}
    for way in ways:
        of_way = [
            Row(request.layer, request.factor, children, iterations, case.batch, way, name, bound)
            for name, bound in zip(PASSES, bounds, strict=True)
        ]
        rows += of_way
        try:
            _check_fits(way, case, request.device)
            if request.device != "cuda":  # memory first: if there is too little, a fresh process is killed
                for row in of_way:
                    progress(f"{title}: {way}, {row.pass_}: memory")
                    measured = memory_of_pass, request, way, row.backward
                    row.bytes = measured[0](*measured[1:]) if request.smoke else in_fresh_process(*measured)
            progress(f"{title}: {way}: values")
            prepared = {row.pass_: prepare(way, case, row.backward) for row in of_way}
            in_float64 = not case.is_exact(way in COMPILED)
            for row in of_way:
                values = prepared[row.pass_]()  # also the warm-up
                if in_float64:
                    values = prepare(way, case.to(request.device, torch.float64), row.backward)()
                    row.note = "values checked in float64"
                elif checked is not case:
                    values = prepare(way, checked, row.backward)()
                    row.note = f"values checked for {counted(checked.children, 'child', 'children')}"
                row.errors = relative_errors(values, truth)
                if way in COMPILED:  # PyTorch captures a CUDA graph in the second call, and replays it in the third
                    prepared[row.pass_]()
                    replayed = prepared[row.pass_]()
                    if row.note is None:
                        row.errors = _larger(row.errors, relative_errors(replayed, truth))
            allowed = dict.fromkeys(eager, EXACT) if in_float64 else eager
            for row in of_way:
                check_values(way, row.errors, allowed, getattr(torch, request.dtype), case.slack)
            if request.device == "cuda":  # PyTorch counts the memory of a pass in this process
                for row in of_way:
                    row.bytes = peak_allocated(prepared[row.pass_], request.device)
            timed = {name: graphed(run) if request.graphs else run for name, run in prepared.items()}
        except Exception as error:  # whatever it is, the other ways are measured
            for row in of_way:
                row.bytes, row.note = None, _reason(error)
            continue
        for row in of_way:
            runs[row.pass_][way] = timed[row.pass_]
            if request.device == "cuda":
                row.launches = launches(timed[row.pass_])
    for name in PASSES:
        progress(f"{title}: {name}: time")
        taken = time_side_by_side(runs[name], rounds, request.device)
        baseline = next((row for row in rows if (row.way, row.pass_) == ("baseline", name)), None)
        for row in rows:
            if row.pass_ == name and row.way in taken:
                row.rounds, row.seconds = taken[row.way], statistics.median(taken[row.way])
                if baseline and baseline.seconds:
                    row.ratio = row.seconds / baseline.seconds
                if baseline and baseline.bytes and row.bytes is not None:
                    row.bytes_ratio = row.bytes / baseline.bytes
    return rows


def _larger(errors: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    return {name: max(error, others[name]) for name, error in errors.items()}


def memory_of_pass(request: Request, way: str, backward: bool) -> int:
    """Return the peak bytes of a pass beyond parameters, children and gradients of the parents, in a fresh process."""
    run = prepare(way, request.build(), backward)
    if way in COMPILED:
        run()  # warms up in full size, for which alone it is compiled
    else:
        prepare(way, replace(request, smoke=True, factor=1).build(), backward)()
    return peak_resident(run)


def _truth(request: Request, case: Case) -> tuple[Case, dict[str, Tensor], dict[str, float]]:
    """A case that fits into memory, its results in float64, and the errors of the eager reference."""
    free, needed = free_bytes(request.device), case.bytes_needed(baseline=False)
    if 2 * needed / case.batch > free and request.factor > 1:
        fewer = replace(request, factor=1)
        return _truth(fewer, fewer.build())
    truth = by_samples(case.to(request.device, torch.float64))
    eager = prepare("reference", case, True)() if needed < free else by_samples(case)
    return case, truth, relative_errors(eager, truth)


def _check_fits(way: str, case: Case, device: str) -> None:
    if way in STORES_VOTES:
        needed, free = case.bytes_needed(way == "baseline"), free_bytes(device)
        if needed > free:
            raise NoNumber(f"not run: needs about {show_bytes(needed)}, {show_bytes(free)} are free")


def _reason(error: Exception) -> str:
    """Return the reason for which a way gets no number: the first line of an error."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first_line if isinstance(error, NoNumber) else f"{type(error).__name__}: {first_line}".removesuffix(": ")
