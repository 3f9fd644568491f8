"""The page of `torchcaps explain` in a real browser: it opens from disk, is complete, and follows mouse and keys."""

import itertools

import pytest

pytest_plugins = ["browser", "pages"]

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


@pytest.mark.parametrize("name", ["images", "texts"])
def test_nothing_is_loaded_and_nothing_goes_wrong(browser, name, request):
    path = request.getfixturevalue(name)
    browser.open(path)
    assert browser.complaints() == []
    assert browser.loaded() == [path.as_uri()]
    assert browser.run("return document.documentElement.lang") == "en"


def test_all_sections_are_there_with_headings_in_order(page):
    assert (
        page.run("return [...document.querySelectorAll('main > section:not([hidden])')].map((s) => s.id)") == SECTIONS
    )
    levels = page.run("return [...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.texts("h1") == ["CapsNet on <digits> & more"]
    assert page.texts("#contents a") == page.texts("main h2")
    assert page.texts(".answer")[0].startswith("99.0\u00a0% right on 360 test inputs, after epoch 25.")


def test_sections_without_data_are_not_there(browser, texts):
    browser.open(texts)
    shown = browser.run("return [...document.querySelectorAll('main > section:not([hidden])')].map((s) => s.id)")
    assert shown == ["example", "tree"]
    assert browser.texts(".answer") == [" On the example below it says “positive”. Its true class is not known."]


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


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["images", "texts"])
def test_a_narrow_page_does_not_scroll_sideways(browser, name, dark, request):
    browser.open(request.getfixturevalue(name), width=360, dark=dark)
    widths = browser.run("const e = document.documentElement; return [e.scrollWidth, e.clientWidth, window.innerWidth]")
    assert widths[0] == widths[1]
    assert widths[2] == 360


@pytest.mark.parametrize("name", ["images", "texts"])
@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(browser, name, dark, request):
    browser.open(request.getfixturevalue(name), dark=dark)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") == dark
    assert browser.run(CONTRASTS) == []


def test_links_lead_to_figures_beside_the_page(page, images):
    assert page.run("return document.querySelector('#figures a').href") == (
        images.parent.as_uri() + "/reconstructions.png"
    )


def test_charts_have_ticks_names_and_descriptions(page):
    found = page.run(
        "return [...document.querySelectorAll('.chart')].map((chart) => [chart.querySelectorAll('.grid').length, "
        "...['title', 'desc'].map((name) => chart.querySelector(name).textContent), "
        "chart.querySelectorAll('.axis').length])"
    )
    assert len(found) == 12
    assert all(ticks >= 2 and title and description and axes >= 2 for ticks, title, description, axes in found)
    outside = """
    return [...document.querySelectorAll(".chart text")].filter((text) => {
      const [box, own] = [text.closest("svg").getBoundingClientRect(), text.getBoundingClientRect()];
      return own.left < box.left - 2 || own.right > box.right + 2;
    }).map((text) => text.textContent)
    """
    assert page.run(outside) == []
