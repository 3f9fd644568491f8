"""Pictures and masks in files as samples: whole or in tiles."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.data.labeled import Batch, LabeledSet
from torchcaps.data.mask_values import codes_of, value_of
from torchcaps.data.masks import VOID, MaskSet, as_targets
from torchcaps.data.pictures import Fit, Window, as_tensor, border_of, fitted, in_threads, read_picture, read_upright
from torchcaps.utils.checks import counted
from torchcaps.utils.memory import free_bytes


class Span(NamedTuple):
    """A tile along one side of a picture: where it begins, and the part of the picture that is taken from it."""

    start: int
    first: int
    end: int


class Piece(NamedTuple):
    """What a sample shows: a picture, or a mask, or the tile of it at these spans of rows and columns."""

    path: str
    tile: tuple[Span, Span] | None = None


class Tile(NamedTuple):
    """A tile of a picture that is predicted: `mask[tile.place] = predicted[tile.inside]`.

    Fields:
        image: bytes `(c, size, size)`; `center` makes a network's input of it.
        place: rows and columns of the picture that are taken from this tile.
        inside: the same rows and columns in the tile.
    """

    image: Tensor
    place: tuple[slice, slice]
    inside: tuple[slice, slice]


def spans(length: int, size: int, margin: int = 0) -> list[Span]:
    """Return the tiles that cover a side of a picture; the last one ends with it. Each place is taken from one tile,
    at least `margin` pixels from the tile's ends where it has a neighbor."""
    if length <= size:
        return [Span(0, 0, length)]
    starts = [*range(0, length - size, size - 2 * margin), length - size]
    ends = [*(start + size - margin for start in starts[:-1]), length]
    return [Span(*of_tile) for of_tile in zip(starts, [0, *ends], ends, strict=False)]


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads pictures and masks as samples.

    Args:
        folder: folder of both.
        shape: channels, height and width of an image.
        fit, window: see `read_picture`.
        codes: the values of the classes as numbers, see `codes_of`.
        colors: whether values are colors.
        ignored: the value that does not count, as a number; None for none.
    """

    folder: Path
    shape: tuple[int, int, int]
    fit: Fit
    window: Window | None
    codes: tuple[int, ...]
    colors: bool
    ignored: int | None

    def image(self, piece: Piece) -> Tensor:
        """Return bytes `(c, h, w)`."""
        if piece.tile is None:
            return read_picture(self.folder / piece.path, self.shape, self.fit, self.window)
        upright = _upright(self, piece.path)
        return as_tensor(cut(upright, piece.tile, self.shape[1], border_of(upright)))

    def mask(self, piece: Piece) -> Tensor:
        """Return bytes `(h, w)`: classes, or `VOID`."""
        return self.of_classes(_classes(self, piece.path), piece.tile)

    def of_classes(self, classes: Image.Image, tile: tuple[Span, Span] | None) -> Tensor:
        """Return the mask of a sample, given that of its picture."""
        size = self.shape[1]
        if tile is None:
            return as_tensor(fitted(classes, (size, size), self.fit, Image.Resampling.NEAREST, VOID))[0]
        return as_tensor(cut(classes, tile, size, VOID))[0]

    def classes(self, path: str) -> Image.Image:
        """Return the classes of a mask in its own size, or `VOID`."""
        codes = codes_of(self.folder / path, self.colors)
        known = np.array(self.codes if self.ignored is None else (*self.codes, self.ignored))
        order = known.argsort()
        place = order[np.searchsorted(known, codes, sorter=order).clip(0, len(known) - 1)]
        if (unknown := known[place] != codes).any():
            row, column = np.argwhere(unknown)[0]
            value = value_of(int(codes[row, column]), self.colors)
            raise DataError(
                f"{self.folder / path}: has the value {value!r} in row {row} and column {column}, which is no class: "
                "add it to data.values, set data.ignore to it, or mend the mask"
            )
        return Image.fromarray(np.where(place < len(self.codes), place, VOID).astype(np.uint8))


@dataclass(frozen=True, eq=False)
class MaskFiles(LabeledSet):
    """Pictures and their masks, read from their files when a batch needs them.

    Args:
        pieces, masks: what each sample shows.
        labels: the number of pixels of each class, `(n, classes)` int64.
        image, mask: return the bytes of a piece, `(c, h, w)` and `(h, w)`.
    """

    pieces: list[Piece]
    masks: list[Piece]
    labels: Tensor
    image: Callable[[Piece], Tensor]
    mask: Callable[[Piece], Tensor]

    @property
    def names(self) -> np.ndarray:
        """What each sample is called: the path of its picture, and the left and upper edge of a tile."""
        return np.array([_name(piece) for piece in self.pieces])

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.image(self.pieces[index]), self.mask(self.masks[index])

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        images, masks = zip(*(self._read(int(index)) for index in indices), strict=True)
        return torch.stack(images), as_targets(torch.stack(masks))

    def subset(self, indices: np.ndarray) -> Self:
        pieces, masks = ([these[index] for index in indices] for these in (self.pieces, self.masks))
        return replace(self, pieces=pieces, masks=masks, labels=self.labels[indices])

    def with_shuffled_labels(self, seed: int) -> Self:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return replace(self, masks=[self.masks[index] for index in order], labels=self.labels[order])

    def on(self, device: torch.device) -> LabeledSet:
        """Return the samples in the memory of a device, or as they are if it is too small."""
        if len(self) * sum(x.nbytes for x in self._read(0)) > free_bytes(device) / 2:
            return self
        samples = in_threads(self._read, range(len(self)), f"reading {counted(len(self), 'sample')}")
        images, masks = (torch.stack(of).to(device) for of in zip(*samples, strict=True))
        return MaskSet(images, masks, self.labels.to(device))


def _name(piece: Piece) -> str:
    return piece.path if piece.tile is None else f"{piece.path} x{piece.tile[1].start} y{piece.tile[0].start}"


def whole(span: Span) -> Span:
    """Return the span of which all pixels count."""
    return span._replace(first=span.start)


def cut(picture: Image.Image, tile: tuple[Span, Span], size: int, border: Any) -> Image.Image:
    """Return the pixels of a tile that count, `(size, size)`; the others have the color of the border."""
    rows, columns = tile
    right, bottom = min(columns.start + size, picture.width), min(rows.start + size, picture.height)
    image = Image.new(picture.mode, (size, size), border)
    inner = picture.crop((columns.first, rows.first, right, bottom))
    image.paste(inner, (columns.first - columns.start, rows.first - rows.start))
    return image


# Tiles of one picture often follow each other: the last picture and the last mask of a reader are kept.
@lru_cache(maxsize=1)
def _upright(reader: Reader, path: str) -> Image.Image:
    return read_upright(reader.folder / path, reader.shape[0], reader.window)


@lru_cache(maxsize=1)
def _classes(reader: Reader, path: str) -> Image.Image:
    return reader.classes(path)
