"""Results of `torchcaps bench` as JSON and as a table."""

import importlib.metadata
import itertools
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from torchcaps.bench.measurement import PASSES, Row
from torchcaps.bench.resources import Rates, show_bytes
from torchcaps.ops import backends, native
from torchcaps.utils.checks import counted
from torchcaps.utils.files import write_text_whole
from torchcaps.utils.machine import commit, processor

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


def environment(device: str, dtype: str, rates: Rates) -> dict[str, Any]:
    """Return what the numbers depend on: software, machine, precision and measured rates."""
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
        "dtype": dtype,
        "matrix_flops_per_second": rates.matrix,
        "copy_bytes_per_second": rates.copy,
    }


def table_rows(rows: Sequence[Row], on_cuda: bool) -> list[tuple[str, ...]]:
    """Return a line per way, and one for the bound, with the columns of TABLE; on CUDA with milliseconds and
    launches."""
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
                launched = "" if row.launches is None else f" ({counted(row.launches, 'launch', 'launches')})"
                cells += [_faster(row.seconds, baselines[row.pass_], on_cuda) + launched, _memory(row)]
                cells.append("-" if row.seconds is None else f"{row.seconds / row.bound_seconds:.3g}")
            lines.append((*head, way, *cells, passes[0].note or ""))
        bound_cells = ((_faster(bounds[name], baselines[name], on_cuda), "", "1") for name in PASSES)
        lines.append((*head, "bound", *itertools.chain.from_iterable(bound_cells), ""))
    return lines


def write_json(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> Path:
    """Write rows as JSON, after `head`; return the path."""
    text = json.dumps({**head, "rows": [row.json() for row in rows]}, indent=1, allow_nan=False)
    return write_text_whole(path, text + "\n")


def _faster(seconds: float | None, baseline: float | None, on_cuda: bool) -> str:
    if seconds is None:
        return "-"
    ratio = f"{baseline / seconds:.3g}x" if baseline else ""
    return f"{seconds * 1e3:.3g} ms {ratio}".rstrip() if on_cuda else ratio or "-"


def _memory(row: Row) -> str:
    if row.bytes is None:
        return "-"
    return show_bytes(row.bytes) + (f" ({1 / row.bytes_ratio:.3g}x)" if row.bytes_ratio else "")
