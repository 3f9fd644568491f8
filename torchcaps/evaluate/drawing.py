"""A figure for each protocol, with several networks side by side."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torchcaps.explain.axes import COLORS, DASHES, MARKERS, in_style
from torchcaps.utils.arguments import checked

COLUMNS = 4  # panels in a row


@checked
@in_style
def protocol_figure(question: str, results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the results of one protocol: a panel for each curve with a line per network, or bars if there is no curve.

    Args:
        question: what the protocol asks, the title.
        results: by network, what :func:`torchcaps.evaluate.evaluate` returns for the protocol; not all of them reasons.
    """
    measured = {name: result for name, result in results.items() if "numbers" in result}
    panels = list(dict.fromkeys(curve for result in measured.values() for curve in result["curves"]))
    return _curves(question, measured, panels) if panels else _bars(question, measured)


def _curves(question: str, measured: Mapping[str, Mapping[str, Any]], panels: list[str]) -> Figure:
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(3.2 * columns, 5), 2.7 * rows + 0.7))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes, panels, strict=False):
        for index, (name, result) in enumerate(measured.items()):
            if curve := result["curves"].get(panel):
                style = {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)]}
                x, y = zip(*curve["points"], strict=True)
                axis.plot(x, y, marker=MARKERS[index % len(MARKERS)], label=name, **style)
                axis.set(xlabel=curve["x"], ylabel=curve["y"])
        axis.set_title(panel)
        axis.grid(axis="y")
        if "%" in axis.get_ylabel():
            axis.set_ylim(0, 102)
        if axis.get_xlabel() in ("iteration", "layer"):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(question)
    if len(measured) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _bars(question: str, measured: Mapping[str, Mapping[str, Any]]) -> Figure:
    names = list(dict.fromkeys(number for result in measured.values() for number in result["numbers"]))
    figure = Figure(figsize=(6.4, 0.3 * len(names) * (1 + 0.5 * (len(measured) - 1)) + 1.3))
    axis = figure.subplots()
    height = 0.8 / len(measured)
    for index, (name, result) in enumerate(measured.items()):
        places = [row + (index - (len(measured) - 1) / 2) * height for row in range(len(names))]
        values = [result["numbers"].get(number, 0.0) for number in names]
        bars = axis.barh(places, values, height, color=COLORS[index % len(COLORS)], label=name)
        axis.bar_label(bars, [f"{value:.3g}" for value in values], padding=2, fontsize=7)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    figure.suptitle(question)
    if len(measured) > 1:
        figure.legend(loc="outside lower center", ncols=3)
    return figure
