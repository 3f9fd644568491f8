"""Reconstructions, coefficients and perturbations of a CapsNet, as pictures; and what a network can have of them."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.explain.heatmaps import heatmaps_figure
from torchcaps.explain.pictures import hide_ticks, show, write
from torchcaps.models.capsnet import ReconstructingCapsNet
from torchcaps.nn import RoutingPool2d

# Sabour et al. 2017, Figure 4: [-0.25, 0.25] in steps of 0.05.
TWEAKS = torch.linspace(-0.25, 0.25, 11)


@torch.no_grad()
def reconstructions_figure(network: ReconstructingCapsNet, images: Tensor, labels: Tensor) -> Figure:
    """Images above what the decoder makes of their most active class capsule."""
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
def coefficients_figure(network: ReconstructingCapsNet, image: Tensor, label: int) -> Figure:
    """Where in one image the children are that each class capsule takes its input from.

    Each map shows one class. If parents compete for children, a position's value is the mean of the coefficients c[i,j]
    of the primary capsules there, weighted by their lengths: 1 / classes is what routing starts from. If children
    compete for parents, it is the sum of those coefficients, relative to that of all positions: routing starts from 1.
    """
    prediction = network(image.unsqueeze(0), return_coefficients=True)
    assert prediction.capsules is not None
    coefficients = prediction.capsules.coefficients
    lengths = network.primary_capsules(image.unsqueeze(0)).activations[0]
    by_position = coefficients[0].unflatten(0, lengths.shape).movedim(-1, 0)  # (classes, types, rows, columns)
    classes = len(by_position)
    if network.class_capsules.routing.softmax == "parents":
        uniform, name = 1 / classes, "mean coefficient"
        maps = (by_position * lengths).sum(1) / lengths.sum(0).clamp_min(1e-12)
    else:
        uniform, name = 1.0, "coefficients, relative"
        maps = by_position.sum(1) * lengths[0].numel()

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
        bold = "bold" if index == prediction.scores[0].argmax() else "normal"
        axis.set_title(f"class {index}: length {prediction.scores[0, index]:.2f}", fontsize=8, fontweight=bold)
        axes.append(axis)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8)
    bar.set_label(f"{name} (white: uniform, {uniform:.2f})", fontsize=8)
    figure.suptitle("Coefficients: how much of each place goes to each class capsule (red: more)", fontsize=11)
    return figure


@torch.no_grad()
def perturb(network: ReconstructingCapsNet, image: Tensor, label: int, tweaks: Tensor = TWEAKS) -> Tensor:
    """Reconstructions when one entry of a class capsule's pose is tweaked, `(features, tweaks, *image)`.

    Args:
        network: with a decoder.
        image: `(channels, height, width)`.
        label: whose class capsule to tweak.
        tweaks: what to add to each entry in turn.

    Reference:
        Sabour et al. 2017, section 5.1, Figure 4.
    """
    capsules = network(image.unsqueeze(0)).capsules
    features = capsules.poses.shape[-1]
    tweaks = tweaks.to(capsules.poses)
    poses = capsules.poses.repeat(features * len(tweaks), 1, 1)
    tweaked = torch.eye(features).to(poses).unsqueeze(1) * tweaks.view(1, -1, 1)  # (feature, tweak, entry)
    poses[:, label] += tweaked.flatten(0, 1)
    labels = torch.full((len(poses),), label, device=poses.device)
    return network.reconstruct(capsules._replace(poses=poses), labels).unflatten(0, (features, len(tweaks)))


def perturbations_figure(network: ReconstructingCapsNet, image: Tensor, label: int) -> Figure:
    """One row per entry of the class capsule's pose, tweaked from -0.25 to 0.25 (Sabour et al. 2017, Figure 4).

    The last column, which the paper does not have, is the last image less the first.
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


def has_figures(network: nn.Module) -> bool:
    """Whether :func:`write_figures` has any for a network."""
    return _is_pooled(network) or isinstance(network, ReconstructingCapsNet)


def _is_pooled(network: nn.Module) -> bool:
    return any(isinstance(module, RoutingPool2d) for module in network.modules())


def write_figures(network: nn.Module, batches: Iterable[tuple[Tensor, ...]], folder: Path) -> Iterator[Path]:
    """Write the figures that a network can have, of the first images of each class; give each path once written.

    Raises:
        TypeError: there are none for such a network.
    """
    if not has_figures(network):
        raise TypeError(
            f"there are figures for a CapsNet or a network with a RoutingPool2d, not for a {type(network).__name__}"
        )
    network.eval()
    images, labels = _one_per_class(batches)
    if _is_pooled(network):
        order = labels.argsort()
        titles = [f"class {label}" for label in labels[order].tolist()]
        yield write(heatmaps_figure(network, images[order], titles), folder / "heatmaps.png")
        yield write(heatmaps_figure(network, images[:1], [f"class {labels[0]}"]), folder / "heatmaps-of-groups.png")
    if isinstance(network, ReconstructingCapsNet):
        yield from _capsnet_figures(network, images, labels, folder)


def _capsnet_figures(network: ReconstructingCapsNet, images: Tensor, labels: Tensor, folder: Path) -> Iterator[Path]:
    digit = images[0], int(labels[0])
    order = labels.argsort()
    yield write(coefficients_figure(network, *digit), folder / "coefficients.png")
    if network.decoder is not None:
        yield write(reconstructions_figure(network, images[order], labels[order]), folder / "reconstructions.png")
        yield write(perturbations_figure(network, *digit), folder / "perturbations.png")


def _one_per_class(batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """The first image of each class, in the order in which they come."""
    found: dict[int, Tensor] = {}
    for images, labels, *_ in batches:
        if labels.dim() != 1:
            raise TypeError("figures show one image per class: there are none of images with several labels")
        for image, label in zip(images, labels.tolist(), strict=True):
            found.setdefault(label, image)
    return torch.stack(list(found.values())), torch.tensor(list(found))
