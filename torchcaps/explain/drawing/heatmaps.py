"""Figure of heatmaps: images and where a routing pool looks in them (Zhao & Huang 2019, Table 3)."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from torchcaps.arguments import FloatTensor, checked
from torchcaps.explain.axes import hide_ticks, show
from torchcaps.explain.heatmaps import heatmaps

PER_LINE = 10  # pictures; longer rows continue on the next line


@checked
def heatmaps_figure(
    model: nn.Module, images: FloatTensor, titles: Sequence[str] = (), name: str | None = None
) -> Figure:
    """Draw images above their heatmaps, the mean of all groups, as in the paper's Table 3.

    A single image has its heatmap beside it, and that of each group of channels too.

    Args:
        model, images, name: as for :func:`heatmaps`; images are in [0, 1].
        titles: titles of the images.
    """
    maps = heatmaps(model, images, name)
    rows = [("mean of all groups", maps.mean(1))]
    if len(images) == 1 and maps.shape[1] > 1:
        rows += [(f"group {group}", maps[:, group]) for group in range(maps.shape[1])]
    lines, panels = (1, 1 + len(rows)) if len(images) == 1 else (2, len(images))
    shape = lines * math.ceil(panels / PER_LINE), min(panels, PER_LINE)
    figure = Figure(figsize=(1.3 * shape[1] + 1.2, 1.3 * shape[0] + 0.4), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)

    def place(line: int, panel: int) -> Axes:
        return grid[lines * (panel // PER_LINE) + line, panel % PER_LINE]

    shown = [values.cpu() for _, values in rows]
    range_ = min(float(values.min()) for values in shown), max(float(values.max()) for values in shown)
    for index, image in enumerate(images):
        show(place(0, index), image)
        if index < len(titles):
            place(0, index).set_title(titles[index], fontsize=8)
        for k, values in enumerate(shown):
            axis = place(0, 1 + k) if lines == 1 else place(1, index)
            heat = axis.imshow(values[index].numpy(), cmap="inferno", vmin=range_[0], vmax=range_[1])
            hide_ticks(axis)
            if lines == 1:
                axis.set_title(rows[k][0], fontsize=8)
    for axis in grid.flat:
        if not axis.images:
            axis.set_axis_off()
    bar = figure.colorbar(heat, ax=grid, shrink=0.9)
    bar.set_label("share, average = 1", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure
