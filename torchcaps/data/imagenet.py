"""ImageNet, or any photographs in one folder per class: read from their files batch by batch."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from torchcaps.data.annotations import Region, find_object
from torchcaps.data.files import DataError, own_folder
from torchcaps.data.images import ImageData
from torchcaps.data.pictures import FileSet
from torchcaps.utils.arguments import Count, CountOrZero, NotNegative, checked
from torchcaps.utils.checks import one_line

SUFFIXES = (".jpeg", ".jpg", ".png")


@dataclass(frozen=True, eq=False)
class ImageFiles(FileSet):
    """Labeled photographs as squares, uint8 (n, 3, side, side).

    Args:
        side: side of the squares in pixels. The shorter side of a photograph is resized to it, and the middle of the
            longer one is kept.
        boxes: folder of annotations, or None. A photograph with an annotation is first cropped to its largest object.
        margin: see `find_object`.
    """

    side: int
    boxes: Path | None
    margin: float

    def read(self, name: str) -> Tensor:
        path = self.folder / name
        try:
            # catch_warnings is not safe with threads, but only one thread of a process reads images: the main one.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of damaged metadata, which is not used here
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path, formats=("JPEG", "PNG")) as image:
                    if image.mode[0] in "IF":  # more than 8 bits: converting would clip
                        raise ValueError(f"its pixels are of mode {image.mode}")
                    pixels = image.convert("RGB")
        except Exception as error:  # damaged bytes make Pillow raise many kinds of errors
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise DataError(f"{path}: is not a JPEG or PNG of 8 bits ({reason}): replace the file") from None
        region = self._object(name, pixels.size)
        if region is not None:
            pixels = pixels.crop(region)
        square = np.array(ImageOps.fit(pixels, (self.side, self.side), Image.Resampling.BILINEAR))
        return torch.from_numpy(square).permute(2, 0, 1)

    def _object(self, name: str, size: tuple[int, int]) -> Region | None:
        """Return the box of a photograph's largest object, if it has an annotation with one."""
        if self.boxes is not None:
            for path in (self.boxes / Path(name).with_suffix(".xml"), self.boxes / f"{Path(name).stem}.xml"):
                if path.is_file():
                    return find_object(path, size, self.margin)
        return None


