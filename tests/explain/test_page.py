"""The page of `torchcaps explain` as a file: one file, safe, of bounded size, with smooth pictures."""

import base64
import io
import json
import re

import pytest
import torch
from PIL import Image

from torchcaps.explain.page import write_page
from torchcaps.explain.page.pictures import encoded_maps, picture, sprite

pytest_plugins = ["pages"]


def opened(source: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


def content(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', page).group(1))


def test_the_page_is_one_file_without_addresses(images, digits_report):
    page = images.read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[\w./]*", page)) == {"http://www.w3.org/2000/svg"}  # the name of SVG's elements
    assert not re.search(r"<(link|script|img)[^>]* (src|href)=\"(?!data:)", page)
    assert "<noscript>" in page
    assert "default-src 'none'" in page  # the browser itself forbids all loading
    assert [found.name for found in images.parent.iterdir()] == ["index.html"]
    (wanted,) = digits_report["snapshots"][1]["sharpening"]
    found = content(page)["snapshots"][1]["sharpening"][0]["effective"]
    assert found == pytest.approx(wanted["effective"].tolist(), 1e-4)


def test_no_text_ends_the_script_or_the_title(text_report, tmp_path):
    wild = "</script><!-- <script> \u2028 \u2029 & </title><b>"
    page = write_page({**text_report, "title": wild}, tmp_path / "index.html").read_text(encoding="utf-8")
    assert content(page)["title"] == wild
    assert "\u2028" not in page.partition("<script")[2]
    assert page.count("</title>") == 1
    assert '<h1 id="title">&lt;/<wbr>script&gt;' in page
    assert "<!-- " not in page
    assert page.count("</script>") == page.count("<script")


def test_pages_that_are_refused(text_report, tmp_path):
    with pytest.raises(ValueError, match=r"the page would have 10\.\d MB, .* show fewer examples or checkpoints"):
        write_page({**text_report, "limits": ["x" * 10_000_000]}, tmp_path / "index.html")
    scores = [{"scores": torch.tensor([0.0, float("nan")])}]
    with pytest.raises(ValueError, match=r"report\.snapshots\[0\]\.scores\[1\] is nan: all numbers"):
        write_page({**text_report, "snapshots": scores}, tmp_path / "index.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shape", "size", "mode"),
    [
        ((1, 8, 8), (112, 112), "L"),
        ((3, 8, 16), (112, 56), "RGB"),
        ((2, 32, 32), (112, 112), "L"),
        ((1, 200, 150), (150, 200), "L"),
    ],
)
def test_size_and_mode_of_pictures(shape, size, mode):
    found = opened(picture(torch.rand(shape), 112))
    assert (found.size, found.mode, found.format) == (size, mode, "JPEG")


def test_small_pictures_are_enlarged_smoothly():
    edge = torch.zeros(1, 8, 8)
    edge[..., 4:] = 1
    row = torch.tensor(list(opened(picture(edge, 80)).crop((0, 40, 80, 41)).tobytes()))
    assert (row.diff() >= 0).float().mean() > 0.9  # bicubic overshoots a little
    assert row.diff().abs().max() < 60
    assert row[0] == 0
    assert row[-1] == 255


def test_the_left_image_of_a_stereo_pair_is_drawn():
    pair = torch.stack([torch.zeros(4, 4), torch.ones(4, 4)])
    assert opened(picture(pair, 4)).getextrema() == (0, 0)


def test_tiles_of_a_sprite_lie_row_by_row():
    images = torch.linspace(0, 1, 6).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    found = sprite(images, 2, 3)
    whole = opened(found["image"])
    assert (found["rows"], found["columns"], whole.size) == (2, 3, (3 * 56, 2 * 56))
    for place in range(6):
        left, top = place % 3 * 56, place // 3 * 56
        low, high = whole.crop((left, top, left + 56, top + 56)).getextrema()
        assert abs(low - 51 * place) < 4  # no tile runs into its neighbor
        assert abs(high - 51 * place) < 4


def test_maps_are_bytes_of_multiples_of_an_even_share():
    maps = torch.tensor([[[0.0, 1.0], [2.0, 1.0]], [[0.5, 0.5], [0.5, 2.5]]])
    shares = torch.tensor([[[0.0, 0.5], [0.25, 0.25]], [[0.0, 0.0], [0.0, 1.0]]])
    even = torch.tensor([[[0.5, 0.25], [0.125, 0.125]]]).expand(2, -1, -1)
    found = encoded_maps("parts", maps, shares, even)
    assert (found["half"], found["even"]) == ([0.25, 0.25], [0.25, 0.25])
    assert (found["layer"], found["size"], found["peak"]) == ("parts", (2, 2), 2.5)
    decoded = torch.tensor([list(base64.b64decode(encoded)) for encoded in found["maps"]]).view(2, 2, 2)
    torch.testing.assert_close(decoded / 255 * 2.5, maps, atol=0.005, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: picture(torch.rand(4, 8, 8), 56), r"image must have the shape \(channels, height, width\)"),
        (lambda: sprite(torch.rand(5, 1, 8, 8), 2, 3), r"images must have the shape \(6, channels, height, width\)"),
        (lambda: encoded_maps("parts", *torch.rand(3, 8, 8)), r"maps must have the shape \(classes, rows, columns\)"),
        (lambda: encoded_maps("parts", *-torch.ones(3, 1, 2, 2)), "maps must be finite and at least zero"),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
