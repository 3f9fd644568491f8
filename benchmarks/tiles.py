"""Which tiles and how many programs are fastest: Triton's kernels with a handful of settings, on a CUDA device.

    python benchmarks/tiles.py --out build/tiles
    python benchmarks/tiles.py --dtypes bfloat16 --layers heinsen head --out build/tiles-half
    python benchmarks/tiles.py --smoke               # tiny layers in Triton's interpreter on a CPU, to try this script

The settings are those at the top of torchcaps/ops/triton/problem.py, each changed alone, and at the end the best of
each together. Layers are the five of `torchcaps bench`, and some as users have them. Passes are replayed from a CUDA
graph, so that only the device counts, and take turns. A setting gets a number only if its values and gradients agree
with those of the settings as they are. The bound is that of `torchcaps bench`. Other processes compile the kernels
first, because most time goes to the compiler. After each layer the folder `--out` has tiles.json and table.txt with all
numbers so far. After `--seconds` no further layer is begun.

The rules in problem.py are chosen from this table by hand. The library does not choose while it runs: what a
measurement of the moment chooses would change the order of sums, and so bits, from run to run, and no kernel can be
timed while a CUDA graph is captured.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

if __name__ == "__main__":  # the package reads it when it is imported
    os.environ["TRITON_INTERPRET"] = str(int("--smoke" in sys.argv))

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps import CapsuleHead, use_backend
from torchcaps.bench import Rates, measure_rates
from torchcaps.bench.layers import LAYERS, Layer, Sizes
from torchcaps.bench.measurement import PASSES
from torchcaps.bench.report import environment
from torchcaps.bench.resources import graphed, time_side_by_side
from torchcaps.bench.ways import prepare, relative_errors
from torchcaps.ops import backend
from torchcaps.ops.triton import problem
from torchcaps.utils.checks import one_line
from torchcaps.utils.files import make_folder, write_text_whole

Run = Callable[[], dict[str, Tensor]]
Settings = dict[str, int]

AS_NOW, BEST = "as now", "best of each"
CHANGES = {
    "TILE": (256, 1024),
    "PER_WARP": (128, 512),
    "ROW_TILE": (2048, 8192),
    "ROW_PER_WARP": (512, 2048),
    "PROGRAMS": (4096, 16384),
}
SMOKE_CHANGES = {"ROW_TILE": (4,), "PROGRAMS": (2,)}
TOLERANCE = 1e-3  # of values and gradients, relative to those of the settings as they are
TURN = 0.02  # seconds that the turn of a setting takes at least


def dynamic(parents: int, in_pose: int, out_pose: int) -> Layer:
    return replace(LAYERS["digit-capsules"], paper=Sizes(64, 576, parents, in_pose, out_pose))


# By name; None stands for a head of 10 classes on maps of 7x7. The deepest poses come last: they compile for longest.
MEASURED: dict[str, Layer | None] = {
    **LAYERS,
    "head": None,
    "8-to-8": dynamic(5, 8, 8),
    "16-to-16": dynamic(10, 16, 16),
    "32-to-32": dynamic(10, 32, 32),
}
SMOKE, TINY = ("heinsen", "32-to-32", "head"), Sizes(2, 3, 2, (1, 2), (1, 2))  # the interpreter is slow


@dataclass
class Row:
    """The time of a pass with some settings beside that with the settings as they are, or a note why there is none."""

    layer: str
    dtype: str
    pass_: str
    settings: str
    changed: Settings
    bound: float | None
    seconds: float | None = None
    seconds_as_now: float | None = None
    note: str = ""


@contextlib.contextmanager
def changed(settings: Settings) -> Iterator[None]:
    """Change settings of the kernels, and let them take poses of any depth, so that the table says what these cost."""
    with contextlib.ExitStack() as changes:
        for module, name, value in ((backend, "MOST_WEIGHTS", sys.maxsize), *((problem, *x) for x in settings.items())):
            changes.enter_context(mock.patch.object(module, name, value))
        yield


def passes(name: str, dtype: str, smoke: bool, rates: Rates | None = None) -> Iterator[tuple[str, Run, float | None]]:
    """Yield the name of each pass, the pass to run, and its bound in seconds if rates are given."""
    device, layer = "cpu" if smoke else "cuda", MEASURED[name]
    torch.manual_seed(0)
    if layer is None:
        head = CapsuleHead(4, 2, types=2, pose=2) if smoke else CapsuleHead(64, 10)
        features = torch.randn((2, 4, 1, 1) if smoke else (64, 64, 7, 7))
        to = {"device": device, "dtype": getattr(torch, dtype)}
        yield PASSES[1], head_pass(head.to(**to), features.to(**to)), None
        return
    case = replace(layer, smoke=TINY).build(1, None, 2 if smoke else None, smoke).to(device, getattr(torch, dtype))
    for pass_, backward in zip(PASSES, (False, True), strict=True):
        work = case.work(backward)
        bound = rates and max(work.flops / rates.matrix, work.bytes / rates.copy)
        yield pass_, prepare("triton", case, backward), bound


def head_pass(head: CapsuleHead, features: Tensor) -> Run:
    """Return a pass of a head, forward and backward."""
    labels = torch.zeros(len(features), dtype=torch.long, device=features.device)
    leaves = {"features": features.requires_grad_(), **dict(head.named_parameters())}

    def run() -> dict[str, Tensor]:
        with use_backend("triton"):
            logits = head(features)
            gradients = torch.autograd.grad(F.cross_entropy(logits, labels), list(leaves.values()))
        return {"logits": logits.detach(), **dict(zip(leaves, gradients, strict=True))}

    return run


def compile_kernels(name: str, dtype: str, smoke: bool, settings: Settings) -> None:
    """Leave the compiled kernels in Triton's cache, for the process that measures."""
    for _, run, _ in passes(name, dtype, smoke):
        with contextlib.suppress(Exception), changed(settings):  # the process that measures has the error, too
            run()


