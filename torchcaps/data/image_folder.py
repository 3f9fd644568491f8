"""Pictures of one's own, in a folder for each class or named by a table."""

from collections import Counter
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from torchcaps.data.copies import near_copies
from torchcaps.data.files import DataError
from torchcaps.data.images import ImageData, PictureSet
from torchcaps.data.labeled import LabeledData
from torchcaps.data.notes import MOST_BAD, listed, say, together
from torchcaps.data.order import evenly_chosen
from torchcaps.data.picture_lists import EXPECTED_FOLDERS, PictureList, pictures_in_folders, pictures_in_table
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
    window_of,
)
from torchcaps.data.splits import (
    ANEW,
    FILE,
    OF_STAGE,
    PART,
    PART_WORDS,
    TABLE,
    Part,
    check_groups,
    check_names,
    check_shares,
    digest,
    packed,
    read_split,
    say_groups,
    split_by_class,
    split_by_group,
)
from torchcaps.utils.arguments import Count, CountOrZero, Fraction, checked
from torchcaps.utils.checks import counted
from torchcaps.utils.files import user_path, write_csv_whole

Augmentation = Literal["shift", "flip", "rotate", "zoom", "color", "erase"]

MOST_PIXELS = 64  # side of images if none is given
MOST_PAIRS = 3 * 10**8  # of pictures that are compared for near copies, which takes some ten seconds
FEW_LEVELS = 26  # of 256: pictures that use fewer are nearly of one gray
FAR_FROM_SQUARE = 1.5  # sides: a third of such a picture, or more, is lost when its middle is cut out


