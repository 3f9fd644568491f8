"""Near copies: what counts as one, and what does not."""

import io

import numpy as np
import pytest
from PIL import Image

from torchcaps.data import copies
from torchcaps.data.copies import near_copies


def scene(seed: int) -> Image.Image:
    """A picture with large and small structures."""
    random = np.random.default_rng(seed)
    large = np.asarray(Image.fromarray(random.integers(0, 256, (6, 6), dtype=np.uint8)).resize((120, 120), 2), float)
    return Image.fromarray((large + random.normal(0, 8, (120, 120))).clip(0, 255).astype(np.uint8))


def thumbnail(picture: Image.Image) -> bytes:
    """Return the small gray picture that `read_all` makes."""
    return picture.convert("L").resize((64, 64)).resize((32, 32), Image.Resampling.BILINEAR).tobytes()


def jpeg(picture: Image.Image) -> Image.Image:
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=40)
    return Image.open(content)


@pytest.mark.parametrize(
    "change",
    [
        jpeg,
        lambda x: x.resize((50, 50)),
        lambda x: x.resize((300, 300)),
        lambda x: x.point(lambda v: 30 + 0.7 * v),
        lambda x: x.convert("RGB"),
    ],
)
def test_changed_copies_are_found(change):
    others = [thumbnail(scene(i)) for i in range(20)]
    assert near_copies([thumbnail(change(scene(7))), thumbnail(scene(99))], others) == {0: 7}


def test_the_nearest_of_several_is_named_across_chunks(monkeypatch):
    monkeypatch.setattr(copies, "CHUNK", 3)
    others = [thumbnail(scene(i)) for i in (4, 1, 2, 3)] + [thumbnail(jpeg(scene(1)))]
    samples = [thumbnail(scene(i)) for i in (9, 8, 7, 2, 1)]
    assert near_copies(samples, others) == {3: 2, 4: 1}


def test_other_pictures_and_flat_ones_are_no_copies():
    shifted = scene(1).crop((10, 10, 120, 120)).resize((120, 120))
    negative = scene(1).point(lambda v: 255 - v)
    flat = [Image.new("L", (50, 50), 100), scene(1).point(lambda v: 100 + v / 50)]
    samples = [thumbnail(x) for x in (shifted, negative, *flat)]
    assert near_copies(samples, [thumbnail(scene(1)), *map(thumbnail, flat)]) == {}
    assert near_copies([], samples) == near_copies(samples, []) == {}


def test_the_same_layout_under_other_noise_is_no_copy():
    """Scans of one organ share a layout."""
    random = np.random.default_rng(0)
    layout = np.asarray(scene(1).resize((32, 32)), float)
    noisy = [Image.fromarray((layout + random.normal(0, 12, (32, 32))).clip(0, 255).astype(np.uint8)) for _ in range(9)]
    samples = [picture.tobytes() for picture in noisy]
    assert near_copies(samples[:4], samples[4:]) == {}
    assert near_copies(samples[:1], samples) == {0: 0}
