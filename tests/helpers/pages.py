"""Reports of small networks, and their pages in a browser: a pytest plugin, together with `browser`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from networks import Network
from torch import nn

from torchcaps import CapsuleLinear, Capsules, DynamicRouting, Prediction, create_model
from torchcaps.data import Digits
from torchcaps.explain.page import Samples, image_samples, report, samples_of, write_page
from torchcaps.explain.words import Word

TEXT = "This film is not bad , it is wonderful , though its <script> ends a little late ."


@pytest.fixture(scope="session")
def digits() -> tuple[nn.Module, Samples]:
    """A trained network and test digits."""
    return create_model("capsnet_digits", pretrained="digits"), image_samples(Digits(), 60)


@pytest.fixture(scope="session")
def digits_report(digits) -> dict[str, Any]:
    """A report on two checkpoints, with all that there can be for images; one label is wrong."""
    network, samples = digits
    labels = samples.labels.clone()
    labels[samples.first_of_each()[9]] = 0
    samples = replace(samples, labels=labels)
    trained = {name: value.clone() for name, value in network.state_dict().items()}
    torch.manual_seed(0)
    fresh = create_model("capsnet_digits").state_dict()
    states = [(f"after epoch {k}", lambda s=s: network.load_state_dict(s)) for k, s in ((1, fresh), (25, trained))]
    found = report(network, samples, "CapsNet on <digits> & more", [("recipe", "quickstart")], states)
    lines = [{"name": name, "x": [1, 2, 4], "y": [0.9, 0.3, 0.1]} for name in ("train", "test")]
    found["curves"] = {"loss": lines, "accuracy": lines}
    found["figures"] = [("reconstructions.png", "digits, and what the network draws of them")]
    return found


@pytest.fixture(scope="session")
def text_report() -> dict[str, Any]:
    """A report on an untrained network of texts, with little else than an example."""
    torch.manual_seed(0)
    words = TEXT.split()
    states, mask = torch.randn(1, 2 + len(words), 2, 8), torch.ones(1, 2 + len(words))
    places = [Word(word, TEXT.index(word), [token]) for token, word in enumerate(words, 1)]
    network = create_model("heinsen_sst", classes=2, layers=2, width=8, parts=4, features=4).eval()
    samples = Samples([(states, mask)], None, ["negative", "positive"], [TEXT], [places])
    return report(network, samples, "Routing over a text encoder", temperature=2.0)


def several_or_numbers(target: Any) -> tuple[nn.Module, Samples]:
    """A network whose capsules give three labels or numbers of images: the gray levels of three pixels. Of two samples
    it gives exactly the true ones, of the last one it gives no label."""
    torch.manual_seed(0)
    images = torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]])[:, :, None].expand(3, 3, 3)[:, None].contiguous()
    layer = CapsuleLinear(9, 3, 1, 4, routing=DynamicRouting())

    def forward(self: Any, images: torch.Tensor) -> Prediction:
        poses = images.flatten(1)[:, :, None]
        return Prediction(10 * images[:, 0, :, 0] - 4, self.layer(Capsules(poses[:, :, None])))

    labels = torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 0, 0]])
    if target == "numbers":
        labels = torch.tensor([[6.5, -4, 6], [-4, 6, -4], [-4, -4, -1234.5]])
    names = ["door", "window", "<chair>"]
    samples = Samples(list(images.split(1)), labels, names, ["a", "b", "c"], dark=True, target=target)
    return Network(forward, layer=layer).eval(), samples


@pytest.fixture(scope="session")
def of_labels() -> tuple[nn.Module, Samples]:
    return several_or_numbers("labels")


@pytest.fixture(scope="session")
def label_report(of_labels) -> dict[str, Any]:
    """A report on a network of several labels."""
    return report(*of_labels, "Labels", thresholds=torch.tensor([0.5, 0.2, 0.7]))


@pytest.fixture(scope="session")
def number_report() -> dict[str, Any]:
    """A report on a network of numbers."""
    return report(*several_or_numbers("numbers"), "Numbers")


@pytest.fixture(scope="session")
def labels(label_report, tmp_path_factory):
    return write_page(label_report, tmp_path_factory.mktemp("page") / "index.html")


@pytest.fixture(scope="session")
def numbers(number_report, tmp_path_factory):
    return write_page(number_report, tmp_path_factory.mktemp("page") / "index.html")


@pytest.fixture(scope="session")
def masks(tmp_path_factory):
    """The page of a network that segments."""
    truth = torch.arange(3).repeat_interleave(100)[:256].view(16, 16).expand(9, -1, -1)
    titles = [f"scans/image {i}.png" for i in range(9)]
    samples = samples_of(torch.rand(9, 1, 16, 16), truth, ["ground", "vessel", "nodule"], titles, "masks")
    page = report(create_model("segcaps", classes=3, features=4, decoder=False), samples, "own/masks/version_0")
    return write_page(page, tmp_path_factory.mktemp("page") / "index.html")


@pytest.fixture(scope="session")
def images(digits_report, tmp_path_factory):
    return write_page(digits_report, tmp_path_factory.mktemp("page") / "index.html")


@pytest.fixture(scope="session")
def texts(text_report, tmp_path_factory):
    return write_page(text_report, tmp_path_factory.mktemp("page") / "index.html")


@pytest.fixture
def page(browser, images):
    """The page of images; it must not complain whatever a test does."""
    yield browser.open(images)
    assert browser.complaints() == []
