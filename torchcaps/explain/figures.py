"""Write the figures that fit a network to a folder, as `torchcaps explain` does.

A network with capsules on a grid has credit, one with a decoder reconstructions and perturbations, one with a
`RoutingPool2d` heatmaps, and one with class capsules on stereo pairs figures of its poses.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps.data import StereoData
from torchcaps.explain.capsnet import perturbations_figure, reconstructions_figure
from torchcaps.explain.page.samples import Samples
from torchcaps.explain.pixels import credit_figure, places
from torchcaps.explain.pool_heatmaps import heatmaps_figure
from torchcaps.explain.poses import Angle, pose_trajectories, pose_trajectories_figure, relative_changes_figure
from torchcaps.measures.axes import write
from torchcaps.measures.predicting import NoClassCapsules, has_decoder, predict
from torchcaps.nn import RoutingPool2d
from torchcaps.utils.arguments import checked

MOST = 20  # classes in a figure


@checked
def write_figures(network: nn.Module, samples: Samples, folder: Path) -> Iterator[Path]:
    """Write the figures that fit a network of images; yield each path once it is written.

    They show the first sample of each class, of at most twenty classes, and changes of the pose of the first sample.
    Without labels there are heatmaps of all samples. Of texts, and of images with several labels each, there are none.

    Args:
        network: the network; it is run in evaluation mode and left as it was.
        samples: samples, see :func:`torchcaps.explain.page.image_samples` and
            :func:`torchcaps.explain.page.samples_of`.
        folder: folder for the files.
    """
    images = [inputs for inputs in samples.inputs if isinstance(inputs, Tensor)]
    if not images or (samples.labels is not None and samples.labels.dim() > 1):
        return
    has_pool = any(isinstance(module, RoutingPool2d) for module in network.modules())
    if samples.labels is None:
        if has_pool:
            figure = heatmaps_figure(network, torch.cat(images), samples.titles)
            yield write(figure, folder / "heatmaps-of-pictures.png")
        return
    some = samples.first_of_each()[:MOST]
    shown, labels = torch.cat([images[index] for index in some]), samples.labels[some]
    if has_pool:
        names = [samples.names[label] for label in labels.tolist()]
        yield write(heatmaps_figure(network, shown, names), folder / "heatmaps.png")
        yield write(heatmaps_figure(network, shown[:1], names[:1]), folder / "heatmaps-of-groups.png")
    if places(network, (shown.shape[1], shown.shape[2], shown.shape[3])):
        yield write(credit_figure(network, shown, labels, samples.names), folder / "credit.png")
    if has_decoder(network) and predict(network, shown[:1]).capsules is not None:
        yield write(reconstructions_figure(network, shown, labels), folder / "reconstructions.png")
        yield write(perturbations_figure(network, images[0][0], int(samples.labels[0])), folder / "perturbations.png")


@checked
def write_pose_figures(network: nn.Module, data: StereoData, folder: Path) -> Iterator[Path]:
    """Write the figures of how poses follow a turning toy; yield each path once it is written.

    They are `trajectories.png`, and `poses-by-elevation.png` and `poses-by-azimuth.png` for each of these angles that
    varies in the test set. All else is held at the first value of the test set. There are none if neither varies, or if
    the network has no class capsules.

    Raises:
        ValueError: as :func:`pose_trajectories`.
    """
    elevations, azimuths, _ = data.grid(train=False)
    angles: dict[Angle, list[int]] = {"elevation": elevations, "azimuth": azimuths}
    try:
        found = [pose_trajectories(network, data, angle) for angle, values in angles.items() if len(values) > 1]
    except NoClassCapsules:
        return
    if found:
        yield write(pose_trajectories_figure(found, data.names), folder / "trajectories.png")
    for trajectories in found:
        figure = relative_changes_figure(trajectories, data.names)
        yield write(figure, folder / f"poses-by-{trajectories.varying}.png")
