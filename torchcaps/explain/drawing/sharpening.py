"""Figure of how coefficients sharpen from iteration to iteration."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torchcaps.explain.axes import MARKERS, in_style
from torchcaps.explain.sharpening import Sharpening
from torchcaps.utils.arguments import checked


@checked
@in_style
def sharpening_figure(found: Mapping[str, Sharpening]) -> Figure:
    """Draw over how many capsules the coefficients of each layer are spread after each iteration.

    The left panel has the effective number of capsules, relative to their number on this axis: 100 % is uniform. The
    right one has the mean largest coefficient.

    Args:
        found: result of :func:`torchcaps.explain.sharpening.sharpening`.

    Raises:
        ValueError: there is no layer.
    """
    if not found:
        raise ValueError("expected the Sharpening of one layer or more, got none")
    figure = Figure(figsize=(8.5, 3.4))
    spread, largest = figure.subplots(1, 2)
    for index, (name, layer) in enumerate(found.items()):
        steps = range(1, 1 + len(layer.largest))
        marker = MARKERS[index % len(MARKERS)]
        label = f"{name}: {layer.size:,} {layer.over}"
        spread.plot(steps, (100 * layer.effective / layer.size).tolist(), marker=marker, label=label)
        largest.plot(steps, layer.largest.tolist(), marker=marker)
    spread.set(ylim=(0, 105), ylabel="capsules that coefficients\nare spread over, %")
    largest.set(ylim=(0, 1.05), ylabel="mean largest coefficient")
    for axis in (spread, largest):
        axis.set(xlabel="iteration")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid()
    handles, labels = spread.get_legend_handles_labels()
    title = "How coefficients sharpen from iteration to iteration"
    figure.legend(handles, labels, title=title, loc="outside upper center", ncols=min(3, len(labels)))
    return figure
