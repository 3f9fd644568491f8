"""Reading picture files: colors, sizes, orientation, transparency, and files that are no pictures."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from torchcaps.data import DataError, read_picture
from torchcaps.data.pictures import any_has_color, range_of, read_header, window_of


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    """A picture of 6 x 4 pixels, red above blue."""
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:2, :, 0], pixels[2:, :, 2] = 255, 51
    Image.fromarray(pixels).save(tmp_path / "flag.png")
    return tmp_path / "flag.png"


def test_pixels_are_those_of_the_file(flag):
    image = read_picture(flag, (3, 4, 6))
    assert image.dtype == torch.uint8
    assert image[0].tolist() == [[255] * 6] * 2 + [[0] * 6] * 2
    assert image[2].tolist() == [[0] * 6] * 2 + [[51] * 6] * 2
    assert read_picture(flag, (1, 8, 8)).shape == (1, 8, 8)


def test_ways_to_make_a_picture_square(flag):
    assert read_picture(flag, (3, 4, 4), "crop").tolist() == read_picture(flag, (3, 4, 6))[:, :, 1:5].tolist()
    padded = read_picture(flag, (3, 6, 6), "pad")
    assert padded[:, 1:5].tolist() == read_picture(flag, (3, 4, 6)).tolist()
    assert padded[0, 0].unique().numel() == 1  # an edge of one color
    stretched = read_picture(flag, (3, 2, 2), "stretch")
    assert stretched[0, 0, 0] > 200
    assert stretched[2, 1, 1] > 40


@pytest.mark.parametrize(("size", "place"), [((400, 3), (slice(None), 32)), ((3, 400), (32, slice(None)))])
def test_a_narrow_picture_is_padded(tmp_path, size, place):
    picture = Image.new("L", size, 10)
    picture.putpixel((0, 0), 255)  # an edge of one color all the same
    picture.save(tmp_path / "narrow.png")
    image = read_picture(tmp_path / "narrow.png", (1, 64, 64), "pad")[0]
    assert image.shape == (64, 64)
    assert (image == 10).sum() > 64 * 63


def deep(path: Path, values: list[int] | np.ndarray, dtype: str = "uint16") -> Path:
    """Write a picture of one row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    row = np.asarray(values).astype(dtype)[None]
    if path.suffix == ".pgm":
        path.write_bytes(f"P5 {row.shape[1]} 1 65535\n".encode() + row.astype(">u2").tobytes())
    else:
        Image.fromarray(row).save(path)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_more_than_eight_bits_become_eight_by_the_window(tmp_path, name, capfd):
    path = deep(tmp_path / name, [0, 1000, 2000, 3000, 4095])
    assert read_header(path).is_deep
    assert read_picture(path, (1, 1, 5), window=(0, 4095)).flatten().tolist() == [0, 62, 125, 187, 255]
    assert capfd.readouterr().err == ""
    assert read_picture(path, (1, 1, 5), window=(1000, 3000)).flatten().tolist() == [0, 0, 128, 255, 255]
    said = "40 % of its pixels are beyond data.window, 1000 to 3000, and became black or white, in other pictures too"
    assert said in capfd.readouterr().err
    read_picture(path, (1, 1, 5), window=(0, 3000))  # said once
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 16, 4080, 4095], "uint16", [0, 1, 254, 255]),
        ([0, 257, 65535], "uint16", [0, 1, 255]),
        ([0, 3, 200, 255], "uint16", [0, 3, 200, 255]),  # bytes in 16 bits
        ([0, 3, 200, 255], "int32", [0, 3, 200, 255]),
        ([-1000, 0, 1000], "int32", [0, 128, 255]),
        ([0.0, 0.5, 1.0], "float32", [0, 128, 255]),
        ([-1.0, np.nan, np.inf, 1.0], "float32", [0, 0, 255, 255]),
    ],
)
def test_without_a_window_a_picture_tells_its_own(tmp_path, values, dtype, expected, capfd):
    path = deep(tmp_path / "a.tif", values, dtype)
    assert read_picture(path, (1, 1, len(values))).flatten().tolist() == expected
    said = capfd.readouterr().err
    assert "has more than 8 bits per pixel, and data.window is not set" in said
    assert ("a.tif: has pixels that are NaN or infinite, which became black or white" in said) == (np.nan in values)


def test_a_picture_without_a_number_is_refused(tmp_path):
    path = deep(tmp_path / "a.tif", [np.nan, np.inf], "float32")
    with pytest.raises(DataError, match=r"a\.tif: has no pixel that is a number: leave it out$"):
        read_picture(path, (1, 1, 2))


