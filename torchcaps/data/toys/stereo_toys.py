"""The data set of stereo toys: rendered once, then read from a cache."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pooch
import torch
from torch import Tensor

from torchcaps.data.files import DataError, own_folder, raise_if_no_downloads
from torchcaps.data.notes import progress_bar
from torchcaps.data.stereo import (
    AZIMUTHS,
    ELEVATIONS,
    LIGHTINGS,
    TEST_INSTANCES,
    TRAINING_INSTANCES,
    Metadata,
    StereoData,
)
from torchcaps.data.toys.renderer import render
from torchcaps.data.toys.solids import VERSION
from torchcaps.utils.arguments import Range, checked
from torchcaps.utils.checks import one_line
from torchcaps.utils.files import write_whole


class StereoToys(StereoData):
    """Stereo toys: 24,300 training and 24,300 test stereo pairs of simple toys in 5 classes, gray, rendered locally.

    This is not smallNORB. It has that set's classes, its grid of poses, its split by instances (4, 6, 7, 8 and 9 for
    training) and the order of its test set. But its toys are made of boxes, cylinders and balls, and there is no ground
    and no shadow. Do not compare an accuracy on one with an accuracy on the other.

    There are ten toys of each class. All have one color, and at azimuth 0 they look to the right. The cameras are 30 to
    70 degrees above the horizontal, at five times the radius of a toy from its middle. The lamps do not turn with a
    toy.

    The first use renders both parts, which takes one core about a minute at 48 x 48. They are kept in pooch's cache, in
    `stereo-toys`: one .npy file for each choice of poses, written completely or not at all, and memory-mapped. A file
    of the same name in `<root>/stereo-toys` is used instead.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        size: side of an image in pixels.
        options: see `StereoData` and `ImageData`. Only the chosen poses are rendered.

    Raises:
        ValueError: an argument is out of range.
        DataError: a rendered file is damaged or cannot be written.
    """

    @checked
    def __init__(self, root: str | None = None, size: Annotated[int, Range(8)] = 48, **options: Any) -> None:
        self.shape = (2, size, size)
        super().__init__(**options)
        self.root, self.size = root, size

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine: the others wait instead of rendering too.
        for train in (True, False):
            self._find(train)

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        path = self._find(train)
        columns = np.meshgrid(*self._axes(train), indexing="ij")
        instance, elevation, azimuth, lighting, category = (torch.from_numpy(column.flatten()) for column in columns)
        shape = len(category), *self.shape
        try:
            images = np.load(path, mmap_mode="c")
            if images.shape != shape or images.dtype != np.uint8:
                raise ValueError(f"holds shape {images.shape} of {images.dtype}, expected {shape} of uint8")
        except (OSError, EOFError, ValueError) as error:
            advice = "" if isinstance(error, PermissionError) else ": remove the file to have it rendered again"
            raise DataError(f"{path}: {one_line(error)}{advice}") from None
        return torch.from_numpy(images), Metadata(category, instance, elevation, azimuth, lighting)

    def _axes(self, train: bool) -> tuple[list[int], ...]:
        """Return the instances, elevations, azimuths, lightings and categories of the images.

        The categories change fastest from image to image, then the lightings, as in smallNORB's test set.
        """
        instances = list(TRAINING_INSTANCES if train else TEST_INSTANCES)
        return instances, *self.grid(train), list(range(self.classes))

    def _find(self, train: bool) -> Path:
        """Return the path of the file with a part's images. Render them if there is no such file."""
        name = f"{'train' if train else 'test'}-{self.size}-v{VERSION}"
        grid = self.grid(train)
        if grid != (list(ELEVATIONS), list(AZIMUTHS), list(LIGHTINGS)):
            name += "".join(f"-{axis}{'.'.join(map(str, chosen))}" for axis, chosen in zip("eal", grid, strict=True))
        folder = own_folder(self.root, "stereo-toys")
        if folder and (folder / f"{name}.npy").is_file():
            return folder / f"{name}.npy"
        path = pooch.os_cache("torchcaps") / "stereo-toys" / f"{name}.npy"
        if not path.is_file():
            raise_if_no_downloads(path)
            self._render(train, path)
        return path

    def _render(self, train: bool, path: Path) -> None:
        instances, elevations, azimuths, lightings, categories = self._axes(train)
        poses = list(product(instances, elevations, azimuths))
        shape = (len(poses) * len(lightings) * len(categories), *self.shape)
        rendering = f"rendering toys for {'training' if train else 'the test'}"

        def write(unfinished: Path) -> None:
            with unfinished.open("wb") as file, progress_bar() as progress:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for pose in progress.track(poses, description=rendering):
                    pairs = [render(category, *pose, lightings, self.size) for category in categories]
                    file.write(np.stack(pairs, 1).tobytes())

        try:
            write_whole(path, write)
        except OSError as error:
            raise DataError(str(error)) from None
