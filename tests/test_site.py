"""The site has a page for every public name and a place for every page."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
MODULES = [
    "torchcaps",
    *(f"torchcaps.{name}" for name in ("functional", "models", "nn", "ops", "routing", "testing")),
    *(f"torchcaps.{name}" for name in ("bench", "data", "deploy", "evaluate", "explain", "training")),
    *("torchcaps.explain.live", "torchcaps.explain.page"),
]


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
            places += [(page.parent / name).relative_to(DOCS).as_posix() for name in names]
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.glob("**/*.md")} - {"index"}
    assert sorted(places) == sorted(pages | {"api/index"})
    contents = (DOCS / "api" / "index.rst").read_text(encoding="utf-8")
    parts = re.findall(r"^   (\w+)$", contents, re.MULTILINE)
    assert sorted(parts) == sorted({path.stem for path in (DOCS / "api").glob("*.rst")} - {"index"})


def test_no_page_has_a_name_that_sphinx_takes_for_its_own():
    assert not {path.stem for path in DOCS.glob("*")} & {"genindex", "py-modindex", "search"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Among the warnings are links within the site that lead nowhere."""
    for module in ("sphinx", "furo", "latex2mathml", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(module, reason='the site needs pip install "torchcaps[docs]"')
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path / "site")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "site" / "index.html").exists()
    assert "torchcaps.CapsuleLinear" in (tmp_path / "site" / "api" / "capsules.html").read_text(encoding="utf-8")
