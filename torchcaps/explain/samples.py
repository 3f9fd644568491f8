"""Test samples that a page and its figures are about."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.data import ImageData, MaskFolder, TextData
from torchcaps.data.images import FileData
from torchcaps.data.labeled import TERMS, TargetKind
from torchcaps.data.order import evenly_chosen
from torchcaps.data.own_files import OwnFiles
from torchcaps.explain.words import LoadedEncoder, Word, words_of
from torchcaps.measures.axes import in_style
from torchcaps.measures.predicting import Inputs
from torchcaps.measures.transforms import on_black
from torchcaps.utils.arguments import Count, FloatTensor, checked

BATCH = 32
TITLE = 60  # characters of a text in its title
STATISTICS = 128  # samples for statistics of capsules
CLASSES = 20  # classes in a figure
LARGEST = 2**28  # entries of all samples, a GiB: volumes are large
CURVES = 12  # channels of a signal that are drawn


@dataclass(frozen=True)
class Samples:
    """Inputs of a network with their labels.

    Fields:
        inputs: one batch of one sample each, as the network takes it.
        labels: class of each, `(n,)`, or `(n, classes)` with 1 for each class of a sample, or numbers `(n, numbers)`;
            None if they are unknown.
        names: names of the classes, labels or numbers.
        titles: what each sample is called.
        words: words of each text; empty for images and arrays.
        dark: whether the background of images is black, so that they can be laid over each other and moved.
        draw: draws an array as an image, see `draw_array`; None for images and texts.
        target: what is predicted, see `LabeledData`.
        edges: of pictures that a network segments, which pixels are an added edge, `(n, height, width)`; None if none
            is, or if masks say it.
    """

    inputs: list[Inputs]
    labels: Tensor | None
    names: list[str]
    titles: list[str]
    words: list[list[Word]] = field(default_factory=list)
    dark: bool = False
    draw: Callable[[Tensor], Tensor] | None = None
    target: TargetKind = "class"
    edges: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def are_images(self) -> bool:
        return not self.words and self.draw is None

    @property
    def term(self) -> str:
        """What the page calls that which is predicted: a class, a label or a number."""
        return TERMS[self.target][0]

    def with_names_of(self, classes: int) -> "Samples":
        """Return the samples with names for so many classes: a network may have more of them than the data."""
        return replace(self, names=[*self.names, *(f"class {k}" for k in range(len(self.names), classes))])

    def first_of_each(self) -> list[int]:
        """Return the index of the first sample of each class that there is, in the order of the classes."""
        assert self.labels is not None
        first = {int(label): index for index, label in reversed(list(enumerate(self.labels)))}
        return [first[label] for label in sorted(first)]

    @property
    def are_images_of_one_class(self) -> bool:
        """Whether there are images, and each has one label."""
        return len(self) > 0 and self.are_images and self.labels is not None and self.labels.dim() == 1

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image: channels, height and width."""
        first = self.inputs[0]
        assert isinstance(first, Tensor)
        return first.shape[1], first.shape[2], first.shape[3]

    def images_of_each(self) -> tuple[Tensor, Tensor]:
        """Return the first image of each class, of twenty classes at most, and their labels."""
        assert self.labels is not None
        some = self.first_of_each()[:CLASSES]
        return self.images(some), self.labels[some]

    def images(self, indices: Sequence[int]) -> Tensor:
        """Return images by their indices, `(n, channels, height, width)`."""
        return torch.cat([inputs for index in indices if isinstance(inputs := self.inputs[index], Tensor)])

    def batches(self, count: int | None = None, size: int = BATCH) -> list[tuple[Inputs, Tensor]]:
        """Return samples with their labels in batches; texts, which differ in length, one by one.

        Args:
            count: number of samples, evenly spaced; None for all.
            size: number of samples in a batch.
        """
        some = evenly_chosen(len(self), len(self) if count is None else count)
        labels = torch.zeros(len(some), dtype=torch.long) if self.labels is None else self.labels[some]
        if self.words:
            return [(self.inputs[index], labels[i : i + 1]) for i, index in enumerate(some)]
        return list(zip(self.images(some).split(size), labels.split(size), strict=True))


