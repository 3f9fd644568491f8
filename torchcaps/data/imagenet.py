"""ImageNet, or any photographs in one folder per class: read from their files batch by batch."""

import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from torchcaps.data.files import DataError, own_folder
from torchcaps.data.images import ImageData
from torchcaps.data.labelled import Batch, LabelledSet

SUFFIXES = (".jpeg", ".jpg", ".png")
EDGES = ("xmin", "ymin", "xmax", "ymax")

Region = tuple[int, int, int, int]  # left, top, right, bottom, in pixels


class _Annotation(ElementTree.TreeBuilder):
    """Without a document type there are no entities, and without entities a short file cannot become a long one."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a DOCTYPE")


def find_object(path: Path, size: tuple[int, int], margin: float) -> Region | None:
    """Where the largest object of an image is, by an annotation as of ILSVRC: Pascal VOC's XML,

        annotation/size/{width,height}, annotation/object/bndbox/{xmin,ymin,xmax,ymax}.

    Args:
        path: of the annotation.
        size: width and height of the image. If the annotation has others, its boxes are scaled.
        margin: so much of the box's width is added left and right, of its height above and below, as far as the
            image goes.

    Returns:
        The box in whole pixels; None if the annotation has no object.

    Raises:
        DataError: it is not exactly this.
    """
    try:
        root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_Annotation()))
        scales = [side / _number(root, f"size/{name}") for side, name in zip(size, ("width", "height"), strict=True)]
        boxes = [[_number(box, edge) for edge in EDGES] for box in root.iterfind("object/bndbox")]
        if not boxes:
            return None
        left, top, right, bottom = max(boxes, key=_area)
        region = []
        for low, high, scale, side in zip((left, top), (right, bottom), scales, size, strict=True):
            more = margin * (high - low)
            region.append((max(0, math.floor((low - more) * scale)), min(side, math.ceil((high + more) * scale))))
            if low >= high or region[-1][0] >= region[-1][1]:
                raise ValueError(f"its largest box, {low:g} to {high:g}, is empty or outside of the image")
    except (OSError, ElementTree.ParseError, LookupError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: is not an annotation of ILSVRC ({reason}): replace or remove the file") from None
    (left, right), (top, bottom) = region
    return left, top, right, bottom


def _number(element: ElementTree.Element, name: str) -> float:
    text = element.findtext(name)
    if text is None:
        raise ValueError(f"it has no {name}")
    return float(text)


def _area(box: list[float]) -> float:
    left, top, right, bottom = box
    return max(right - left, 0) * max(bottom - top, 0)


@dataclass(frozen=True, eq=False)
class ImageFiles(LabelledSet):
    """Labelled photographs, read from their files as squares: uint8 (n, 3, side, side).

    Args:
        folder: where they are.
        names: paths in it, `<class>/<file>`, an array of n.
        labels: (n,) int64.
        side: pixels. The shorter side of a photograph is resized to so many, and the centre of the longer one is kept.
        boxes: folder of annotations; where one is there, its object is the photograph.
        margin: see `find_object`.
    """

    folder: Path
    names: np.ndarray
    labels: Tensor
    side: int
    boxes: Path | None
    margin: float

    def __getitems__(self, indices: list[int]) -> Batch:
        images = np.stack([self._read(self.names[index]) for index in indices])
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        return replace(self, names=self.names[indices], labels=self.labels[indices])

    def _read(self, name: str) -> np.ndarray:
        """(side, side, 3) uint8."""
        path = self.folder / name
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is wrong with metadata does not matter here
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path, formats=("JPEG", "PNG")) as image:
                    if image.mode[0] in "IF":  # converting would clip them
                        raise ValueError(f"its pixels are of mode {image.mode}")
                    pixels = image.convert("RGB")
        except Exception as error:  # Pillow raises whatever the bad bytes lead to
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"{path}: is not a JPEG or PNG of 8 bits ({reason}): replace the file") from None
        region = self._object(name, pixels.size)
        if region is not None:
            pixels = pixels.crop(region)
        return np.asarray(ImageOps.fit(pixels, (self.side, self.side), Image.Resampling.BILINEAR))

    def _object(self, name: str, size: tuple[int, int]) -> Region | None:
        if self.boxes is not None:
            for path in (self.boxes / Path(name).with_suffix(".xml"), self.boxes / f"{Path(name).stem}.xml"):
                if path.is_file():
                    return find_object(path, size, self.margin)
        return None


def read_class_list(path: Path) -> list[str]:
    """The names in a text file, one a line, in its order; what follows a `#` is a comment.

    Raises:
        DataError: it cannot be read, or it has no name, or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}: expected a text file in UTF-8, a class a line") from None
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    if not names:
        raise DataError(f"{path}: has no classes: expected the name of one a line")
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}: has class {name} twice: remove one of them")
    return names


