"""What a figure of `torchcaps explain` is drawn from, and what each says about itself."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from torch import nn

from torchcaps.explain.samples import Samples


class Material(NamedTuple):
    """What figures are drawn from.

    Fields:
        network: classifier that returns a `Prediction`, class capsules or scores `(batch, classes)`.
        samples: test samples, or pictures of a user's own, which have no labels.
        data: data set of the run, or None.
        states: labels of several states of the weights, and a function for each that puts it into the network.
    """

    network: nn.Module
    samples: Samples
    data: Any = None
    states: Sequence[tuple[str, Callable[[], None]]] = ()


class FigureKind(NamedTuple):
    """A figure of `torchcaps explain`. It stands in the module that computes what it shows.

    Fields:
        name: name of its file, without ".png".
        caption: what it shows, for the page.
        fits: whether it can be drawn from this material.
        draw: returns the figure, if it fits.
    """

    name: str
    caption: str
    fits: Callable[[Material], bool]
    draw: Callable[[Material], Figure]
