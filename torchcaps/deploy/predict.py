"""Predictions of a trained network for files and texts, batch by batch, and masks of pictures."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchcaps.data import DataError, MaskFolder, TextData
from torchcaps.data.images import FileData
from torchcaps.runs import Run
from torchcaps.utils.arguments import Count, checked

TEXTS_AT_ONCE = 100  # whose embeddings are on the disk at once, 1 GB if each has 512 tokens in a base-size encoder


@checked
def predict_pictures(
    run: Run, paths: Sequence[Path | str], batch_size: Count = 64, skipped: list[str] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of each file and the probabilities of its classes, or its numbers, `(classes,)`.

        for index, probabilities in predict_pictures(Run.find("best.ckpt"), ["a.png", "b.jpg"]): ...

    Args:
        run: run of a network of images or of arrays.
        paths: the files.
        batch_size: files in a batch.
        skipped: list to which the errors of files that cannot be read are appended; None raises them.

    Raises:
        TypeError: the network was trained on something else.
        DataError: a file cannot be read; the one line names all of a batch.
        ValueError: the network's scores are NaN or infinite.
    """
    data = run.data()
    if not isinstance(data, FileData):
        raise TypeError(f"the network was trained on {type(data).__name__}, which has no images and no arrays")
    for start in range(0, len(paths), batch_size):
        images = data.pictures([Path(path) for path in paths[start : start + batch_size]], skipped)
        if images:
            batch = data.center(torch.stack(list(images.values())))
            yield from zip((start + place for place in images), _predicted(run, batch), strict=True)


@checked
def predict_masks(
    run: Run, paths: Sequence[Path | str], skipped: list[str] | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the index of each picture and the class of each of its pixels, `(height, width)` uint8, in its own size.

        for index, mask in predict_masks(run, ["a.png"]): Image.fromarray(run.data().palette[mask]).save("mask.png")

    Args:
        run: run of a network that segments pictures of one's own.
        paths: the pictures.
        skipped: list to which the errors of pictures that cannot be read are appended; None raises them.

    Raises:
        TypeError: the network was trained on something else.
        DataError: a picture cannot be read.
        ValueError: the network's scores are NaN or infinite.
    """
    data = run.data()
    if not isinstance(data, MaskFolder):
        raise TypeError(f"the network was trained on {type(data).__name__}, and masks are predicted by a MaskFolder")
    for index, path in enumerate(map(Path, paths)):
        try:
            mask = _mask(run, data, path)
        except DataError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
            continue
        yield index, mask


def _mask(run: Run, data: MaskFolder, path: Path) -> np.ndarray:
    def classes(image: Tensor) -> Tensor:
        return run.probabilities(data.center(image[None]))[0].argmax(0)

    if not data.tiled:
        return data.placed(classes(data.picture(path)), path)
    mask = np.zeros(data.size_of(path), np.uint8)
    for tile in data.tiles(path):
        mask[tile.place] = classes(tile.image).numpy(force=True)[tile.inside]
    return mask


@checked
def predict_texts(run: Run, texts: Sequence[str], batch_size: Count = 64) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of each text and the probabilities of its classes, or its numbers, `(classes,)`.

    Args:
        run: run of a network of texts.
        texts: the texts.
        batch_size: texts in a batch.

    Raises:
        TypeError: the network was not trained on texts.
        DataError: the encoder cannot be loaded, or a text is too long for it.
        ValueError: the network's scores are NaN or infinite.
    """
    data = run.data()
    if not isinstance(data, TextData):
        raise TypeError(f"the network was trained on {type(data).__name__}, which has no texts")
    from torchcaps.explain.words import LoadedEncoder  # which takes a second, and pictures do not need it

    with tempfile.TemporaryDirectory() as cache:
        encoder = LoadedEncoder(data.encoder, data.revision, cache, data.truncate)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            chunk = texts[start : start + TEXTS_AT_ONCE]
            embeddings = encoder.embed(chunk)
            for first in range(0, len(chunk), batch_size):
                places = range(first, min(first + batch_size, len(chunk)))
                states, mask = embeddings.padded(places)
                rows = _predicted(run, (states.float(), mask))
                yield from zip((start + place for place in places), rows, strict=True)
            shutil.rmtree(encoder.folder)


def _predicted(run: Run, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return run.scores(inputs) if run.target == "numbers" else run.probabilities(inputs)
