"""Pictures in files: read upright, in one size and number of channels, and one by one where they are many."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.data.notes import progress_bar, say
from torchcaps.utils.arguments import Count, checked
from torchcaps.utils.checks import counted

R = TypeVar("R")
T = TypeVar("T")
Fit = Literal["crop", "pad", "stretch"]
Box = tuple[float, float, float, float]  # left, top, right, bottom
Window = tuple[float, float]  # the numbers that become black and white, of pixels with more than 8 bits

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
ENOUGH = 256  # pixels of a side in which colors are looked for
FAR_OFF = 0.001  # share of the darkest, and of the brightest, pixels of a picture that do not count in a window
QUEUED = 64  # files that wait for a thread
WHOLE = 2**16  # no side of a JPEG is longer
THUMBNAIL = 32  # side of the small gray picture by which near copies are found
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
def read_picture(
    path: Path, shape: tuple[Count, Count, Count], fit: Fit = "stretch", window: Window | None = None
) -> Tensor:
    """Read a picture file as an image `(channels, height, width)` of bytes.

    A photograph is turned as its metadata (EXIF) says. Transparent parts become white. Of an animation, the first
    picture counts.

    Args:
        path: file in one of the formats `FORMATS`.
        shape: channels (1 for gray, 3 for color), height and width.
        fit: how a picture of other proportions gets this shape: "crop" keeps its middle, "pad" adds edges in the color
            of its border, "stretch" changes its proportions.
        window: the numbers that become black and white in a gray picture of more than 8 bits per pixel. A line names
            the first picture of which more than a few pixels are beyond. None for what the picture itself uses: 0 and
            the largest number of the bits that its values have, at least 8; or its smallest and largest value if some
            are negative or no integers.

    Raises:
        DataError: the file cannot be read, or is not a picture.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged metadata
        return as_tensor(_read(path, shape, fit, window))


def _read(path: Path, shape: tuple[int, int, int], fit: Fit, window: Window | None) -> Image.Image:
    """Read a picture file, see `read_picture`. Filters of warnings, which all threads share, stay as they are."""
    channels, height, width = shape
    if channels not in (1, 3):
        raise DataError(f"{path}: pictures have 1 or 3 channels, and the network takes images of {channels}")
    upright = read_upright(path, channels, window, 4 * max(height, width))
    border = border_of(upright) if fit == "pad" else 0
    return fitted(upright, (width, height), fit, Image.Resampling.BICUBIC, border)


def read_upright(path: Path, channels: int, window: Window | None, side: int = WHOLE) -> Image.Image:
    """Read a picture file in its own size, or a large JPEG in a fraction of it with at least `side` pixels to each
    side."""
    with opened(path, side) as picture:
        return turned(_eight_bits(picture, window, path).convert("L" if channels == 1 else "RGB"), picture)


def turned(pixels: Image.Image, picture: Image.Image) -> Image.Image:
    """Return pixels upright, as the metadata of the picture that they are from says."""
    # Not by exif_transpose, which also writes the EXIF anew, and cannot if one of its tags is of a wrong type.
    orientation = picture.getexif().get(0x0112)
    return pixels.transpose(TURNS[orientation]) if orientation in TURNS else pixels


def upright_size(path: Path) -> tuple[int, int]:
    """Return the width and the height of a picture that is upright."""
    with opened(path) as picture:
        return picture.size[::-1] if lies(picture) else picture.size


def lies(picture: Image.Image) -> bool:
    """Return whether the metadata of a picture says that its rows are columns."""
    return picture.getexif().get(0x0112) in (5, 6, 7, 8)


def placement(picture: tuple[int, int], image: tuple[int, int], fit: Fit) -> tuple[Box, tuple[int, int, int, int]]:
    """Return the part of a picture that an image shows, and where in the image it is.

    Args:
        picture, image: width and height.
        fit: see `read_picture`.

    Returns:
        Two boxes: left, top, right and bottom.
    """
    (wide, high), (width, height) = picture, image
    if fit == "stretch" or wide / high == width / height:
        return (0, 0, wide, high), (0, 0, width, height)
    is_wider = wide / high > width / height
    if fit == "crop":  # as in ImageOps.fit
        across, down = (width / height * high, high) if is_wider else (wide, wide / (width / height))
        left, top = (wide - across) * 0.5, (high - down) * 0.5
        return (left, top, left + across, top + down), (0, 0, width, height)
    # As in ImageOps.pad, but that rounds the side of a narrow picture to 0.
    across, down = width, height
    if is_wider:
        down = max(1, round(high / wide * width))
    else:
        across = max(1, round(wide / high * height))
    left, top = round((width - across) / 2), round((height - down) / 2)
    return (0, 0, wide, high), (left, top, left + across, top + down)