@checked
def image_samples(data: FileData, count: Count) -> Samples:
    """Return evenly spaced test images, or arrays, prepared as in a validation."""
    data.setup("test")
    most = max(1, LARGEST // math.prod(data.shape))  # all of them are in memory at once
    some = evenly_chosen(len(data.part("test")), min(count, most))  # type: ignore[arg-type]
    images, classes = data.samples("test", some)
    files = data.keys("test") if isinstance(data, OwnFiles) else None
    titles = [files[index] if files else f"test image {index}" for index in some]
    if classes.dim() > 1 and data.target not in ("numbers", "masks"):
        shown = [" and ".join(data.names[k] for k in row.nonzero().flatten().tolist()) for row in classes]
        titles = [f"{title}: {names or 'no label'}" for title, names in zip(titles, shown, strict=True)]
    return _samples_of(data, images, classes, titles)


@checked
def picture_samples(data: FileData, files: Sequence[Path]) -> Samples:
    """Return the user's pictures, or arrays, whose classes are unknown.

    Raises:
        DataError: a file cannot be read; the one line names all.
    """
    images = data.center(torch.stack([*data.pictures(files).values()]))
    samples = _samples_of(data, images, None, [path.name for path in files])
    if isinstance(data, MaskFolder):
        return replace(samples, edges=torch.stack([data.edges(path) for path in files]))
    return samples


def _samples_of(data: FileData, inputs: Tensor, labels: Tensor | None, titles: list[str]) -> Samples:
    if isinstance(data, ImageData):
        return samples_of(inputs, labels, data.names, titles, data.target)
    return Samples(list(inputs.split(1)), labels, data.names, titles, draw=draw_array, target=data.target)


@in_style
@checked
def draw_array(array: FloatTensor) -> Tensor:
    """Draw an array `(channels, *size)` as an image `(channels, height, width)` in [0, 1]: a signal as the curves of
    its channels, twelve at most; of an image, and of the middle depth of a volume, the first channel."""
    array = array.detach().cpu().float()
    if array.dim() == 2:
        figure = Figure((2.8, 2.8), dpi=100)
        for channel, axis in zip(array, figure.subplots(min(len(array), CURVES), squeeze=False).flat, strict=False):
            axis.plot(channel.numpy(), linewidth=0.7)
            axis.axis("off")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return torch.tensor(np.asarray(canvas.buffer_rgba())[..., :3]).movedim(-1, 0) / 255
    plane = array[0] if array.dim() == 3 else array[0, array.shape[1] // 2]
    return ((plane - plane.min()) / (plane.max() - plane.min()).clamp_min(1e-12))[None]


@checked
def samples_of(
    images: FloatTensor, labels: Tensor | None, names: list[str], titles: list[str], target: TargetKind = "class"
) -> Samples:
    """Return images `(n, channels, height, width)` as samples."""
    return Samples(list(images.split(1)), labels, names, titles, dark=on_black(images), target=target)


@checked
def text_samples(data: TextData, count: Count) -> Samples:
    """Return evenly spaced test texts with their words.

    Raises:
        DataError: the texts or the encoder are missing.
    """
    texts, labels = data.read("test")
    most = count if data.max_texts is None else min(count, data.max_texts)
    some = evenly_chosen(len(texts), most)
    encoder = LoadedEncoder.of(data)
    chosen = [texts[index] for index in some]
    embeddings = encoder.embed(chosen)
    inputs: list[Inputs] = []
    for index in range(len(chosen)):
        states, mask = embeddings.padded([index])
        inputs.append((states.float(), mask))
    words = [words_of(encoder, text) for text in chosen]
    titles = [f"test text {index}: {shorten(texts[index], TITLE, placeholder=' ...')}" for index in some]
    return Samples(inputs, labels[some], data.names, titles, words, target=data.target)
