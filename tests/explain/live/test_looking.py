"""What the page shows of networks with and without capsules, as HTML."""

import re
from html import unescape

import pytest
import torch

from torchcaps.data import CIFAR10, MNIST, SVHN, AffNIST, DataError, Digits, MultiMNIST, SmallNORB, StereoToys
from torchcaps.deploy import Trained
from torchcaps.explain.words import Word
from torchcaps.models import create_model

pytest.importorskip("gradio", reason='Gradio is not installed: pip install "torchcaps[show]"')

from torchcaps.explain.live import app
from torchcaps.explain.live.components import choice_of_images
from torchcaps.explain.live.examples import test_images as images_of
from torchcaps.explain.live.looking import Looking
from torchcaps.explain.live.markup import bars, heated, shaded


def looking(name, data, values=None, temperature=None, **arguments):
    torch.manual_seed(0)
    return Looking(Trained(create_model(name, **arguments).eval(), data, values or {}, temperature))


def captions(html):
    return re.findall("<figcaption>(.*?)</figcaption>", html)


def test_a_network_with_a_decoder():
    found = looking("capsnet_small", MNIST(), pretrained="mnist")
    assert found.pose_features == 16
    image = torch.rand(1, 1, 28, 28)
    scores, maps, drawn = found.image(image, 3, [])
    assert scores.count("<tr") == 10
    assert "How present each class is" in scores
    (said,) = captions(maps)
    assert said.startswith("Layer class_capsules: shares in 3, at the lightest place ")
    assert captions(drawn) == ["from 3"]
    assert drawn == found.drawn(image, 3, [])
    changed = found.drawn(image, 3, [0.25] + 15 * [0.0])
    assert captions(changed) == ["from 3", "from 3, pose changed"]
    first, second = re.findall('src="(.*?)"', changed)
    assert first != second
    assert all(re.findall('alt="(.*?)"', maps + changed))


def test_the_likeliest_class_is_shown():
    found = looking("capsnet_small", MNIST(), pretrained="mnist")
    image = torch.rand(1, 1, 28, 28)
    label = int(found.network(image).evidence.argmax())
    assert captions(found.image(image, -1, [])[2]) == [f"from {label}"]


def test_two_classes_at_once():
    values = {"model": {"labels_per_image": 2}}
    found = looking("capsnet_small", MultiMNIST(), values, image_size=36)
    scores, maps, drawn = found.image(torch.rand(1, 1, 36, 36), -1, [])
    assert scores.count('class="likeliest"') == len(captions(maps)) == len(captions(drawn)) == 2


def test_a_routing_pool():
    found = looking("pooling_resnet_small", CIFAR10(), temperature=2.0, pretrained="cifar10")
    image = torch.rand(1, 3, 32, 32)
    scores, maps, drawn = found.image(image, 5, [])
    assert "Probability of each class" in scores
    numbers = [float(value) for value in re.findall(r'number">(.*?)<', scores)]
    assert numbers == pytest.approx(found.trained.probabilities(image)[0].tolist(), abs=0.006)
    assert captions(maps)[0].endswith("times an even one.")
    assert drawn == found.drawn(image, 5, []) == ""


def test_a_network_without_capsules():
    found = looking("cnn_multimnist", MultiMNIST())
    scores, maps, drawn = found.image(torch.rand(1, 1, 36, 36), -1, [])
    assert scores.count("<tr") == 10
    assert "This network has no capsules." in maps
    assert drawn == ""


def test_other_errors_are_not_hidden(monkeypatch):
    def fails(*_):
        raise ValueError("another error")

    monkeypatch.setattr("torchcaps.explain.live.looking.credit", fails)
    with pytest.raises(ValueError, match="another error"):
        looking("capsnet_small", MNIST()).image(torch.rand(1, 1, 28, 28), -1, [])


