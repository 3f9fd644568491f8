"""The style of all figures: colors and dashes that are told apart, maps that grow lighter, and small images drawn
smoothly; rows of panels; and figures of credit."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figures import assert_texts_fit
from matplotlib import colormaps, rc_context, rcParams
from matplotlib.colors import Colormap, to_rgb
from matplotlib.figure import Figure
from networks import Network, small_capsnet
from PIL import Image

from torchcaps import CapsNet, CapsuleLinear, DynamicRouting
from torchcaps.explain import credit_figure, heat
from torchcaps.measures.axes import CHANGES, COLORS, DASHES, HEAT, ORDERED, SMALL, STYLE, show, show_map, write

# Linear RGB as it looks to people without the cones for middle or for long waves (Machado et al. 2009, severity 1).
BLINDNESS = {
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def lightness(color: Any) -> float:
    """L* of an sRGB color, from 0 to 100."""
    luminance = float(linear(color) @ np.array([0.2126, 0.7152, 0.0722]))
    return 116 * np.cbrt(luminance) - 16 if luminance > 0.008856 else 903.3 * luminance


def linear(color: Any) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colors_of_lines_are_told_apart(blindness):
    seen = [np.array(BLINDNESS[blindness]) @ linear(color) for color in COLORS]
    for (a, first), (b, second) in itertools.combinations(zip(COLORS, seen, strict=True), 2):
        assert np.abs(first - second).max() > 0.08, (a, b)
    assert len({str(dashes) for dashes in DASHES}) == len(COLORS)
    assert all(lightness(color) < 75 for color in COLORS)  # not lost on white


@pytest.mark.parametrize("colors", [colormaps[HEAT], colormaps[ORDERED], CHANGES], ids=lambda x: x.name)
def test_maps_grow_lighter_with_their_values(colors: Colormap):
    found = np.array([lightness(colors(x)) for x in np.linspace(0, 1, 33)])
    assert (np.diff(found) > 0).all()
    assert found[-1] - found[0] > 60


def test_the_style_holds_in_a_file_whatever_the_reader_has_set(tmp_path: Path):
    figure = Figure(figsize=(1, 1))
    with rc_context({"savefig.dpi": 20, "font.size": 30}):
        write(figure, tmp_path / "new" / "a.png")
        assert rcParams["font.size"] == 30
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert image.size == (130, 130)


def test_half_precision_is_drawn():
    axis = Figure().add_subplot()
    show(axis, torch.rand(1, 4, 4).bfloat16())
    show_map(axis, torch.rand(4, 4).bfloat16(), (0, 1))
    assert len(axis.images) == 2


def test_small_images_are_drawn_smoothly():
    for side, expected in ((SMALL, "bicubic"), (SMALL + 1, "auto")):
        axis = Figure().subplots()
        show(axis, torch.rand(1, 8, side))
        assert axis.images[0].get_interpolation() == expected


# Credit


@pytest.fixture
def network() -> CapsNet:
    return small_capsnet(decoder=None)


def maps_of(figure: Figure) -> list[np.ndarray]:
    return [
        axis.images[0].get_array().data
        for axis in figure.axes
        if axis.images and axis.images[0].get_cmap().name == HEAT
    ]


def test_images_stand_above_the_maps_of_their_predicted_classes(network):
    images = torch.rand(12, 1, 8, 8)
    scores = network(images).evidence
    labels = scores.argmax(1)
    labels[1] = (labels[1] + 1) % 3
    figure = credit_figure(network, images, labels, ["cat", "dog", "eel"])
    (expected,) = heat(network, images).values()
    drawn = maps_of(figure)
    assert len(drawn) == 12
    for index, found in enumerate(drawn):
        torch.testing.assert_close(torch.from_numpy(found), expected[index, scores[index].argmax()])
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    names = ["cat", "dog", "eel"]
    assert titles[0] == names[labels[0]]
    assert titles[1] == f"{names[labels[1]]}, seen as\n{names[scores[1].argmax()]}"
    assert len(titles) == 12
    assert figure.axes[10].get_ylabel() == "class_capsules"


def test_a_single_image_has_a_map_for_each_class(network):
    image = torch.rand(1, 1, 8, 8)
    figure = credit_figure(network, image, torch.tensor([1]))
    (expected,) = heat(network, image).values()
    for k, found in enumerate(maps_of(figure)):
        torch.testing.assert_close(torch.from_numpy(found), expected[0, k])
    titles = [axis.get_title() for axis in figure.axes]
    scores = network(image).evidence[0]
    assert titles[:4] == ["input:\nclass 1", *(f"class {k}\n{scores[k]:.2f}" for k in range(3))]
    bold = [axis.title.get_fontweight() == "bold" for axis in figure.axes[1:4]]
    assert bold == [k == int(scores.argmax()) for k in range(3)]


@pytest.mark.parametrize("count", [1, 11])
def test_no_text_is_cut_off_or_overlaps(network, count):
    names = ["a frilled lizard", "a flying squirrel", "eel"]
    figure = credit_figure(network, torch.rand(count, 1, 8, 8), torch.arange(count) % 3, names)
    with rc_context(STYLE):
        assert_texts_fit(figure)


def test_what_cannot_be_drawn(network):
    layer = CapsuleLinear(4, 3, 2, 2, DynamicRouting(1))  # its capsules have no place in the image
    flat = Network(lambda net, images: net.layer(images.flatten(1)[:, :8].view(-1, 4, 2)), layer=layer)
    with pytest.raises(ValueError, match="expected one image or more, got none"):
        credit_figure(network, torch.rand(0, 1, 8, 8), torch.zeros(0).long())
    with pytest.raises(ValueError, match="Network has no capsule layer whose children lie on a grid"):
        credit_figure(flat, torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))