def measure(
    name: str, dtype: str, smoke: bool, candidates: Mapping[str, Settings], rates: Rates, rounds: int
) -> Iterator[Row]:
    """Check and time each pass of a layer with all settings. The first settings are what the others must agree with."""
    device, allowed = "cpu" if smoke else "cuda", max(TOLERANCE, 2 * torch.finfo(getattr(torch, dtype)).eps)
    for pass_, run, bound in passes(name, dtype, smoke, rates):
        rows = {text: Row(name, dtype, pass_, text, settings, bound) for text, settings in candidates.items()}
        timed: dict[str, Callable[[], object]] = {}
        truth: dict[str, Tensor] = {}
        for text, row in rows.items():
            try:
                with changed(row.changed):
                    results = {what: x.double() for what, x in run().items()}
                    truth = truth or results
                    row.note = disagreement(results, truth, allowed)
                    if not row.note:
                        timed[text] = partial(in_settings, run, row.changed) if smoke else graphed(run)
            except Exception as error:  # whatever it is, such as too many registers, the others are measured
                row.note = f"{type(error).__name__}: {one_line(error)[:200]}"
            if not truth:
                break  # there is nothing to compare with
        once = {text: seconds[0] for text, seconds in time_side_by_side(timed, 1, device).items()}
        often = {text: max(1, int(TURN / seconds)) for text, seconds in once.items()}
        turns = {text: partial(repeat, timed[text], often[text]) for text in timed}
        for text, seconds in time_side_by_side(turns, rounds, device).items():
            rows[text].seconds = statistics.median(seconds) / often[text]
            rows[text].seconds_as_now = rows[AS_NOW].seconds
        yield from rows.values()


def disagreement(results: dict[str, Tensor], truth: dict[str, Tensor], allowed: float) -> str:
    """Say which results are further off than allowed; "" if none is. A result that is not finite is infinitely off."""
    errors = relative_errors(results, truth)
    return ", ".join(f"{what} is off by {error:.1e}" for what, error in errors.items() if not error <= allowed)


def in_settings(run: Run, settings: Settings) -> None:
    with changed(settings):
        run()


