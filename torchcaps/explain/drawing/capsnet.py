"""Figures of a CapsNet: reconstructions, coefficients and perturbations."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.arguments import CountOrZero, FloatTensor, checked
from torchcaps.explain.axes import hide_ticks, show
from torchcaps.explain.capsnet import TWEAKS, coefficient_maps, perturb
from torchcaps.models.reconstructing import ReconstructingCapsNet


@torch.no_grad()
@checked
def reconstructions_figure(network: ReconstructingCapsNet, images: FloatTensor, labels: Tensor) -> Figure:
    """Draw images above the reconstructions that the decoder makes from their most active class capsule."""
    prediction = network(images)
    reconstructions = network.reconstruct(prediction.capsules)
    classes = prediction.scores.argmax(1)
    figure = Figure(figsize=(1 + 0.95 * len(images), 3), layout="constrained")
    axes = figure.subplots(2, len(images), squeeze=False)
    for column, (image, drawn) in enumerate(zip(images, reconstructions, strict=True)):
        show(axes[0, column], image)
        show(axes[1, column], drawn)
        wrong = classes[column] != labels[column]
        axes[0, column].set_title(f"label {labels[column]}", fontsize=9)
        axes[1, column].set_title(f"seen as {classes[column]}", fontsize=9, color="red" if wrong else "black")
    axes[0, 0].set_ylabel("input", fontsize=9)
    axes[1, 0].set_ylabel("drawn again", fontsize=9)
    figure.suptitle("Each test image, and what its longest class capsule makes of it", fontsize=11)
    return figure


@torch.no_grad()
@checked
def coefficients_figure(network: ReconstructingCapsNet, image: FloatTensor, label: CountOrZero) -> Figure:
    """Draw where in one image each class capsule takes its input from: a map of coefficients for each class.

    :class:`torchcaps.explain.capsnet.CoefficientMaps` says what a map's values are.
    """
    found = coefficient_maps(network, image)
    maps, uniform, classes = found.maps, found.uniform, len(found.maps)
    per_row = (classes + 1) // 2
    figure = Figure(figsize=(1.5 * (per_row + 1) + 1, 4), layout="constrained")
    grid = figure.add_gridspec(2, per_row + 1)
    axis = figure.add_subplot(grid[:, 0])
    show(axis, image)
    axis.set_title(f"input, label {label}", fontsize=10)
    reach = max(float((maps - uniform).abs().max()), 1e-6)
    axes = []
    for index in range(classes):
        axis = figure.add_subplot(grid[index // per_row, 1 + index % per_row])
        shown = axis.imshow(maps[index].cpu().numpy(), cmap="RdBu_r", vmin=uniform - reach, vmax=uniform + reach)
        hide_ticks(axis)
        bold = "bold" if index == found.scores.argmax() else "normal"
        axis.set_title(f"class {index}: length {found.scores[index]:.2f}", fontsize=8, fontweight=bold)
        axes.append(axis)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8)
    name = "coefficients, relative" if found.relative else "mean coefficient"
    bar.set_label(f"{name} (white: uniform, {uniform:.2f})", fontsize=8)
    figure.suptitle("Coefficients: how much of each place goes to each class capsule (red: more)", fontsize=11)
    return figure


@checked
def perturbations_figure(network: ReconstructingCapsNet, image: FloatTensor, label: CountOrZero) -> Figure:
    """Draw a row for each entry of the class capsule's pose, tweaked from -0.25 to 0.25 (Sabour et al. 2017, Figure 4).

    The last column, which the paper does not have, is the difference of the last image and the first.
    """
    drawn = perturb(network, image, label)
    features, tweaks = drawn.shape[:2]
    changes = (drawn[:, -1] - drawn[:, 0]).mean(1).cpu().numpy()
    figure = Figure(figsize=(0.5 * tweaks + 1.5, 0.5 * features + 1), layout="constrained")
    axes = figure.subplots(features, tweaks + 1, squeeze=False)
    for row in range(features):
        axes[row, tweaks].imshow(changes[row], cmap="RdBu_r", vmin=-0.5, vmax=0.5)
        hide_ticks(axes[row, tweaks])
        for column in range(tweaks):
            show(axes[row, column], drawn[row, column])
            if row == 0:
                axes[row, column].set_title(f"{round(float(TWEAKS[column]), 2) + 0.0:+.2f}", fontsize=7)
        axes[row, 0].set_ylabel(f"{row}", fontsize=8, rotation=0, labelpad=10, va="center")
    axes[0, tweaks].set_title("change", fontsize=7)
    figure.suptitle(f"Class {label}: each of the {features} entries of its pose, tweaked", fontsize=11)
    return figure