class ImageNet(ImageData):
    """ImageNet's photographs, or any in folders by class: squares of `size` x `size` in colour.

    Source: O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015: 1,281,167 training
    images and, for the test, the 50,000 of its validation set, of 1000 classes. It cannot be downloaded without an
    account: it is read from

        <root>/imagenet/train/<class>/*.JPEG
        <root>/imagenet/val/<class>/*.JPEG

    where files may also be .jpg or .png, in upper or lower case; hidden ones are left out. `val` is the test set;
    `val_size` holds out images of `train`. Classes are numbered by the names of their folders, in order.

    h-ImageNet (Li et al. 2018, section 5: the 200 classes that are hardest for a ResNet-18) is a `class_list`; see
    `torchcaps.data.hardest`.

    A photograph is resized (bilinear) until its shorter side is `resize`, and the centre of its longer one is kept.
    Batches that a loader gives are these squares, uint8 (batch, 3, resize, resize); what the Trainer's hook, or
    `augment`, `centre` and `crops` make of them are the crops, floats (batch, 3, size, size). Li et al. take 128 of
    156, and 224 of 256. The whole image is decoded, metadata on its orientation is ignored, and so is transparency.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        size: of a crop, in pixels.
        resize: of the square that it is taken from.
        class_list: text file with the names of the classes to take, one a line, which number them in its order; what
            follows a `#` is a comment. By default all. It is looked for from here, and then from `<root>/imagenet`.
        boxes: folder of annotations, looked for likewise, see `find_object`: `<class>/<image>.xml` or `<image>.xml`
            for `<class>/<image>.JPEG`, there or in its folders `train` and `val`. Where an image has one, its largest
            object takes the place of the photograph.
        margin: what is left around an object, relative to the sides of its box.
        num_workers: see `ImageData`; decoding is what takes the time here.
        options: see `ImageData`.

    Raises:
        ValueError: an argument is out of range.
        DataError: a folder or a file is missing, or a file is not what its name says; one line that says which, what
            was expected and what to do. Images are read, and missed, while training.
    """

    resize: int

    def __init__(
        self,
        root: str | None = None,
        size: int = 128,
        resize: int = 156,
        class_list: str | None = None,
        boxes: str | None = None,
        margin: float = 0.1,
        num_workers: int = 2,
        **options: Any,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if not margin >= 0:
            raise ValueError(f"margin must be 0 or more, got {margin}")
        self.shape = (3, size, size)
        super().__init__(resize=resize, num_workers=num_workers, **options)
        self.root, self.class_list, self.boxes, self.margin = root, class_list, boxes, margin

    @cached_property
    def names(self) -> list[str]:
        """Of the classes: their folders."""
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
    def classes(self) -> int:  # type: ignore[override]  # the folders may not be there yet when this object is made
        return len(self.names)

    def prepare_data(self) -> None:
        # What is missing is better missed now than after the training.
        _ = self.names, self._boxes

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
            raise DataError(f"{folder}: is no folder: expected one with annotations, boxes={self.boxes!r}")
        return folder

    def _find(self, name: str) -> Path:
        here, there = Path(name).expanduser(), self._folder / name
        if not here.exists() and not there.exists():
            raise DataError(f"no {here} and no {there}: give the path of one that is there")
        return here if here.exists() else there


def _shown(path: Path) -> bool:
    return not path.name.startswith(".")
