"""The picture of a search: the metric of its trials, and how it depends on each of the values."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchcaps.explain.axes import BLUE, VERMILLION, in_style
from torchcaps.recipes.search import Choices, Range, Search
from torchcaps.search.trial import COMPLETE, FAILED, PRUNED, RUNNING, Trial

COLUMNS = 3
STYLES: dict[str, dict[str, Any]] = {  # of the points, by the state of the trial
    COMPLETE: {"color": BLUE, "alpha": 0.8},
    PRUNED: {"edgecolors": BLUE, "facecolors": "none"},
    RUNNING: {"color": "0.6", "marker": "s"},
}
LABELS = {RUNNING: "not finished", FAILED: "failed"}
BEST = VERMILLION


@in_style
def search_figure(search: Search, trials: Sequence[Trial], best: Trial | None) -> Figure:
    """Draw the metric by trial, with the best so far, and a panel for each value.

    Metrics that are much worse than most are triangles on the edge, and failed trials are crosses on the lower edge.
    """
    panels = 1 + len(search.values)
    columns = 2 if panels == 4 else min(panels, COLUMNS)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(0.6 + 3.4 * columns, 0.6 + 2.9 * rows))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.remove()
    limits = _limits(trials)
    for axis, name in zip(axes, (None, *search.values), strict=False):
        known = [trial for trial in trials if name is None or name in trial.values]
        if name is None:
            places: list[float] = [trial.number for trial in known]
            axis.plot(*_best_so_far(search, trials), drawstyle="steps-post", color=BEST, zorder=1, label="best so far")
            axis.set(xlabel="trial")
            axis.xaxis.get_major_locator().set_params(integer=True)
        else:
            places = _prepare(axis, name, search.values[name], known)
        if limits is not None:
            axis.set_ylim(limits)
        _draw(axis, known, places, best)
        axis.grid(axis="y")
        if axes.index(axis) % columns == 0:
            axis.set_ylabel(search.metric)
    handles, labels = axes[0].get_legend_handles_labels()
    title = f"How good each trial was ({search.metric}), and how that depends on the values"
    figure.legend(handles, labels, title=title, loc="outside upper center", ncols=6)
    return figure


def _limits(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """Return the ends of the axis of the metric, without what lies far from most; None if there is no metric."""
    metrics = [trial.metric for trial in trials if trial.metric is not None]
    if not metrics:
        return None
    complete = [trial.metric for trial in trials if trial.state == COMPLETE and trial.metric is not None]
    low, high = min(metrics), max(metrics)
    if len(complete) >= 4:
        first, third = np.quantile(complete, [0.25, 0.75])
        reach = 3 * (third - first)  # Tukey's outer fences
        low = max(low, min(first - reach, *complete) if reach == 0 else first - reach)
        high = min(high, max(third + reach, *complete) if reach == 0 else third + reach)
    margin = 0.06 * (high - low) or 0.01 * abs(high) or 0.01
    return float(low - margin), float(high + margin)


def _draw(axis: Axes, trials: Sequence[Trial], places: Sequence[float], best: Trial | None) -> None:
    """Draw a point for each trial, by its state."""
    low, high = axis.get_ylim()
    points = list(zip(places, trials, strict=True))
    inside = [(x, trial) for x, trial in points if trial.metric is not None and low <= trial.metric <= high]
    for state, style in STYLES.items():
        chosen = [(x, trial.metric) for x, trial in inside if trial.state == state and trial != best]
        if chosen:
            xs, ys = zip(*chosen, strict=True)
            axis.scatter(xs, ys, s=30, label=LABELS.get(state, state), zorder=2, **style)
    if best is not None and best.metric is not None:
        place = [x for x, trial in inside if trial == best]
        axis.scatter(place, [best.metric] * len(place), s=55, color=BEST, marker="D", label="best", zorder=3)
    edges = [
        ([x for x, t in points if t.metric is not None and t.metric < low], 0.0, "v", BLUE, "off the axis"),
        ([x for x, t in points if t.metric is not None and t.metric > high], 1.0, "^", BLUE, "off the axis"),
        ([x for x, t in points if t.state == FAILED and t.metric is None], 0.0, "x", "black", LABELS[FAILED]),
    ]
    for chosen_places, edge, marker, color, label in edges:
        if chosen_places:
            axis.scatter(
                chosen_places,
                [edge] * len(chosen_places),
                transform=axis.get_xaxis_transform(),
                clip_on=False,
                marker=marker,
                color=color,
                label=label,
                zorder=3,
            )


def _best_so_far(search: Search, trials: Sequence[Trial]) -> tuple[list[int], list[float]]:
    """Return the numbers of the trials from the first complete one on, and the best metric up to each."""
    better = max if search.mode == "max" else min
    numbers: list[int] = []
    heights: list[float] = []
    for trial in trials:
        counts = trial.state == COMPLETE and trial.metric is not None
        if counts or heights:
            found = [*heights[-1:], *([trial.metric] if counts and trial.metric is not None else [])]
            numbers.append(trial.number)
            heights.append(better(found))
    return numbers, heights


def _prepare(axis: Axes, name: str, space: Range | Choices, trials: Sequence[Trial]) -> list[float]:
    """Set the axis of a value, and return the places of the trials on it."""
    axis.set_xlabel(name if len(name) < 34 else f"...{name[-31:]}")
    if isinstance(space, Choices):
        axis.set_xticks(range(len(space.values)), [_spelled(value) for value in space.values])
        axis.set_xlim(-0.5, len(space.values) - 0.5)
        return [space.values.index(trial.values[name]) for trial in trials]
    low, high = (math.log(end) for end in space.ends) if space.log else space.ends
    margin = 0.05 * (high - low)
    ends = (low - margin, high + margin)
    if space.log:
        axis.set_xscale("log")
    axis.set_xlim(*(math.exp(end) for end in ends) if space.log else ends)
    return [trial.values[name] for trial in trials]


def _spelled(value: Any) -> str:
    """Return a choice as a short label: a class by its own name."""
    text = str(value).rpartition(".")[2] if isinstance(value, str) else str(value)
    return text if len(text) < 14 else f"{text[:12]}..."
