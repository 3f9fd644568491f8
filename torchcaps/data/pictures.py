"""Pictures in files: read upright, in one size and number of channels, and one by one where they are many."""

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.data.labeled import Batch, LabeledSet
from torchcaps.data.notes import progress_bar
from torchcaps.utils.arguments import Count, checked

Fit = Literal["crop", "pad", "stretch"]

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
GRAY_MODES = ("1", "L", "LA", "La")


@checked
def read_picture(path: Path, shape: tuple[Count, Count, Count], fit: Fit = "stretch") -> Tensor:
    """Read a picture file as an image `(channels, height, width)` of bytes.

    A photograph is turned as its metadata (EXIF) says. Transparent parts become white. Of an animation, the first
    picture counts. 16 bits per pixel become 8.

    Args:
        path: file in one of the formats `FORMATS`.
        shape: channels (1 for gray, 3 for color), height and width.
        fit: how a picture of other proportions gets this shape: "crop" keeps its middle, "pad" adds edges in the color
            of its border, "stretch" changes its proportions.

    Raises:
        DataError: the file cannot be read, or is not a picture.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged metadata
        return _read(path, shape, fit)


def _read(path: Path, shape: tuple[int, int, int], fit: Fit) -> Tensor:
    """Read a picture file, see `read_picture`. Filters of warnings, which all threads share, stay as they are."""
    channels, height, width = shape
    if channels not in (1, 3):
        raise DataError(f"{path}: pictures have 1 or 3 channels, and the network takes images of {channels}")
    size, pillow_filter = (width, height), Image.Resampling.BICUBIC
    try:
        with Image.open(path, formats=FORMATS) as picture:
            picture.draft(None, (4 * max(size), 4 * max(size)))  # a large JPEG is decoded at a fraction of its size
            upright = _eight_bits(ImageOps.exif_transpose(picture)).convert("L" if channels == 1 else "RGB")
        if fit == "crop":
            fitted = ImageOps.fit(upright, size, pillow_filter)
        elif fit == "pad":
            fitted = ImageOps.pad(upright, size, pillow_filter, color=_border(upright))
        else:
            fitted = upright.resize(size, pillow_filter)
    except Exception as error:  # damaged bytes make Pillow raise errors of many types
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({' '.join(str(error).split())})"
        raise DataError(f"{path} is not a picture that can be read{reason}: give a PNG or JPEG file") from None
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).movedim(-1, 0)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Return a picture without transparency and with 8 bits per channel."""
    if picture.mode.startswith("I"):  # Pillow would clip 16 bits at 255
        return Image.fromarray((np.asarray(picture).clip(0, 2**16 - 1) >> 8).astype(np.uint8))
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is not known")
    if picture.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    return picture


def _border(picture: Image.Image) -> Any:
    """Return the median color of a picture's border."""
    pixels = np.asarray(picture)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    color = np.median(edge, axis=0).astype(int)
    return int(color) if color.ndim == 0 else tuple(color.tolist())


@dataclass(frozen=True)
class Header:
    """What the beginning of a picture file says.

    Args:
        side: length of its shorter side.
        is_gray: whether its pixels have no color.
        frames: number of its pictures; more than 1 for an animation.
    """

    side: int
    is_gray: bool
    frames: int


def read_header(path: Path) -> Header | None:
    """Read the beginning of a picture file; None if it is not that of a picture."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as picture:
                is_gray = picture.mode in GRAY_MODES or picture.mode.startswith("I")
                if picture.mode == "P" and picture.palette is not None:  # the colors of a palette may all be gray
                    colors = np.frombuffer(bytes(picture.palette.getdata()[1]), np.uint8)
                    colors = colors[: len(colors) // 3 * 3].reshape(-1, 3)
                    is_gray = bool((colors == colors[:, :1]).all())
                return Header(min(picture.size), is_gray, getattr(picture, "n_frames", 1))
    except Exception:  # damaged bytes make Pillow raise errors of many types
        return None


def damaged(paths: Sequence[Path], shape: tuple[int, int, int], fit: Fit) -> dict[int, str]:
    """Read all pictures, and return an error of one line for each that cannot be read, by its index."""

    def problem(path: Path) -> str | None:
        try:
            _read(path, shape, fit)
        except DataError as error:
            return str(error)
        return None

    # Pillow decodes without Python's lock.
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as threads, progress_bar() as progress:
        warnings.simplefilter("ignore")
        found = threads.map(problem, paths)
        results = progress.track(found, len(paths), description=f"reading {len(paths):,} pictures")
        return {index: said for index, said in enumerate(results) if said}


@dataclass(frozen=True, eq=False)
class FileSet(LabeledSet):
    """Labeled images that are read from their files when a batch needs them. A subclass implements `read`.

    Args:
        folder: folder with the files.
        names: paths of the files in it, an array (n,).
        labels: labels (n,) int64.
    """

    folder: Path
    names: np.ndarray
    labels: Tensor

    def __getitems__(self, indices: list[int]) -> Batch:
        return torch.stack([self.read(self.names[index]) for index in indices]), self.labels[indices]

    def read(self, name: str) -> Tensor:
        """Return one image, uint8 (c, h, w)."""
        raise NotImplementedError

    def subset(self, indices: np.ndarray) -> Self:
        return replace(self, names=self.names[indices], labels=self.labels[indices])


@dataclass(frozen=True, eq=False)
class PictureSet(FileSet):
    """Labeled pictures of a shape, see `read_picture`."""

    shape: tuple[int, int, int]
    fit: Fit

    def read(self, name: str) -> Tensor:
        return read_picture(self.folder / name, self.shape, self.fit)