def read_class_list(path: Path) -> list[str]:
    """Read the class names in a text file, one per line. The rest of a line after a `#` is a comment.

    Raises:
        DataError: the file cannot be read, has no name, or has a name twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}: expected a text file in UTF-8, one class per line") from None
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    if not names:
        raise DataError(f"{path}: has no classes: expected one name per line")
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}: has class {name} twice: remove one of them")
    return names


class ImageNet(ImageData):
    """ImageNet, or any photographs in one folder per class: color images of `size` x `size`.

    Source: O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015: 1,281,167 training
    images and, for the test, the 50,000 images of its validation set, in 1000 classes. Downloading it needs an account,
    so torchcaps does not do that. It is read from

        <root>/imagenet/train/<class>/*.JPEG
        <root>/imagenet/val/<class>/*.JPEG

    Files may also end in .jpg or .png, in upper or lower case. Hidden files are ignored. `val` is the test set;
    `val_size` holds out images of `train`. Classes are numbered in the order of their folders' names.

    h-ImageNet (Li et al. 2018, section 5) has 200 of the classes: `class_list="h-imagenet.txt"`, which torchcaps has.

    A photograph is resized (bilinear) until its shorter side is `resize`, and the middle of its longer side is kept.
    Loaders return these squares, uint8 (batch, 3, resize, resize). The Trainer's hook, or `augment`, `center` and
    `crops`, make floats (batch, 3, size, size) of them by cropping. Li et al. use crops of 128 out of 156, and of 224
    out of 256. The whole image is decoded; its orientation in the metadata and its transparency are ignored.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        size: side of a crop in pixels.
        resize: side in pixels of the square from which it is cropped.
        class_list: text file with the classes to use, one name per line; the rest of a line after a `#` is a comment.
            Classes are numbered in the order of the file. None for all classes. A relative path starts from the working
            directory, or else from `<root>/imagenet`, or else from the folder of this module.
        boxes: folder of annotations, see `find_object`; None for no boxes. Relative paths are as for `class_list`. The
            annotation of `<class>/<image>.JPEG` is `<class>/<image>.xml` or `<image>.xml`, in this folder or, if it has
            folders `train` and `val`, in these. An image with an annotation is cropped to its largest object.
        margin: margin around an object, relative to the sides of its box.
        num_workers: see `ImageData`. The default is above 0 because decoding takes most of the time.
        options: see `ImageData`.

    Raises:
        ValueError: an argument is out of range.
        DataError: a folder or a file is missing or damaged. The one line says which one, what was expected and what to
            do. Image files are read during training, so errors in them come only then.
    """

    resize: int

    @checked
    def __init__(
        self,
        root: str | None = None,
        size: Count = 128,
        resize: Count = 156,
        class_list: str | None = None,
        boxes: str | None = None,
        margin: NotNegative = 0.1,
        num_workers: CountOrZero = 2,
        **options: Any,
    ) -> None:
        self.shape, self.stored_shape = (3, size, size), (3, resize, resize)
        super().__init__(resize=resize, num_workers=num_workers, **options)
        self.root, self.class_list, self.boxes, self.margin = root, class_list, boxes, margin

    @cached_property
    def names(self) -> list[str]:
        """Names of the classes: those of their folders."""
        folders = [self._folder / part for part in ("train", "val")]
        found = [{path.name for path in folder.iterdir() if _shown(path) and path.is_dir()} for folder in folders]
        if self.class_list is None:
            source, names = "train and val", sorted(set.union(*found))
        else:
            path = self._find(self.class_list)
            source, names = f"{path}", read_class_list(path)
        for name in names:
            for folder, there in zip(folders, found, strict=True):
                if name not in there:
                    raise DataError(f"{folder}: has no folder {name}: expected one for each class of {source}")
        if not names:
            raise DataError(f"{folders[0]}: has no folders: expected one for each class, with its images")
        return names

    @cached_property
    def classes(self) -> int:  # type: ignore[override]  # known only when the folders exist
        return len(self.names)

    def prepare_data(self) -> None:
        # Report missing folders now, not after the training.
        _ = self.names, self._boxes

    @checked
    def picture(self, path: Path) -> Tensor:
        return ImageFiles(path.parent, np.array([]), torch.empty(0), self.resize, None, self.margin).read(path.name)

    def _images(self, train: bool) -> ImageFiles:
        folder = self._folder / ("train" if train else "val")
        files, labels = [], []
        for label, name in enumerate(self.names):
            images = [
                path.name for path in (folder / name).iterdir() if path.suffix.lower() in SUFFIXES and _shown(path)
            ]
            if not images:
                raise DataError(f"{folder / name}: has no images: expected files that end in {', '.join(SUFFIXES)}")
            files += [f"{name}/{image}" for image in sorted(images)]
            labels += [label] * len(images)
        boxes = self._boxes
        if boxes is not None and (boxes / folder.name).is_dir():
            boxes = boxes / folder.name
        return ImageFiles(folder, np.array(files), torch.tensor(labels), self.resize, boxes, self.margin)

    @cached_property
    def _folder(self) -> Path:
        folder = own_folder(self.root, "imagenet")
        if folder is None or not all((folder / part).is_dir() for part in ("train", "val")):
            here, advice = (folder, "") if folder else ("DIR/imagenet", " and set TORCHCAPS_DATA=DIR")
            raise DataError(f"no ImageNet: put its images at {here}/{{train,val}}/<class>/*.JPEG{advice}")
        return folder

    @property
    def _boxes(self) -> Path | None:
        if self.boxes is None:
            return None
        folder = self._find(self.boxes)
        if not folder.is_dir():
            raise DataError(f"{folder}: is not a folder: expected one with annotations, boxes={self.boxes!r}")
        return folder

    def _find(self, name: str) -> Path:
        """Return a path relative to the working directory, or else to the folder of ImageNet, or else to torchcaps."""
        here, there, packaged = Path(name).expanduser(), self._folder / name, Path(__file__).parent / name
        for path in (here, there, packaged):
            if path.exists():
                return path
        raise DataError(f"neither {here} nor {there} exists: give the path of an existing one")


def _shown(path: Path) -> bool:
    return not path.name.startswith(".")
