"""ImageNet, or any photographs in one folder per class: read from their files batch by batch."""

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcaps.data.files import DataError, own_folder
from torchcaps.data.images import FileSet, ImageData
from torchcaps.data.pictures import SUFFIXES, read_picture
from torchcaps.utils.arguments import Count, CountOrZero, checked
from torchcaps.utils.files import read_text, user_path


def read_class_list(path: Path) -> list[str]:
    """Read the class names in a text file, one per line. The rest of a line after a `#` is a comment.

    Raises:
        DataError: the file cannot be read, has no name, or has a name twice.
    """
    try:
        lines = read_text(path).splitlines()
    except ValueError as error:
        raise DataError(f"{error}: expected a text file in UTF-8, one class per line") from None
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

    Files may also be of other formats, see `read_picture`. Hidden files are ignored. `val` is the test set; `val_size`
    holds out images of `train`. Classes are numbered in the order of their folders' names.

    h-ImageNet (Li et al. 2018, section 5) has 200 of the classes: `class_list="h-imagenet.txt"`, which torchcaps has.

    A photograph is resized until its shorter side is `resize`, and the middle of its longer side is kept, see
    `read_picture`. Loaders return these squares, uint8 (batch, 3, resize, resize). The Trainer's hook, or `augment`,
    `center` and `crops`, make floats (batch, 3, size, size) of them by cropping. Li et al. use crops of 128 out of 156,
    and of 224 out of 256.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        size: side of a crop in pixels.
        resize: side in pixels of the square from which it is cropped.
        class_list: text file with the classes to use, one name per line; the rest of a line after a `#` is a comment.
            Classes are numbered in the order of the file. None for all classes. A file that does not exist is looked
            for in the folder of this module.
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
        num_workers: CountOrZero = 2,
        **options: Any,
    ) -> None:
        self.shape, self.stored_shape = (3, size, size), (3, resize, resize)
        super().__init__(resize=resize, num_workers=num_workers, **options)
        self.root, self.class_list = root, class_list

    @cached_property
    def names(self) -> list[str]:
        """Names of the classes: those of their folders."""
        folders = [self._folder / part for part in ("train", "val")]
        subfolders = [{path.name for path in folder.iterdir() if _shown(path) and path.is_dir()} for folder in folders]
        if self.class_list is None:
            source, names = "train and val", sorted(set.union(*subfolders))
        else:
            path = user_path(self.class_list)
            packaged = Path(__file__).parent / path
            source, names = str(path), read_class_list(packaged if packaged.exists() and not path.exists() else path)
        for name in names:
            for folder, inside in zip(folders, subfolders, strict=True):
                if name not in inside:
                    raise DataError(f"{folder}: has no folder {name}: expected one for each class of {source}")
        if not names:
            raise DataError(f"{folders[0]}: has no folders: expected one for each class, with its images")
        return names

    @cached_property
    def classes(self) -> int:  # type: ignore[override]  # known only when the folders exist
        return len(self.names)

    def prepare_data(self) -> None:
        _ = self.names  # report missing folders now, not after the training

    def _images(self, train: bool) -> FileSet:
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
        read = partial(read_picture, shape=(3, self.resize, self.resize), fit=self.fit)
        return FileSet(folder, np.array(files), torch.tensor(labels), read)

    @cached_property
    def _folder(self) -> Path:
        folder = own_folder(self.root, "imagenet")
        if folder is None or not all((folder / part).is_dir() for part in ("train", "val")):
            place, advice = (folder, "") if folder else ("DIR/imagenet", " and set TORCHCAPS_DATA=DIR")
            raise DataError(f"no ImageNet: put its images at {place}/{{train,val}}/<class>/*.JPEG{advice}")
        return folder


def _shown(path: Path) -> bool:
    return not path.name.startswith(".")
