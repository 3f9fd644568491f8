"""The site has a page for every public name and a place for every page."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest

pytest_plugins = ["browser"]

DOCS = Path(__file__).parents[1] / "docs"
MODULES = [
    "torchcaps",
    *(f"torchcaps.{name}" for name in ("functional", "models", "nn", "ops", "routing", "testing")),
    *(f"torchcaps.{name}" for name in ("bench", "data", "deploy", "evaluate", "explain", "live", "training")),
    "torchcaps.explain.page",
]


# What a reader types into the search of the site, and the page that answers.
QUESTIONS = {
    "what is a capsule": "start",
    "average pooling better": "start",
    "CNN": "start",
    "routing algorithms": "algorithms",
    "which routing": "choosing",
    "softmax over whom": "concepts",
    "coefficients": "concepts",
    "why does it not learn": "not-learning",
    "accuracy at chance": "not-learning",
    "nan": "not-learning",
    "saturated parents": "not-learning",
    "learning rates": "not-learning",
    "out of memory": "not-learning",
    "CapsuleHead": "api/capsules",
    "head network": "own-network",
    "own network": "own-network",
    "torchvision timm": "own-network",
    "padding": "own-network",
    "new routing": "own-routing",
    "new algorithm": "own-routing",
    "score and activation": "concepts",
    "memory": "backends",
    "compile": "backends",
    "run out of memory": "speed",
    "how to be faster": "speed",
    "own pictures": "own-images",
    "folder of pictures": "own-images",
    "16 bit": "own-images",
    "CT window": "own-images",
    "patients": "own-images",
    "table of pictures csv": "own-images",
    "own texts": "own-texts",
    "imbalance": "own-images",
    "imbalanced": "own-images",
    "class weights": "own-images",
    "weighted loss": "not-learning",
    "balanced accuracy": "own-images",
    "sampler": "own-images",
    "oversampling": "own-images",
    "rare class": "own-images",
    "imbalanced texts": "own-texts",
    "multi-label": "other-tasks",
    "several labels": "other-tasks",
    "regression": "other-tasks",
    "ECG": "other-tasks",
    "time series": "other-tasks",
    "MRI": "other-tasks",
    "3D volumes": "other-tasks",
    "trained weights": "weights",
    "weights trained elsewhere": "weights",
    "hugging face hub": "weights",
    "predict": "own-images",
    "data set": "data",
    "several machines": "distributed",
    "four GPUs": "distributed",
    "resume": "training",
    "freeze backbone": "how-do-i",
    "fine-tune": "how-do-i",
    "retrieval vector": "how-do-i",
    "largest batch": "how-do-i",
    "decoder own network": "how-do-i",
    "number of iterations": "how-do-i",
    "unknown classes": "how-do-i",
    "uncertainty": "how-do-i",
    "EMA": "how-do-i",
    "accumulate gradients": "how-do-i",
    "AMD": "how-do-i",
    "mps": "how-do-i",
    "CUDA graph": "how-do-i",
    "export without torchcaps": "how-do-i",
    "AOTInductor": "how-do-i",
    "hyperparameters": "hyperparameters",
    "export onnx": "export",
    "attacks": "evaluate",
    "mnist results": "results",
    "cite": "project/citing",
    "squash": "concepts",
    "inverted attention": "papers/tsai2020",
    "Efficient-CapsNet": "papers/mazzia2021",
    "pool sharpness": "papers/zhao2019",
    "routing pool": "papers/zhao2019",
}


def public_names(module: Any) -> list[str]:
    """`__all__`; without it, the names without an underscore that are defined in the module."""
    own = [name for name, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def described() -> dict[str, list[Any]]:
    """Objects that the pages in `docs/api` describe, by their last name."""
    objects: dict[str, list[Any]] = {}
    for page in (DOCS / "api").glob("*.rst"):
        module = None
        for directive, name in re.findall(r"^\.\. ([\w:]+):: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            if directive in ("automodule", "currentmodule"):
                module = importlib.import_module(name)
            if directive == "currentmodule":
                continue
            thing = module if directive == "automodule" else getattr(module, name)
            objects.setdefault(name.rpartition(".")[2], []).append(thing)
    return objects


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_page(module):
    objects, home = described(), importlib.import_module(module)
    missing = [name for name in public_names(home) if not any(x is getattr(home, name) for x in objects.get(name, []))]
    assert not missing, f"docs/api lacks names of {module}: {missing}"


def test_every_page_has_one_place_in_the_table_of_contents():
    places = []
    for page in DOCS.glob("**/*.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            places += [(page.parent / name).resolve().relative_to(DOCS).as_posix() for name in names]
    files = [*DOCS.glob("**/*.md"), *DOCS.glob("**/*.ipynb")]
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in files} - {"index"}
    assert sorted(places) == sorted(pages | {"api/index"})
    contents = (DOCS / "api" / "index.rst").read_text(encoding="utf-8")
    parts = re.findall(r"^   (\w+)$", contents, re.MULTILINE)
    assert sorted(parts) == sorted({path.stem for path in (DOCS / "api").glob("*.rst")} - {"index"})


def test_no_page_has_a_name_that_sphinx_takes_for_its_own():
    assert not {path.stem for path in DOCS.glob("*")} & {"genindex", "py-modindex", "search"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. A warning is an error, such as a link within the site that leads nowhere."""
    for module in ("sphinx", "furo", "latex2mathml", "myst_nb", "sphinx_copybutton"):
        pytest.importorskip(module, reason='the site needs pip install "torchcaps[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.slow
def test_the_site_shows_formulas_tables_and_sources(site):
    page = (site / "api" / "routing.html").read_text(encoding="utf-8")
    assert 'id="torchcaps.DynamicRouting"' in page
    assert "<mfrac>" in page
    assert "_modules/torchcaps/routing/dynamic.html" in page
    assert r"\frac" not in page


@pytest.mark.slow
def test_a_percent_sign_stays_with_its_number(site):
    page = (site / "results.html").read_text(encoding="utf-8")
    assert "19.27\N{NO-BREAK SPACE}%" in page
    assert "19.27 %" not in page


@pytest.mark.slow
def test_the_index_of_names_has_a_sentence_on_each(site):
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    cells = [re.sub(r"<[^>]*>|\s+", " ", cell).strip() for cell in re.findall(r"<td.*?</td>", page, re.DOTALL)]
    sentences = dict(zip(cells[::2], cells[1::2], strict=True))
    assert (
        sentences["CapsuleStack"] == "Stack of capsule layers: the parents of each layer are the children of the next."
    )
    names = {name for objects in described().items() for name in objects[:1]}
    assert len(sentences) > 200
    assert not [name for name, sentence in sentences.items() if len(sentence) < 10 or name not in names]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "page"), QUESTIONS.items())
def test_the_search_answers_in_two_clicks(words, page, site, browser):
    """The page is among the first five that the search finds."""
    finished = "/found|not match/.test(document.getElementById('search-results')?.textContent)"
    browser.open(f"{(site / 'search.html').as_uri()}?q={quote_plus(words)}", drawn=finished)
    script = "return [...document.querySelectorAll('#search-results ul.search li a')].map((link) => link.pathname)"
    results = [Path(path).relative_to(site).with_suffix("").as_posix() for path in browser.run(script)]
    assert page in list(dict.fromkeys(results))[:5]


@pytest.mark.slow
def test_pages_fit_on_a_phone_and_load_nothing_from_elsewhere(site, browser):
    for page in sorted(site.glob("*.html")) + sorted(site.glob("*/*.html")):
        browser.open(page, width=390, drawn="document.readyState === 'complete'")
        assert browser.run("return document.documentElement.scrollWidth") <= 390, page
        assert all(address.startswith("file:") for address in browser.loaded()), page
