"""The page of `torchcaps explain` follows mouse and keys: pictures, maps and sentences change in a real browser.

These are slow tests. The fast tests of the same page are in test_page_in_browser.py.
"""

import hashlib

import pytest

pytest_plugins = ["browser", "pages"]
pytestmark = pytest.mark.slow


def pixels(page, selector: str) -> str:
    """Return a digest of what a canvas shows."""
    drawn = page.run("return document.querySelector(arguments[0]).toDataURL()", selector)
    return hashlib.sha256(drawn.encode()).hexdigest()


def changed(page, selector: str, action) -> bool:
    """Whether an action changes what a canvas shows, after what is loaded has been drawn."""
    before = pixels(page, selector)
    action()
    page.run("return new Promise((resolve) => setTimeout(resolve, 100))")
    return pixels(page, selector) != before


def set_slider(page, selector: str, value: int) -> None:
    page.run(
        "const found = document.querySelector(arguments[0]); found.value = arguments[1];"
        "found.dispatchEvent(new Event('input', { bubbles: true }))",
        selector,
        value,
    )


def test_a_slider_of_a_pose_changes_its_picture(page):
    cells = [f".cell:nth-child({place}) canvas" for place in (1, 2)]
    for cell in cells:
        page.wait(f"document.querySelector('{cell}').dataset.drawn")
    start = [pixels(page, cell) for cell in cells]
    page.focus("[data-key=pose-0]")
    assert changed(page, cells[0], lambda: page.press("\ue014", "\ue014", "\ue014"))  # the right arrow
    assert pixels(page, cells[1]) == start[1]
    assert page.texts(".cell output")[:2] == ["+0.15", "0"]
    assert page.run("return document.querySelector('[data-key=pose-0]').getAttribute('aria-valuetext')") == "+0.15"
    assert changed(page, cells[1], lambda: set_slider(page, "[data-key=pose-all]", 0))
    assert page.texts(".cell output")[:2] == ["\u22120.25", "\u22120.25"]
    page.run("document.querySelector('[data-key=pose-reset]').click()")
    page.wait("document.querySelector('.cell canvas').dataset.drawn === '0,5'")
    assert [pixels(page, cell) for cell in cells] == start


def test_a_turned_input_and_its_reconstruction_follow_the_slider(page):
    canvases = [f"#moved .block:first-of-type figure:nth-child({place}) canvas" for place in (1, 2)]
    for found in canvases:
        page.wait(f"document.querySelector('{found}').dataset.drawn")
    before = pixels(page, canvases[1])
    cursor = "return document.querySelector('#moved .cursor').getAttribute('x1')"
    place = page.run(cursor)
    assert page.texts("#moved .verdict")[0] == "With the input as it was the network says “3”, with a score of 0.9."
    assert changed(page, canvases[0], lambda: set_slider(page, "[data-key=change-turned]", 0))
    assert pixels(page, canvases[1]) != before
    assert page.run(cursor) != place
    assert page.texts("#moved .verdict")[0].startswith("With the input turned by \u221260 degrees the network says “9”")


def test_a_class_changes_maps_and_tree(page):
    assert page.texts("#example h3")[-1] == "Where “0” comes from"
    page.focus("[data-key=class-7]")
    assert changed(page, ".map", lambda: page.press(" "))
    assert page.texts("#example h3")[-1] == "Where “7” comes from"
    assert page.texts("#tree .part .name")[0] == "class 7"
    assert page.run("return document.activeElement.dataset.key") == "class-7"  # drawn anew, the focus is kept
    assert page.run("return document.getElementById('class').value") == "7"
    page.run("const c = document.getElementById('class'); c.value = 2; c.dispatchEvent(new Event('change'))")
    page.wait("document.querySelector('#tree .name').textContent === 'class 2'")


def test_the_input_under_a_map_can_be_hidden(page):
    page.focus("[data-key=covering]")
    assert changed(page, ".map", lambda: page.press(" "))


