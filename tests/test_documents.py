"""What the README and the package say about themselves is true."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

import torchcaps
from torchcaps.recipes import load_recipe
from torchcaps.testing import assert_routing_laws, assert_stacks_are_alive

ROOT = Path(__file__).parent.parent


def blocks(language: str, document: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_python_of_the_readme_runs():
    namespace: dict = {}
    exec("\n".join(blocks("python")), namespace)
    assert namespace["layer"].backend == "tiled"
    assert set(namespace["backends"]()) == {"reference", "tiled", "native", "triton"}
    assert namespace["digits"].poses.shape == (2, 10, 16)
    assert namespace["grid"].poses.shape == (2, 32, 7, 7, 4, 4)
    assert namespace["scores"].shape == (2, 10)
    assert sum(p.numel() for p in namespace["model"].parameters()) == 8_215_568


def test_the_routing_of_contributing_is_a_whole_algorithm():
    namespace: dict = {}
    exec("\n".join(blocks("python", "CONTRIBUTING.md")), namespace)
    routing = namespace["TemperedRouting"](temperature=2.0)
    assert_routing_laws(routing)
    assert_stacks_are_alive(routing)
    layer = torchcaps.CapsuleLinear(4, 3, 2, 2, routing)
    assert layer.routing.log_temperature.exp().item() == pytest.approx(2)


def test_imports_point_one_way():
    """No cycle, and no arrow up, among the modules of the core."""
    ranks = {"checks": 0, "private": 0, "capsules": 1, "ops": 2, "routing": 3, "nn": 4, "functional": 5, "testing": 5, "models": 5}
    package = ROOT / "torchcaps"
    imports: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        part = [*name.split("."), ""][1]
        if part not in ranks:
            continue
        imports[name] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # not those inside functions
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchcaps"):
                found = node.module or ""
                names = [f"{found}.{x.name}" for x in node.names]
                paths = {x: ROOT / x.replace(".", "/") for x in names}
                modules = {x for x, at in paths.items() if at.with_suffix(".py").exists() or at.is_dir()}
                imports[name] |= modules or {found}
                own = [*found.split("."), ""][1]
                assert ranks[own] <= ranks[part], f"{name} imports {found}"
    graph = TopologicalSorter({k: {x for x in v if x in imports and x != k} for k, v in imports.items()})
    graph.prepare()


def test_the_recipe_of_the_readme_extends_one_of_ours(tmp_path):
    recipe, _ = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(recipe)
    assert len(load_recipe(str(tmp_path / "mine.yaml")).files) == 2
    assert yaml.safe_load(recipe)["model"]["network"]["init_args"] == {"iterations": 5}


def test_every_public_name_is_there():
    for module in (torchcaps, torchcaps.functional):
        assert all(hasattr(module, name) for name in module.__all__)
        assert len(module.__all__) == len(set(module.__all__))


def test_the_core_imports_torch_alone():
    code = "import sys, torch; before = set(sys.modules); import torchcaps, torchcaps.testing; "
    code += "print(*{m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(run.stdout.split()) <= {"torchcaps", "torch"}, run.stdout


def test_version():
    assert f'version = "{torchcaps.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {torchcaps.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_no_control_character_in_any_source():
    """A backslash of an equation that a string has swallowed."""
    for path in (ROOT / "torchcaps").rglob("*.py"):
        assert not re.search(r"[^\n\x20-\x7e\xa0-\uffff]", path.read_text(encoding="utf-8")), path
