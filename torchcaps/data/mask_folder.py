"""Pictures of one's own with a mask of each: the class of each pixel."""

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from torchcaps.data.file_lists import FileList, files_with_masks
from torchcaps.data.files import DataError
from torchcaps.data.image_folder import Augmentation, ImageFolder
from torchcaps.data.mask_files import MaskFiles, Piece, Reader, Span, Tile, cut, spans, whole
from torchcaps.data.mask_values import MOST_VALUES, Value, check_palettes, checked_value, code_of, find_values, value_of
from torchcaps.data.masks import VOID, MaskData, pixel_counts
from torchcaps.data.notes import listed, say
from torchcaps.data.pictures import (
    Window,
    as_tensor,
    border_of,
    in_threads,
    lies,
    opened,
    placement,
    read_upright,
    upright_size,
)
from torchcaps.data.splits import PART_WORDS, Part
from torchcaps.data.targets import Target
from torchcaps.utils.arguments import Count, CountOrZero, Fraction, checked
from torchcaps.utils.checks import percent

MARGIN = 8  # an eighth of the side of a tile is predicted by its neighbor


FEW = 1e-4  # share of the pixels below which a value may be a mistake


class MaskFolder(MaskData, ImageFolder):
    """Pictures of one's own with a mask of each, which has the class of each pixel:

        <folder>/images/<name>.png           and <folder>/masks/<name>.png
        <folder>/train/images/<name>.png     and <folder>/train/masks/<name>.png, and folders val and test
        <folder>/images/train/<name>.png     and <folder>/masks/train/<name>.png, and folders val and test

    Names of masks may have `_mask`, `_label` or `_seg` behind the name of the picture, and another ending. Both may lie
    in further folders, the same ones below `images` and `masks`. A mask is as large as its picture, which is turned as
    its metadata (EXIF) says.

    The values of a mask are gray values of up to 32 bits, indices of a palette, in which all masks must have the same
    colors, or colors. In a picture of one bit they
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

    kind = ImageFolder.kind._replace(has_masks=True)
    largest, step = 128, 8

    @checked
    def __init__(
        self,
        folder: str | None = None,
        size: Count | None = None,
        channels: Literal[1, 3] | None = None,
        fit: Literal["crop", "pad", "stretch", "tile"] = "pad",
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
        self._values: list[Any] | None = (
            None if values is None else [checked_value("values", value) for value in values]
        )
        self.ignore = None if ignore is None else checked_value("ignore", ignore)
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
        self._color_of: dict[int, tuple[str, Path]] = {}  # by index, in the palettes of masks: and whose
        self._nearest = nn.ModuleList(self._changes_by("nearest"))

    @cached_property
    def values(self) -> list[Any]:
        """The values of the classes in masks: numbers, or colors as six hexadecimal digits."""
        return [*self._found] if self._values is None else self._values

    @property
    def palette(self) -> np.ndarray:
        """The value of each class as pixels: `Image.fromarray(data.palette[mask])` is a mask as those of the training.

        `(classes,)` of uint8, uint16 or int32 (for TIFF files), or `(classes, 3)` uint8 for colors.
        """
        if self._colors:
            return np.array([[*bytes.fromhex(value)] for value in self.values], np.uint8)
        least, most = min(self.values), max(self.values)
        kind = np.int32 if least < 0 or most >= 2**16 else np.uint16 if most >= 2**8 else np.uint8
        return np.array(self.values, kind)

    def resolved_arguments(self) -> dict[str, Any]:
        return super().resolved_arguments() | {"values": self.values}

    def prepare_data(self) -> None:
        if self._values is None:
            pixels = sum(self._found.values())
            shares = [
                f"value {value} is class {name!r} ({percent(count / pixels)} of the pixels)"
                for name, (value, count) in zip(self.names, self._found.items(), strict=True)
            ]
            say(f"{self.folder}: {listed(shares, MOST_VALUES)}")
            if few := [str(value) for value, count in self._found.items() if count < FEW * pixels]:
                say(
                    f"{self.folder}: nearly no pixel has the value {listed(few)}: if such pixels are mistakes, give "
                    "the values of the classes as --data.values, which names the files with others, or data.ignore"
                )
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
        upright = self.upright(path)
        border = border_of(upright)
        for rows in spans(upright.height, size, size // MARGIN):
            for columns in spans(upright.width, size, size // MARGIN):
                place = slice(rows.first, rows.end), slice(columns.first, columns.end)
                inside = tuple(slice(x.first - x.start, x.end - x.start) for x in (rows, columns))
                image = cut(upright, (whole(rows), whole(columns)), size, border)
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

    @checked
    def edges(self, path: Path) -> Tensor:
        """Return which pixels of the image that `picture` gives are an added edge, `(size, size)` bool."""
        size = self.shape[1]
        _, (left, top, right, bottom) = placement(upright_size(path), (size, size), self.fit)
        edges = torch.ones(size, size, dtype=torch.bool)
        edges[top:bottom, left:right] = False
        return edges

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
        codes = tuple(code_of(value, self._colors) for value in self.values)
        ignored = None if self.ignore is None else code_of(self.ignore, self._colors)
        return Reader(self._folder, self.shape, self.fit, self.window, codes, self._colors, ignored)

    def _errors(self, paths: list[str]) -> list[str]:
        errors, reader = super()._errors(paths), self._reader
        readable = [path for path, error in zip(paths, errors, strict=True) if not error]
        if not self._colors:
            check_palettes([self._folder / self._mask_of(path) for path in readable], self._color_of)
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
            with opened(self._folder / path) as picture:
                only_turned = lies(picture) and classes.size == picture.size
            turns = ", as its metadata turns it: turn the mask, too" if only_turned else ": give both one size"
            return (
                f"{self._folder / self._mask_of(path)}: is {classes.width} x {classes.height}, and its picture "
                f"{Path(path).name} {size[0]} x {size[1]}{turns}"
            )
        tiles: list[tuple[Span, Span] | None] = [None]
        if self.tiled:
            trained = self.parts[path] == "train"  # where all pixels of a tile count
            rows, columns = (
                [whole(span) if trained else span for span in spans(length, self.shape[1])] for length in size[::-1]
            )
            tiles = [*product(rows, columns)]
        masks = torch.stack([reader.of_classes(classes, tile) for tile in tiles])
        self._tiles[path] = tiles, pixel_counts(masks, self.classes)
        return ""

    def _samples(self, part: Part, paths: list[str], labels: Tensor) -> MaskFiles:
        super()._samples(part, paths, labels)  # which says what is dark or there twice
        samples = [(path, tile) for path in paths for tile in self._tiles[path][0]]
        pieces = [Piece(path, tile and (whole(tile[0]), whole(tile[1]))) for path, tile in samples]
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
    def _found(self) -> dict[Value, int]:
        """The number of pixels of each value in all masks but the one that does not count."""
        counts = find_values([self._folder / self._mask_of(path) for path in self._files], self.skip_bad)
        colors = any(isinstance(value, str) for value in counts)
        if isinstance(self.ignore, str) and not colors:
            raise DataError(
                f"data.ignore is {self.ignore!r}, and the masks in {self.folder} have numbers: give a number"
            )
        if self.ignore is not None:
            ignored = value_of(code_of(self.ignore, colors), colors)
            if counts.pop(ignored, None) is None:
                quoted = (
                    ": it was given as a number: write a color in quotes within quotes, such as --data.ignore "
                    """'"ff0000"'"""
                )
                hint = quoted if colors and not isinstance(self.ignore, str) else ""
                say(f"{self.folder}: no mask has the value of data.ignore, {ignored!r}{hint}")
        values = [*counts]
        if len(values) < 2:
            there = f"one class alone, the value {values[0]!r}" if values else "no value that counts"
            raise DataError(f"{self.folder}: masks that can be read have {there}: at least two classes are needed")
        if self._class_names is not None and len(self._class_names) != len(values):
            raise DataError(
                f"{self.folder}: masks have {len(values)} values, {listed([*map(str, values)], MOST_VALUES)}, and "
                f"data.class_names has {len(self._class_names)} names: give one for each value, in this order"
            )
        return counts


def _sources(length: int, low: float, high: float, first: int, last: int) -> np.ndarray:
    """Return for each of so many pixels the one from `first` to `last` that shows it, if these show what is from `low`
    to `high`; -1 if none does."""
    centers = np.arange(length) + 0.5
    places = first + ((centers - low) / (high - low) * (last - first)).astype(int)
    return np.where((low <= centers) & (centers < high), places.clip(first, last - 1), -1)


def _check_values(values: list[Value], ignore: Value | None, class_names: list[str] | None) -> None:
    if not 2 <= len(values) <= VOID or len(set(values)) < len(values):
        raise ValueError(f"values must be from 2 to {VOID} different ones, got {values}")
    colors = isinstance(values[0], str)
    codes = [code_of(value, colors) for value in values]
    if ignore is not None and (isinstance(ignore, str) > colors or code_of(ignore, colors) in codes):
        raise ValueError(f"ignore must be another value than those of values, and of their kind, got {ignore!r}")
    if class_names is not None and len(class_names) != len(values):
        raise ValueError(f"class_names must be one for each of the {len(values)} values, got {class_names}")
