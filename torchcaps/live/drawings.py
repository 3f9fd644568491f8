"""Pictures that a person drew or dropped on the page, as images for a network."""

import base64
import io
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from torchcaps.data import MNIST, DataError, Digits, FashionMNIST, ImageData
from torchcaps.data.notes import hear, say
from torchcaps.data.pictures import FORMATS
from torchcaps.utils.arguments import Count, FloatTensor, checked

DIGIT = 20  # pixels: MNIST's digits fit into 20x20
INK = 0.1  # least gray level that belongs to a drawing
LARGEST = 20  # megabytes of a picture
PIXELS = 50  # millions in a picture: 150 MB of memory in color


@checked
def has_digits(data: ImageData) -> bool:
    """Return whether the images are handwritten digits, to which a drawing is made alike."""
    return isinstance(data, (MNIST, Digits)) and not isinstance(data, FashionMNIST)


@checked
def as_digit(drawing: FloatTensor, side: Count) -> Tensor:
    """Make an image like MNIST's of a drawing: the digit is scaled into 20x20 pixels and centered by its mass.

    Images smaller than 28x28 are filled by the digit.

    Args:
        drawing: light lines on black, `(height, width)` in [0, 1].
        side: height and width of the image.

    Returns:
        `(1, side, side)`; zeros for a drawing without lines.
    """
    image = drawing.new_zeros(1, side, side)
    rows, columns = ((drawing > INK).any(axis).nonzero().flatten() for axis in (1, 0))
    if not len(rows):
        return image
    digit = drawing[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = (DIGIT if side >= 28 else side) / max(digit.shape)
    size = [max(1, round(length * scale)) for length in digit.shape]
    digit = F.interpolate(digit[None, None], size, mode="bilinear", antialias=True)[0, 0].clamp(0, 1)
    top, left = (_start(digit.sum(1 - axis), side) for axis in (0, 1))
    image[0, top : top + size[0], left : left + size[1]] = digit
    return image


def _start(mass: Tensor, side: int) -> int:
    """Return where a digit with this mass per row begins, so that its center is in the middle, as far as it fits."""
    center = float((mass * torch.arange(len(mass))).sum() / mass.sum())
    return min(max(0, round((side - 1) / 2 - center)), side - len(mass))


@checked
def read_drawing(data: ImageData, url: str) -> Tensor | None:
    """Read a drawing from a data URL as a network's input `(1, *shape)`; None if it is empty.

    Raises:
        DataError: it is no picture, or too large a one.
    """
    content = _content(url, "the drawing")
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as picture:
            gray = picture.convert("L")
            drawing = torch.frombuffer(bytearray(gray.tobytes()), dtype=torch.uint8).view(gray.height, gray.width)
    except Exception:  # damaged bytes make Pillow raise errors of many types
        raise DataError("the drawing cannot be read: reload the page") from None
    drawing = drawing.float() / 255
    if not (drawing > INK).any():
        return None
    _, height, width = data.shape
    if has_digits(data):
        return as_digit(drawing, height).unsqueeze(0)
    return F.interpolate(drawing[None, None], (height, width), mode="bilinear", antialias=True).clamp(0, 1)


@contextmanager
@checked
def uploaded(url: str, name: str) -> Iterator[Path]:
    """Return a context with the path of a picture file from a data URL: it is in a temporary file within the context,
    and nowhere afterwards.

    Raises:
        DataError: it is not a picture that can be read, or larger than `LARGEST` megabytes or `PIXELS` million pixels.
    """
    content = _content(url, name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture"
        path.write_bytes(content)
        try:
            with hear() as notes:
                yield path
        except DataError as error:
            raise DataError(str(error).replace(str(path), name)) from None
        for note in notes:
            say(note.replace(str(path), name))


def _content(url: str, name: str) -> bytes:
    """Return the bytes of a picture that is not too large to be decoded."""
    encoded = url.partition(",")[2]
    if len(encoded) * 3 / 4 > LARGEST * 1e6 + 2:  # the last four characters can stand for a single byte
        raise DataError(f"{name} is larger than {LARGEST} MB: give a smaller picture")
    try:
        content = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise DataError("the picture did not arrive whole: try again") from None
    if _pixels(content) > PIXELS * 1e6:
        raise DataError(f"{name} has more than {PIXELS} million pixels: give a smaller picture")
    return content


def _pixels(content: bytes) -> float:
    """Return the number of pixels that a picture's header says; 0 for what is no picture."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large and of damaged pictures
            with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
                return picture.width * picture.height
    except Image.DecompressionBombError:
        return float("inf")
    except Exception:  # whoever decodes it says what is wrong
        return 0
