"""Pictures of one's own, in a folder for each class or named by a table."""

from functools import cached_property, partial
from statistics import median_low
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from torchcaps.data.copies import near_copies
from torchcaps.data.files import DataError
from torchcaps.data.images import FileSet, ImageData, color_jitter
from torchcaps.data.labeled import LabeledSet
from torchcaps.data.notes import listed, say
from torchcaps.data.order import evenly_chosen
from torchcaps.data.own_files import OwnFiles
from torchcaps.data.pictures import (
    Fit,
    Header,
    Reading,
    Window,
    any_has_color,
    in_threads,
    range_of,
    read_all,
    read_header,
    read_picture,
    window_of,
)
from torchcaps.data.splits import PART_WORDS, Part
from torchcaps.utils.arguments import Count, checked
from torchcaps.utils.checks import counted

Augmentation = Literal["shift", "flip", "rotate", "zoom", "color", "erase"]

JITTER = 0.2  # strength of the augmentation "color"
MOST_PIXELS = 64  # side of images if none is given
MOST_PAIRS = 3 * 10**8  # of pictures that are compared for near copies, which takes some ten seconds
FEW_LEVELS = 26  # of 256: pictures that use fewer are nearly of one gray
FAR_FROM_SQUARE = 1.5  # sides: a third of such a picture, or more, is lost when its middle is cut out