def test_arrow_keys_choose_an_example(page):
    page.focus("[data-key=example-0]")
    page.press("\ue014")
    page.wait("document.querySelector('.verdict').textContent.includes('“1”')")
    assert page.run("return document.activeElement.dataset.key") == "example-1"
    page.press("\ue010")  # End
    page.wait("document.querySelector('.verdict').textContent.includes('wrong')")
    assert page.texts("#example .verdict") == ["The network says “8”, which is wrong: it is “3”."]
    assert page.texts(".score .note") == ["", "", "", "★ true", "", "", "", "", "◀ answer", ""]
    assert page.run("return document.querySelectorAll('.thumb[tabindex=\"0\"]').length") == 1


def test_the_tree_opens_and_outlines_what_has_the_focus(page):
    part = "#tree ul ul > li:first-child > .part"
    assert page.run(f"return document.querySelector('{part}').getAttribute('aria-expanded')") == "false"
    assert changed(page, ".outlined", lambda: page.focus(part))
    page.press(" ")
    assert page.run(f"return document.querySelector('{part}').getAttribute('aria-expanded')") == "true"
    inside = page.texts(f"{part} + ul > li .name")
    assert inside == ["type 0 at row 0, column 0", "type 1 at row 1, column 0", "all others together"]
    assert page.texts(f"{part} + ul .value") == ["20.0\u00a0%", "12.0\u00a0%", "8.0\u00a0%"]
    page.press(" ")
    assert not page.run(f"return document.querySelector('{part} + ul').checkVisibility()")


def test_the_outlined_input_stays_in_sight_on_a_phone(browser, images):
    page = browser.open(images, width=360, height=500)
    page.run("document.querySelector('#tree .tree').scrollIntoView({ block: 'end' })")
    page.focus("#tree ul ul > li:nth-child(3) > .part")
    boxes = page.run(
        "return ['#bar', '.outlined', ':focus'].map((name) => document.querySelector(name).getBoundingClientRect())"
    )
    places = [place for box in boxes for place in (box["top"], box["bottom"])]
    assert places == sorted(places)  # the bar, the input and the part lie below each other
    assert places[-1] < 500


def test_another_checkpoint_switches_everything(page):
    assert page.texts(".sentences li")[0] == (
        "parts: after 4 iterations a child\u2019s coefficients are spread over 2 of 8 parents; "
        "with uniform coefficients, over 8."
    )
    page.focus("[data-key=snapshot]")
    page.press("\ue011")  # Home
    page.wait("document.querySelector('.answer').textContent.includes('after epoch 1.')")
    assert "spread over 6 of 8 parents" in page.texts(".sentences li")[0]
    assert page.run("return document.activeElement.dataset.key") == "snapshot"
    assert page.texts(".score .value")[0] == "0.300"


def test_words_tell_their_shares(browser, texts):
    page = browser.open(texts)
    page.focus("[data-key=word-0]")
    page.press(*["\ue014"] * 8)
    assert page.run("return document.activeElement.textContent") == "wonderful"
    assert page.texts(".said") == ["“wonderful” gave 29.1\u00a0% of “positive”: 5.2 times an even share."]
    assert page.texts("tbody tr:first-child *") == ["wonderful", "29.1\u00a0%", "5.2\u00d7"]
    assert "<script>" in page.texts(".word")
    assert page.complaints() == []


def test_all_can_be_reached_by_keys_and_the_focus_is_seen(page):
    page.focus(".skip")
    reached, unseen = [], []
    while True:
        page.press("\ue004")  # Tab
        key, outline = page.run(
            "const f = document.activeElement; return [f.dataset.key ?? f.className, getComputedStyle(f).outlineStyle]"
        )
        if not key and page.run("return document.activeElement === document.body"):
            break
        reached.append(key)
        if outline in ("none", "hidden"):
            unseen.append(key)
    assert unseen == []
    wanted = {"snapshot", "example-0", "class-0", "class-9", "covering", "part", "pose-0", "pose-reset", "change-moved"}
    assert wanted <= set(reached)
    assert "example-1" not in reached  # the arrow keys lead there
