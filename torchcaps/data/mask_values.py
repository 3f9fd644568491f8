"""Values of masks: gray values, indices of a palette, or colors, as numbers."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from torchcaps.data.files import DataError
from torchcaps.data.notes import listed
from torchcaps.data.pictures import GRAY_MODES, in_threads, is_deep, opened, turned

Value = int | str  # a number, or a color such as "ff0000"

PALETTES = ("P", "PA")  # modes of Pillow
MOST_VALUES = 64  # in masks of which nothing is said


def find_values(masks: Sequence[Path], skip_bad: bool = False) -> dict[Value, int]:
    """Return how many pixels of some masks have each value, in ascending order; colors if a pixel has one. Masks that
    cannot be read are left out, and with `skip_bad` those that have too many values, unless all have.

    Raises:
        DataError: there are too many values.
    """
    colors = any(in_threads(_has_color, masks, "looking for colors in masks"))
    totals: Counter[int] = Counter()
    of_masks = [*in_threads(partial(_counts, colors), masks, "finding values")]
    skip_bad = skip_bad and any(0 < len(counts) <= MOST_VALUES for counts in of_masks)
    for path, counts in zip(masks, of_masks, strict=True):
        if skip_bad and len(counts) > MOST_VALUES:
            continue
        totals.update(counts)
        if len(totals) > MOST_VALUES:
            some = listed([str(value_of(code, colors)) for code in counts], 3)
            raise DataError(
                f"{path}: masks have more than {MOST_VALUES} values, here {some}: smoothed edges, JPEG, and a number "
                "for each object make many: save masks as PNG with one value for each class, or, if all are classes, "
                "list them in data.values"
            )
    return {value_of(code, colors): totals[code] for code in sorted(totals)}


def check_palettes(masks: Sequence[Path], known: dict[int, tuple[str, Path]]) -> None:
    """Check that an index of a palette, if a pixel has it, is one color in all masks.

    Args:
        masks: files; those that cannot be read are left out.
        known: the color of each index that was found before, and its file. New ones are added.
    """
    for path, colors in zip(masks, in_threads(_used_colors, masks, "comparing palettes"), strict=True):
        for index, color in colors.items():
            other, first = known.setdefault(index, (color, path))
            if color != other:
                raise DataError(
                    f'{path}: palettes differ: {index} is the color "{color}", and "{other}" in {first.name}: give '
                    "data.values as colors, or, if the numbers are the classes, save all masks with one palette"
                )


def _used_colors(path: Path) -> dict[int, str]:
    """Return the color of each index that pixels of a mask have; empty if it has no palette."""
    try:
        with opened(path) as picture:
            if picture.mode not in PALETTES:
                return {}
            palette = bytes(picture.getpalette() or [])
            indices = np.unique(np.asarray(picture.getchannel("P")))
    except DataError:
        return {}
    return {index: palette[3 * index : 3 * index + 3].hex() for index in indices.tolist()}


def _has_color(path: Path) -> bool:
    """Return whether a mask has pixels that are not gray, palettes aside."""
    try:
        with opened(path) as picture:
            if picture.mode in (*GRAY_MODES, *PALETTES) or is_deep(picture.mode):
                return False
            pixels = np.asarray(picture.convert("RGB"))
    except DataError:
        return False
    return bool((pixels != pixels[..., :1]).any())


def _counts(colors: bool, path: Path) -> dict[int, int]:
    """Return how many pixels of a mask have each value, of too many values only some; empty if it cannot be read."""
    try:
        codes, counts = np.unique(codes_of(path, colors), return_counts=True)
    except DataError:
        return {}
    return dict(zip(codes[: MOST_VALUES + 1].tolist(), counts.tolist(), strict=False))


def codes_of(path: Path, colors: bool) -> np.ndarray:
    """Return the values of a mask that is upright as numbers, `(height, width)`: a color is 0xrrggbb."""
    with opened(path) as picture:
        mode = picture.mode
        if mode == "1":
            plain = picture.convert("L")
        elif mode in PALETTES and not colors:
            plain = picture.getchannel("P") if mode == "PA" else picture
        elif mode in ("LA", "La"):
            plain = picture.getchannel("L")
        elif mode == "L" or is_deep(mode):
            plain = picture
        else:
            plain = picture.convert("RGB")
        pixels = np.asarray(turned(plain, picture))
    if pixels.ndim == 3 and not colors:
        if (pixels != pixels[..., :1]).any():
            raise DataError(
                f"{path}: has colors, and the values of the classes are numbers: give data.values as colors in "
                'quotes, such as ["000000", "ff0000"], or save the mask with the numbers'
            )
        return pixels[..., 0]
    if pixels.ndim == 3:
        return pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    if pixels.dtype.kind == "f" and not ((abs(pixels) < 2**31) & (pixels == np.round(pixels))).all():
        raise DataError(
            f"{path}: has values that are no whole numbers of at most 32 bits: save the number of its class in each "
            "pixel"
        )
    codes = pixels.astype(np.int64)
    if colors and ((codes < 0) | (codes > 255)).any():
        raise DataError(
            f"{path}: has the number {codes.flat[abs(codes).argmax()]}, and the values of the classes are colors: save "
            "the mask with colors"
        )
    return codes * 0x010101 if colors else codes


def value_of(code: int, colors: bool) -> Value:
    """Return the value of a number of `codes_of`."""
    return f"{code:06x}" if colors else code


def code_of(value: Value, colors: bool) -> int:
    """Return the number of a value."""
    # A command makes a number of a color that has digits alone.
    return int(str(value).zfill(6), 16) if colors else int(value)


def checked_value(name: str, value: Value) -> Value:
    """Return a value that the user gave, a color in lower case and without a sign before it or quotes."""
    text = str(value).lower().strip("\"'").removeprefix("#")
    if isinstance(value, str) and not re.fullmatch("[0-9a-f]{6}", text):
        raise ValueError(f'{name} must be numbers, or colors such as "ff0000", got {value!r}')
    if not isinstance(value, str) and not -(2**31) <= value < 2**31:
        raise ValueError(
            f'{name} must be numbers from {-(2**31)} to {2**31 - 1}, or colors such as "ff0000", got {value}'
        )
    return text if isinstance(value, str) else value
