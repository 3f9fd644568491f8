"""Drawings and dropped pictures as a network's input."""

import base64
import struct
import zlib

import pytest
import torch
from pictures import as_url

from torchcaps.data import CIFAR10, MNIST, AffineMNIST, DataError, Digits, FashionMNIST

pytest.importorskip("gradio", reason='Gradio is not installed: pip install "torchcaps[show]"')

from torchcaps.data.notes import hear, say
from torchcaps.live.drawings import as_digit, has_digits, read_drawing, uploaded


def drawing(top: int, left: int, height: int, width: int) -> torch.Tensor:
    """A light rectangle on a black field."""
    field = torch.zeros(280, 280)
    field[top : top + height, left : left + width] = 1
    return field


@pytest.mark.parametrize("place", [(0, 0), (40, 200), (79, 3)])
@pytest.mark.parametrize("size", [(200, 60), (60, 70), (33, 200)])
@pytest.mark.parametrize("side", [28, 40])
def test_a_digit_is_scaled_and_centered(place, size, side):
    height, width = size
    image = as_digit(drawing(*place, *size)[:280, :280], side)
    assert image.shape == (1, side, side)
    seen_height = min(height, 280 - place[0])
    seen_width = min(width, 280 - place[1])
    scale = 20 / max(seen_height, seen_width)
    rows, columns = ((image[0] > 0.5).any(axis).sum() for axis in (1, 0))
    assert (rows, columns) == (round(seen_height * scale), round(seen_width * scale))
    for axis in (1, 0):
        mass = image[0].sum(axis)
        center = (mass * torch.arange(side)).sum() / mass.sum()
        assert abs(center - (side - 1) / 2) <= 0.5


def test_mass_counts_not_the_box():
    seven = drawing(40, 60, 40, 140)
    seven[80:240, 170:200] = 1
    image = as_digit(seven, 28)[0]
    rows = (image > 0.5).any(1).nonzero().flatten()
    assert 28 - 1 - rows[-1] < rows[0]  # the heavy upper line is nearer to the middle than the middle of the box


def test_small_images_are_filled():
    image = as_digit(drawing(10, 10, 200, 100), 8)[0]
    assert (image > 0.5).any(1).all()
    assert (image > 0.5).any(0).sum() == 4


def test_nothing_drawn():
    assert not as_digit(torch.zeros(280, 280), 28).any()
    assert read_drawing(MNIST(), as_url(torch.zeros(280, 280, dtype=torch.uint8))) is None


def test_kinds_of_data():
    assert has_digits(MNIST())
    assert has_digits(AffineMNIST())
    assert has_digits(Digits())
    assert not has_digits(FashionMNIST())
    assert not has_digits(CIFAR10())


def test_a_drawing_of_no_digit_fills_the_image():
    url = as_url((drawing(0, 0, 140, 280) * 255).byte())
    image = read_drawing(FashionMNIST(), url)
    assert image.shape == (1, 1, 28, 28)
    assert (image[0, 0, :13] > 0.99).all()
    assert (image[0, 0, 15:] < 0.01).all()
    assert read_drawing(MNIST(), url).shape == (1, 1, 28, 28)


def read(url: str) -> None:
    with uploaded(url, "cat.png") as path:
        CIFAR10().picture(path)


def test_a_file_is_there_within_the_context_alone():
    pixels = torch.randint(0, 256, (50, 70, 3), dtype=torch.uint8)
    with uploaded(as_url(pixels), "a.png") as path:
        assert CIFAR10().picture(path).shape == (3, 32, 32)
    assert not path.parent.exists()


def test_what_is_said_of_a_file_has_its_name():
    with hear() as notes, uploaded(as_url(torch.zeros(2, 2, 3, dtype=torch.uint8)), "a.png") as path:
        say(f"{path}: is dark")
    assert notes == ["a.png: is dark"]


@pytest.mark.parametrize(
    ("content", "of_a_file", "of_a_drawing"),
    [
        ("aGVsbG8=", "cat.png is not a picture that can be read: give a PNG", "the drawing cannot be read: reload the"),
        ("%", "the picture did not arrive whole: try again", "the picture did not arrive whole: try again"),
        ("\u00e9", "the picture did not arrive whole: try again", "the picture did not arrive whole: try again"),
        ("A" * 28_000_000, "cat.png is larger than 20 MB: give a smaller", "the drawing is larger than 20 MB: give a"),
    ],
    ids=["no picture", "no base64", "no ASCII", "too large"],
)
def test_what_cannot_be_read(content, of_a_file, of_a_drawing):
    url = f"data:image/png;base64,{content}"
    with pytest.raises(DataError, match=f"^{of_a_file}"):
        read(url)
    with pytest.raises(DataError, match=f"^{of_a_drawing}"):
        read_drawing(MNIST(), url)


@pytest.mark.parametrize("side", [7100, 9600, 14200])  # Pillow is silent, warns, and refuses
def test_pictures_of_many_pixels_are_not_decoded(side, monkeypatch):
    url = as_url_of_many_pixels(side)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(DataError, match="^the drawing has more than 50 million pixels: give a smaller picture$"):
        read_drawing(MNIST(), url)
    with pytest.raises(DataError, match="^cat.png has more than 50 million pixels: give a smaller picture$"):
        read(url)


def as_url_of_many_pixels(side: int) -> str:
    """A black square, whose file is small."""
    rows = zlib.compress(bytes((side + 7) // 8 + 1) * side)  # one bit per pixel
    chunks = [(b"IHDR", struct.pack(">2I5B", side, side, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