class ImageFolder(OwnFiles, ImageData):
    """Pictures of one's own, in a folder for each class, or in one folder beside a table of names and classes. How they
    are found and split, and the options of that, are those of `OwnFiles`.

        <folder>/<class>/<any>.jpg
        <folder>/train/<class>/<any>.jpg     and folders val and test
        <folder>/<any>.jpg                   and `table`, a CSV with a column of names and a column of classes

    Pictures may have any size, and be gray or in color. A photograph is turned as its metadata (EXIF) says. Of an
    animation the first picture counts.

    Args:
        folder: folder of the pictures.
        size: height and width of an image; None for the median of the shorter sides of all pictures, or of the longer
            ones if they are not cropped, at most 64.
        channels: 1 for gray, 3 for color; None for color if a pixel of one of the pictures has any.
        fit: how pictures of other proportions are made square, see `read_picture`.
        window: the numbers that become black and white in gray pictures of more than 8 bits per pixel; None for those
            that the training pictures use, see `window_of`.
        picture: name of the column of the table with the pictures.
        augmentations: random changes of training images. "shift": by up to an eighth of the side; "flip": mirrored
            left to right; "rotate": by up to 15 degrees; "zoom": to a part of at least half of the area; "color":
            brightness, contrast, saturation and hue; "erase": a rectangle of up to a third of the area becomes black.
        options: see `OwnFiles`.

    Raises:
        ValueError: an argument is out of range.
        DataError: the folder, or a file in it, cannot be used; see `OwnFiles`.
    """

    padding = "replicate"
    largest = MOST_PIXELS  # side of images if none is given, which is a multiple of `step`
    step = 1

    @checked
    def __init__(
        self,
        folder: str | None = None,
        size: Count | None = None,
        channels: Literal[1, 3] | None = None,
        fit: Fit = "crop",
        window: Window | None = None,
        picture: str = "file",
        augmentations: list[Augmentation] | None = None,
        **options: Any,
    ) -> None:
        if window is not None and not window[0] < window[1]:
            raise ValueError(f"window must be two numbers, the smaller one first, got {window[0]:g} and {window[1]:g}")
        self.fit, self.window, self.file_column = fit, window, picture
        self._size, self._channels, self.augmentations = size, channels, list(augmentations or ())
        self._readings: dict[str, Reading] = {}  # by the paths of the pictures that were read
        super().__init__(folder, **options)
        size = self.shape[1]
        names = set(self.augmentations)
        self.shift, self.flip = size // 8 if "shift" in names else 0, "flip" in names
        if "color" in names and self.shape[0] == 3:
            self.jitter, self._jitter = JITTER, color_jitter(JITTER)
        self._changes = nn.Sequential(*self._changes_by("bilinear"))

    def _changes_by(self, resample: str) -> list[nn.Module]:
        """Return the augmentations that turn, enlarge and erase, with their way to find a pixel between others."""
        named = [name for name in ("rotate", "zoom", "erase") if name in self.augmentations]
        return [_change(name, self.shape[1], resample) for name in named]

    @cached_property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]  # that of the pictures, if it was not given
        channels, size = self._channels, self._size
        if channels is None:
            may_have_color = [self._folder / path for path, header in self._headers.items() if not header.is_gray]
            channels = 3 if any_has_color(may_have_color) else 1
        if size is None:
            side = min if self.fit == "crop" else max  # of what is kept of a picture
            median = median_low(side(x.width, x.height) for x in self._headers.values())
            size = min(self.largest, -(-median // self.step) * self.step)
        return channels, size, size

    def network_arguments(self) -> dict[str, Any]:
        return super().network_arguments() | {"in_channels": self.shape[0], "image_size": self.shape[1]}

    def resolved_arguments(self) -> dict[str, Any]:
        self._find_window()
        window = self.window and tuple(map(float, self.window))  # as values of a recipe are read
        return super().resolved_arguments() | {"channels": self.shape[0], "size": self.shape[1], "window": window}

    def prepare_data(self) -> None:
        super().prepare_data()
        if "color" in self.augmentations and self.shape[0] != 3:
            say('the augmentation "color" changes nothing: these images are gray')
        headers = self._headers
        if animated := [path for path, header in headers.items() if header.frames > 1]:
            say(f"took the first picture of {counted(len(animated), 'animation')}: {listed(animated)}")
        if cut := [path for path, header in headers.items() if header.is_cut]:
            say(
                f"{counted(len(cut), 'picture')} with 16 bits for each color, such as {cut[0]}: the upper 8 are read, "
                "which are nearly black if the values are small: save such pictures as gray, or with 8 bits"
            )
        long = [
            path for path, x in headers.items() if max(x.width, x.height) > FAR_FROM_SQUARE * min(x.width, x.height)
        ]
        if self.fit == "crop" and 10 * len(long) >= len(headers):
            say(
                f"{counted(len(long), 'picture')} of {len(headers):,} are far from square, such as {long[0]}, and "
                "only their middle is kept: --data.fit pad or stretch keeps all of them"
            )

    @checked
    def augment(self, images: Tensor) -> Tensor:
        return self._changes(super().augment(images))

    def _errors(self, paths: list[str]) -> list[str]:
        self._find_window()
        readings = read_all([self._folder / path for path in paths], self.shape, self.fit, self.window)
        self._readings |= zip(paths, readings, strict=True)
        return [reading.error for reading in readings]

    def _samples(self, part: Part, paths: list[str], labels: Tensor) -> LabeledSet:
        if part == "train":
            self._say_what_is_dark(paths)
            self._say_what_is_there_twice(paths)
            self._readings = {}  # what nothing reads any more takes a kilobyte of each picture
        read = partial(read_picture, shape=self.shape, fit=self.fit, window=self.window)
        return FileSet(self._folder, np.array(paths), labels, read)

    def _find_window(self) -> None:
        """Set the window of pictures with more than 8 bits to what those of the training use."""
        if self.window is not None or self.folder is None:
            return
        deep = [path for path, of in self.parts.items() if of == "train" and self._is_deep(path)]
        ranges = in_threads(range_of, [self._folder / path for path in deep], "finding black and white")
        if readable := [x for x in ranges if x is not None]:
            self.window = window_of(readable)
            low, high = self.window
            say(
                f"{self.folder}: {counted(len(deep), 'training picture')} with more than 8 bits: {low:.12g} is black "
                f"and {high:.12g} white (data.window)"
            )
            if len(deep) < sum(of == "train" for of in self.parts.values()):
                say(f"{self.folder}: the other training pictures have 8 bits: 0 is black and 255 white in those")

    def _is_deep(self, path: str) -> bool:
        return (header := self._headers.get(path)) is not None and header.is_deep

    def _say_what_is_dark(self, names: list[str]) -> None:
        """Say if most training pictures use few gray levels, or have one gray alone."""
        readings = [self._readings[name] for name in names]
        flat = [name for name, x in zip(names, readings, strict=True) if x.least == x.most]
        all_levels = max(x.most for x in readings) - min(x.least for x in readings) + 1
        most_use = median_low(x.most - x.least for x in readings) + 1
        deep = [self._folder / name for name in names if self._is_deep(name)]
        if self.window is not None and not deep:
            say("data.window changes nothing: no training picture is gray with more than 8 bits per pixel")
        if self.window is not None and 2 * len(deep) > len(names) and most_use < FEW_LEVELS:
            ranges = [x for x in in_threads(range_of, deep, "finding black and white") if x is not None]
            low, high = median_low(x for x, _ in ranges), median_low(x for _, x in ranges)
            black, white = self.window
            if low < high:
                say(
                    f"{self.folder}: most training pictures use {most_use} of 256 gray levels or fewer: their values "
                    f"are about {low:.12g} to {high:.12g}, and {black:.12g} is black and {white:.12g} white: set "
                    f"--data.window {low:.12g} {high:.12g}"
                )
                return
        if all_levels < FEW_LEVELS:
            say(
                f"{self.folder}: the training pictures use {all_levels} of 256 gray levels: a network sees little in "
                "them: make them brighter"
            )
        elif 10 * len(flat) >= 9 * len(names):
            say(
                f"{self.folder}: {len(flat):,} of {counted(len(names), 'training picture')} have one gray alone, such "
                f"as {flat[0]}"
            )

    def _say_what_is_there_twice(self, trained: list[str]) -> None:
        """Say how many validation and test pictures are training pictures too, file for file or nearly."""
        files = {self._readings[path].digest for path in trained}
        thumbnails = [self._readings[path].thumbnail for path in trained]
        parts: tuple[Part, ...] = ("val", "test")
        for part in parts:
            names = self._readable(part)
            others = [name for name in names if self._readings[name].digest not in files]
            count = counted(len(names), f"{PART_WORDS[part]} picture")
            if len(others) < len(names):
                say(f"{self.folder}: training has {len(names) - len(others)} of {count} too")
            compared = [others[i] for i in evenly_chosen(len(others), max(1, MOST_PAIRS // len(trained)))]
            copies = near_copies([self._readings[name].thumbnail for name in compared], thumbnails)
            if self.target == "numbers":  # pictures are alike where their numbers are
                numbers = self._files
                copies = {k: i for k, i in copies.items() if numbers[compared[k]] == numbers[trained[i]]}
            if copies:
                place, other = next(iter(copies.items()))
                of = count if len(compared) == len(others) else f"the {len(compared):,} of {count} that were compared"
                say(
                    f"{self.folder}: training has near copies of {len(copies)} of {of}, such as {compared[place]} and "
                    f"{trained[other]}"
                )

    @cached_property
    def _headers(self) -> dict[str, Header]:
        """The headers of all pictures that have one."""
        headers = {path: read_header(self._folder / path) for path in self._files}
        readable = {path: header for path, header in headers.items() if header is not None}
        if not readable:
            raise DataError(f"{self._folder}: none of {counted(len(headers), 'file')} is a picture that can be read")
        return readable


def _change(name: str, size: int, resample: str) -> nn.Module:
    from kornia.augmentation import RandomErasing, RandomResizedCrop, RandomRotation  # slow to import

    if name == "rotate":
        return RandomRotation(15.0, resample=resample, p=1.0)
    if name == "zoom":
        # Of the nearest pixels, "slice" takes those half a pixel beside the places that are interpolated.
        mode = "slice" if resample == "bilinear" else "resample"
        return RandomResizedCrop(
            (size, size), scale=(0.5, 1.0), ratio=(0.9, 1.1), resample=resample, cropping_mode=mode, p=1.0
        )
    return RandomErasing(scale=(0.02, 0.33), p=0.5)
