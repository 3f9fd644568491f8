"""Pictures of one's own with a mask of each: the class of each pixel."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from torchcaps.data.file_lists import FileList, files_with_masks
from torchcaps.data.files import DataError
from torchcaps.data.image_folder import Augmentation, ImageFolder
from torchcaps.data.labeled import Batch, LabeledSet
from torchcaps.data.masks import VOID, MaskData, MaskSet, as_targets, pixel_counts
from torchcaps.data.notes import listed, say
from torchcaps.data.pictures import (
    GRAY_MODES,
    Fit,
    Window,
    as_tensor,
    border_of,
    fitted,
    in_threads,
    is_deep,
    opened,
    placement,
    read_picture,
    read_upright,
    turned,
    upright_size,
)
from torchcaps.data.splits import PART_WORDS, Part
from torchcaps.data.targets import Target
from torchcaps.utils.arguments import Count, CountOrZero, Fraction, checked
from torchcaps.utils.checks import counted, percent
from torchcaps.utils.memory import free_bytes

PALETTES = ("P", "PA")  # modes of Pillow
MOST_VALUES = 64  # in masks of which nothing is said
MARGIN = 8  # an eighth of the side of a tile is predicted by its neighbor


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


@dataclass(frozen=True)
class Reader:
    """Reads pictures and masks as samples.

    Args:
        folder: folder of both.
        shape: channels, height and width of an image.
        fit, window: see `read_picture`.
        codes: the values of the classes as numbers, see `_codes`.
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
        upright = _upright(self.folder / piece.path, self.shape[0], self.window)
        return as_tensor(_cut(upright, piece.tile, self.shape[1], border_of(upright)))

    def mask(self, piece: Piece) -> Tensor:
        """Return bytes `(h, w)`: classes, or `VOID`."""
        return self.of_classes(_classes(self, piece.path), piece.tile)

    def of_classes(self, classes: Image.Image, tile: tuple[Span, Span] | None) -> Tensor:
        """Return the mask of a sample, given that of its picture."""
        size = self.shape[1]
        if tile is None:
            return as_tensor(fitted(classes, (size, size), self.fit, Image.Resampling.NEAREST, VOID))[0]
        return as_tensor(_cut(classes, tile, size, VOID))[0]

    def classes(self, path: str) -> Image.Image:
        """Return the classes of a mask in its own size, or `VOID`."""
        codes = _codes(self.folder / path, self.colors)
        known = np.array(self.codes if self.ignored is None else (*self.codes, self.ignored))
        order = known.argsort()
        place = order[np.searchsorted(known, codes, sorter=order).clip(0, len(known) - 1)]
        if (unknown := known[place] != codes).any():
            row, column = np.argwhere(unknown)[0]
            value = _value(int(codes[row, column]), self.colors)
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


