"""Markdown tables of what `torchcaps.bench.gpu` has measured, for docs/performance.md."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchcaps.bench.measurement import PASSES, show_bytes

Entry = dict[str, Any]  # of a `Ledger` in torchcaps.bench.items
BESIDE = "compiled-reference"  # the way that ratios refer to
DISAGREE = "values disagree"
TOP = 12  # kernels of a pass in a table; the others are added up


def to_markdown(entries: Iterable[Entry]) -> str:
    """Return the tables of all entries, grouped by machine and commit."""
    parts: dict[str, list[Entry]] = {}
    for entry in entries:
        stamp = [f"{name} {entry[name]}" for name in ("capability", "driver", "torch", "triton", "commit")]
        parts.setdefault(", ".join([entry["device"], *stamp]), []).append(entry)
    texts = []
    for head, entries_of_part in parts.items():
        dates = sorted({entry["date"][:10] for entry in entries_of_part})
        texts += [f"{head}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}", _outcomes(entries_of_part)]
        texts += [text for entry in entries_of_part if "result" in entry for text in _tables(entry)]
    return "\n\n".join(texts) + "\n"


def _outcomes(entries: Sequence[Entry]) -> str:
    """Table with a line for each item that says something, and for each that failed."""
    lines = []
    for entry in entries:
        said = entry["result"].get("said") if "result" in entry else f"failed: {_reason(entry['error'])}"
        lines += [(entry["item"], said)] if said else []
    return _table(("", ""), lines) if lines else "(nothing failed)"


def _reason(note: str) -> str:
    """Reason for a table; for wrong values it leaves out by how much they are off."""
    return DISAGREE if note.startswith(DISAGREE) else note.replace("|", "/")


def _tables(entry: Entry) -> list[str]:
    result = entry["result"]
    if "rows" in result:
        return [_layer(result["rows"], entry["arguments"]["request"])]
    if "kernels" in result:
        return [f"**{entry['item']}**", *(_kernels(name, table) for name, table in result["kernels"].items())]
    lines = [(name, _microseconds(seconds)) for name, seconds in result.get("launches", {}).items()]
    if "matrix_flops_per_second" in result:
        lines.append(("copy, bytes read and written", f"{result['copy_bytes_per_second'] / 1e12:.2f} TB/s"))
        products = result["matrix_flops_per_second"].items()
        lines += [(f"matrix product, {name}", f"{rate / 1e12:.3g} TFLOP/s") for name, rate in products]
    return [f"**{entry['item']}**", _table(("", ""), lines)] if lines else []


def _layer(rows: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
    first = rows[0]
    precision = f"{request['dtype']}{' (autocast)' if request['autocast'] else ''}"
    title = (
        f"**{first['layer']}: batch {first['batch']}, {first['children']} children, {first['iterations']} iterations"
    )
    beside = {row["pass"]: row for row in rows if row["way"] == BESIDE and not _wrong(row)}
    lines, notes = [], []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells: list[str] = []
        for row in rows:
            if row["way"] == way:
                cells += _cells(row, beside.get(row["pass"], {}))
                if row["note"] and not _wrong(row):
                    notes.append(f"{way}, {row['pass']}: {_reason(row['note'])}")
        lines.append((way, *cells))
    bounds = {row["pass"]: row["bound_seconds"] for row in rows}
    bound_cells = (cell for name in PASSES for cell in (_microseconds(bounds[name]), "", ""))
    heads = (f"{name}: {what}" for name in PASSES for what in ("time", "faster than compiled", "memory"))
    table = _table(("", *heads), [*lines, ("bound", *bound_cells)])
    return "\n\n".join([f"{title}, {precision}**", table, *dict.fromkeys(notes)])


def _wrong(row: Mapping[str, Any]) -> bool:
    return (row["note"] or "").startswith(DISAGREE)


def _cells(row: Mapping[str, Any], beside: Mapping[str, Any]) -> list[str]:
    if _wrong(row):
        return [DISAGREE, "-", "-"]
    if row["seconds"] is None:
        return ["-"] * 3
    compiled = beside.get("seconds")
    faster = f"{compiled / row['seconds']:.2g}x" if compiled else "-"
    return [_microseconds(row["seconds"]), faster, "-" if row["bytes"] is None else show_bytes(row["bytes"])]


def _kernels(name: str, table: Sequence[Sequence[Any]]) -> str:
    total = sum(microseconds for _, _, microseconds in table)
    lines = [(f"`{kernel[:60]}`", str(count), f"{took:.0f} µs", f"{took / total:.0%}") for kernel, count, took in table]
    others = sum(count for _, count, _ in table[TOP:]), sum(took for _, _, took in table[TOP:])
    rest = [("others", str(others[0]), f"{others[1]:.0f} µs", f"{others[1] / total:.0%}")] if table[TOP:] else []
    all_of_it = ("all", str(sum(count for _, count, _ in table)), f"{total:.0f} µs", "")
    return _table((name, "launches", "time", ""), [*lines[:TOP], *rest, all_of_it])


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.3g} µs" if seconds < 1e-3 else f"{seconds * 1e6:,.0f} µs"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
