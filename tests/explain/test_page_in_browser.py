"""The page of `torchcaps explain` in a real browser: it opens from disk, is complete, and follows mouse and keys."""

import hashlib
import itertools

import pytest
import torch

pytest_plugins = ["browser", "pages"]
pytestmark = pytest.mark.slow

SECTIONS = ["results", "example", "tree", "poses", "moved", "overlaps", "routing", "honest", "figures"]
# The ratio of text to what lies behind it, after WCAG 2.
CONTRASTS = """
const light = (color) => {
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(color[0]) + 0.7152 * part(color[1]) + 0.0722 * part(color[2]);
};
const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const over = (colors) => {
  context.clearRect(0, 0, 1, 1);
  for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
  return [...context.getImageData(0, 0, 1, 1).data];
};
const behind = (element) => element
  ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : ["#fff"];
return [...document.querySelectorAll("body *")].flatMap((element) => {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.checkVisibility() || element.closest("script, style, option, .skip")) return [];
  const style = getComputedStyle(element);
  const ground = behind(element);
  const text = over([...ground, element.closest("svg") ? style.fill : style.color]);
  const [a, b] = [light(text), light(over(ground))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < 4.5 ? [element.outerHTML.slice(0, 90) + ((a + 0.05) / (b + 0.05))] : [];
});
"""
SHOWN = "return [...document.querySelectorAll('main > section:not([hidden])')].map((s) => s.id)"
RIGHT, HOME, END, TAB = "\ue014", "\ue011", "\ue010", "\ue004"


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


