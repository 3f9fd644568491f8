"""Draw docs/figures/choosing.png from results.csv: accuracy of each row of compare/affine on digits as they are, and on
affine ones.

    python docs/choosing.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from torchcaps.measures.axes import in_style, write
from torchcaps.reproduce.results import IN_PACKAGE, read_results

PLAIN = "torchcaps.data.ExpandedMNIST"
CONTROLS = ("uniform", "random", "average", "cnn", "resnet20", "resnet20-uniform")
LEFT_OUT = ("slot-attention",)  # far from all others


@in_style
def main() -> None:
    accuracies: dict[str, dict[str, list[float]]] = {}
    for result in read_results(IN_PACKAGE):
        table, _, row = result.recipe.rpartition("/")
        if table == "compare/affine" and row not in LEFT_OUT:
            accuracies.setdefault(row, {}).setdefault(result.data, []).append(result.value)
    figure = Figure(figsize=(8, 5))
    axis = figure.add_subplot()
    for controls, marker, label in ((True, "s", "controls, without routing"), (False, "o", "routing")):
        rows = {row: values for row, values in accuracies.items() if (row in CONTROLS) == controls}
        points = [[sum(values[data]) / len(values[data]) for data in (PLAIN, "")] for values in rows.values()]
        axis.scatter(*zip(*points, strict=True), marker=marker, label=label)
        for row, point in zip(rows, points, strict=True):
            axis.annotate(row, point, xytext=(5, 3), textcoords="offset points", fontsize=9)
    axis.set(xlabel="accuracy on digits as they are (%)", ylabel="accuracy on affine digits (%)")
    axis.set_title("What is better on digits as they are is mostly better on new poses too", fontsize=11)
    axis.legend(loc="upper left")
    write(figure, Path(__file__).parent / "figures" / "choosing.png")


if __name__ == "__main__":
    main()
