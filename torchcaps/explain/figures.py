"""All figures of `torchcaps explain`, and the function that writes those that fit."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import nn

from torchcaps.data.labeled import LabeledData
from torchcaps.explain.capsnet import PERTURBATIONS, RECONSTRUCTIONS
from torchcaps.explain.dynamics import DYNAMICS
from torchcaps.explain.material import Material
from torchcaps.explain.pixels import CREDIT
from torchcaps.explain.pool_heatmaps import HEATMAPS, HEATMAPS_OF_GROUPS, HEATMAPS_OF_PICTURES
from torchcaps.explain.poses import BY_AZIMUTH, BY_ELEVATION, TRAJECTORIES
from torchcaps.explain.samples import Samples
from torchcaps.explain.segmentation import MASKS
from torchcaps.measures.axes import write
from torchcaps.utils.arguments import checked

FIGURES = (
    DYNAMICS,
    TRAJECTORIES,
    BY_ELEVATION,
    BY_AZIMUTH,
    HEATMAPS_OF_PICTURES,
    HEATMAPS,
    HEATMAPS_OF_GROUPS,
    CREDIT,
    RECONSTRUCTIONS,
    PERTURBATIONS,
    MASKS,
)


@checked
def write_figures(
    network: nn.Module,
    samples: Samples,
    folder: Path,
    data: LabeledData | None = None,
    states: Sequence[tuple[str, Callable[[], None]]] = (),
) -> Iterator[tuple[Path, str]]:
    """Write the figures that fit a network of images; yield each path, once it is written, and what the figure shows.

    They show the first sample of each class, of at most twenty classes, and changes of the pose of the first sample.
    Without labels there are heatmaps of all samples. Of texts there are none, and of images with several labels each
    only the routing dynamics.

    Args:
        network: the network. It is run in evaluation mode and left as it was, but with the weights of the last state.
        samples: samples, see :func:`torchcaps.explain.page.image_samples` and
            :func:`torchcaps.explain.page.samples_of`.
        folder: folder for the files.
        data: data set of the samples. Figures of how poses follow a turning toy need it; all but one angle is held at
            the first value of the test set.
        states: labels of several states of the weights, and a function for each that puts it into the network, see
            :func:`torchcaps.explain.page.report`. The figure of the routing dynamics needs them, one at least.

    Raises:
        ValueError: as :func:`pose_trajectories` and :func:`routing_dynamics`.
    """
    material = Material(network, samples, data, states)
    for kind in FIGURES:
        if kind.fits(material):
            yield write(kind.draw(material), folder / f"{kind.name}.png"), kind.caption
