"""Keep the curves of trainings in docs/curves, and draw them as docs/figures/curves-*.png.

python docs/curves.py NAME FOLDER    # keeps the curves of the run in this folder
python docs/curves.py                # draws all figures
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from torchcaps.data import read_table
from torchcaps.measures.axes import COLORS, in_style, write
from torchcaps.reproduce.results import IN_PACKAGE, read_results
from torchcaps.training.curves import curves_of
from torchcaps.utils.files import write_csv_whole

DOCS = Path(__file__).parent
AVERAGE, ROUTING, MAX = COLORS[:3]
# Errors on the test images, of the runs that are rows of results.csv.
TESTED = {f"{x.recipe.replace('/', '-')}-seed{x.seed}": f"{x.value:.2f} %" for x in read_results(IN_PACKAGE)}
# By figure: its title, and for each run its label, color and style. "-val" in the name of a figure: errors on images
# held out, in place of those on the training images.
FIGURES: dict[str, tuple[str, dict[str, tuple[str, str, str]]]] = {
    "sabour2017-table1": (
        "MNIST, CapsNet of Sabour et al. under one cycle of 22 epochs",
        {"sabour2017-table1-capsnet-short-seed0": ("seed 0", ROUTING, "-")},
    ),
    "zhao2019-table1": (
        "Fashion-MNIST, Table 1 of Zhao & Huang",
        {
            "zhao2019-table1-fashion-mnist-average-seed0": ("average, seed 0", AVERAGE, "-"),
            "zhao2019-table1-fashion-mnist-average-seed1": ("average, seed 1", AVERAGE, "--"),
            "zhao2019-table1-fashion-mnist-routing-seed0": ("routing, seed 0", ROUTING, "-"),
            "zhao2019-table1-fashion-mnist-routing-seed1": ("routing, seed 1", ROUTING, "--"),
            "zhao2019-table1-fashion-mnist-max-seed0": ("max, seed 0", MAX, "-"),
            "zhao2019-table1-fashion-mnist-max-seed1": ("max, seed 1", MAX, "--"),
            "zhao2019-table1-fashion-mnist-average-pytorch-seed0": ("average, PyTorch's weights, 7.97 %", AVERAGE, ":"),
            "zhao2019-table1-fashion-mnist-routing-pytorch-seed0": ("routing, PyTorch's weights, 8.23 %", ROUTING, ":"),
        },
    ),
    "zhao2019-table2": (
        "CIFAR-10, ResNet-20, Table 2 of Zhao & Huang",
        {
            "zhao2019-table2-resnet20-average-seed0": ("average", AVERAGE, "-"),
            "zhao2019-table2-resnet20-routing-seed0": ("routing", ROUTING, "-"),
        },
    ),
    "zhao2019-table1-cifar10": (
        "CIFAR-10, Table 1 of Zhao & Huang",
        {
            "zhao2019-table1-cifar10-average-seed0": ("average, mirrored", AVERAGE, "-"),
            "zhao2019-table1-cifar10-routing-seed0": ("routing, mirrored", ROUTING, "-"),
            "zhao2019-table1-cifar10-max-seed0": ("max, mirrored", MAX, "-"),
            "zhao2019-table1-cifar10-average-crops-alone-seed0": ("average, crops alone, 22.64 %", AVERAGE, ":"),
            "zhao2019-table1-cifar10-routing-crops-alone-seed0": ("routing, crops alone, 22.95 %", ROUTING, ":"),
            "zhao2019-table1-cifar10-max-crops-alone-seed0": ("max, crops alone, 29.68 %", MAX, ":"),
        },
    ),
    "zhao2019-table1-cifar10-val": (
        "CIFAR-10, Table 1 of Zhao & Huang: with and without mirrored images",
        {
            "zhao2019-table1-cifar10-max-val": ("max", MAX, ":"),
            "zhao2019-table1-cifar10-max-val-flip": ("max, mirrored", MAX, "-"),
            "zhao2019-table1-cifar10-average-val": ("average", AVERAGE, ":"),
            "zhao2019-table1-cifar10-average-val-flip": ("average, mirrored", AVERAGE, "-"),
            "zhao2019-table1-cifar10-routing-val": ("routing", ROUTING, ":"),
            "zhao2019-table1-cifar10-routing-val-flip": ("routing, mirrored", ROUTING, "-"),
        },
    ),
}


def keep(name: str, folder: Path) -> None:
    """Write the errors of a run by epoch, in percent: of the training images, averaged while they were trained on, and
    of the images held out, if there were any."""
    curves = curves_of(folder)["accuracy"]
    errors: dict[float, dict[str, float]] = {}  # by epoch
    for part, points in curves.items():
        for epoch, accuracy in zip(*points, strict=True):
            errors.setdefault(epoch, {})[part] = round(100 * (1 - accuracy), 2)
    rows = [[epoch, *(errors[epoch].get(part, "") for part in curves)] for epoch in sorted(errors)]
    write_csv_whole(DOCS / "curves" / f"{name}.csv", ["epoch", *curves], rows)


@in_style
def draw(figure_name: str, title: str, runs: dict[str, tuple[str, str, str]]) -> None:
    figure = Figure(figsize=(8, 4))
    axis = figure.add_subplot()
    part, images = ("validation", "held-out") if figure_name.endswith("-val") else ("training", "training")
    for name, (label, color, style) in runs.items():
        rows = [row.values for row in read_table(DOCS / "curves" / f"{name}.csv").rows]
        epochs, errors = ([float(row[column] or "nan") for row in rows] for column in ("epoch", part))
        label = f"{label}, test {TESTED[name]}" if name in TESTED else label
        axis.plot(epochs, errors, style, color=color, label=label)
    axis.set(xlabel="epoch", ylabel=f"error on {images} images (%), log scale", yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.legend()
    axis.set_title(title, fontsize=11)
    write(figure, DOCS / "figures" / f"curves-{figure_name}.png")


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(sys.argv[1], Path(sys.argv[2]))
    else:
        for figure_name, (title, runs) in FIGURES.items():
            draw(figure_name, title, runs)
