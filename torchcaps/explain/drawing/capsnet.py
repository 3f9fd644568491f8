"""Figures of a CapsNet: reconstructions and perturbations."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.explain.axes import CHANGES, VERMILLION, color_bar, in_style, show, show_map
from torchcaps.explain.capsnet import TWEAKS, perturb
from torchcaps.models.reconstructing import ReconstructingCapsNet
from torchcaps.utils.arguments import CountOrZero, FloatTensor, checked


@torch.no_grad()
@checked
@in_style
def reconstructions_figure(network: ReconstructingCapsNet, images: FloatTensor, labels: Tensor) -> Figure:
    """Draw images above the reconstructions that the decoder makes from their most active class capsule."""
    prediction = network(images)
    reconstructions = network.reconstruct(prediction.capsules)
    classes = prediction.evidence.argmax(1)
    figure = Figure(figsize=(max(1 + 0.95 * len(images), 6), 3.1))
    axes = figure.subplots(2, len(images), squeeze=False)
    for column, (image, drawn) in enumerate(zip(images, reconstructions, strict=True)):
        show(axes[0, column], image)
        show(axes[1, column], drawn)
        axes[0, column].set_title(f"label {labels[column]}")
        if classes[column] == labels[column]:
            axes[1, column].set_title(f"seen as {classes[column]}")
        else:
            axes[1, column].set_title(f"seen as {classes[column]},\nwrong", color=VERMILLION, fontweight="bold")
    axes[0, 0].set_ylabel("input")
    axes[1, 0].set_ylabel("drawn again")
    figure.suptitle("Test images, and what the decoder draws from the longest class capsule of each")
    return figure


@checked
@in_style
def perturbations_figure(network: ReconstructingCapsNet, image: FloatTensor, label: CountOrZero) -> Figure:
    """Draw a row for each entry of the class capsule's pose, tweaked from -0.25 to 0.25 (Sabour et al. 2017, Figure 4).

    The last column, which the paper does not have, is the difference of the last image and the first.
    """
    drawn = perturb(network, image, label)
    features, tweaks = drawn.shape[:2]
    changes = (drawn[:, -1] - drawn[:, 0]).mean(1)
    figure = Figure(figsize=(0.55 * (tweaks + 1) + 1.6, 0.55 * features + 1))
    axes = figure.subplots(features, tweaks + 1, squeeze=False)
    for row in range(features):
        change = show_map(axes[row, tweaks], changes[row], (-0.5, 0.5), CHANGES)
        for column in range(tweaks):
            show(axes[row, column], drawn[row, column])
            if row == 0:
                axes[row, column].set_title(f"{round(float(TWEAKS[column]), 2) + 0.0:+.2f}", fontsize=8)
        axes[row, 0].set_ylabel(f"{row + 1}", rotation=0, labelpad=10, va="center")
    axes[0, tweaks].set_title("change", fontsize=8)
    bar = color_bar(figure, change, axes, "change from the first picture to the last", shrink=min(1, 4 / features))
    bar.set_ticks([-0.5, 0, 0.5], labels=["darker", "none", "brighter"])
    figure.supylabel("entry of the pose", fontsize=9)
    figure.suptitle(f"What the {features} pose entries of class {label} mean: each row changes one of them")
    return figure
