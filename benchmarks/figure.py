"""Draw time and memory over the number of children, or of iterations, from the numbers of `torchcaps bench`.

    torchcaps bench --layer heinsen --children 1 10 --out bench
    python benchmarks/figure.py bench/bench.json --over children --out bench.png

A line for each way and one for the bound; a row of panels for each layer. Times are relative to the baseline's for the
fewest children or iterations.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from torchcaps.explain.axes import in_style, write

PASSES = ("forward", "forward+backward")


@in_style
def draw(rows: list[dict[str, Any]], over: str) -> Figure:
    """Draw rows of bench.json."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    figure = Figure(figsize=(15, 0.6 + 3.3 * len(layers)))
    for layer, line in zip(layers, figure.subplots(len(layers), 4, squeeze=False), strict=True):
        for index, name in enumerate(PASSES):
            chosen = [row for row in rows if (row["layer"], row["pass"]) == (layer, name)]
            numbers = sorted({row[over] for row in chosen})
            fewest = min(chosen, key=lambda row: (row[over], row["way"] != "baseline"))
            unit = fewest["seconds"] or fewest["bound_seconds"]
            panels = {"seconds": (line[index], unit), "bytes": (line[2 + index], 1e6)}
            for key, (axes, scale) in panels.items():
                for way in dict.fromkeys(row["way"] for row in chosen):
                    points = [(row[over], row[key] / scale) for row in chosen if row["way"] == way and row[key]]
                    axes.plot(*zip(*points, strict=True) if points else ([], []), label=way, marker="o")
                axes.set(xscale="log" if over == "children" else "linear", yscale="log", xlabel=over)
                axes.set_xticks(numbers, [f"{n:,}" for n in numbers])
                axes.set_xticks([], minor=True)
                axes.set_title(f"{layer}\n{name}: {'time' if key == 'seconds' else 'peak memory'}")
                axes.grid()
            bounds = {row[over]: row["bound_seconds"] / unit for row in chosen}
            line[index].plot(*zip(*bounds.items(), strict=True), color="black", linestyle=":", label="bound")
            line[index].set_ylabel(f"baseline with {numbers[0]:,} {over} = 1")
            line[2 + index].set_ylabel("MB beyond inputs and weights")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=Path, metavar="FILE", help="bench.json")
    parser.add_argument("--over", choices=("children", "iterations"), default="children", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench.png"), metavar="FILE", help="default: %(default)s")
    options = parser.parse_args()
    results = json.loads(options.numbers.read_text(encoding="utf-8"))
    print(write(draw(results["rows"], options.over), options.out))


if __name__ == "__main__":
    main()
