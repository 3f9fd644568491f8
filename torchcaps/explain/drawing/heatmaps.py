"""Figure of heatmaps: images and where a routing pool looks in them (Zhao & Huang 2019, Table 3)."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from torchcaps.explain.axes import color_bar, in_style, show, show_map
from torchcaps.explain.heatmaps import heatmaps
from torchcaps.utils.arguments import FloatTensor, checked

PER_LINE = 10  # pictures; longer rows continue on the next line


@checked
@in_style
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
    rows = [("all groups", maps.mean(1))]
    if len(images) == 1 and maps.shape[1] > 1:
        rows += [(f"group {group}", maps[:, group]) for group in range(maps.shape[1])]
    lines, panels = (1, 1 + len(rows)) if len(images) == 1 else (2, len(images))
    shape = lines * math.ceil(panels / PER_LINE), min(panels, PER_LINE)
    figure = Figure(figsize=(max(1.3 * shape[1] + 1.2, 6), 1.4 * shape[0] + 0.5))
    grid = figure.subplots(*shape, squeeze=False)

    def place(line: int, panel: int) -> Axes:
        return grid[lines * (panel // PER_LINE) + line, panel % PER_LINE]

    shown = [values.cpu() for _, values in rows]
    limits = min(float(values.min()) for values in shown), max(float(values.max()) for values in shown)
    for index, image in enumerate(images):
        show(place(0, index), image)
        if index < len(titles):
            place(0, index).set_title(titles[index])
        for k, values in enumerate(shown):
            axis = place(0, 1 + k) if lines == 1 else place(1, index)
            heat = show_map(axis, values[index], limits)
            if lines == 1:
                axis.set_title(rows[k][0])
    for axis in grid.flat:
        if not axis.images:
            axis.set_axis_off()
    color_bar(figure, heat, grid, "share of a place,\n1 in an average")
    figure.suptitle("What the pool takes from each place of an image: the brighter, the more")
    return figure
