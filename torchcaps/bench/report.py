"""Results of `torchcaps bench` as JSON, as a table and as a figure."""

import importlib.metadata
import itertools
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchcaps.bench.measurement import PASSES, Rates, Row, show_bytes
from torchcaps.ops import backends, native
from torchcaps.utils.extras import needs
from torchcaps.utils.files import write_whole
from torchcaps.utils.machine import commit, processor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Over = Literal["children", "iterations"]  # the horizontal axis of a figure

# Columns of each pass: speed and memory relative to the baseline, and time relative to the bound.
PASS = ("faster", "memory (less)", "x bound")
TABLE = (
    "layer",
    "children",
    "iterations",
    "way",
    *(f"{pass_}: {cell}" for pass_ in ("fwd", "+bwd") for cell in PASS),
    "",
)
# Colors are told apart by color-blind readers, and dashes and markers in grey.
LINES: dict[str, dict[str, Any]] = {
    "baseline": {"color": "#d55e00", "linestyle": "-.", "marker": "o"},
    "reference": {"color": "#0072b2", "linestyle": "--", "marker": "s"},
    "compiled-reference": {"color": "#56b4e9", "linestyle": "-.", "marker": "P"},
    "tiled": {"color": "#009e73", "linestyle": "-", "marker": "^"},
    "native": {"color": "#e69f00", "linestyle": "--", "marker": "D"},
    "triton": {"color": "#cc79a7", "linestyle": "-", "marker": "v"},
}


def environment(device: str, dtype: str, rates: Rates) -> dict[str, Any]:
    """Return what the numbers depend on: software, machine, precision and measured rates."""
    return {
        **software_and_machine(device),
        "dtype": dtype,
        "matrix_flops_per_second": rates.matrix,
        "copy_bytes_per_second": rates.copy,
    }


def software_and_machine(device: str) -> dict[str, Any]:
    """Return the versions, the commit, the device and the threads."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": torch.__version__,
        "native": native.instructions() if backends()["native"] is None else None,
        "triton": triton,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "opt_einsum": torch.backends.opt_einsum.is_available(),  # if so, it may contract the baselines in another order
    }


def table_rows(rows: Sequence[Row], on_cuda: bool) -> list[tuple[str, ...]]:
    """Return a line per way, and one for the bound, with the columns of TABLE; on CUDA with milliseconds."""
    lines: list[tuple[str, ...]] = []
    for case in dict.fromkeys((row.layer, row.children, row.iterations) for row in rows):
        case_rows = [row for row in rows if (row.layer, row.children, row.iterations) == case]
        head = (case[0], f"{case[1]:,}", str(case[2]))
        baselines = {row.pass_: row.seconds for row in case_rows if row.way == "baseline"}
        bounds = {row.pass_: row.bound_seconds for row in case_rows}
        for way in dict.fromkeys(row.way for row in case_rows):
            cells: list[str] = []
            passes = [row for row in case_rows if row.way == way]
            for row in passes:
                cells += [_faster(row.seconds, baselines[row.pass_], on_cuda), _memory(row)]
                cells.append("-" if row.seconds is None else f"{row.seconds / row.bound_seconds:.3g}")
            lines.append((*head, way, *cells, passes[0].note or ""))
        bound_cells = ((_faster(bounds[name], baselines[name], on_cuda), "", "1") for name in PASSES)
        lines.append((*head, "bound", *itertools.chain.from_iterable(bound_cells), ""))
    return lines


def write_json(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> Path:
    """Write rows as JSON, after `head`; return the path."""
    text = json.dumps({**head, "rows": [row.json() for row in rows]}, indent=1, allow_nan=False)
    return write_whole(path, lambda unfinished: unfinished.write_text(text + "\n", encoding="utf-8"))


def write_figure(path: Path, rows: Sequence[Row], over: Over, on_cuda: bool) -> Path:
    """Write :func:`scaling_figure`; return the path."""
    with needs("train"):
        from torchcaps.explain.axes import in_style, write

    return write(in_style(scaling_figure)(rows, over, on_cuda), path)


def scaling_figure(rows: Sequence[Row], over: Over, on_cuda: bool) -> "Figure":
    """Draw time and memory of both passes over the number of children or of iterations, one line per way."""
    with needs("train"):
        from matplotlib.figure import Figure

    layers = list(dict.fromkeys(row.layer for row in rows))
    figure = Figure(figsize=(15, 0.6 + 3.3 * len(layers)), layout="constrained")
    for layer, line in zip(layers, figure.subplots(len(layers), 4, squeeze=False), strict=True):
        for index, name in enumerate(PASSES):
            panel_rows = [row for row in rows if (row.layer, row.pass_) == (layer, name)]
            unit, label = _time_unit(panel_rows, over, on_cuda)
            time, memory = line[index], line[2 + index]
            bounds = {getattr(row, over): row.bound_seconds / unit for row in panel_rows}
            time.plot(*zip(*bounds.items(), strict=True), color="black", linestyle=":", label="bound")
            _draw(time, over, [(row, row.seconds and row.seconds / unit) for row in panel_rows])
            _draw(memory, over, [(row, row.bytes and row.bytes / 1e6) for row in panel_rows])
            time.set_title(f"{layer}\n{name}: time")
            time.set_ylabel(label)
            memory.set_title(f"{layer}\n{name}: peak memory")
            memory.set_ylabel("MB beyond inputs and weights")
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    title = f"Time and memory of a pass by the number of {over}"
    count = len(handles)
    figure.legend(handles.values(), handles.keys(), title=title, loc="outside upper center", ncols=count, frameon=False)
    return figure


def _draw(axes: "Axes", over: Over, points: Sequence[tuple[Row, float | None]]) -> None:
    for way, style in LINES.items():
        line = [(getattr(row, over), value) for row, value in points if row.way == way and value]
        if line:
            axes.plot(*zip(*line, strict=True), label=way, **style)
    numbers = sorted({getattr(row, over) for row, _ in points})
    axes.set(xscale="log" if over == "children" else "linear", yscale="log", xlabel=over)
    axes.set_xticks(numbers, [f"{n:,}" for n in numbers])
    axes.set_xticks([], minor=True)
    axes.grid()


def _time_unit(rows: Sequence[Row], over: Over, on_cuda: bool) -> tuple[float, str]:
    """Unit of a time axis and its label: milliseconds on CUDA.

    On the CPU it is the baseline's time for the fewest children or iterations, or the bound if that time is missing.
    """
    fewest = min(rows, key=lambda row: (getattr(row, over), row.way != "baseline"))
    if on_cuda:
        return 1e-3, "ms"
    unit, number = fewest.seconds or fewest.bound_seconds, getattr(fewest, over)
    noun = over if number > 1 else over.removesuffix("s")
    return unit, f"{'baseline' if fewest.seconds else 'bound'} at {number:,} {noun} = 1"


def _faster(seconds: float | None, baseline: float | None, on_cuda: bool) -> str:
    if seconds is None:
        return "-"
    ratio = f"{baseline / seconds:.3g}x" if baseline else ""
    return f"{seconds * 1e3:.3g} ms {ratio}".rstrip() if on_cuda else ratio or "-"


def _memory(row: Row) -> str:
    if row.bytes is None:
        return "-"
    return show_bytes(row.bytes) + (f" ({1 / row.bytes_ratio:.3g}x)" if row.bytes_ratio else "")
