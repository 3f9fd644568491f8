"""What the live page answers, and which test images it offers, without a browser."""

import base64
import gc
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import as_url, draw_digits
from PIL import Image
from runs import run_of

from torchcaps.capsules import Segmentation
from torchcaps.data import (
    CIFAR10,
    MNIST,
    SVHN,
    AffNIST,
    Cells,
    DataError,
    Digits,
    ImageFolder,
    MaskFolder,
    MultiMNIST,
    SmallNORB,
    StereoToys,
)
from torchcaps.data.images import ImageSet
from torchcaps.explain.page import samples_of
from torchcaps.measures.masks import dice_of, overlaps
from torchcaps.models import create_model

pytest.importorskip("gradio", reason='Gradio is not installed: pip install "torchcaps[show]"')

from torchcaps.live import app, listen
from torchcaps.live.app import Looking
from torchcaps.live.examples import test_images as images_of


def answer(name, data, temperature=None, **arguments):
    """What the page shows of noise, and the probabilities that `torchcaps predict` writes of it."""
    torch.manual_seed(0)
    trained = run_of(create_model(name, **arguments), data, temperature)
    image = torch.rand(1, *data.shape)
    return Looking(trained).answer(samples_of(image, None, data.names, ["noise"])), trained.probabilities(image)[0]


def test_a_network_with_a_decoder():
    found, _ = answer("capsnet_small", MNIST(), pretrained="mnist")
    assert (found["report"]["scores"], found["report"]["temperature"]) == ("activations", None)
    example = found["example"]
    assert [layer["layer"] for layer in example["maps"]] == ["class_capsules"]
    assert len(example["scores"]) == len(example["trees"]) == 10
    assert example["sliders"]["sprite"]["rows"] == 16
    json.dumps(found, allow_nan=False)


def test_probabilities_are_those_of_predict():
    found, probabilities = answer("pooling_resnet_small", CIFAR10(), 2.0, pretrained="cifar10")
    assert found["example"]["probabilities"] == pytest.approx(probabilities.tolist(), rel=1e-4)
    assert found["report"]["temperature"] == 2.0
    assert "sliders" not in found["example"]


def test_a_network_without_capsules():
    found, _ = answer("cnn_multimnist", MultiMNIST())
    assert found["report"]["limits"] == [
        "This network has no capsule layer, so there are no coefficients, shares or poses to look at."
    ]
    assert "maps" not in found["example"]


def test_several_labels_and_numbers():
    data = Digits()
    data.target = "labels"
    trained = run_of(create_model("capsnet_digits"), data)
    trained = replace(trained, checkpoint=replace(trained.checkpoint, thresholds=(0.0,) * 5 + (1.0,) * 5))
    trained.__dict__["_parts"] = (create_model("capsnet_digits").eval(), data)
    noise = torch.rand(1, 1, 8, 8)
    found = Looking(trained).answer(samples_of(noise, None, data.names, ["noise"], "labels"))
    assert found["example"]["named"] == [0, 1, 2, 3, 4]
    assert found["example"]["scores"] == pytest.approx(trained.probabilities(noise)[0].tolist(), rel=1e-4)
    assert found["report"]["thresholds"] == [0.0] * 5 + [1.0] * 5
    data.target = "numbers"
    found = Looking(trained).answer(samples_of(noise, None, data.names, ["noise"], "numbers"))
    assert found["example"]["scores"] == pytest.approx(trained.scores(noise)[0].tolist(), rel=1e-4)
    assert found["report"]["scores"] == "numbers"


def test_a_network_that_segments():
    torch.manual_seed(0)
    data = Cells(size=32, train_size=4, test_size=12)
    classes = len(data.names)
    trained = run_of(create_model("segcaps", classes=classes, features=4, decoder=False), data)
    offered = images_of(data)
    assert (len(offered), offered.titles[1], offered.target) == (10, "test image 1", "masks")
    found = Looking(trained).answer(offered, 1)
    json.dumps(found, allow_nan=False)
    assert [of for _, of in found["example"]["pictures"]][:3] == ["image", "mask", "prediction"]
    predicted = trained.probabilities(offered.inputs[1]).argmax(1)
    dice = dice_of(overlaps(predicted, offered.labels[[1]], classes)).nanmean()
    assert found["example"]["dice"] == pytest.approx(float(dice), abs=1e-4)
    unknown = Looking(trained).answer(replace(offered, labels=None), 1)["example"]
    assert unknown["dice"] is None
    assert [of for _, of in unknown["pictures"]][:2] == ["image", "prediction"]


