"""Pictures of one's own, in a folder for each class."""

from collections import Counter
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

import numpy as np
import torch
from kornia.augmentation import RandomErasing, RandomResizedCrop, RandomRotation
from torch import Tensor, nn

from torchcaps.data.files import DataError
from torchcaps.data.images import ImageData
from torchcaps.data.labeled import LabeledData
from torchcaps.data.notes import MOST_BAD, listed, say, together
from torchcaps.data.pictures import (
    SUFFIXES,
    Fit,
    Header,
    PictureSet,
    find_pictures,
    is_hidden,
    read_all,
    read_header,
)
from torchcaps.data.splits import (
    FILE,
    KINDS,
    OF_STAGE,
    PART,
    TABLE,
    Part,
    check_names,
    check_shares,
    digest,
    packed,
    read_split,
    split_by_class,
)
from torchcaps.utils.arguments import Count, CountOrZero, Fraction, checked
from torchcaps.utils.checks import counted, nearest
from torchcaps.utils.files import user_path, write_csv_whole

Augmentation = Literal["shift", "flip", "rotate", "zoom", "color", "erase"]

FOLDERS: dict[str, Part] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
MOST_PIXELS = 64  # side of images if none is given
EXPECTED = "expected a folder with a folder of pictures for each class"


class ImageFolder(ImageData):
    """Pictures of one's own, in a folder for each class:

        <folder>/<class>/<any>.jpg
        <folder>/train/<class>/<any>.jpg     or with folders train (or training), val (or valid, validation, dev, eval)
                                             and test (or testing), in upper or lower case

    Pictures may have any size, be gray or in color, and lie in further folders within that of their class. Files are
    read when a batch needs them, so any number of them will do. Links to folders are followed. Hidden files and
    folders, those of servers (`@eaDir`), and files that do not end as pictures do, are left out. A photograph is turned
    as its metadata (EXIF) says. Of an animation the first picture counts.

    Without a folder `val` or `test`, the part is split off the training pictures, the same share of every class, by a
    split that depends on the names of the files alone. `write_split` writes it down, and `split` reads it again. Every
    checkpoint of `torchcaps train` holds it, by hashes of the names. A class of one or two pictures has all of them in
    training.

    Args:
        folder: folder of the pictures.
        size: height and width of an image; None for the median of the shorter sides of all pictures, at most 64.
        channels: 1 for gray, 3 for color; None for color if one of the pictures has any.
        fit: how pictures of other proportions are made square, see `read_picture`.
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
        augmentations: list[Augmentation] | None = None,
        val_share: Fraction = 0.15,
        test_share: Fraction = 0.15,
        split: str | None = None,
        skip_bad: bool = False,
        class_names: list[str] | None = None,
        batch_size: Count = 32,
        num_workers: CountOrZero = 2,
        shuffle_labels: bool = False,
    ) -> None:
        self.folder, self.split, self.skip_bad, self.fit = folder, split, skip_bad, fit
        self.val_share, self.test_share = val_share, test_share
        check_shares(val_share, test_share)
        check_names(class_names)
        self._class_names = class_names
        self._trained_on: set[bytes] = set()  # hashes of the files
        self._errors: dict[str, str] = {}  # of the pictures that were read
        self._contents: dict[str, bytes] = {}  # hashes of those that can be read
        names = set(augmentations or ())
        if channels is None:
            channels = 1 if all(header.is_gray for header in self._headers.values()) else 3
        if size is None:
            size = min(MOST_PIXELS, median_low(header.side for header in self._headers.values()))
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
        return self._found_classes if self._class_names is None else self._class_names

    @property
    def classes(self) -> int:  # type: ignore[override]  # known only when the folder exists
        return len(self.names)

    @property
    def title(self) -> str:
        return super().title if self.folder is None else f"pictures in {Path(self.folder).name or self.folder}"

    def facts(self) -> dict[str, Any]:
        return {"classes": self.classes, "in_channels": self.shape[0], "image_size": self.shape[1]}

    def found(self) -> dict[str, Any]:
        return {"class_names": self.names, "channels": self.shape[0], "size": self.shape[1]}

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
                    f"{self.split}: has none of the pictures in {self.folder}: give the folder of its run, or set "
                    "data.split to null for a new split"
                )
            if gone := len(split) - len(parts):
                say(f"{self.folder}: no longer has {counted(gone, 'picture')} of the split of {self.split}")
            if new := [path for path in files if path not in parts]:
                say(
                    f"{self.folder}: left out {counted(len(new), 'picture')} that the split of {self.split} does not "
                    f"have: {listed(new)}"
                )
            return parts
        found = {path: self._part_of(path) for path in files}
        shares: dict[Part, float] = {"val": self.val_share, "test": self.test_share}
        open_parts = {part: share for part, share in shares.items() if part not in found.values()}
        pictures = [path for path in files if found[path] == "train"]
        classes = [files[path] for path in pictures]
        found |= dict(zip(pictures, split_by_class(pictures, classes, open_parts), strict=True))
        if "test" not in found.values():
            raise DataError(f"{self.folder}: has no picture to test on: {_more(open_parts)}")
        return found

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
        for name in self._found_classes:
            if name not in labels:
                raise DataError(f"{self.folder}: has a class {name!r}, which is none of {', '.join(labels)}")
        self._read(list(self.parts) if stage == "fit" else [path for path, of in self.parts.items() if of == part])
        names = [path for path, of in self.parts.items() if of == part and path in self._contents]
        if not names:
            raise DataError(f"{self.folder}: the part {part!r} has no picture that can be read")
        contents = [self._contents[path] for path in names]
        if part == "train":
            lost = {self._files[path] for path, of in self.parts.items() if of == part}
            lost -= {self._files[path] for path in names}
            if lost:
                raise DataError(
                    f"{self.folder}: no training picture of {listed(sorted(lost))} can be read: mend some, or remove "
                    "the class"
                )
            self._trained_on = set(contents)
        elif both := sum(content in self._trained_on for content in contents):
            say(f"{self.folder}: training has {both} of {counted(len(names), f'{KINDS[part]} picture')} too")
        classes = torch.tensor([labels[self._files[path]] for path in names])
        return PictureSet(self._folder, np.array(names), classes, self.shape, self.fit)

    def _read(self, paths: list[str]) -> None:
        """Read pictures that were not read before. All that cannot be read are one error, or are left out."""
        paths = [path for path in paths if path not in self._contents and path not in self._errors]
        errors, contents = read_all([self._folder / path for path in paths], self.shape, self.fit)
        bad = {paths[index]: said for index, said in errors.items()}
        if bad and not self.skip_bad:
            raise DataError(f"{together([*bad.items()])}, or leave such files out by --data.skip_bad true")
        if bad:
            say(f"left out {counted(len(bad), 'picture')} that cannot be read: {listed(list(bad), MOST_BAD)}")
        self._errors |= bad
        self._contents |= {path: content for path, content in zip(paths, contents, strict=True) if path not in bad}

    def _say_what_is_left_out(self) -> None:
        """Say which files were not taken for pictures, and which classes are small."""
        if beside := self._beside:
            say(f"left out what lies in no folder of a class: {listed(beside)}")
        if "color" in self.augmentations and self.shape[0] != 3:
            say('the augmentation "color" changes nothing: these images are gray')
        if self._others:
            say(f"left out {counted(len(self._others), 'file')} beside the pictures: {listed(self._others)}")
        moving = [path for path, header in self._headers.items() if header.frames > 1]
        if moving:
            say(f"took the first picture of {counted(len(moving), 'animation')}: {listed(moving)}")
        training = Counter(self._files[path] for path, part in self.parts.items() if part == "train")
        tested = {self._files[path] for path, part in self.parts.items() if part == "test"}
        if alone := [f"{name} ({training[name]})" for name in self.names if name not in tested]:
            say(f"classes that have too few pictures to be tested: {listed(alone)}")

    @cached_property
    def _folder(self) -> Path:
        if self.folder is None:
            raise DataError(f"data.folder is missing: give --data.folder FOLDER, {EXPECTED}")
        folder = user_path(self.folder)
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder: {EXPECTED}")
        return folder

    @cached_property
    def _in_parts(self) -> list[str]:
        """Names of the folders of parts: train, and perhaps val and test; none if the classes lie in the folder."""
        found = [path.name for path in _folders(self._folder) if path.name.lower() in FOLDERS]
        by_part = Counter(FOLDERS[name.lower()] for name in found)
        if not found:
            return []
        if not by_part["train"]:
            raise DataError(
                f"{self._folder}: has {listed(found)}, and no folder train: add one with the training "
                "pictures, or rename the folder if it is a class"
            )
        for part, count in by_part.items():
            if count > 1:
                raise DataError(f"{self._folder}: has {count} folders for the part {part!r}: expected one")
        return found

    @property
    def _places(self) -> list[Path]:
        """The folders that have the folders of the classes."""
        return [self._folder / name for name in self._in_parts] or [self._folder]

    @property
    def _beside(self) -> list[str]:
        """Folders that are no part beside those of the parts, and pictures that lie in no folder of a class."""
        parts = self._in_parts
        beside = [path for path in _folders(self._folder) if path.name not in parts] if parts else []
        for place in {self._folder, *self._places}:
            beside += (path for path in place.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
        return sorted(self._inside(path) for path in beside if not path.name.startswith("."))

    def _inside(self, path: Path) -> str:
        """Return the path of a file in the folder."""
        return path.relative_to(self._folder).as_posix()

    def _part_of(self, path: str) -> Part:
        """Return the part whose folder a picture lies in; "train" where the folder has none."""
        return FOLDERS[path.partition("/")[0].lower()] if self._in_parts else "train"

    @cached_property
    def _all(self) -> tuple[dict[str, str], list[str]]:
        """Return the class of each picture by its path in the folder, and the paths of other files."""
        files: dict[str, str] = {}
        others: list[str] = []
        empty: list[str] = []
        for place in self._places:
            for home in _folders(place):
                pictures, rest = find_pictures(home)
                if not pictures:
                    empty.append(self._inside(home))
                files |= dict.fromkeys(map(self._inside, pictures), home.name)
                others += map(self._inside, rest)
        if empty:
            raise DataError(
                f"{self._folder}: there are no pictures in {listed(empty)}: expected files that end in "
                f"{', '.join(SUFFIXES)}"
            )
        trained = {name for path, name in files.items() if self._part_of(path) == "train"}
        if unknown := {name: file for file, name in files.items() if name not in trained}:
            name, file = next(iter(unknown.items()))
            more = f" (and none of {listed(others)})" if (others := [*unknown][1:]) else ""
            raise DataError(
                f"{self._folder / file}: there is no class {name!r} in training{more}{nearest(name, trained)}"
            )
        if len(trained) < 2:
            raise DataError(
                f"{self._folder}: has pictures of {counted(len(trained), 'class', 'classes')}, two or more are needed: "
                f"{EXPECTED}"
                + (
                    f"; {listed(self._in_parts)} was taken for a part: rename it if it is a class"
                    if self._in_parts
                    else ""
                )
            )
        return files, others

    @property
    def _files(self) -> dict[str, str]:
        return self._all[0]

    @property
    def _others(self) -> list[str]:
        return self._all[1]

    @cached_property
    def _found_classes(self) -> list[str]:
        return sorted({self._files[path] for path in self.parts}, key=_natural)

    @cached_property
    def _headers(self) -> dict[str, Header]:
        """The headers of all pictures that have one."""
        headers = {path: read_header(self._folder / path) for path in self._files}
        found = {path: header for path, header in headers.items() if header is not None}
        if not found:
            raise DataError(f"{self._folder}: none of {counted(len(headers), 'file')} is a picture that can be read")
        return found


def _change(name: str, size: int) -> nn.Module:
    if name == "rotate":
        return RandomRotation(15.0, p=1.0)
    if name == "zoom":
        return RandomResizedCrop((size, size), scale=(0.5, 1.0), ratio=(0.9, 1.1), p=1.0)
    return RandomErasing(scale=(0.02, 0.33), p=0.5)


def _folders(place: Path) -> list[Path]:
    """Return the folders in a place, without hidden ones and without runs of this recipe, which have figures."""
    inside = (path for path in place.iterdir() if path.is_dir() and not is_hidden(path.name))
    return sorted(path for path in inside if not (path / "own" / "images").is_dir())


def _natural(name: str) -> tuple[int, int, str]:
    """Key that sorts names which are numbers as numbers, before all others."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _more(parts: Any) -> str:
    if parts.get("test") == 0:
        return "set data.test_share above 0, or add a folder test"
    return "a class needs three pictures to be split" if parts else "expected pictures in its folder test"
