"""Images from picture files, for heatmaps of one's own pictures."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from torchcaps.arguments import checked


@checked
def read_image(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """Read a picture file as an image `(channels, height, width)` in [0, 1], upright and resized to `shape`.

    Transparent parts become white.

    Raises:
        ValueError: the file cannot be read, or is not a picture.
    """
    channels, height, width = shape
    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            if upright.has_transparency_data:
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
            small = upright.convert("L" if channels == 1 else "RGB").resize((width, height))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise ValueError(f"{path} is not a picture that can be read{reason}: give a PNG or JPEG file") from None
    pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).movedim(-1, 0) / 255
