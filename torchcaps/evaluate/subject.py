"""What a protocol gets and what it returns: a trained network with its test images, and numbers and curves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.data.labeled import TargetKind
from torchcaps.measures.accuracy import is_right
from torchcaps.measures.labels import DEFAULT, label_probabilities
from torchcaps.measures.masks import dice_of, overlaps
from torchcaps.measures.predicting import as_prediction, predict, run_network, segment
from torchcaps.measures.transforms import Padding, on_black

BATCH = 100
Loss = Callable[[Tensor, Tensor], Tensor]


class DoesNotApply(ValueError):
    """A protocol cannot test this network or these images; the message says why."""


class Curve(NamedTuple):
    """A measure at several values of a setting.

    Fields:
        x, y: names of both, with their units.
        points: pairs of both. Where x is a word, a figure has bars.
    """

    x: str
    y: str
    points: Sequence[tuple[float | str, float]]


class Outcome(NamedTuple):
    """What a protocol measured.

    Fields:
        numbers: by name, with their units.
        curves: by name.
        notes: what a part of the protocol could not measure, and why, each as a sentence.
        images: number of images, if they are not those of the subject.
    """

    numbers: dict[str, float]
    curves: dict[str, Curve] = {}  # noqa: RUF012
    notes: Sequence[str] = ()
    images: int | None = None


class Protocol(NamedTuple):
    """A measurement, each in a module of its own, whose docstring has the procedure and its source.

    Fields:
        question: what it asks, in one sentence.
        published: numbers of papers to hold beside, each as a sentence.
        run: the measurement. It raises `DoesNotApply` with the reason.
        max_images: how many images it takes at most, the first of the subject, whose order is random; None for all.
    """

    question: str
    published: Sequence[str]
    run: Callable[["Subject"], Outcome]
    max_images: int | None = None


@dataclass(frozen=True)
class Subject:
    """A trained network and the images that protocols test it on.

    Args:
        network: network that returns a `Prediction`, class capsules or scores `(batch, classes)`. Activations stand for
            scores where there are none.
        images: test images in [0, 1], `(n, channels, height, width)`, on the CPU and in random order: some protocols
            take the first ones only, or fit on the first and test on the last.
        labels: their classes `(n,)`, or 1 for each class of an image and 0 for the others, `(n, classes)`, or numbers,
            or masks `(n, height, width)`.
        held_out: images and labels that neither the training nor the test has seen, for thresholds; or None.
        loss: loss of the training, a function of the scores (or the activations) and the labels.
        seed: seed of all random numbers.
        progress: called with a line for each step of a long measurement.
        data: data set of the run, or None.
        training: trains the network of the run anew on a number of images per class, or None.
        target: what the network predicts, see `LabeledData`.
        thresholds: probability above which each of several labels is predicted, `(labels,)`; None for 0.5.
    """

    network: nn.Module
    images: Tensor
    labels: Tensor
    held_out: tuple[Tensor, Tensor] | None = None
    loss: Loss = F.cross_entropy
    seed: int = 0
    progress: Callable[[str], None] = field(default=lambda line: None, repr=False)
    data: Any = None
    training: Callable[[int], nn.Module] | None = None
    target: TargetKind = "class"
    thresholds: Tensor | None = None

    def generator(self) -> torch.Generator:
        """Return a new generator of random numbers with the seed."""
        return torch.Generator().manual_seed(self.seed)

    def need_classes(self) -> None:
        """Raise `DoesNotApply` if the network predicts numbers or masks."""
        if self.target in ("numbers", "masks"):
            raise DoesNotApply(f"the network predicts {self.target}, and this measures classes of whole images")

    def need_one_label(self) -> None:
        """Raise `DoesNotApply` if images have several labels or numbers."""
        self.need_classes()
        if self.labels.dim() != 1:
            raise DoesNotApply("images have several labels each")

    @property
    def padding(self) -> Padding:
        """What enters an image that moves: black if the images are gray on black, or else copies of the edge."""
        return "zeros" if on_black(self.images) else "border"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the images with their labels in batches."""
        yield from zip(self.images.split(BATCH), self.labels.split(BATCH), strict=True)

    def accuracy(self, images: Tensor, labels: Tensor | None = None) -> float:
        """Return the percentage of images on which the network is right, see `right`; labels are by default those of
        the subject. Of masks, return the mean Dice coefficient of the classes in percent."""
        if self.target == "masks":
            return 100 * float(dice_of(self._overlaps(images, self.labels if labels is None else labels)).nanmean())
        return percent(self.right(self.scores(images), self.labels if labels is None else labels))

    def right(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return on which images the network is right, `(n,)` bool, see :func:`torchcaps.measures.accuracy.is_right`.
        With any number of labels, it is right where it predicts exactly those of the image."""
        self.need_classes()
        if self.target == "labels":
            return (self.predicted(scores) == (labels > 0)).all(1)
        return is_right(scores, labels)

    def _overlaps(self, images: Tensor, masks: Tensor) -> Tensor:
        """Return the numbers of pixels of all images, see `overlaps`."""
        total = torch.zeros((), dtype=torch.long)
        for batch, of_batch in zip(images.split(BATCH), masks.split(BATCH), strict=True):
            probabilities = segment(self.network, batch).cpu()
            total = total + overlaps(probabilities.argmax(1), of_batch, probabilities.shape[1]).sum(0)
        return total

    @property
    def measure(self) -> str:
        """What `accuracy` returns, with its unit."""
        return "mean Dice (%)" if self.target == "masks" else "accuracy (%)"

    def predicted(self, scores: Tensor) -> Tensor:
        """Return the class of each image, `(n,)`, or whether each label is predicted, `(n, labels)`."""
        if self.target == "labels":
            return scores > (DEFAULT if self.thresholds is None else self.thresholds)
        return scores.argmax(1)

    def scores(self, images: Tensor) -> Tensor:
        """Return the scores of images, `(n, classes)` on the CPU; the probabilities of labels."""
        outputs = (predict(self.network, batch) for batch in images.split(BATCH))
        return torch.cat([(label_probabilities(x) if self.target == "labels" else x.evidence).cpu() for x in outputs])


def scores_of(network: nn.Module, images: Tensor) -> Tensor:
    """Return a network's scores for a batch of images, or its activations, with gradients if they are on."""
    return as_prediction(network, run_network(network, images)).evidence


def percent(hits: Tensor) -> float:
    """Return the share of true values in percent."""
    return 100 * float(hits.double().mean())