def test_many_classes():
    html = bars([f"class {index}" for index in range(100)], torch.arange(100) / 100, "caption")
    assert re.findall('row">(.*?)<', html)[:2] == ["class 99", "class 98"]
    assert html.count("<tr") == 12


def test_names_are_escaped():
    html = bars(["<b>", "{{#if}}${`x`}"], torch.ones(2), "a & b")
    assert not set("{}`$") & set(html)
    assert "&lt;b&gt;" in html


def test_descriptions_of_test_images_are_escaped():
    name = '${Object.assign(window,{pwned:1})}`\\{{url}}@children"<b>'
    choice = choice_of_images([("data:image/png;base64,aGVsbG8=", name)])
    template = choice.html_template
    assert choice.props == {}  # Handlebars fills nothing in
    assert not set("{}`$\\@") & set(template)
    assert re.findall('alt="(.*?)"', template) == re.findall('title="(.*?)"', template)
    assert unescape(re.findall('alt="(.*?)"', template)[0]) == name


def test_shades_of_words():
    text = "Not  bad."
    words = [Word("Not", 0, [1]), Word("bad", 5, [2]), Word(".", 8, [3])]
    html = shaded(text, words, torch.tensor([0.3, 2.4, 0.0]))
    shares = [float(share) for share in re.findall('--share: (.*?)"', html)]
    assert shares == pytest.approx([0.085, 0.68, 0])
    assert re.sub("<.*?>", "", html) == text


def test_a_map_is_light_at_its_peak():
    colored = heated(torch.zeros(3, 4, 4), torch.eye(4), 1.0)
    light = colored.sum(0)
    assert colored.shape == (3, 4, 4)
    assert torch.equal(light > 1, torch.eye(4) == 1)
    assert heated(torch.zeros(1, 4, 4), torch.zeros(4, 4), 0.0).isfinite().all()


def test_images_for_the_page(mnist_of_noise, tmp_path, monkeypatch):
    examples = images_of(Digits())
    assert [name for _, name in examples] == [str(label) for label in range(10)]
    assert examples[0][0].shape == (1, 1, 8, 8)
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path)
    assert images_of(MNIST()) == []  # and nothing is downloaded
    with pytest.warns(UserWarning, match="has md5"):
        assert images_of(MNIST(str(mnist_of_noise)))
    assert images_of(StereoToys()) == []  # and nothing is rendered


@pytest.mark.parametrize("kind", [MNIST, MultiMNIST, AffNIST, CIFAR10, SVHN, SmallNORB, StereoToys])
@pytest.mark.parametrize("place", ["cache", "root"])
def test_nothing_is_downloaded_into_empty_folders(kind, place, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    for refused in ("pooch.retrieve", "torchcaps.data.toys.stereo_toys.render"):
        monkeypatch.setattr(refused, lambda *_, **__: pytest.fail("it is downloaded or rendered"))
    for folder in ("mnist", "affnist", "cifar-10", "svhn", "smallnorb", "stereo-toys"):
        (tmp_path / place / folder).mkdir(parents=True)
    assert images_of(kind(root=str(tmp_path / "root"))) == []


@pytest.mark.parametrize("kind", [MNIST, AffNIST, CIFAR10, SVHN, SmallNORB])
@pytest.mark.parametrize("place", ["cache", "root"])
@pytest.mark.filterwarnings("ignore:.* it is used anyway")
def test_images_of_files_that_are_here(kind, place, images_of_noise, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda name: images_of_noise if place == "cache" else tmp_path)
    data = kind(root=str(images_of_noise if place == "root" else tmp_path))
    assert bool(images_of(data)) == (place == "root" or kind is not AffNIST)  # which has no place in the cache


def test_no_way_to_give_an_image(tmp_path, monkeypatch):
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path)
    trained = Trained(create_model("heinsen_smallnorb").eval(), StereoToys(root=str(tmp_path)), {})
    with pytest.raises(DataError, match="images of 2 channels, which nobody can draw, and there are no test images of"):
        app(trained)
