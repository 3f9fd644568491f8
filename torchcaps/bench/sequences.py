"""Memory and time of Heinsen's layer on longer and longer sequences, for each backend.

    python -m torchcaps.bench.sequences [--lengths 100 1000 10000 100000] [--rounds 5] [--device cuda] [--out FOLDER]
    python -m torchcaps.bench.sequences --smoke      # seconds; with TRITON_INTERPRET=1 the kernels' values too: minutes

The layer is the first one of `EmbeddingCapsNet`: any number of vectors of 64 features, with scores and shared weights,
to 64 parts of 2. One sequence runs forward (without gradients) and forward and backward, in float32. Time is relative
to the reference's, medians of rounds in turns. Memory is the peak of a pass in a process of its own, beyond vectors,
parameters and the gradients of both: what PyTorch allocates and, on the CPU, by how much the process grows.

Numbers are printed only after values and gradients of all backends agree with the reference in float64, at that length
or, where that reference does not fit, at the longest length where it does. A backend that would take more than half of
the free memory is not run. `--out` writes sequences.png.
"""

import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from torchcaps import CapsuleLinear, HeinsenRouting
from torchcaps.bench import baselines, peak_bytes
from torchcaps.bench.layers import Layer, LayerCase, Sizes
from torchcaps.bench.measurement import PASSES, show_bytes, time_side_by_side
from torchcaps.bench.memory import free_bytes, peak_allocated
from torchcaps.bench.passes import prepare, relative_errors, tolerances
from torchcaps.bench.report import LINES
from torchcaps.bench.script import script_parser
from torchcaps.ops.backend import HAS_TRITON, INTERPRETED
from torchcaps.utils.extras import needs

with needs("train"):
    from matplotlib.figure import Figure

    from torchcaps.explain.axes import in_style, write

FEATURES = 64  # of a vector
HEAD = f"{'vectors':>9}  {'backend':11}" + 2 * f"{'time':>7}{'allocated':>11}{'resident':>10}"


class Row(NamedTuple):
    """Time and memory of one pass of one backend.

    Fields:
        length: number of vectors.
        way: backend.
        pass_: one of `PASSES`.
        seconds: median time.
        allocated: peak bytes that PyTorch allocated.
        resident: bytes by which the process grew; None on CUDA.
    """

    length: int
    way: str
    pass_: str
    seconds: float
    allocated: int
    resident: int | None


def parts_of(sizes: Sizes, iterations: int) -> CapsuleLinear:
    layer = CapsuleLinear(
        None, sizes.parents, sizes.in_pose, sizes.out_pose, HeinsenRouting(iterations, init="paper"), bias=True
    )
    assert layer.bias is not None
    nn.init.normal_(layer.bias, std=0.1)  # not zero, as after some training
    return layer


LAYER = Layer(
    parts_of,
    baselines.heinsen,
    iterations=3,
    paper=Sizes(
        batch=1, types=1, parents=64, in_pose=FEATURES, out_pose=2
    ),  # one vector, so that the length is the factor
    smoke=Sizes(batch=1, types=1, parents=3, in_pose=4, out_pose=2),
    scores=True,
)


def build(length: int, device: str, smoke: bool) -> LayerCase:
    torch.manual_seed(0)
    return LAYER.build(length, batch=None, iterations=None, smoke=smoke).to(device, torch.float32)


def check(case: LayerCase, ways: Sequence[str], device: str) -> None:
    """Exit if a backend is more than twice as far from float64 as the reference in float32 is."""
    truth = prepare("reference", case.to(device, torch.float64), True)()
    allowed = tolerances(relative_errors(prepare("reference", case, True)(), truth), torch.float32)
    for way in ways:
        for backward in (False, True):
            for name, error in relative_errors(prepare(way, case, backward)(), truth).items():
                if not error <= allowed[name]:
                    off = f"{name} is off by {error:.1e}, allowed {allowed[name]:.1e}"
                    raise SystemExit(f"{way}, {case.children:,} vectors: values disagree: {off}")


def peaks(length: int, way: str, backward: bool, device: str, smoke: bool) -> tuple[int, int | None]:
    """Bytes that PyTorch allocated in a pass, and by which this process grew (None on CUDA)."""
    prepare(way, build(5, device, smoke=True), backward)()  # libraries loaded at first use do not count
    case = build(length, device, smoke)
    run = prepare(way, case, backward)
    kept = sum(x.numel() * x.element_size() for x in (*case.inputs.values(), *case.module.parameters())) * backward
    grown = peak_bytes(run, device)
    if device == "cuda":
        return grown - kept, None
    return peak_allocated(run) - kept, max(0, grown - kept)


