"""Write all figures that fit a network to a folder: what `torchcaps explain` does.

A CapsNet has credit, reconstructions and perturbations, a network with a `RoutingPool2d` has heatmaps, and a
network with class capsules on stereo pairs has figures of its poses.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps.arguments import checked
from torchcaps.data import StereoData, read_picture
from torchcaps.explain.axes import write
from torchcaps.explain.drawing.capsnet import perturbations_figure, reconstructions_figure
from torchcaps.explain.drawing.credit import credit_figure
from torchcaps.explain.drawing.heatmaps import heatmaps_figure
from torchcaps.explain.drawing.poses import pose_trajectories_figure, relative_changes_figure
from torchcaps.explain.poses import Angle, how_to_vary, pose_trajectories
from torchcaps.models.reconstructing import ReconstructingCapsNet
from torchcaps.nn import RoutingPool2d


@checked
def has_figures(network: nn.Module) -> bool:
    """Return whether :func:`write_figures` has any figure of a network."""
    return _is_pooled(network) or isinstance(network, ReconstructingCapsNet)


def _is_pooled(network: nn.Module) -> bool:
    return any(isinstance(module, RoutingPool2d) for module in network.modules())


@checked
def write_figures(network: nn.Module, batches: Iterable[tuple[Tensor, ...]], folder: Path) -> Iterator[Path]:
    """Write the figures of a CapsNet or of a network with a `RoutingPool2d`; yield each path once it is written.

    They show the first image of each class in `batches`.

    Raises:
        TypeError: there are no figures for this type of network.
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
    order = labels.argsort()
    yield write(credit_figure(network, images[order], labels[order]), folder / "credit.png")
    if network.decoder is not None:
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
