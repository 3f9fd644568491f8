"""A figure for each protocol, with several networks side by side."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torchcaps.measures.axes import COLORS, DASHES, MARKERS, in_style
from torchcaps.utils.arguments import checked


@checked
@in_style
def protocol_figure(question: str, results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the results of one protocol: a panel for each curve, with a line per network, or bars where x is a word.

    Args:
        question: what the protocol asks, the title.
        results: by network, what :func:`torchcaps.evaluate.evaluate` returns for the protocol; not all of them reasons.
    """
    measured = {name: result["curves"] for name, result in results.items() if "curves" in result}
    panels = list(dict.fromkeys(panel for curves in measured.values() for panel in curves))
    bars = {panel: _words(panel, measured) for panel in panels}
    columns = 3 if len(panels) % 3 == 0 else min(4, len(panels))
    rows = -(-len(panels) // columns)
    height = max(2.7, 1 + max(map(len, bars.values())) * (0.1 + 0.12 * len(measured)))
    figure = Figure(figsize=(max(3.2 * columns, 6.4), height * rows + 0.7))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes, panels, strict=False):
        axis.set_title(panel)
        for index, (name, curves) in enumerate(measured.items()):
            if panel not in curves:
                continue
            curve, color = curves[panel], COLORS[index % len(COLORS)]
            if bars[panel]:
                _draw_bars(axis, curve, bars[panel], (index + 0.5) / len(measured), 0.8 / len(measured), color, name)
            else:
                style = {"linestyle": DASHES[index % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
                axis.plot(*zip(*curve["points"], strict=True), color=color, label=name, **style)
                axis.set(xlabel=curve["x"], ylabel=curve["y"])
        _finish(axis, bars[panel])
    for axis in axes[1 : len(panels)]:
        if bars[panels[0]] and axis.get_xlabel() == axes[0].get_xlabel():
            axis.sharex(axes[0])
            axis.autoscale(axes[0].get_autoscalex_on(), axis="x")
    figure.suptitle(question)
    entries = [axis.get_legend_handles_labels() for axis in axes]
    named = {label: handle for handles, labels in entries for handle, label in zip(handles, labels, strict=True)}
    shown = [name for name in measured if name in named]
    fitting = int(figure.get_figwidth() // (0.6 + 0.07 * max(map(len, shown))))  # inches of a line and a letter
    figure.legend([named[name] for name in shown], shown, loc="outside lower center", ncols=max(1, min(3, fitting)))
    return figure


def _words(panel: str, measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the words on the axis of a panel; none if it has numbers."""
    points = [x for curves in measured.values() if panel in curves for x, _ in curves[panel]["points"]]
    return list(dict.fromkeys(x for x in points if isinstance(x, str)))


def _draw_bars(
    axis: Axes, curve: Mapping[str, Any], words: list[str], place: float, height: float, color: str, name: str
) -> None:
    rows = [words.index(word) + 0.8 * (place - 0.5) for word, _ in curve["points"]]
    values = [value for _, value in curve["points"]]
    bars = axis.barh(rows, values, height, color=color, label=name)
    axis.bar_label(
        bars, [f"{value:.1f}" if "%" in curve["y"] else f"{value:.2f}" for value in values], padding=2, fontsize=6
    )
    axis.set_xlabel(curve["y"])


def _finish(axis: Axes, words: list[str]) -> None:
    """Set ticks, limits and the grid of a panel."""
    if words:
        axis.set_yticks(range(len(words)), words)
        axis.invert_yaxis()
        axis.grid(axis="x")
        axis.margins(x=0.15)
        if axis.get_xlabel().endswith("(%)"):
            axis.set_xlim(0, 115)
            axis.set_xticks(range(0, 101, 25))
        return
    axis.grid(axis="y")
    if axis.get_ylabel().endswith("(%)") or axis.get_ylabel().startswith("entropy"):
        axis.set_ylim(-3, 103)
    if axis.get_xlabel().startswith(("iteration", "layer")):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