@pytest.mark.parametrize("name", ["images", "texts", "labels", "numbers", "masks"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_loads_nothing_and_can_be_read(browser, name, dark, request):
    path = request.getfixturevalue(name)
    browser.open(path, width=360, dark=dark)
    assert browser.complaints() == []
    assert browser.loaded() == [path.as_uri()]
    widths = browser.run("const e = document.documentElement; return [e.scrollWidth, e.clientWidth, window.innerWidth]")
    assert widths[0] == widths[1]  # a narrow page does not scroll sideways
    assert widths[2] == 360
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") == dark
    assert browser.run(CONTRASTS) == []


def test_all_sections_are_there_with_headings_in_order(page, digits_report):
    assert page.run(SHOWN) == SECTIONS
    levels = page.run("return [...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.texts("h1") == ["CapsNet on <digits> & more"]
    assert page.texts("#contents a") == page.texts("main > section:not([hidden]) h2")
    snapshot = digits_report["snapshots"][1]
    accuracy = snapshot["accuracy"]
    assert page.texts(".answer")[0].startswith(f"{100 * accuracy:.1f}\u00a0% right on 60 test inputs, after epoch 25.")
    balanced = f"Classes count equally in the balanced accuracy, which is {100 * snapshot['balanced']:.1f}\u00a0%."
    assert balanced in page.texts(".answer")[0]
    assert balanced in page.texts("#results p")[0]
    assert page.run("return document.querySelector('#figures a').href").endswith("/reconstructions.png")


def test_what_stands_beside_a_class_has_its_name(browser, images, texts):
    page = browser.open(images)
    assert page.texts(".scores .small")[0].startswith("Activations of the class capsules, from 0 to 1")
    page = browser.open(texts)
    assert page.texts(".scores .small")[0].startswith(
        "Probabilities of the classes, calibrated on validation data with a temperature of 2."
    )
    assert page.run(SHOWN) == ["results", "example", "tree", "routing", "honest"]  # sections without data are not there
    assert "Its true class is not known." in page.texts(".answer")[0]


def test_several_labels_and_numbers_are_said(browser, labels, numbers):
    page = browser.open(labels)
    assert page.texts(".answer")[0].startswith("66.7\u00a0% exactly right on 3 test inputs.")
    assert page.texts(".verdict")[0] == "The network says \u201cdoor\u201d and \u201c<chair>\u201d, which is right."
    assert page.texts(".score .note") == ["\u25c0 answer \u2605 true", "", "\u25c0 answer \u2605 true"]
    assert page.texts(".scores .value") == ["99.8\u00a0%", "1.8\u00a0%", "99.8\u00a0%"]
    page.run("document.querySelectorAll('.thumb')[2].click()")
    page.wait("document.querySelector('.verdict').textContent.includes('no label')")
    assert page.texts(".verdict")[0] == "The network says no label, which is wrong: it has \u201cdoor\u201d."
    page = browser.open(numbers)
    said = "x door 6 (true: 6.5), window \u22124 (true: \u22124) and <chair> 6 (true: 6).".removeprefix("x ")
    assert page.texts(".verdict")[0] == f"The network says {said}"
    assert page.texts(".scores h3") == ["What it says"]
    assert page.texts(".thumb .sign") == []
    page.run("document.querySelectorAll('.score')[2].click()")
    page.wait("document.querySelector('#tree .part .name').textContent === '<chair>'")
    assert browser.complaints() == []


def test_everything_that_is_seen_has_a_name(page):
    nameless = """
    const named = (e) => e.matches("img") ? e.hasAttribute("alt")
      : e.getAttribute("role") === "img" && e.getAttribute("aria-label");
    const labeled = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length;
    const pictures = [...document.querySelectorAll("img, canvas, svg")].filter((e) => !named(e));
    const controls = [...document.querySelectorAll("button, input, select, a")].filter((e) => !labeled(e));
    return [...pictures, ...controls].map((e) => e.outerHTML);
    """
    assert page.run(nameless) == []
    empty = "return [...document.querySelectorAll('img')].filter((e) => !e.alt && !e.closest('button, a')).length"
    assert page.run(empty) == 0  # only pictures in buttons and links that have names of their own


def test_charts_have_ticks_names_and_descriptions(page):
    found = page.run(
        "return [...document.querySelectorAll('.chart')].map((chart) => [chart.querySelectorAll('.grid').length, "
        "...['title', 'desc'].map((name) => chart.querySelector(name).textContent), "
        "chart.querySelectorAll('.axis').length])"
    )
    assert len(found) == 11
    assert all(ticks >= 2 and title and description and axes >= 2 for ticks, title, description, axes in found)
    outside = """
    return [...document.querySelectorAll(".chart text")].filter((text) => {
      const [box, own] = [text.closest("svg").getBoundingClientRect(), text.getBoundingClientRect()];
      return own.left < box.left - 2 || own.right > box.right + 2;
    }).map((text) => text.textContent)
    """
    assert page.run(outside) == []


def test_a_table_says_that_it_scrolls(browser, images):
    hint = "return document.querySelector('.confusion').closest('.table').querySelector('.hint').checkVisibility()"
    assert browser.open(images, width=360).run(hint)
    assert not browser.open(images).run(hint)


def test_a_slider_of_a_pose_changes_its_picture(page):
    cells = [f".cell:nth-child({place}) canvas" for place in (1, 2)]
    for cell in cells:
        page.wait(f"document.querySelector('{cell}').dataset.drawn")
    start = [pixels(page, cell) for cell in cells]
    page.focus("[data-key=pose-0]")
    assert changed(page, cells[0], lambda: page.press(RIGHT, RIGHT, RIGHT))
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
    said = page.texts("#moved .verdict")[0]
    assert said.startswith("With the input as it was the network says “0”, with an activation of 0.")
    assert changed(page, canvases[0], lambda: set_slider(page, "[data-key=change-turned]", 0))
    assert pixels(page, canvases[1]) != before
    assert page.run(cursor) != place
    assert page.texts("#moved .verdict")[0].startswith("With the input turned by \u221260 degrees the network says “")


def test_a_class_changes_maps_and_tree(page):
    assert page.texts("#example h3")[-1] == "Where “0” comes from"
    page.focus("[data-key=class-7]")
    assert changed(page, ".map", lambda: page.press(" "))
    assert page.texts("#example h3")[-1] == "Where “7” comes from"
    assert page.texts("#tree .part .name")[0] == "7"
    assert page.run("return document.activeElement.dataset.key") == "class-7"  # drawn anew, the focus is kept
    assert page.run("return document.getElementById('class').value") == "7"
    page.run("const c = document.getElementById('class'); c.value = 2; c.dispatchEvent(new Event('change'))")
    page.wait("document.querySelector('#tree .name').textContent === '2'")
    page.focus("[data-key=covering]")
    assert changed(page, ".map", lambda: page.press(" "))  # the input under a map is hidden


def test_arrow_keys_choose_an_example(page):
    page.focus("[data-key=example-0]")
    page.press(RIGHT)
    page.wait("document.querySelector('.verdict').textContent.includes('“1”, which is right')")
    assert page.run("return document.activeElement.dataset.key") == "example-1"
    assert page.texts(".score .note")[:3] == ["", "◀ answer ★ true", ""]
    page.press(END)
    page.wait("document.querySelector('.verdict').textContent.includes('“3”')")
    assert page.run("return document.querySelectorAll('.thumb[tabindex=\"0\"]').length") == 1


def test_the_tree_outlines_what_has_the_focus_and_stays_in_sight_on_a_phone(browser, images):
    page = browser.open(images, width=360, height=500)
    page.run("document.querySelector('#tree .tree').scrollIntoView({ block: 'end' })")
    assert changed(page, ".outlined", lambda: page.focus("#tree ul ul > li:nth-child(3) > .part"))
    boxes = page.run(
        "return ['#bar', '.outlined', ':focus'].map((name) => document.querySelector(name).getBoundingClientRect())"
    )
    places = [place for box in boxes for place in (box["top"], box["bottom"])]
    assert places == sorted(places)  # the bar, the input and the part lie below each other
    assert places[-1] < 500


def test_one_part_of_the_tree_is_outlined(page, digits_report):
    example = digits_report["snapshots"][1]["examples"][0]
    parts = example["trees"][example["predicted"]]["parts"]
    said = page.texts("#tree figcaption")
    assert said == [f"Outlined: {parts[0]['name']}, the strongest part of 0 that has a place here."]
    page.focus("#tree ul ul > li:nth-child(3) > .part")
    assert page.texts("#tree figcaption") == [f"Outlined: {parts[2]['name']}."]
    # The color of the outline is on the sides of this part's box and nowhere else.
    found = page.run(
        "const drawn = document.querySelector('.outlined'), { width, height } = drawn;"
        "const bytes = drawn.getContext('2d').getImageData(0, 0, width, height).data;"
        "const places = [...Array(width * height).keys()].filter((k) => bytes[4 * k] > 240 && bytes[4 * k + 2] < 120);"
        "return places.map((k) => [(k % width) / width, Math.floor(k / width) / height])"
    )
    left, top, right, bottom = parts[2]["box"]
    assert len(found) > 100
    assert all(min(abs(x - left), abs(x - right)) < 0.02 or min(abs(y - top), abs(y - bottom)) < 0.02 for x, y in found)


@pytest.mark.parametrize("name", ["images", "labels", "numbers"])
@pytest.mark.parametrize("width", [1360, 390])
def test_no_row_is_left_empty_at_its_end(browser, name, width, request):
    page = browser.open(request.getfixturevalue(name), width=width)
    ends = page.run(
        "return [...document.querySelectorAll('.charts, .maps, .cards, .card.side, .beside, .change')].map((row) => ["
        "row.className, row.getBoundingClientRect().right - parseFloat(getComputedStyle(row).paddingRight)"
        " - Math.max(...[...row.children].slice(-1).map((last) => last.getBoundingClientRect().right))])"
    )
    assert len(ends) >= 3
    assert [(name, gap) for name, gap in ends if gap > 24] == []


def test_words_fit_any_picture(browser, labels):
    said = browser.open(labels).run("return document.body.innerText").lower()
    assert "an edge, a corner, a whole object" in said
    assert not any(word in said for word in ("digit", "stroke", "handwrit"))
    assert browser.run("return document.querySelector('.scores').getAttribute('aria-label')") == "The labels"


def test_the_tree_opens_by_keys(browser, texts):
    page = browser.open(texts)
    part = "#tree ul ul > li:first-child > .part"
    opened = f"return document.querySelector('{part}').getAttribute('aria-expanded')"
    page.focus(part)
    assert page.run(opened) == "false"
    page.press(" ")
    assert page.run(opened) == "true"
    assert set(page.texts(f"{part} + ul > li > .part .name")) <= set(page.texts(".word"))
    assert page.texts(f"{part} + ul > .rest .name") == ["all others together"]
    page.press(" ")
    assert not page.run(f"return document.querySelector('{part} + ul').checkVisibility()")


def test_another_checkpoint_switches_everything(page, digits_report):
    before = page.texts(".sentences li")[0]
    assert before.startswith("class_capsules: after 3 iterations a child\u2019s coefficients are spread over ")
    page.focus("[data-key=snapshot]")
    page.press(HOME)
    page.wait("document.querySelector('.answer').textContent.includes('after epoch 1.')")
    assert page.texts(".sentences li")[0] != before
    assert page.run("return document.activeElement.dataset.key") == "snapshot"
    first = digits_report["snapshots"][0]["examples"][0]["scores"][0]
    assert page.texts(".score .value")[0] == f"{float(first):.3f}"


def test_words_tell_their_shares(browser, texts, text_report):
    page = browser.open(texts)
    page.focus("[data-key=word-0]")
    page.press(*[RIGHT] * 8)
    assert page.run("return document.activeElement.textContent") == "wonderful"
    (example,) = text_report["snapshots"][0]["examples"]
    shares = example["word_shares"][example["predicted"]]
    share, ratios = float(shares[8]), torch.as_tensor(shares) / torch.as_tensor(example["word_even"])
    assert page.texts(".said")[0].startswith(f"“wonderful” gave {100 * share:.1f}\u00a0% of ")
    shades = "return [...document.querySelectorAll('.word')].map((word) => +word.style.getPropertyValue('--share'))"
    beyond_even = (ratios - 1).clamp_min(0) / (max(float(ratios.max()), 2) - 1)
    assert page.run(shades) == pytest.approx(beyond_even.tolist(), abs=1e-3)
    assert "<script>" in page.texts(".word")
    assert page.complaints() == []


def test_all_can_be_reached_by_keys_and_the_focus_is_seen(page):
    page.focus(".skip")
    reached, unseen = [], []
    while True:
        page.press(TAB)
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