class ImageFolder(ImageData):
    """Pictures of one's own, in a folder for each class, or in one folder beside a table of names and classes:

        <folder>/<class>/<any>.jpg
        <folder>/train/<class>/<any>.jpg     or with folders train (or training), val (or valid, validation, dev, eval)
                                             and test (or testing), in upper or lower case
        <folder>/<any>.jpg                   and `table`, a CSV with a column of names and a column of classes

    Pictures may have any size, be gray or in color, and lie in further folders within that of their class. Files are
    read when a batch needs them, so any number of them will do. Links to folders are followed. Hidden files and
    folders, those of servers (`@eaDir`), and files that do not end as pictures do, are left out. A photograph is turned
    as its metadata (EXIF) says. Of an animation the first picture counts.

    Without a folder `val` or `test`, the part is split off the training pictures, the same share of every class, by a
    split that depends on the names of the files alone. `write_split` writes it down, and `split` reads it again. Every
    checkpoint of `torchcaps train` holds it, by hashes of the names. A class of one or two pictures has all of them in
    training. With `group`, no group is in two parts; see `split_by_group`.

    Args:
        folder: folder of the pictures.
        size: height and width of an image; None for the median of the shorter sides of all pictures, at most 64.
        channels: 1 for gray, 3 for color; None for color if a pixel of one of the pictures has any.
        fit: how pictures of other proportions are made square, see `read_picture`.
        window: the numbers that become black and white in gray pictures of more than 8 bits per pixel; None for those
            that the training pictures use, see `window_of`.
        table: table that names the pictures and their classes, see `torchcaps.data.table.read_table`; None for a folder
            of each class. It names a picture by its path in `folder` or by the name of its file, with or without the
            ending.
        picture, label: names of its columns with the pictures and with their classes.
        columns: names of all of its columns if it has no header line; None if it has one.
        group: what pictures of one group, such as a patient, have in common: "folder", the first folder within that of
            the class; a column of the table; or a regular expression, what it matches in the name of the file without
            its ending, or what its brackets match. "none" for no groups; with None a line says if there seem to be
            some.
        augmentations: random changes of training images. "shift": by up to an eighth of the side; "flip": mirrored
            left to right; "rotate": by up to 15 degrees; "zoom": to a part of at least half of the area; "color":
            brightness, contrast, saturation and hue; "erase": a rectangle of up to a third of the area becomes black.
        val_share, test_share: shares of the pictures of each class for validation and test.
        split: file with the parts of all pictures, as `write_split` writes it, or a checkpoint of a run; None for a new
            split. Pictures that it does not have are left out.
        skip_bad: whether pictures that cannot be read are left out. Otherwise they are an error.
        class_names: names of the classes; None for those of the folders.
        batch_size: images in a batch.
        num_workers: worker processes of each loader.
        shuffle_labels: whether to shuffle the training labels and the validation labels, see `LabeledData`.
        balance: whether an epoch of training has equally many pictures of each class, see `Order`.

    Raises:
        ValueError: an argument is out of range.
        DataError: the folder, or a file in it, cannot be used; the one line says which and why. All pictures of a part
            are read once in `setup`, so that none stops the training later.
    """

    padding = "replicate"

    @checked
    def __init__(
        self,
        folder: str | None = None,
        size: Count | None = None,
        channels: Literal[1, 3] | None = None,
        fit: Fit = "crop",
        window: Window | None = None,
        table: str | None = None,
        picture: str = "file",
        label: str = "label",
        columns: list[str] | None = None,
        group: str | None = None,
        augmentations: list[Augmentation] | None = None,
        val_share: Fraction = 0.15,
        test_share: Fraction = 0.15,
        split: str | None = None,
        skip_bad: bool = False,
        class_names: list[str] | None = None,
        batch_size: Count = 32,
        num_workers: CountOrZero = 2,
        shuffle_labels: bool = False,
        balance: bool = False,
    ) -> None:
        self.folder, self.split, self.skip_bad, self.fit, self.balance = folder, split, skip_bad, fit, balance
        self.table, self.picture_column, self.label_column, self.columns = table, picture, label, columns
        self.group = group
        self.val_share, self.test_share = val_share, test_share
        if window is not None and not window[0] < window[1]:
            raise ValueError(f"window must be two numbers, the smaller one first, got {window[0]:g} and {window[1]:g}")
        self.window = window
        check_shares(val_share, test_share)
        check_names(class_names)
        self._class_names = class_names
        self._readings: dict[str, Reading] = {}  # by the paths of the pictures that were read
        names = set(augmentations or ())
        if channels is None:
            may_have_color = [self._folder / path for path, header in self._headers.items() if not header.is_gray]
            channels = 3 if any_has_color(may_have_color) else 1
        if size is None:
            size = min(MOST_PIXELS, median_low(min(x.width, x.height) for x in self._headers.values()))
        self.shape, self.augmentations = (channels, size, size), list(augmentations or ())
        super().__init__(
            batch_size=batch_size,
            num_workers=num_workers,
            shuffle_labels=shuffle_labels,
            shift=size // 8 if "shift" in names else 0,
            flip="flip" in names,
            jitter=0.2 if "color" in names and channels == 3 else 0.0,
        )
        self._changes = nn.Sequential(*(_change(name, size) for name in ("rotate", "zoom", "erase") if name in names))

    @property
    def names(self) -> list[str]:
        """Names of the classes: those of their folders."""
        return self._names_in_data if self._class_names is None else self._class_names

    @property
    def classes(self) -> int:  # type: ignore[override]  # known only when the folder exists
        return len(self.names)

    @property
    def title(self) -> str:
        return super().title if self.folder is None else f"pictures in {Path(self.folder).name or self.folder}"

    def network_arguments(self) -> dict[str, Any]:
        return {"classes": self.classes, "in_channels": self.shape[0], "image_size": self.shape[1]}

    def resolved_arguments(self) -> dict[str, Any]:
        self._find_window()
        window = self.window and tuple(map(float, self.window))  # as values of a recipe are read
        return {"class_names": self.names, "channels": self.shape[0], "size": self.shape[1], "window": window}

    def prepare_data(self) -> None:
        self._say_what_is_left_out()

    setup = LabeledData.setup  # `parts` says which pictures belong to a stage

    @property
    def _validates(self) -> bool:
        return "val" in self.parts.values()

    @checked
    def augment(self, images: Tensor) -> Tensor:
        return self._changes(super().augment(images))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The part of each picture, by its path in the folder: "train", "val" or "test"."""
        files = self._files
        if self.split is not None:
            split = read_split(self.split)
            parts = {path: split[key] for path in files if (key := digest(path)) in split}
            if not parts:
                raise DataError(
                    f"{self.split}: has none of the pictures in {self.folder}: give the folder of its run, or, for "
                    "pictures that its network was not trained on, set data.split to null"
                )
            if gone := len(split) - len(parts):
                say(f"{self.folder}: no longer has {counted(gone, 'picture')} of the split of {self.split}")
            if new := [path for path in files if path not in parts]:
                say(
                    f"{self.folder}: left out {counted(len(new), 'picture')} that the split of {self.split} does not "
                    f"have: {listed(new)}"
                )
            if groups := self._listed.groups:
                advice = f"{ANEW}, or set data.group to none"
                check_groups(((groups[path], part) for path, part in parts.items()), self.split, advice)
            return parts
        parts = {path: self._listed.parts.get(path, "train") for path in files}
        shares: dict[Part, float] = {"val": self.val_share, "test": self.test_share}
        open_parts = {part: share for part, share in shares.items() if part not in parts.values()}
        pictures = [path for path in files if parts[path] == "train"]
        classes = [files[path] for path in pictures]
        groups = self._listed.groups
        if groups:
            parts |= dict(
                zip(pictures, split_by_group(classes, [groups[x] for x in pictures], open_parts), strict=True)
            )
            advice = "move all pictures of a group into one of the folders, or set data.group to none"
            check_groups(((groups[path], part) for path, part in parts.items()), self._folder, advice)
        else:
            parts |= dict(zip(pictures, split_by_class(pictures, classes, open_parts), strict=True))
        if "test" not in parts.values():
            raise DataError(f"{self.folder}: has no picture to test on: {_how_to_test(self.test_share, bool(groups))}")
        return parts

    @checked
    def write_split(self, folder: Path) -> Path:
        """Write `split.csv` with the path and the part of each picture; return its path."""
        return write_csv_whole(folder / TABLE, (FILE, PART), self.parts.items())

    def split_hashes(self) -> dict[str, Tensor]:
        return packed({digest(path): part for path, part in self.parts.items()})

    @checked
    def keys(self, stage: str) -> list[str]:
        """Return the paths of the pictures of a stage, in the folder."""
        samples = self._loaded(stage)
        assert isinstance(samples, PictureSet)
        return samples.names.tolist()

    def _set(self, stage: str) -> PictureSet:
        part: Part = OF_STAGE[stage]
        labels = {name: label for label, name in enumerate(self.names)}
        for name in self._names_in_data:
            if name not in labels:
                raise DataError(f"{self.folder}: has a class {name!r}, which is none of {', '.join(labels)}")
        self._read(list(self.parts) if stage == "fit" else [path for path, of in self.parts.items() if of == part])
        names = self._readable(part)
        if not names:
            raise DataError(f"{self.folder}: the part {part!r} has no picture that can be read")
        if part == "train":
            lost = {self._files[path] for path, of in self.parts.items() if of == part}
            lost -= {self._files[path] for path in names}
            if lost:
                raise DataError(
                    f"{self.folder}: no training picture of {listed(sorted(lost))} can be read: mend some, or remove "
                    "the class"
                )
            self._say_what_is_dark(names)
            self._say_what_is_there_twice(names)
        classes = torch.tensor([labels[self._files[path]] for path in names])
        return PictureSet(self._folder, np.array(names), classes, self.shape, self.fit, self.window)

    def _read(self, paths: list[str]) -> None:
        """Read pictures that were not read before. All that cannot be read are one error, or are left out."""
        self._find_window()
        paths = [path for path in paths if path not in self._readings]
        readings = read_all([self._folder / path for path in paths], self.shape, self.fit, self.window)
        bad = {path: reading.error for path, reading in zip(paths, readings, strict=True) if reading.error}
        if bad and not self.skip_bad:
            raise DataError(f"{together([*bad.items()])}, or leave such files out by --data.skip_bad true")
        if bad:
            say(f"left out {counted(len(bad), 'picture')} that cannot be read: {listed(list(bad), MOST_BAD)}")
        self._readings |= zip(paths, readings, strict=True)

    def _readable(self, part: Part) -> list[str]:
        """Return the pictures of a part that were read without an error."""
        paths = (path for path, of in self.parts.items() if of == part)
        return [path for path in paths if path in self._readings and not self._readings[path].error]

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

    def _say_what_is_left_out(self) -> None:
        """Say which files were not taken for pictures, which classes are small, and which pictures are cut."""
        pictures = self._listed
        if pictures.beside:
            place = "row of the table" if self.table else "folder of a class"
            say(f"left out what lies in no {place}: {listed(pictures.beside)}")
        if "color" in self.augmentations and self.shape[0] != 3:
            say('the augmentation "color" changes nothing: these images are gray')
        if pictures.others:
            say(f"left out {counted(len(pictures.others), 'file')} beside the pictures: {listed(pictures.others)}")
        headers = self._headers
        if moving := [path for path, header in headers.items() if header.frames > 1]:
            say(f"took the first picture of {counted(len(moving), 'animation')}: {listed(moving)}")
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
        if self.split is None:
            for doubt in pictures.doubts:
                say(doubt)
        if groups := pictures.groups:
            paths = [*self.parts]
            say_groups(
                str(self.folder),
                "picture",
                [self._files[x] for x in paths],
                [groups[x] for x in paths],
                [*self.parts.values()],
            )
        training = Counter(self._files[path] for path, part in self.parts.items() if part == "train")
        tested = {self._files[path] for path, part in self.parts.items() if part == "test"}
        if alone := [f"{name} ({training[name]})" for name in self.names if name not in tested]:
            few = "pictures or groups" if pictures.groups else "pictures"
            why = "are not in the test part" if pictures.parts or self.split else f"have too few {few} to be tested"
            say(f"classes that {why}: {listed(alone)}")

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
            if copies:
                place, other = next(iter(copies.items()))
                of = count if len(compared) == len(others) else f"the {len(compared):,} of {count} that were compared"
                say(
                    f"{self.folder}: training has near copies of {len(copies)} of {of}, such as {compared[place]} and "
                    f"{trained[other]}"
                )
        # What nothing reads any more takes a kilobyte of each picture.
        self._readings = {path: Reading(x.error, b"", b"", 0, 0) for path, x in self._readings.items()}

    @cached_property
    def _folder(self) -> Path:
        if self.folder is None:
            raise DataError(f"data.folder is missing: give --data.folder FOLDER, {EXPECTED_FOLDERS}")
        return user_path(self.folder)

    @cached_property
    def _listed(self) -> PictureList:
        if self.table is None:
            return pictures_in_folders(self._folder, self.group)
        names = self.picture_column, self.label_column, self.columns
        return pictures_in_table(self._folder, self.table, *names, self.group, self.skip_bad)

    @property
    def _files(self) -> dict[str, str]:
        """The class of each picture, by its path in the folder."""
        return self._listed.classes

    @cached_property
    def _names_in_data(self) -> list[str]:
        return sorted({self._files[path] for path in self.parts}, key=_natural)

    @cached_property
    def _headers(self) -> dict[str, Header]:
        """The headers of all pictures that have one."""
        headers = {path: read_header(self._folder / path) for path in self._files}
        readable = {path: header for path, header in headers.items() if header is not None}
        if not readable:
            raise DataError(f"{self._folder}: none of {counted(len(headers), 'file')} is a picture that can be read")
        return readable


def _change(name: str, size: int) -> nn.Module:
    from kornia.augmentation import RandomErasing, RandomResizedCrop, RandomRotation  # slow to import

    if name == "rotate":
        return RandomRotation(15.0, p=1.0)
    if name == "zoom":
        return RandomResizedCrop((size, size), scale=(0.5, 1.0), ratio=(0.9, 1.1), p=1.0)
    return RandomErasing(scale=(0.02, 0.33), p=0.5)


def _natural(name: str) -> tuple[int, int, str]:
    """Key that sorts names which are numbers as numbers, before all others."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _how_to_test(test_share: float, has_groups: bool) -> str:
    if test_share == 0:
        return "set data.test_share above 0, or add a folder test"
    return "a class needs two groups to be tested" if has_groups else "a class needs three pictures to be split"
