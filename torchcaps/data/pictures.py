"""Pictures in files: read upright, in one size and number of channels, and one by one where they are many."""

import hashlib
import os
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
from torchcaps.utils.checks import counted

Fit = Literal["crop", "pad", "stretch"]

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Folders of Synology and QNAP servers, of macOS, Windows and Linux.
OF_SYSTEMS = (
    *("@eaDir", "#recycle", "@Recycle", "@__thumb", "__MACOSX"),
    *("$RECYCLE.BIN", "System Volume Information", "lost+found"),
)
BITS_PER_SAMPLE = 258  # a tag of TIFF
GRAY_MODES = ("1", "L", "LA", "La")
TURNS = {  # what makes a picture upright, by its orientation in EXIF
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


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
            picture.load()  # the EXIF of a PNG may be behind its pixels; a TIFF is turned already
            upright = _eight_bits(picture).convert("L" if channels == 1 else "RGB")
            # Not by exif_transpose, which also writes the EXIF anew, and cannot if one of its tags is of a wrong type.
            if (orientation := picture.getexif().get(0x0112)) in TURNS:
                upright = upright.transpose(TURNS[orientation])
        if fit == "crop":
            fitted = ImageOps.fit(upright, size, pillow_filter)
        elif fit == "pad":
            # As in ImageOps.pad, but that rounds the side of a narrow picture to 0.
            if (ratio := upright.width / upright.height) > width / height:
                inner = width, max(1, round(upright.height / upright.width * width))
            else:
                inner = max(1, round(ratio * height)), height
            fitted = Image.new(upright.mode, size, _border(upright))
            place = round((width - inner[0]) / 2), round((height - inner[1]) / 2)
            fitted.paste(upright.resize(inner, pillow_filter), place)
        else:
            fitted = upright.resize(size, pillow_filter)
    except Exception as error:  # damaged bytes make Pillow raise errors of many types
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({' '.join(str(error).split())})"
        raise DataError(f"{path} is not a picture that can be read{reason}: give a PNG or JPEG file") from None
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).movedim(-1, 0)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Return a picture without transparency and with 8 bits per channel."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        tags = getattr(picture, "tag_v2", {})  # of a TIFF, whose pixels may have 10 to 16 bits
        bits = max(tags.get(BITS_PER_SAMPLE, (16,)))
        pixels = np.asarray(picture).clip(0, 2**bits - 1) >> (bits - 8)
        return Image.fromarray(pixels.astype(np.uint8))  # or Pillow clips at 255
    if picture.mode in ("F", "I"):
        kind = "floating-point numbers" if picture.mode == "F" else "signed or 32-bit integers"
        raise ValueError(f"its pixels are {kind}, whose range is not known")
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
                # MPO: a photograph with a preview beside it.
                frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
                if palette := picture.getpalette() if picture.mode == "P" else None:
                    colors = np.array(palette).reshape(-1, 3)  # the colors of a palette may all be gray
                    is_gray = bool((colors == colors[:, :1]).all())
                return Header(min(picture.size), is_gray, frames)
    except Exception:  # damaged bytes make Pillow raise errors of many types
        return None


def find_pictures(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the pictures in a folder and in those below it, and the other files. Links to folders are followed, each
    folder once. What is hidden is left out.

    Raises:
        DataError: the path of a picture is not UTF-8, so that no table can name it.
    """
    pictures: list[Path] = []
    others: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not is_hidden(name)]
        folders.sort(key=lambda name: (os.path.islink(os.path.join(place, name)), name))  # links last: names stay
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if path.is_file():
                (pictures if path.suffix.lower() in SUFFIXES else others).append(path)
    for path in pictures:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DataError(f"{str(path)!r}: the name is not text in UTF-8: rename the file or its folder") from None
    return sorted(pictures), sorted(others)


def is_hidden(folder: str) -> bool:
    """Return whether a folder of this name is one of a system: hidden, of a Synology or QNAP server, or of macOS."""
    return folder.startswith(".") or folder in OF_SYSTEMS


def read_all(paths: Sequence[Path], shape: tuple[int, int, int], fit: Fit) -> tuple[dict[int, str], list[bytes]]:
    """Read all pictures.

    Returns:
        An error of one line for each picture that cannot be read, by its index; and a hash of each file.
    """

    def check(path: Path) -> tuple[str | None, bytes]:
        try:
            _read(path, shape, fit)
            with path.open("rb") as file:
                return None, hashlib.file_digest(file, "sha256").digest()
        except DataError as error:
            return str(error), b""

    # Pillow decodes without Python's lock.
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as threads, progress_bar() as progress:
        warnings.simplefilter("ignore")
        found = threads.map(check, paths)
        results = list(progress.track(found, len(paths), description=f"reading {counted(len(paths), 'picture')}"))
    return {index: said for index, (said, _) in enumerate(results) if said}, [digest for _, digest in results]


@dataclass(frozen=True, eq=False)
class PictureSet(LabeledSet):
    """Labeled pictures that are read from their files when a batch needs them, see `read_picture`.

    Args:
        folder: folder with the files.
        names: paths of the files in it, an array (n,).
        labels: labels (n,) int64.
        shape: channels, height and width of an image.
        fit: how a picture gets this shape.
    """

    folder: Path
    names: np.ndarray
    labels: Tensor
    shape: tuple[int, int, int]
    fit: Fit

    def __getitems__(self, indices: list[int]) -> Batch:
        images = [read_picture(self.folder / self.names[index], self.shape, self.fit) for index in indices]
        return torch.stack(images), self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        return replace(self, names=self.names[indices], labels=self.labels[indices])