class MaskFolder(MaskData, ImageFolder):
    """Pictures of one's own with a mask of each, which has the class of each pixel:

        <folder>/images/<name>.png           and <folder>/masks/<name>.png
        <folder>/train/images/<name>.png     and <folder>/train/masks/<name>.png, and folders val and test

    Names of masks may have `_mask`, `_label` or `_seg` behind the name of the picture, and another ending. Both may lie
    in further folders, the same ones below `images` and `masks`. A mask is as large as its picture, which is turned as
    its metadata (EXIF) says.

    The values of a mask are gray values of up to 32 bits, indices of a palette, or colors. In a picture of one bit they
    are 0 and 255. Each value is a class. How pictures are read, split and augmented, and the options of that, are those
    of `ImageFolder` and `OwnFiles`. The split depends on the names of the pictures alone.

    Args:
        folder: folder of the pictures and masks.
        size: height and width of an image; None for the median of the sides of all pictures, see `ImageFolder`, at most
            128, rounded up to a multiple of 8.
        channels, window: see `ImageFolder`.
        fit: "crop", "pad" and "stretch" as in `read_picture`, the mask like its picture; pixels of an added edge do not
            count. "tile": pictures are not resized. Each is cut into tiles of `size`, which cover it; the last one of a
            row or column ends at the border of the picture. Validation and test count each pixel once. Files are read
            again for every tile, unless all fit into the memory (`trainer.resident`).
        values: the values of the classes, in their order: numbers, or colors such as "ff0000". None for all that the
            masks have, in ascending order, at most 64.
        ignore: a value whose pixels do not count.
        class_names: names of the classes, in the order of their values; None for the values.
        augmentations: see `ImageFolder`. Masks move with their pictures. A pixel does not count where the picture was
            moved in from outside or erased.
        group, val_share, test_share, split, batch_size, num_workers, shuffle_labels: see `OwnFiles`.
        skip_bad: whether pictures are left out that have no mask, or whose files cannot be used.

    Raises:
        ValueError: an argument is out of range.
        DataError: the folder, or a file in it, cannot be used; see `OwnFiles`.
    """

    largest, step = 128, 8

    @checked
    def __init__(
        self,
        folder: str | None = None,
        size: Count | None = None,
        channels: Literal[1, 3] | None = None,
        fit: Literal["crop", "pad", "stretch", "tile"] = "crop",
        window: Window | None = None,
        values: list[str] | list[int] | None = None,
        ignore: int | str | None = None,
        class_names: list[str] | None = None,
        augmentations: list[Augmentation] | None = None,
        group: str | None = None,
        val_share: Fraction = 0.15,
        test_share: Fraction = 0.15,
        split: str | None = None,
        skip_bad: bool = False,
        batch_size: Count = 16,
        num_workers: CountOrZero = 2,
        shuffle_labels: bool = False,
    ) -> None:
        self.tiled = fit == "tile"
        self._values: list[Any] | None = None if values is None else [_normal("values", value) for value in values]
        self.ignore = None if ignore is None else _normal("ignore", ignore)
        if self._values is not None:
            _check_values(self._values, self.ignore, class_names)
        super().__init__(
            folder=folder,
            size=size,
            channels=channels,
            fit="crop" if fit == "tile" else fit,
            window=window,
            class_names=class_names,
            augmentations=augmentations,
            group=group,
            val_share=val_share,
            test_share=test_share,
            split=split,
            skip_bad=skip_bad,
            batch_size=batch_size,
            num_workers=num_workers,
            shuffle_labels=shuffle_labels,
        )
        if self.tiled:
            self.fit = "pad"  # the checks see whole pictures
        self._target, self.target = Target("masks", [], None, "data.values"), "masks"
        self.balance = None  # an image has pixels of several classes
        self._tiles: dict[str, tuple[list[tuple[Span, Span] | None], Tensor]] = {}  # by path: and their pixels
        self._nearest = nn.ModuleList(self._changes_by("nearest"))

    @cached_property
    def values(self) -> list[Any]:
        """The values of the classes in masks: numbers, or colors as six hexadecimal digits."""
        return self._found[0] if self._values is None else self._values

    @property
    def palette(self) -> np.ndarray:
        """The value of each class as pixels: `Image.fromarray(data.palette[mask])` is a mask as those of the training.

        `(classes,)` of uint8, uint16 or int32 (for TIFF files), or `(classes, 3)` uint8 for colors.
        """
        if self._colors:
            return np.array([[*bytes.fromhex(value)] for value in self.values], np.uint8)
        most = max(self.values)
        return np.array(self.values, np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.int32)

    def resolved_arguments(self) -> dict[str, Any]:
        return super().resolved_arguments() | {"values": self.values}

    def prepare_data(self) -> None:
        if self._values is None:
            values, counts = self._found
            pixels = sum(counts)
            shares = [
                f"value {value} is class {name!r} ({percent(count / pixels)} of the pixels)"
                for name, value, count in zip(self.names, values, counts, strict=True)
            ]
            say(f"{self.folder}: {listed(shares, MOST_VALUES)}")
        super().prepare_data()

    def picture(self, path: Path) -> Tensor:
        if self.tiled:
            raise DataError(f"{path}: pictures of these data are cut into tiles: read them by data.tiles(path)")
        return super().picture(path)

    @checked
    def tiles(self, path: Path) -> Iterator[Tile]:
        """Yield the tiles of a picture that is predicted. They overlap by a quarter of their side, so that nothing is
        taken from the border of a tile but at the border of the picture. With "tile" only, see `picture`.
        """
        if not self.tiled:
            raise DataError(f"{path}: pictures of these data are not cut into tiles: read them by data.picture(path)")
        size = self.shape[1]
        upright = read_upright(path, self.shape[0], self.window)
        border = border_of(upright)
        for rows in spans(upright.height, size, size // MARGIN):
            for columns in spans(upright.width, size, size // MARGIN):
                place = slice(rows.first, rows.end), slice(columns.first, columns.end)
                inside = tuple(slice(x.first - x.start, x.end - x.start) for x in (rows, columns))
                image = _cut(upright, (_whole(rows), _whole(columns)), size, border)
                yield Tile(as_tensor(image), place, (inside[0], inside[1]))

    @checked
    def placed(self, mask: Tensor, path: Path) -> np.ndarray:
        """Return a predicted mask in the size of its picture, `(height, width)` uint8.

        Args:
            mask: class of each pixel of the image that `picture` gives, `(size, size)`.
            path: the picture. What "crop" cuts off is of class 0.
        """
        if self.tiled:
            raise DataError(f"{path}: pictures of these data are cut into tiles: write their masks by data.tiles")
        width, height = upright_size(path)
        classes = mask.numpy(force=True)
        size = self.shape[1]
        if classes.shape != (size, size):
            raise ValueError(f"mask must be of shape ({size}, {size}), got {classes.shape}: give that of the image")
        part, inner = placement((width, height), (size, size), self.fit)
        own = np.zeros((height, width), np.uint8)
        rows, columns = (
            _sources(length, part[k], part[k + 2], inner[k], inner[k + 2]) for k, length in ((1, height), (0, width))
        )
        own[np.ix_(rows >= 0, columns >= 0)] = classes[np.ix_(rows[rows >= 0], columns[columns >= 0])]
        return own

    def upright(self, path: Path) -> Image.Image:
        """Read a picture in its own size, with 8 bits per channel, gray or in color as the images are."""
        return read_upright(path, self.shape[0], self.window)

    def size_of(self, path: Path) -> tuple[int, int]:
        """Return the height and the width of a picture, upright."""
        width, height = upright_size(path)
        return height, width

    def _changed(self, images: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        changes: Any = zip(self._changes, self._nearest, strict=True)
        for change, nearest in changes:
            images = change(images)
            known = nearest(known, params=change._params)
        return images, known

    @property
    def _colors(self) -> bool:
        return isinstance(self.values[0], str)

    @property
    def _reader(self) -> Reader:
        codes = tuple(_code(value, self._colors) for value in self.values)
        ignored = None if self.ignore is None else _code(self.ignore, self._colors)
        return Reader(self._folder, self.shape, self.fit, self.window, codes, self._colors, ignored)

    def _errors(self, paths: list[str]) -> list[str]:
        errors, reader = super()._errors(paths), self._reader
        readable = [path for path, error in zip(paths, errors, strict=True) if not error]
        of_masks = dict(zip(readable, in_threads(partial(self._error_of_mask, reader), readable, "masks"), strict=True))
        return [of_masks.get(path, error) for path, error in zip(paths, errors, strict=True)]

    def _error_of_mask(self, reader: Reader, path: str) -> str:
        """Count the classes of the samples of a picture; return what is wrong with its mask, or ""."""
        try:
            classes = reader.classes(self._mask_of(path))
            size = upright_size(self._folder / path)
        except DataError as error:
            return str(error)
        if classes.size != size:
            return (
                f"{self._folder / self._mask_of(path)}: is {classes.width} x {classes.height}, and its picture "
                f"{Path(path).name} {size[0]} x {size[1]}: give both one size"
            )
        side = self.shape[1]
        tiles: list[tuple[Span, Span] | None] = [None]
        if self.tiled:
            side, whole = self.shape[1], self.parts[path] == "train"  # in training all pixels of a tile count
            rows, columns = ([_whole(span) if whole else span for span in spans(length, side)] for length in size[::-1])
            tiles = [*product(rows, columns)]
        masks = torch.stack([reader.of_classes(classes, tile) for tile in tiles])
        self._tiles[path] = tiles, pixel_counts(masks, self.classes)
        return ""

    def _samples(self, part: Part, paths: list[str], labels: Tensor) -> MaskFiles:
        super()._samples(part, paths, labels)  # which says what is dark or there twice
        samples = [(path, tile) for path in paths for tile in self._tiles[path][0]]
        pieces = [Piece(path, tile and (_whole(tile[0]), _whole(tile[1]))) for path, tile in samples]
        masks = [Piece(self._mask_of(path), tile) for path, tile in samples]
        counts, reader = torch.cat([self._tiles[path][1] for path in paths]), self._reader
        if absent := [name for name, count in zip(self.names, counts.sum(0).tolist(), strict=True) if not count]:
            say(f"{self.folder}: classes without a pixel in the {PART_WORDS[part]} masks: {listed(absent)}")
        return MaskFiles(pieces, masks, counts, reader.image, reader.mask)

    def _mask_of(self, path: str) -> str:
        return str(self._files[path])

    @cached_property
    def _listed(self) -> FileList:
        return files_with_masks(self._folder, self.kind, self.group, self.skip_bad)

    @cached_property
    def _names_in_data(self) -> list[str]:
        return [str(value) for value in self.values] if self._class_names is None else self._class_names

    @cached_property
    def _found(self) -> tuple[list[Any], list[int]]:
        """The values in all masks but the one that does not count, and how many pixels have each."""
        masks = [self._folder / self._mask_of(path) for path in self._files]
        colors = any(in_threads(_has_color, masks, "looking for colors in masks"))
        totals: Counter[int] = Counter()
        for path, counts in zip(masks, in_threads(partial(_counts, colors), masks, "finding values"), strict=True):
            totals.update(counts)
            if len(totals) > MOST_VALUES:
                some = listed([str(_value(code, colors)) for code in counts], 3)
                raise DataError(
                    f"{path}: masks have more than {MOST_VALUES} values, here {some}: smoothed edges and JPEG have "
                    "values between those of the classes: save masks as PNG without smoothing, or, if all are classes, "
                    "list them in data.values"
                )
        if isinstance(self.ignore, str) and not colors:
            raise DataError(
                f"data.ignore is {self.ignore!r}, and the masks in {self.folder} have numbers: give a number"
            )
        if self.ignore is not None and totals.pop(_code(self.ignore, colors), None) is None:
            say(f"{self.folder}: no mask has the value of data.ignore, {self.ignore!r}")
        values = [_value(code, colors) for code in sorted(totals)]
        if len(values) < 2:
            there = f"one class alone, the value {values[0]!r}" if values else "no value that counts"
            raise DataError(f"{self.folder}: masks that can be read have {there}: at least two classes are needed")
        if self._class_names is not None and len(self._class_names) != len(values):
            raise DataError(
                f"{self.folder}: masks have {len(values)} values, {listed([*map(str, values)], MOST_VALUES)}, and "
                f"data.class_names has {len(self._class_names)} names: give one for each value, in this order"
            )
        return values, [totals[code] for code in sorted(totals)]


def _name(piece: Piece) -> str:
    return piece.path if piece.tile is None else f"{piece.path} x{piece.tile[1].start} y{piece.tile[0].start}"


def _whole(span: Span) -> Span:
    """Return the span of which all pixels count."""
    return span._replace(first=span.start)


def _cut(picture: Image.Image, tile: tuple[Span, Span], size: int, border: Any) -> Image.Image:
    """Return the pixels of a tile that count, `(size, size)`; the others have the color of the border."""
    rows, columns = tile
    right, bottom = min(columns.start + size, picture.width), min(rows.start + size, picture.height)
    image = Image.new(picture.mode, (size, size), border)
    inner = picture.crop((columns.first, rows.first, right, bottom))
    image.paste(inner, (columns.first - columns.start, rows.first - rows.start))
    return image


# Tiles of one picture often follow each other: the last picture and mask are kept.
_upright = lru_cache(maxsize=1)(read_upright)


@lru_cache(maxsize=1)
def _classes(reader: Reader, path: str) -> Image.Image:
    return reader.classes(path)


def _sources(length: int, low: float, high: float, first: int, last: int) -> np.ndarray:
    """Return for each of so many pixels the one from `first` to `last` that shows it, if these show what is from `low`
    to `high`; -1 if none does."""
    centers = np.arange(length) + 0.5
    places = first + ((centers - low) / (high - low) * (last - first)).astype(int)
    return np.where((low <= centers) & (centers < high), places.clip(first, last - 1), -1)


def _has_color(path: Path) -> bool:
    """Return whether a mask has pixels that are not gray, palettes aside."""
    try:
        with opened(path) as picture:
            if picture.mode in (*GRAY_MODES, *PALETTES) or is_deep(picture.mode):
                return False
            pixels = np.asarray(picture.convert("RGB"))
    except DataError:
        return False
    return bool((pixels != pixels[..., :1]).any())


def _counts(colors: bool, path: Path) -> dict[int, int]:
    """Return how many pixels of a mask have each value, of too many values only some; empty if it cannot be read."""
    try:
        codes, counts = np.unique(_codes(path, colors), return_counts=True)
    except DataError:
        return {}
    return dict(zip(codes[: MOST_VALUES + 1].tolist(), counts.tolist(), strict=False))


def _codes(path: Path, colors: bool) -> np.ndarray:
    """Return the values of a mask that is upright as numbers, `(height, width)`: a color is 0xrrggbb."""
    with opened(path) as picture:
        mode = picture.mode
        if mode == "1":
            plain = picture.convert("L")
        elif mode in PALETTES and not colors:
            plain = picture.getchannel("P") if mode == "PA" else picture
        elif mode in ("LA", "La"):
            plain = picture.getchannel("L")
        elif mode == "L" or is_deep(mode):
            plain = picture
        else:
            plain = picture.convert("RGB")
        pixels = np.asarray(turned(plain, picture))
    if pixels.ndim == 3 and not colors:
        if (pixels != pixels[..., :1]).any():
            raise DataError(
                f"{path}: has colors, and the values of the classes are numbers: give data.values as colors in "
                'quotes, such as ["000000", "ff0000"], or save the mask with the numbers'
            )
        return pixels[..., 0]
    if pixels.ndim == 3:
        return pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    codes = np.nan_to_num(pixels).astype(np.int64)
    if pixels.dtype.kind == "f" and (codes != pixels).any():
        raise DataError(f"{path}: has values that are no whole numbers: save the number of its class in each pixel")
    return codes * 0x010101 if colors else codes


def _value(code: int, colors: bool) -> int | str:
    return f"{code:06x}" if colors else code


def _code(value: int | str, colors: bool) -> int:
    # A command makes a number of a color that has digits alone.
    return int(f"{value:0>6}", 16) if colors else int(value)


def _normal(name: str, value: int | str) -> int | str:
    """Return a value of the user as `values` has it."""
    text = str(value).lower().removeprefix("#")
    if isinstance(value, str) and not re.fullmatch("[0-9a-f]{6}", text):
        raise ValueError(f'{name} must be numbers, or colors such as "ff0000", got {value!r}')
    return text if isinstance(value, str) else value


def _check_values(values: list[Any], ignore: int | str | None, class_names: list[str] | None) -> None:
    if not 2 <= len(values) <= VOID or len(set(values)) < len(values):
        raise ValueError(f"values must be from 2 to {VOID} different ones, got {values}")
    colors = isinstance(values[0], str)
    codes = [_code(value, colors) for value in values]
    if ignore is not None and (isinstance(ignore, str) > colors or _code(ignore, colors) in codes):
        raise ValueError(f"ignore must be another value than those of values, and of their kind, got {ignore!r}")
    if class_names is not None and len(class_names) != len(values):
        raise ValueError(f"class_names must be one for each of the {len(values)} values, got {class_names}")
