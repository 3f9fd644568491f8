"""Write the figures that fit a network to a folder, as `torchcaps explain` does.

A network with capsules on a grid has credit, one with a decoder reconstructions and perturbations, one with a
`RoutingPool2d` heatmaps, and one with class capsules on stereo pairs figures of its poses.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps.data import StereoData, read_picture
from torchcaps.explain.axes import write
from torchcaps.explain.capsnet import perturbations_figure, reconstructions_figure
from torchcaps.explain.heatmaps import heatmaps_figure
from torchcaps.explain.pixels import credit_figure, places
from torchcaps.explain.poses import (
    Angle,
    how_to_vary,
    pose_trajectories,
    pose_trajectories_figure,
    relative_changes_figure,
)
from torchcaps.models.reconstructing import ReconstructingCapsNet
from torchcaps.nn import RoutingPool2d
from torchcaps.nn.modes import evaluating
from torchcaps.utils.arguments import checked

MOST = 20  # classes in a figure


@checked
def write_figures(
    network: nn.Module, batches: Iterable[tuple[Tensor, ...]], folder: Path, names: Sequence[str] = ()
) -> Iterator[Path]:
    """Write the figures that fit a network of images; yield each path once it is written.

    They show the first image of each class in `batches`, of at most twenty classes.

    Args:
        network: the network; it is run in evaluation mode and left as it was.
        batches: images `(batch, channels, height, width)` in [0, 1], and their labels `(batch,)`.
        folder: folder for the files.
        names: names of the classes.
    """
    with evaluating(network):
        images, labels = _one_per_class(batches)
        order = labels.argsort()[:MOST]
        if any(isinstance(module, RoutingPool2d) for module in network.modules()):
            titles = [names[label] if names else f"class {label}" for label in labels[order].tolist()]
            yield write(heatmaps_figure(network, images[order], titles), folder / "heatmaps.png")
            yield write(heatmaps_figure(network, images[order[:1]], titles[:1]), folder / "heatmaps-of-groups.png")
        if places(network, (images.shape[1], images.shape[2], images.shape[3])):
            yield write(credit_figure(network, images[order], labels[order], names), folder / "credit.png")
        if isinstance(network, ReconstructingCapsNet) and network.decoder is not None:
            yield write(reconstructions_figure(network, images[order], labels[order]), folder / "reconstructions.png")
            yield write(perturbations_figure(network, images[0], int(labels[0])), folder / "perturbations.png")


def _one_per_class(batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """The first image of each class and its label, in the order of the batches."""
    found: dict[int, Tensor] = {}
    for images, labels, *_ in batches:
        if labels.dim() != 1:
            raise TypeError("figures show one image per class, and these images have several labels each")
        for image, label in zip(images, labels.tolist(), strict=True):
            found.setdefault(label, image)
    return torch.stack(list(found.values())), torch.tensor(list(found))


@checked
def write_heatmaps(model: nn.Module, files: Sequence[Path], shape: tuple[int, int, int], folder: Path) -> Path:
    """Write `heatmaps-of-pictures.png`, the heatmaps of picture files that are resized to `shape`; return its path."""
    images = torch.stack([read_picture(path, shape) for path in files]) / 255
    figure = heatmaps_figure(model, images, [path.name for path in files])
    return write(figure, folder / "heatmaps-of-pictures.png")


@checked
def write_pose_figures(network: nn.Module, data: StereoData, folder: Path) -> Iterator[Path]:
    """Write the figures of how poses follow a turning toy; yield each path once it is written.

    They are `trajectories.png`, and `poses-by-elevation.png` and `poses-by-azimuth.png` for each of these angles that
    varies in the test set. All else is held at the first value of the test set.

    Raises:
        TypeError, ValueError: as :func:`pose_trajectories`; or neither angle varies.
    """
    elevations, azimuths, _ = data.grid(train=False)
    angles: dict[Angle, list[int]] = {"elevation": elevations, "azimuth": azimuths}
    found = [pose_trajectories(network, data, angle) for angle, values in angles.items() if len(values) > 1]
    if not found:
        raise ValueError(
            "the test set has a single elevation and a single azimuth, so that nothing varies: "
            + how_to_vary("elevation", "azimuth")
        )
    yield write(pose_trajectories_figure(found, data.names), folder / "trajectories.png")
    for trajectories in found:
        figure = relative_changes_figure(trajectories, data.names)
        yield write(figure, folder / f"poses-by-{trajectories.varying}.png")
