"""Pictures and maps as text, small enough that hundreds of them fit into a page."""

import base64
import io
import math
from typing import Any

import torch
from matplotlib import colormaps
from PIL import Image
from torch import Tensor

from torchcaps.utils.arguments import Count, FloatTensor, Positive, checked, shown

TILE = 56  # pixels; smaller tiles of a sprite are enlarged
BLOCK = 8  # pixels; JPEG compresses blocks of this size, and tiles of whole blocks do not run into each other
QUALITY = 85  # of JPEG


@checked
def picture(image: FloatTensor, side: Count) -> str:
    """Encode an image as a JPEG data URI.

    Args:
        image: `(channels, height, width)` in [0, 1], gray or color; two channels are a stereo pair, whose left image is
            drawn.
        side: the longer side of a smaller image is enlarged to this number of pixels, smoothly, so that a person sees
            strokes and not squares. Larger images stay as they are.

    Raises:
        ValueError: the image has another shape.
    """
    if image.dim() != 3 or len(image) not in (1, 2, 3) or not image.numel():
        raise ValueError(
            f"image must have the shape (channels, height, width), with 1 to 3 channels, got {shown(image)}"
        )
    drawn = _drawn(image)
    factor = max(1.0, side / max(drawn.size))
    return _encoded(_resized(drawn, round(drawn.width * factor), round(drawn.height * factor)))


@checked
def sprite(images: FloatTensor, rows: Count, columns: Count) -> dict[str, Any]:
    """Lay images side by side in one picture, row by row: return it as a JPEG data URI, with its rows and columns.

    Args:
        images: `(rows * columns, channels, height, width)`, each as in :func:`picture`. Images smaller than 56 pixels
            are enlarged smoothly.
        rows, columns: number of tiles down and across.

    Raises:
        ValueError: the images have another shape.
    """
    if images.dim() != 4 or images.shape[1] not in (1, 2, 3) or len(images) != rows * columns or not images.numel():
        raise ValueError(
            f"images must have the shape ({rows * columns}, channels, height, width), with 1 to 3 channels, "
            f"got {shown(images)}"
        )
    height, width = images.shape[-2:]
    factor = max(1.0, TILE / max(height, width))
    across, down = (BLOCK * math.ceil(size * factor / BLOCK) for size in (width, height))
    tiles = [_resized(_drawn(image), across, down) for image in images]
    whole = Image.new(tiles[0].mode, (columns * across, rows * down))
    for place, tile in enumerate(tiles):
        whole.paste(tile, (place % columns * across, place // columns * down))
    return {"image": _encoded(whole), "rows": rows, "columns": columns}


@checked
def encoded_maps(layer: str, maps: FloatTensor, shares: FloatTensor, even: FloatTensor) -> dict[str, Any]:
    """Encode the maps of a layer, one for each class, as base64 of a byte per value: 255 is their `peak`.

    `half` has the smallest part of the positions that gives half of each class, and `even` the same of even shares.

    Args:
        layer: name of the layer.
        maps: shares as multiples of an even share, `(classes, rows, columns)`, at least zero.
        shares, even: the shares of the positions themselves, and what they would be if all capsules contributed alike,
            both `(classes, rows, columns)` of the grid of capsules.

    Raises:
        ValueError: the maps have another shape, or a value is negative, infinite or nan.
    """
    if maps.dim() != 3 or not maps.numel():
        raise ValueError(f"maps must have the shape (classes, rows, columns), got {shown(maps)}")
    if not (maps.isfinite() & (maps >= 0)).all():
        raise ValueError("maps must be finite and at least zero: they are multiples of an even share")
    maps = maps.detach().cpu()
    peak = max(float(maps.max()), 1e-12)
    levels = (maps / peak * 255).round().to(torch.uint8)
    encoded = [base64.b64encode(level.numpy().tobytes()).decode() for level in levels]
    size = maps.shape[1], maps.shape[2]
    return {"layer": layer, "size": size, "maps": encoded, "peak": peak, "half": _half(shares), "even": _half(even)}


def _half(shares: Tensor) -> list[float]:
    """Return the smallest part of the positions that has half of the shares of each class."""
    order = shares.detach().cpu().double().flatten(1).sort(descending=True).values.cumsum(1)
    needed = (order < order[:, -1:] / 2).sum(1) + 1
    return (needed / order.shape[1]).tolist()


@checked
def heat_picture(map_: FloatTensor, peak: Positive, side: Count) -> str:
    """Encode a map `(rows, columns)` of shares as a JPEG data URI, from black at 0 to light yellow at `peak`.

    Args:
        map_: shares as multiples of an even share.
        peak: share of the lightest color.
        side: see :func:`picture`.
    """
    colors = colormaps["magma"]((map_.detach().cpu() / peak).clamp(0, 1).numpy())
    return picture(torch.from_numpy(colors[..., :3]).movedim(-1, 0).float(), side)


def _drawn(image: Tensor) -> Image.Image:
    image = image[:1] if len(image) == 2 else image
    levels = (image.detach().cpu().float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.movedim(0, -1).squeeze(-1).contiguous().numpy())


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


def _encoded(image: Image.Image) -> str:
    written = io.BytesIO()
    image.save(written, "JPEG", optimize=True, quality=QUALITY, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"