def test_a_few_pixels_far_off_do_not_count(tmp_path, capfd):
    pixels = np.linspace(700, 900, 1024).round()
    pixels[5], pixels[9] = 0, 65535
    path = deep(tmp_path / "a.png", pixels)
    assert range_of(path) == (700, 900)
    image = read_picture(path, (1, 1, 1024), window=(700, 900)).flatten()
    assert (image[5], image[9], image[-1]) == (0, 255, 255)
    assert capfd.readouterr().err == ""
    pixels[:20] = 65535
    assert range_of(deep(tmp_path / "b.png", pixels))[1] == 65535
    read_picture(tmp_path / "b.png", (1, 1, 1024), window=(700, 900))
    assert "1.95 % of its pixels are beyond data.window, 700 to 900" in capfd.readouterr().err


def test_colors_of_16_bits_are_known_to_be_cut(tmp_path):
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + np.full((4, 3), 3000, ">u2").tobytes() for _ in range(4))
    head = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    assert read_header(tmp_path / "a.png").is_cut
    assert read_picture(tmp_path / "a.png", (1, 4, 4)).unique().tolist() == [3000 >> 8]
    deep(tmp_path / "b.png", [1, 2])
    Image.new("RGB", (3, 3)).save(tmp_path / "c.tif")
    assert not any(read_header(tmp_path / name).is_cut for name in ("b.png", "c.tif"))


def test_a_window_is_from_the_smallest_to_the_largest_value():
    assert window_of([(764, 900), (800, 984)]) == (764, 984)
    assert window_of([(-0.5, 0.0), (0.0, 2.5)]) == (-0.5, 2.5)
    assert window_of([(7, 7)]) == (7, 8)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_colors_are_looked_for_in_the_pixels(tmp_path, suffix):
    gray = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50), dtype=np.uint8)).convert("RGB")
    for i in range(70):
        gray.save(tmp_path / f"{i}.{suffix}")
    (tmp_path / "damaged.png").write_bytes(b"x")
    paths = sorted(tmp_path.iterdir())
    assert not any_has_color(paths)
    gray.paste((200, 30, 30), (5, 5, 9, 9))
    gray.save(tmp_path / f"zz.{suffix}")
    assert any_has_color([*paths, tmp_path / f"zz.{suffix}"])


def test_transparent_parts_are_white(tmp_path):
    clear = torch.zeros(2, 2, 4, dtype=torch.uint8)
    clear[0, 0, 3] = 255
    Image.fromarray(clear.numpy()).save(tmp_path / "clear.png")
    assert read_picture(tmp_path / "clear.png", (1, 2, 2)).tolist() == [[[0, 255], [255, 255]]]


@pytest.mark.parametrize(
    ("mode", "value", "found", "options"),
    [
        ("L", 77, [77, 77, 77], {"format": "JPEG"}),
        ("1", 1, [255, 255, 255], {}),
        ("LA", (77, 255), [77, 77, 77], {}),
        ("P", 3, [1, 2, 3], {}),
        ("P", 3, [255, 255, 255], {"transparency": bytes([255, 255, 255, 0])}),
        ("CMYK", (255, 0, 0, 0), [0, 255, 255], {"format": "JPEG", "quality": 100}),
    ],
)
def test_other_modes(tmp_path, mode, value, found, options):
    picture = Image.new(mode, (6, 6), value)
    if mode == "P":
        picture.putpalette([9] * 9 + [1, 2, 3])
    picture.save(tmp_path / "a.png", **options)
    image = read_picture(tmp_path / "a.png", (3, 6, 6)).int()
    assert (image - torch.tensor(found)[:, None, None]).abs().max() <= 1


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_photographs_are_turned_upright(tmp_path, flag, suffix):
    lying = Image.open(flag).resize((60, 40), Image.Resampling.NEAREST)
    lying.getexif()[0x0112] = 6  # viewers turn it by 90 degrees clockwise
    lying.save(tmp_path / f"lying.{suffix}", exif=lying.getexif(), **({"quality": 95} if suffix == "jpg" else {}))
    upright = read_picture(tmp_path / f"lying.{suffix}", (3, 60, 40)).float()
    assert upright[0, 30, 39] > 240  # red is on the right
    assert upright[0, 30, 0] < 15


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_every_orientation(tmp_path, suffix):
    picture = Image.fromarray(np.arange(35, dtype=np.uint8).reshape(5, 7) * 7)
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture.save(tmp_path / f"a.{suffix}", exif=exif)
        with Image.open(tmp_path / f"a.{suffix}") as opened:
            upright = np.asarray(ImageOps.exif_transpose(opened))
        assert read_picture(tmp_path / f"a.{suffix}", (1, *upright.shape))[0].tolist() == upright.tolist()


