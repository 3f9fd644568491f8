"""Pages of made-up reports, opened in a browser: a pytest plugin, together with `browser`."""

import pytest
from reports import image_report, text_report

from torchcaps.explain.page import write_page


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_page(image_report(), tmp_path_factory.mktemp("page") / "index.html")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_page(text_report(), tmp_path_factory.mktemp("page") / "index.html")


@pytest.fixture
def page(browser, images):
    """The page of images; it must not complain whatever a test does."""
    yield browser.open(images)
    assert browser.complaints() == []