def repeat(run: Callable[[], object], often: int) -> None:
    for _ in range(often):
        run()


def best_of_each(rows: Iterable[Row]) -> Settings:
    """Return the fastest value of each setting in the longest pass, of those that were changed alone."""
    times = {row.settings: (row.seconds, row.changed) for row in rows if row.pass_ == PASSES[1] and row.seconds}
    best: dict[str, tuple[float, int]] = {}
    for seconds, changes in times.values():
        for setting, value in changes.items():
            fastest, _ = best.get(setting, times[AS_NOW])
            if seconds < fastest:
                best[setting] = seconds, value
    return {setting: value for setting, (_, value) in best.items()}


def table(rows: Sequence[Row]) -> str:
    """Return a line for each time: milliseconds, relative to the settings as they are, and relative to the bound."""
    lines = [f"{'layer':<24}{'type':<10}{'pass':<18}{'settings':<46}{'ms':>9}{'as now':>8}{'bound':>7}"]
    for row in rows:
        text = ", ".join(f"{name} {value}" for name, value in row.changed.items()) or AS_NOW
        begin = f"{row.layer:<24}{row.dtype:<10}{row.pass_:<18}{text:<46}"
        if row.seconds is None:
            lines.append(f"{begin}{row.note or 'not measured'}")
            continue
        ratio = f"{row.seconds / row.seconds_as_now:.2f}x" if row.seconds_as_now else ""
        bound = f"{row.seconds / row.bound:.1f}x" if row.bound else ""
        lines.append(f"{begin}{row.seconds * 1e3:>9.3f}{ratio:>8}{bound:>7}")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the layers; return 0, 1 if one has no times, or 2 if there is no device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", nargs="+", choices=MEASURED, help="default: all")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=9, help="to take medians of (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="of all layers (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile (default: one for each core, at most 8)")
    parser.add_argument("--out", type=Path, default=Path("build", "tiles"), help="folder (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny layers in Triton's interpreter on a CPU")
    options = parser.parse_args(arguments)
    device = "cpu" if options.smoke else "cuda"
    reason = None if options.smoke or torch.cuda.is_available() else "PyTorch finds no CUDA device"
    reason = reason or backend.why_no_triton(torch.device(device))
    if reason is not None:
        print(f"tiles: {reason}: run it on a machine with an NVIDIA GPU, or with --smoke", file=sys.stderr)
        return 2
    began, rows = time.monotonic(), list[Row]()
    make_folder(options.out)
    rates = measure_rates(device, torch.float32)
    changes = SMOKE_CHANGES if options.smoke else CHANGES
    alone = [{name: value} for name, values in changes.items() for value in values]
    candidates = {AS_NOW: {}, **{f"{name} {value}": each for each in alone for name, value in each.items()}}
    jobs = options.jobs or min(os.cpu_count() or 1, 8)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as processes:
        for name in options.layers or (SMOKE if options.smoke else MEASURED):
            for dtype in options.dtypes:
                if time.monotonic() - began > options.seconds:
                    print(f"{name}, {dtype}: not begun, the {options.seconds:g} seconds are over", flush=True)
                    continue
                if not options.smoke:  # the interpreter compiles nothing
                    list(processes.map(partial(compile_kernels, name, dtype, False), candidates.values()))
                new = list(measure(name, dtype, options.smoke, candidates, rates, options.rounds))
                best = best_of_each(new)
                if len(best) > 1:
                    both = {AS_NOW: {}, BEST: best}
                    again = measure(name, dtype, options.smoke, both, rates, options.rounds)
                    new += [row for row in again if row.settings == BEST]
                rows += new
                print(table(new), flush=True)
                values = {**environment(device, "float32", rates), "rows": [asdict(row) for row in rows]}
                write_text_whole(options.out / "tiles.json", json.dumps(values, indent=1) + "\n")
                write_text_whole(options.out / "table.txt", table(rows))
    measured = {row.layer for row in rows if row.seconds is not None}
    return 0 if measured == {row.layer for row in rows} and rows else 1


if __name__ == "__main__":
    sys.exit(main())