class Bright(torch.nn.Module):
    """Segments what is bright."""

    def forward(self, images):
        return Segmentation(scores=torch.cat([0.5 - images, images - 0.5], dim=1))


def run_of_bright(folder: Path, **options):
    """A run of this network on pictures with a bright part."""
    for kind, pixels in (("images", 200), ("masks", 1)):
        (folder / kind).mkdir()
        for name in range(6):
            drawn = np.zeros((40, 20), np.uint8)
            drawn[:, name:] = pixels
            Image.fromarray(drawn).save(folder / kind / f"{name}.png")
    return run_of(Bright(), MaskFolder(str(folder), num_workers=0, **options))


@pytest.mark.parametrize(("size", "most"), [(16, 2**22), (16, 5 * 16**2), (128, 2**22)])
def test_a_picture_in_tiles_is_shown_whole(size, most, tmp_path, monkeypatch):
    trained = run_of_bright(tmp_path, size=size, fit="tile")
    drawn = np.zeros((1100, 550), np.uint8) if size == 128 else np.zeros((40, 20), np.uint8)
    drawn[:, drawn.shape[1] // 2 :] = 200
    url = as_url(drawn)
    monkeypatch.setattr(sys.modules[Looking.__module__], "MOST_PIXELS", most)
    if most < 2**22:
        with pytest.raises(DataError, match="^new.png has more than 5 tiles: use torchcaps predict$"):
            Looking(trained).answer_file(url, "new.png")
        return
    found = Looking(trained).answer_file(url, "new.png")
    assert (found["example"]["title"], found["example"]["dice"], found["report"]["classes"]) == (
        "new.png",
        None,
        ["0", "1"],
    )
    image, prediction = (as_pixels(source) for source, _ in found["example"]["pictures"])
    assert (image.shape, prediction.shape) == ((512, 256), (512, 256, 3))
    color = np.array([int(found["report"]["colors"][1][i : i + 2], 16) for i in (1, 3, 5)])
    assert np.abs(prediction[:, :110]).max() < 30
    assert np.abs(prediction[:, 146:] - (0.4 * 200 + 0.6 * color)).max() < 30


def test_small_things_stay_in_sight(tmp_path):
    trained = run_of_bright(tmp_path, size=128, fit="tile")
    drawn = np.zeros((1200, 1100), np.uint8)
    drawn[101::300, 103::300] = 255  # single pixels
    found = Looking(trained).answer_file(as_url(drawn), "new.png")
    prediction = as_pixels(found["example"]["pictures"][1][0])
    for row in range(101, 1200, 300):
        for column in range(103, 1100, 300):
            y, x = (int(place * 512 / 1200) for place in (row, column))
            assert np.ptp(prediction[y, x]) > 12  # JPEG halves the resolution of colors


def test_edges_of_a_picture_are_white_and_notes_are_shown(tmp_path):
    trained = run_of_bright(tmp_path, size=16, fit="pad")
    found = Looking(trained).answer_file(as_url(np.full((40, 20), 255, np.uint16)), "new.png")
    prediction = as_pixels(found["example"]["pictures"][1][0])
    side = prediction.shape[1]
    assert prediction[:, : side // 5].min() > 240
    assert prediction[:, -side // 5 :].min() > 240
    assert np.ptp(prediction[side // 2, side // 2]) > 40
    assert found["report"]["limits"][-1].startswith("new.png: has more than 8 bits per pixel, and data.window is not")


def as_pixels(source: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))), int)


def test_images_with_numbers_are_offered_by_their_places():
    data = Digits()
    data.target = "numbers"
    data.setup("test")
    data.test_set = ImageSet(data.test_set.images, torch.rand(len(data.test_set), 2))
    found = images_of(data)
    assert found.titles[:2] == ["test image 0", "test image 1"]
    assert (len(found.titles), found.target, found.labels.shape) == (10, "numbers", (10, 2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gradio leaves event loops open
def test_the_parts_of_the_page_are_values_of_json():
    """Gradio takes a quoted word of a script for the name of an event, also that of one of its own properties."""
    page = app(run_of(create_model("capsnet_digits"), Digits()))
    json.dumps(page.get_config_file()["components"])
    del page
    gc.collect()  # the loops, while their warnings are ignored


def test_ports():
    with pytest.raises(ValueError, match="port must be from 1 to 65535, or 0 for any that is free, got 70000"):
        listen(70000)
    with listen(0) as taken, pytest.raises(OSError, match="in use"):
        listen(taken.getsockname()[1])


def test_images_for_the_page():
    examples = images_of(Digits())
    assert examples.titles == [f"test image: {label}" for label in range(10)]
    assert examples.labels.tolist() == list(range(10))
    assert examples.inputs[0].shape == (1, 1, 8, 8)


@pytest.fixture
def folder(tmp_path):
    return ImageFolder(str(draw_digits(tmp_path / "digits", 0, 20)), num_workers=0)


def test_own_pictures_are_called_by_their_files(folder):
    examples = images_of(folder)
    assert [
        (title.partition("/")[0], label) for title, label in zip(examples.titles, examples.labels, strict=True)
    ] == [
        ("one", 0),
        ("seven", 1),
        ("zero", 2),
    ]
    for title, image in zip(examples.titles, examples.inputs, strict=True):
        torch.testing.assert_close(image[0], folder.center(folder.picture(Path(folder.folder) / title)[None])[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gradio leaves event loops open
def test_the_page_names_the_network_and_the_data(folder):
    network = create_model("pooling_resnet", depth=8, in_channels=1, classes=3)
    network.name = "pooling_resnet"
    page = app(run_of(network, folder))
    assert page.title == "pooling_resnet on pictures in digits"
    (heading, *_) = [part["props"]["value"] for part in page.config["components"] if part["type"] == "markdown"]
    assert heading.startswith("# Inside pooling\\_resnet\nTrained on pictures in digits: ")
    del page
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gradio leaves event loops open
@pytest.mark.parametrize("begins", [True, False])
def test_the_page_begins_with_a_test_image_if_there_is_one(begins, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path)
    data = Digits() if begins else MNIST(root=str(tmp_path))
    page = app(run_of(create_model("capsnet_digits" if begins else "capsnet_small"), data))
    field, answer = (block for block in page.blocks.values() if block.elem_id in ("field", "answer"))
    ways = ["draw an image", "choose a picture", *(["take a test image"] if begins else [])]
    assert list(answer.props["ways"]) == ways
    assert field.value == ({"test": 0} if begins else None)
    (event,) = page.fns.values()
    assert ("load" in {name for _, name in event.targets}) == begins
    if begins:
        found = event.fn(field.value)["example"]
        assert (found["title"], found["label"]) == ("test image: 0", 0)
    del page, field, answer, event
    gc.collect()


@pytest.mark.parametrize("kind", [MNIST, MultiMNIST, AffNIST, CIFAR10, SVHN, SmallNORB, StereoToys])
def test_nothing_is_downloaded_into_empty_folders(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    for refused in ("pooch.retrieve", "torchcaps.data.toys.stereo_toys.render"):
        monkeypatch.setattr(refused, lambda *_, **__: pytest.fail("it is downloaded or rendered"))
    for folder in ("mnist", "affnist", "cifar-10", "svhn", "smallnorb", "stereo-toys"):
        for place in ("cache", "root"):
            (tmp_path / place / folder).mkdir(parents=True)
    assert images_of(kind(root=str(tmp_path / "root"))) is None


@pytest.mark.parametrize("kind", [MNIST, AffNIST, CIFAR10, SVHN, SmallNORB])
@pytest.mark.parametrize("place", ["cache", "root"])
def test_images_of_files_that_are_here(kind, place, images_of_noise, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda name: images_of_noise if place == "cache" else tmp_path)
    data = kind(root=str(images_of_noise if place == "root" else tmp_path))
    # The cache holds files as they were downloaded: AffNIST never is, and those of the others here are unpacked.
    assert (images_of(data) is None) == (place == "cache" and kind in (AffNIST, CIFAR10, SmallNORB))


def test_no_way_to_give_an_image(tmp_path, monkeypatch):
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path)
    trained = run_of(create_model("heinsen_smallnorb"), StereoToys(root=str(tmp_path)))
    with pytest.raises(DataError, match="images of 2 channels, which nobody can draw, and there are no test images of"):
        app(trained)
