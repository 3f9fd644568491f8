"""The notebooks run, say what is true, and carry the outputs of their own code.

Their cells run here without a kernel. `python docs/notebooks.py` makes the outputs anew.
"""

import ast
import base64
import contextlib
import io
import json
import re
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn", reason='the notebooks need pip install "torchcaps[train]"')
plt = pytest.importorskip("matplotlib.pyplot")
from matplotlib.figure import Figure  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
SITE = "https://torchcaps.github.io/torchcaps/"
COLAB = "https://colab.research.google.com/github/torchcaps/torchcaps/blob/main/docs/notebooks/"
NUMBER = re.compile(r"-?\d[\d.,]*")

of_each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def text(path: Path) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(x["text"]) for x in cell["outputs"] if x["output_type"] == "stream")


def pictures(cell: dict[str, Any]) -> list[bytes]:
    return [base64.b64decode(x["data"]["image/png"]) for x in cell["outputs"] if "image/png" in x.get("data", {})]


def run(source: str, names: dict[str, Any]) -> tuple[str, int]:
    """Run a cell; return what it prints, and how many figures a notebook shows below it."""
    body = ast.parse(re.sub(r"(?m)^%.*\n", "", source)).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
    assert value is None or isinstance(value, Figure), f"a cell shows {value!r}"
    figures = len(plt.get_fignums()) + isinstance(value, Figure)
    plt.close("all")
    return out.getvalue(), figures


@pytest.mark.notebooks
@of_each
def test_a_notebook_runs_and_its_outputs_are_its_own(path, tmp_path, monkeypatch):
    """The asserts of its cells hold what it says. Numbers may differ between machines, so only the words of the outputs
    are compared with the committed ones."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"notebook_{path.stem.replace('-', '_')}")
    with plt.rc_context({"backend": "Agg"}), warnings.catch_warnings():
        warnings.simplefilter("error")
        for cell in cells(path, "code"):
            source = "".join(cell["source"])
            out, figures = run(source, module.__dict__)
            assert NUMBER.sub("#", out).split() == NUMBER.sub("#", printed(cell)).split(), source
            assert figures == len(pictures(cell)), source


@of_each
def test_outputs_are_whole_and_private(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < 300_000
    assert any(pictures(cell) for cell in code)
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name", "stdout") == "stdout", output["text"]  # no warning
            words = json.dumps({kind: x for kind, x in output.get("data", {}).items() if kind != "image/png"})
            assert not re.search(r"/home|/root|/Users|/work|/tmp|site-packages|0x[0-9a-f]{6}", words + printed(cell))
        assert all(picture.startswith(b"\x89PNG") for picture in pictures(cell))


@of_each
def test_a_notebook_says_how_to_open_it_and_its_links_lead_somewhere(path):
    first = "".join(cells(path, "markdown")[0]["source"])
    assert f"]({COLAB}{path.name})" in first
    assert 'pip install "torchcaps[train] @ git+https://github.com/torchcaps/torchcaps"' in first
    for target in re.findall(r"\]\(([^)\s]+)\)", text(path)):
        if target.startswith(SITE):
            name = target.removeprefix(SITE).partition("#")[0]
            assert (DOCS / name).with_suffix(".md").exists(), target  # Sphinx checks the anchor, see docs/conf.py
        elif not target.startswith("https:"):
            assert (path.parent / target).exists(), target
