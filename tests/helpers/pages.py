"""Reports of small networks, and their pages in a browser: a pytest plugin, together with `browser`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torchcaps import create_model
from torchcaps.data import Digits
from torchcaps.explain.page import Samples, image_samples, report, write_page
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
    found["curves"] = {"loss": [{"name": name, "x": [1, 2, 4], "y": [0.9, 0.3, 0.1]} for name in ("train", "test")]}
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
