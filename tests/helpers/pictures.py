"""Pictures of digits in folders, as a user may have them, and as data URLs."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = {0: "zero", 1: "one", 7: "seven"}


def draw_digits(folder: Path, first: int, last: int) -> Path:
    """Write the UCI digits number `first` to `last` of three classes into a folder for each."""
    digits = load_digits()
    for label, name in NAMES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in np.flatnonzero(digits.target == label)[first:last]:
            image = np.round(digits.images[index] * 255 / 16).astype(np.uint8)
            Image.fromarray(image).save(folder / name / f"{name}-{index:04}.png")
    return folder


def as_url(pixels: Any) -> str:
    """Return a picture with these pixels as a data URL of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