def test_metadata_of_a_wrong_type_does_not_hide_the_picture(tmp_path, flag):
    tags = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0), struct.pack("<HHI4s", 0x0213, 2, 4, b"abc")  # text for a number
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + b"".join(tags) + bytes(4)
    Image.open(flag).resize((60, 40), Image.Resampling.NEAREST).save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = read_picture(tmp_path / "a.jpg", (3, 60, 40))
    assert upright[0, 30, 39] > 240
    assert upright[0, 30, 0] < 15


def test_the_first_picture_of_an_animation_counts(tmp_path):
    frames = [Image.new("L", (4, 4), shade) for shade in (10, 200)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    header = read_header(tmp_path / "moving.gif")
    assert (header.frames, header.is_gray, header.width, header.height) == (2, True, 4, 4)
    assert read_picture(tmp_path / "moving.gif", (1, 4, 4)).unique().tolist() == [10]


def test_a_photograph_with_a_preview_is_no_animation(tmp_path):
    frames = [Image.new("RGB", (4, 4), shade) for shade in ("red", "blue")]
    frames[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=frames[1:])
    assert read_header(tmp_path / "phone.jpg").frames == 1


def test_gray_is_told_from_color(tmp_path):
    for name, mode, gray in (("a", "L", True), ("b", "1", True), ("c", "RGB", False), ("d", "LA", True)):
        Image.new(mode, (3, 5)).save(tmp_path / f"{name}.png")
        header = read_header(tmp_path / f"{name}.png")
        assert (header.is_gray, header.width, header.height) == (gray, 3, 5)
    grays = [shade for i in range(256) for shade in [(7 * i) % 256] * 3]
    for colors, gray in (([255, 0, 0, 0, 0, 255], False), (grays, True)):
        palette = Image.new("P", (2, 2))
        palette.putpalette(colors)
        for suffix in ("png", "bmp", "tif", "gif"):
            palette.save(tmp_path / f"e.{suffix}")
            header = read_header(tmp_path / f"e.{suffix}")
            assert header.is_gray == gray


def test_a_large_photograph_is_read_at_a_fraction_of_its_size(tmp_path):
    Image.new("RGB", (4000, 3000), (10, 200, 30)).save(tmp_path / "large.jpg")
    image = read_picture(tmp_path / "large.jpg", (3, 32, 32), "crop")
    assert image.flatten(1).float().mean(1).sub(torch.tensor([10.0, 200, 30])).abs().max() < 3


def test_files_that_are_no_pictures(tmp_path, flag):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    for suffix in ("png", "jpg"):
        noise.save(tmp_path / f"whole.{suffix}")
    whole = {suffix: (tmp_path / f"whole.{suffix}").read_bytes() for suffix in ("png", "jpg")}
    cases = {
        **{
            f"{part}-cut.{suffix}": content[: len(content) * part // 20]
            for suffix, content in whole.items()
            for part in range(19)
        },
        "text.png": b"no picture",
        "empty.png": b"",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} is not a picture that can be read.*: give a PNG or JPEG file"):
            read_picture(tmp_path / name, (1, 8, 8))
    with pytest.raises(DataError, match=r"none.png is not a picture that can be read \(.*No such file"):
        read_picture(tmp_path / "none.png", (1, 8, 8))
    with pytest.raises(DataError, match="directory"):
        read_picture(tmp_path, (1, 8, 8))
    with pytest.raises(DataError, match="pictures have 1 or 3 channels, and the network takes images of 2"):
        read_picture(flag, (2, 8, 8))


def test_a_small_file_of_a_huge_picture(flag, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # Pillow refuses twice as many; the flag has 24
    with pytest.raises(DataError, match=r"flag.png is not a picture that can be read \(Image size"):
        read_picture(flag, (3, 8, 8))


def test_a_tiff_of_twelve_bits(tmp_path):
    """Its largest number is white."""
    pixels = bytes.fromhex("fff800")  # 4095 and 2048, packed
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path = tmp_path / "a.tif"
    path.write_bytes(
        b"II*\0" + struct.pack("<I", 12) + pixels + b"\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    )
    assert read_picture(path, (1, 1, 2)).flatten().tolist() == [255, 128]
