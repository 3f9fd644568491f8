"""Figure of overlapping digits that a network takes apart (Sabour et al. 2017, Figure 5)."""

from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.explain.axes import VERMILLION, in_style, show
from torchcaps.explain.overlaps import taken_apart
from torchcaps.utils.arguments import FloatTensor, checked


@checked
@in_style
def overlaps_figure(network: nn.Module, images: FloatTensor, labels: Tensor) -> Figure:
    """Draw images of two overlapping digits above what the capsules of the two highest-scoring classes draw.

    Args:
        network: network with a decoder that returns a `Prediction` with class capsules; it is run in evaluation mode
            and left as it was.
        images: images, `(batch, channels, height, width)` in [0, 1].
        labels: the two classes in each image, `(batch, 2)`.

    Raises:
        ValueError: there is no image, or there are not two labels for each.

    Reference:
        Sabour et al. 2017, section 6 and Figure 5.
    """
    if not len(images) or labels.shape != (len(images), 2):
        raise ValueError(
            f"expected images and two labels for each, got {len(images)} images and labels of shape "
            f"{tuple(labels.shape)}"
        )
    figure = Figure(figsize=(max(1 + 1.1 * len(images), 6), 4.6))
    axes = figure.subplots(3, len(images), squeeze=False)
    for column, (image, pair) in enumerate(zip(images, labels.tolist(), strict=True)):
        found = taken_apart(network, image)
        show(axes[0, column], image)
        axes[0, column].set_title(f"{pair[0]} and {pair[1]}")
        order = found.classes.argsort().tolist()  # the lower class above, whichever has the higher score
        for row, place in enumerate(order):
            class_ = int(found.classes[place])
            axis = axes[1 + row, column]
            show(axis, found.drawn[place])
            wrong = class_ not in pair
            axis.set_title(f"seen: {class_}{', wrong' * wrong}", color=VERMILLION if wrong else "black")
    for axis, name in zip(axes[:, 0], ("input", "drawn from\none capsule", "drawn from\nthe other"), strict=True):
        axis.set_ylabel(name)
    figure.suptitle("Two digits over each other, and what the two class capsules with the highest scores draw")
    return figure
