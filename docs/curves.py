"""Keep the curves of trainings in docs/curves, and draw them as docs/figures/curves-*.png.

python docs/curves.py NAME FOLDER    # keeps the curves of the run in this folder
python docs/curves.py                # draws all figures
"""

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from torchcaps.explain.axes import COLORS, in_style, write
from torchcaps.training.report import curves_of

DOCS = Path(__file__).parent
LINES = {"training": ":", "validation": "-"}
# By figure: its title, and the runs by their labels.
FIGURES: dict[str, tuple[str, dict[str, str]]] = {
    "zhao2019-table1": (
        "Fashion-MNIST, Table 1 of Zhao & Huang",
        {
            "average pooling, Glorot's first weights": "zhao2019-table1-fashion-mnist-average-glorot-seed0",
            "routing, Glorot's first weights": "zhao2019-table1-fashion-mnist-routing-glorot-seed0",
            "max pooling, Glorot's first weights": "zhao2019-table1-fashion-mnist-max-glorot-seed0",
            "average pooling, PyTorch's first weights": "zhao2019-table1-fashion-mnist-average-seed0",
            "routing, PyTorch's first weights": "zhao2019-table1-fashion-mnist-routing-seed0",
        },
    ),
    "zhao2019-table2": (
        "CIFAR-10, Table 2 of Zhao & Huang",
        {"ResNet-20, average pooling": "zhao2019-table2-resnet20-average-seed0"},
    ),
    "zhao2019-table1-cifar10": (
        "CIFAR-10, Table 1 of Zhao & Huang",
        {
            "max pooling": "zhao2019-table1-cifar10-max-seed0",
            "average pooling": "zhao2019-table1-cifar10-average-seed0",
            "routing": "zhao2019-table1-cifar10-routing-seed0",
        },
    ),
}


def keep(name: str, folder: Path) -> None:
    """Write the errors of a run by epoch, in percent: of the training images, averaged while they were trained on, and
    of the images held out, if there were any."""
    errors = {}
    for part, (epochs, accuracies) in curves_of(folder)["accuracy"].items():
        errors[part] = pd.Series([round(100 * (1 - x), 2) for x in accuracies], epochs)
    pd.DataFrame(errors).to_csv(DOCS / "curves" / f"{name}.csv", index_label="epoch")


@in_style
def draw(figure_name: str, title: str, runs: dict[str, str]) -> None:
    figure = Figure(figsize=(8, 4))
    axis = figure.add_subplot()
    for color, (label, name) in zip(COLORS, runs.items(), strict=False):
        errors = pd.read_csv(DOCS / "curves" / f"{name}.csv", index_col="epoch")
        for column, style in LINES.items():
            if column in errors:
                axis.plot(errors.index, errors[column], style, color=color, label=f"{label}, {column}")
    axis.set(xlabel="epoch", ylabel="error (%)", yscale="log")
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