def measure(length: int, ways: Sequence[str], rounds: int, device: str, smoke: bool) -> list[Row]:
    """Measure memory and time of both passes in each way."""
    rows: list[Row] = []
    if device == "cuda":
        torch.cuda.empty_cache()  # leave the device to the fresh processes
    for backward, name in enumerate(PASSES):
        memory = {}
        for way in ways:
            task = length, way, bool(backward), device, smoke
            if smoke:
                memory[way] = peaks(*task)  # saves the seconds that a process takes to start
                continue
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                memory[way] = fresh.submit(peaks, *task).result()
        case = build(length, device, smoke)
        runs = {way: prepare(way, case, bool(backward)) for way in ways}
        time_side_by_side(runs, 1, device)  # warms up
        taken = time_side_by_side(runs, rounds, device)
        rows += [Row(length, way, name, statistics.median(taken[way]), *memory[way]) for way in ways]
    return rows


def show(rows: Sequence[Row], ways: Sequence[str]) -> None:
    """Print a line per backend; all rows have the same length."""
    reference = {row.pass_: row.seconds for row in rows if row.way == "reference"}
    for way in ways:
        line = f"{rows[0].length:>9,}  {way:11}"
        for row in (row for row in rows if row.way == way):
            time = f"{row.seconds / reference[row.pass_]:.2f}x" if reference else "-"
            resident = "-" if row.resident is None else show_bytes(row.resident)
            line += f"{time:>7}{show_bytes(row.allocated):>11}{resident:>10}"
        print(line, flush=True)


@in_style
def figure_of(rows: Sequence[Row]) -> Figure:
    """Draw the allocated memory of both passes over the number of vectors."""
    figure = Figure(figsize=(9, 4))
    lengths = sorted({row.length for row in rows})
    for axes, name in zip(figure.subplots(1, 2, sharey=True), PASSES, strict=True):
        for way in dict.fromkeys(row.way for row in rows):
            line = [(row.length, row.allocated / 1e6) for row in rows if (row.way, row.pass_) == (way, name)]
            axes.plot(*zip(*line, strict=True), **LINES[way], label=way)
        vectors = [length * FEATURES * 4 / 1e6 for length in lengths]
        axes.plot(lengths, vectors, color="black", linestyle=":", label="the vectors themselves")
        axes.set(xscale="log", yscale="log", title=name, xlabel="vectors")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.set_xticks([], minor=True)
        axes.grid()
    figure.axes[0].set_ylabel("MB beyond vectors, parameters\nand the gradients of both")
    figure.axes[0].legend()
    figure.suptitle("Heinsen's layer, 64 features to 64 parts of 2: peak memory of a pass")
    return figure


def main() -> None:
    parser = script_parser("sequences", __doc__)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[100, 1_000, 10_000, 100_000],
        help="numbers of vectors (default: 100 1000 10000 100000)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="passes of each backend (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for sequences.png")
    parser.add_argument("--smoke", action="store_true", help="run a tiny layer on 7 and 40 vectors")
    options = parser.parse_args()
    device, smoke, lengths, rounds = options.device, options.smoke, sorted(options.lengths), options.rounds
    if smoke:
        lengths, rounds = [7, 40], 1
    ways = ["reference", "tiled", *(["triton"] if HAS_TRITON and device == "cuda" else [])]
    checked_too = (
        ["triton"] if HAS_TRITON and INTERPRETED and smoke else []
    )  # without a time, which would be the interpreter's
    print(f"{'':22}{PASSES[0]:^28}{PASSES[1]:^28}\n{HEAD}")
    rows: list[Row] = []
    checked = 0
    for length in lengths:
        case = build(length, device, smoke)
        needed, free = case.bytes_needed(baseline=False), free_bytes(device) // 2
        if 2 * needed <= free:
            check(case, [*ways, *checked_too], device)
            checked = length
        elif not checked:
            raise SystemExit(f"not run: {length:,} vectors cannot be checked in {show_bytes(free)}: start with fewer")
        del case
        fitting = ways if needed <= free else [way for way in ways if way != "reference"]
        found = measure(length, fitting, rounds, device, smoke)
        if fitting != ways:
            print(f"{length:>9,}  reference  not run: needs about {show_bytes(needed)} of {show_bytes(free)}")
        show(found, fitting)
        if checked < length:
            print(f"{'':11}values checked for {checked:,} vectors")
        rows += found
    if options.out:
        print(write(figure_of(rows), options.out / "sequences.png"))


if __name__ == "__main__":
    main()
