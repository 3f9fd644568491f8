"""The style of all figures, and helpers that show an image, draw a map, lay panels out, hide ticks and write a file.

A function that draws is decorated with `in_style`. Colors are told apart by color-blind readers, and in grey lines are
told apart by their dashes and markers. Maps grow lighter with their values, so that grey shows the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.rcsetup import cycler
from torch import Tensor

from torchcaps.utils.files import write_whole

# Okabe & Ito's colors without yellow, which is too pale on white.
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9"
COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")

HEAT = "magma"  # how much: black is nothing
ORDERED = "cividis"  # positions in an order, such as angles
# Changes: dark blue is less, grey is none, light yellow is more.
CHANGES = LinearSegmentedColormap.from_list("changes", ["#00204d", "#0072b2", "#8c8c8c", "#f0a830", "#fff3b0"])

SMALL = 48  # pixels; images up to this size are drawn smoothly, so that a person sees strokes and not squares

# DejaVu Sans comes with matplotlib: figures look the same on all machines.
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "figure.titlesize": 11,
    "figure.labelsize": 9,
    "figure.constrained_layout.use": True,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLORS, linestyle=DASHES),
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.title_fontsize": 11,
    "legend.frameon": False,
    "legend.handlelength": 3,  # long enough to show the dashes
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "image.cmap": ORDERED,
    "savefig.dpi": 130,
}
in_style = rc_context(STYLE)  # a decorator of functions that draw


def show(axis: Axes, image: Tensor) -> None:
    """Draw an image `(channels, height, width)` in [0, 1], gray or color; two channels are a stereo pair, whose left
    image is drawn."""
    image = image[:1] if len(image) == 2 else image
    pixels = image.movedim(0, -1).squeeze(-1).float().clamp(0, 1).cpu().numpy()
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation=_smoothing(image))
    hide_ticks(axis)


def show_map(axis: Axes, values: Tensor, limits: tuple[float, float], colors: Any = HEAT) -> AxesImage:
    """Draw a map `(height, width)` in colors from one limit to the other; return what a color bar needs."""
    low, high = limits
    shown = axis.imshow(
        values.float().cpu().numpy(), cmap=colors, vmin=low, vmax=high, interpolation=_smoothing(values)
    )
    hide_ticks(axis)
    return shown


class Row(NamedTuple):
    """A row of a figure.

    Fields:
        panels: images `(channels, height, width)` in [0, 1], and maps `(height, width)`; None leaves a gap.
        titles: a title for each panel.
        styles: options of matplotlib for each title, such as its color.
        label: what stands beside the first panel.
    """

    panels: Sequence[Tensor | None]
    titles: Sequence[str] = ()
    styles: Sequence[dict[str, Any]] = ()
    label: str = ""


@in_style
def panels_figure(
    rows: Sequence[Row],
    title: str,
    side: float = 1.2,
    per_line: int = 10,
    limits: tuple[float, float] = (0.0, 1.0),
    bar: str = "",
    colors: Any = HEAT,
    **options: Any,
) -> Figure:
    """Draw rows of images and maps; rows of more panels than fit into a line continue below, all together.

    Args:
        rows: the rows, with the same number of panels each.
        title: title of the figure.
        side: inches of a panel.
        per_line: number of panels in a line.
        limits, colors: values of the first and the last color of maps, and the colors.
        bar: label of the scale of the maps; without it there is no scale.
        options: options of `Figure.colorbar`.
    """
    count, height = len(rows[0].panels), len(rows)
    columns = min(count, per_line)
    blocks = -(-count // columns)
    lines = blocks * height
    inches = max(2.5, blocks * sum(side + (0.3 if row.titles else 0.02) for row in rows) + 0.6)
    figure = Figure(figsize=(max(side * columns + 1.8, 6.5), inches))
    grid = figure.subplots(lines, columns, squeeze=False)
    for axis in grid.flat:
        axis.set_axis_off()
    for line, row in enumerate(rows):
        for index, panel in enumerate(row.panels):
            axis = grid[index // columns * height + line, index % columns]
            if panel is None:
                continue
            axis.set_axis_on()
            if panel.dim() == 2:
                shown = show_map(axis, panel, limits, colors)
            else:
                show(axis, panel)
            if index < len(row.titles):
                axis.set_title(row.titles[index], **(row.styles[index] if row.styles else {}))
            if index % columns == 0 or row.panels[index - 1] is None:
                axis.set_ylabel(row.label)
    if bar:
        color_bar(figure, shown, grid, bar, shrink=min(0.9, 3 / lines), **options)
    figure.suptitle(title)
    return figure


def color_bar(figure: Figure, shown: Any, axes: Any, label: str, **options: Any) -> None:
    """Draw the scale of maps beside their axes, an array or a list of `Axes`."""
    figure.colorbar(shown, ax=axes, label=label, **{"shrink": 0.9, "pad": 0.02, **options})


def hide_ticks(axis: Axes) -> None:
    """Draw neither ticks nor their labels, and a thin frame."""
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set(visible=True, color="0.75", linewidth=0.6)


@in_style
def write(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG; the file appears only when it is complete. Return its path."""
    return write_whole(path, lambda unfinished: figure.savefig(unfinished))


def _smoothing(image: Tensor) -> str:
    return "bicubic" if max(image.shape[-2:]) <= SMALL else "auto"