def fitted(
    picture: Image.Image, size: tuple[int, int], fit: Fit, pillow_filter: Image.Resampling, border: Any
) -> Image.Image:
    """Return an image of this width and height that shows a picture, see `placement`, with a border of one color."""
    part, (left, top, right, bottom) = placement(picture.size, size, fit)
    inner = picture.resize((right - left, bottom - top), pillow_filter, box=part)
    if inner.size == size:
        return inner
    image = Image.new(picture.mode, size, border)
    image.paste(inner, (left, top))
    return image


@contextmanager
def opened(path: Path, side: int = WHOLE) -> Iterator[Image.Image]:
    """Within this context a picture is open, and its pixels are read; a large JPEG only at a fraction of its size, with
    at least `side` pixels to each side. What goes wrong with it is a DataError."""
    try:
        with Image.open(path, formats=FORMATS) as picture:
            picture.draft(None, (side, side))
            picture.load()  # the EXIF of a PNG may be behind its pixels; a TIFF is turned already
            yield picture
    except Exception as error:  # damaged bytes make Pillow raise errors of many types
        if isinstance(error, (MemoryError, DataError)):
            raise
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({' '.join(str(error).split())})"
        ways = {PermissionError: "make it readable", Image.DecompressionBombError: "make it smaller"}
        advice = ways.get(type(error), "give a PNG or JPEG file")
        raise DataError(f"{path} is not a picture that can be read{reason}: {advice}") from None


def as_tensor(picture: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(picture.height, picture.width, len(picture.getbands())).movedim(-1, 0)


def _eight_bits(picture: Image.Image, window: Window | None, path: Path) -> Image.Image:
    """Return a picture without transparency and with 8 bits per channel."""
    if is_deep(picture.mode):
        pixels = np.asarray(picture)
        if not (finite := np.isfinite(pixels)).all():
            if not finite.any():
                raise DataError(f"{path}: has no pixel that is a number: leave it out")
            say(
                f"{path}: has pixels that are NaN or infinite, which became black or white, in other pictures too: if "
                "they are no background, mend them",
                once="not finite",
            )
        least, most = _range(pixels)
        low, high = window or _window_of_bits(least, most)
        if window is None:
            say(
                f"{path}: has more than 8 bits per pixel, and data.window is not set: {low:.12g} became black and "
                f"{high:.12g} white; each such picture has two numbers of its own: where the training had 8 bits, save "
                "it with 8",
                once="depth",
            )
        elif (beyond := _share_beyond(pixels, low, high)) > 3 * FAR_OFF:
            say(
                f"{path}: {100 * beyond:.3g} % of its pixels are beyond data.window, {low:.12g} to {high:.12g}, and "
                "became black or white, in other pictures too: if these are most of its pixels, it has another scale "
                "than the training",
                once="beyond",
            )
        scaled = (np.nan_to_num(pixels.astype(np.float64), nan=low) - low) * (255 / (high - low))
        return Image.fromarray(scaled.clip(0, 255).round().astype(np.uint8))
    if picture.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    return picture


def _share_beyond(pixels: np.ndarray, low: float, high: float) -> float:
    """Return the share of pixels that are at least a gray level darker than black or brighter than white."""
    level = (high - low) / 255
    return float(np.mean((pixels <= low - level) | (pixels >= high + level)))


def is_deep(mode: str) -> bool:
    """Return whether pictures of a mode of Pillow are gray with more than 8 bits per pixel."""
    return mode == "F" or mode.startswith("I")


def _range(pixels: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest value of pixels, ints or floats as they are, without the few that are far
    off, such as hot pixels: a thousandth at each end."""
    finite = pixels[np.isfinite(pixels)]
    if not finite.size:
        return 0, 0
    few = int(FAR_OFF * finite.size)
    ends = np.partition(finite, [few, finite.size - 1 - few])
    return ends[few].item(), ends[-1 - few].item()


def window_of(ranges: Sequence[tuple[float, float]]) -> Window:
    """Return the numbers that become black and white in pictures with these ranges, the smallest and the largest. Not 0
    and a power of 2, between which pictures may use few of the 256 gray levels."""
    least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
    return (least, most) if most > least else (least, least + 1)


def _window_of_bits(least: float, most: float) -> Window:
    """Return what is black and white in one picture, of which nothing else is known, by its smallest and largest value:
    0 and the largest number of the bits that it uses; the values themselves if some are negative or no integers."""
    if least >= 0 and isinstance(most, int):
        return 0, 2 ** max(8, most.bit_length()) - 1
    return window_of([(least, most)])


def border_of(picture: Image.Image) -> Any:
    """Return the median color of a picture's border."""
    pixels = np.asarray(picture)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    color = np.median(edge, axis=0).astype(int)
    return int(color) if color.ndim == 0 else tuple(color.tolist())


@dataclass(frozen=True)
class Header:
    """What the beginning of a picture file says.

    Args:
        width, height: its size.
        is_gray: whether its pixels have no color by the kind of file; those of a color file may have none either.
        is_deep: whether they are gray and have more than 8 bits.
        is_cut: whether they have 16 bits for each color, of which Pillow reads the upper 8.
        frames: number of its pictures; more than 1 for an animation.
    """

    width: int
    height: int
    is_gray: bool
    is_deep: bool
    is_cut: bool
    frames: int


def read_header(path: Path) -> Header | None:
    """Read the beginning of a picture file; None if it is not that of a picture."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as picture:
                deep = is_deep(picture.mode)
                is_gray = deep or picture.mode in GRAY_MODES
                # MPO: a photograph with a preview beside it.
                frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
                if palette := picture.getpalette() if picture.mode == "P" else None:
                    colors = np.array(palette).reshape(-1, 3)  # the colors of a palette may all be gray
                    is_gray = bool((colors == colors[:, :1]).all())
                is_cut = not deep and ";16" in str([tile[3] for tile in picture.tile])
                return Header(*picture.size, is_gray, deep, is_cut, frames)
    except Exception:  # damaged bytes make Pillow raise errors of many types
        return None


def any_has_color(paths: Sequence[Path]) -> bool:
    """Return whether a pixel of one of the pictures is not gray. Most often the first picture tells."""

    def has_color(path: Path) -> bool:
        try:
            with opened(path, ENOUGH) as picture:
                pixels = np.asarray(_eight_bits(picture, None, path).convert("RGB"))
        except DataError:
            return False
        return bool((pixels != pixels[..., :1]).any())

    return any(in_threads(has_color, paths, "looking for colors"))


def range_of(path: Path) -> tuple[float, float] | None:
    """Return the smallest and the largest value of a picture's pixels, without a thousandth at each end, which may be
    hot pixels; None if it cannot be read or has none."""
    try:
        with opened(path, ENOUGH) as picture:
            pixels = np.asarray(picture)
            return _range(pixels) if np.isfinite(pixels).any() else None
    except DataError:
        return None


class Reading(NamedTuple):
    """What is known of a picture file after it was read: an error of one line, or "", a hash of the file, and a small
    gray picture, THUMBNAIL x THUMBNAIL bytes; its smallest and largest value are those of the image."""

    error: str
    digest: bytes
    thumbnail: bytes
    least: int
    most: int


def read_all(
    paths: Sequence[Path], shape: tuple[int, int, int], fit: Fit, window: Window | None = None
) -> list[Reading]:
    """Read all pictures once, see `read_picture`."""

    def check(path: Path) -> Reading:
        try:
            gray = _read(path, shape, fit, window).convert("L")
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
        except DataError as error:
            return Reading(str(error), b"", b"", 0, 0)
        small = gray.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)  # which changes with the size the least
        return Reading("", digest, small.tobytes(), *gray.getextrema())

    return list(in_threads(check, paths, f"reading {counted(len(paths), 'picture')}"))


def in_threads(function: Callable[[T], R], paths: Sequence[T], description: str) -> Iterator[R]:
    """Yield what a function returns for each picture file, with a progress bar."""
    # Pillow decodes without Python's lock.
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as threads, progress_bar() as progress:
        warnings.simplefilter("ignore")
        some = (threads.map(function, paths[first : first + QUEUED]) for first in range(0, len(paths), QUEUED))
        yield from progress.track(chain.from_iterable(some), len(paths), description=description)
