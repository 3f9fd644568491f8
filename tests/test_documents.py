"""The documentation agrees with the package."""

import argparse
import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, call

import torchcaps
from torchcaps.cli import parser
from torchcaps.cli.arguments import changes_in
from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.testing import assert_routing_laws, assert_stacks_are_alive
from torchcaps.training.build import recipe_parser
from torchcaps.training.values import Values

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("**/*.md"))
# A claim of the code on a page: `name = ...  # (2, 10)`, or `name = ...  # what it is: name.poses: (2, 10)`.
CLAIM = re.compile(r"^ *(\w+) = .*  # (?:.*?\b([\w.]+): )?(\(\d[\d, ]*\))", re.MULTILINE)
OVERRIDE = re.compile(r"--(model|data|trainer)\.[\w.+]+|--data|--seed_everything")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), flags=re.DOTALL)


PYTHON = [page for page in PAGES if blocks("python", page)]


def prose(page: str) -> str:
    """The page without its Python and YAML."""
    return re.sub(r"```\w+\n.*?```", "", read(page), flags=re.DOTALL)


def spans(page: str) -> list[str]:
    """Inline code."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def command_lines(page: str) -> list[str]:
    """Lines of indented code."""
    return re.findall(r"^    (.*)$", re.sub(r" *\\\n *", " ", prose(page)), flags=re.MULTILINE)


def words(line: str, name: str) -> list[str] | None:
    """Words of a shell command after the program's name; None if it calls no such program."""
    if not re.search(rf"(^|[\s/]){name}(\s|$)", line):
        return None
    found = shlex.split(line, comments=True)
    at = next((i for i, word in enumerate(found) if word == name or word.endswith(f"/{name}")), None)
    if at is None:
        return None
    quoted = shlex.split(line, comments=True, posix=False)  # a "|" in quotes ends no command
    end = next((i for i, word in enumerate(quoted) if i > at and re.match(r"[|&;>]", word)), len(found))
    return found[at + 1 : end]


@cache
def run(page: str) -> dict[str, Any]:
    """Run the Python of a page from top to bottom; check the shapes that its comments claim."""
    module = types.ModuleType(f"page_{Path(page).stem.replace('-', '_')}")
    sys.modules[module.__name__] = module  # recipes look for routings by name, also among those of a page
    namespace: dict[str, Any] = module.__dict__
    for block in blocks("python", page):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Capsule")  # no example begins as no network should
            exec(block, namespace)
        for name, described, shape in CLAIM.findall(block):
            value = eval(described or name, namespace)
            assert tuple(value.shape) == ast.literal_eval(shape), described or name
    return namespace


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    names = run(page)
    assert names
    if page == "README.md":
        assert names["accuracy"] > 0.85


def test_the_page_of_runs_continues_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("train", "quickstart", "--trainer.max_epochs", "1", *TINY) == 0
    assert 0 <= run("docs/training.md")["continued"]("quickstart") <= 1
    assert Path("runs/quickstart/version_1/checkpoints/last.ckpt").is_file()


def test_the_routing_of_the_page_is_a_whole_algorithm():
    routing = run("docs/own-routing.md")["TemperedRouting"](temperature=2.0)
    assert_routing_laws(routing)
    assert_stacks_are_alive(routing)
    layer = torchcaps.CapsuleLinear(4, 3, 2, 2, routing)
    assert layer.routing.log_temperature.exp().item() == pytest.approx(2)


def holds(values: Any, changes: Any) -> bool:
    if not isinstance(changes, dict):
        return values == changes
    return all(key in values and holds(values[key], change) for key, change in changes.items())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("yaml", page)])
def test_the_recipes_of_a_page_extend_ours(page, tmp_path):
    for number, text in enumerate(blocks("yaml", page)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        recipe, changes = load_recipe(str(path)), yaml.safe_load(text)
        assert changes.pop("extends")
        assert len(recipe.files) == 2
        assert holds(recipe.config, changes)


def test_a_recipe_that_names_another_class_drops_the_arguments_of_the_class_before(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(blocks("yaml", "docs/training.md")[1])
    optimizer = load_recipe(str(path)).config["model"]["optimizer"]
    assert optimizer == {"class_path": "torch.optim.RAdam", "init_args": {"lr": 0.0005}}


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def quoted_lines(page: str) -> Iterator[tuple[str, list[str]]]:
    """Inline code in the last column of each table in "Equations and code", with the files that are named above it."""
    section = re.search(r"^## Equations and code\n(.*?)(?=^## |\Z)", read(page), flags=re.DOTALL | re.MULTILINE)
    assert section
    files: list[str] = []
    for block in re.split(r"\n\s*\n", section[1].strip()):
        if not block.startswith("|"):
            links = re.findall(r"\]\((\.\.[^)#\s]+\.py)\)", block)
            files = [((ROOT / page).parent / link).read_text(encoding="utf-8") for link in links] or files
            continue
        for row in block.splitlines()[2:]:
            cell = re.split(r"(?<!\\)\|", row.rstrip().removesuffix("|"))[-1].replace(r"\|", "|")
            yield from ((code, files) for code in re.findall(r"`([^`]+)`", cell))


@pytest.mark.parametrize("page", [page for page in PAGES if "## Equations and code\n" in read(page)])
def test_the_lines_of_code_beside_equations_are_in_the_source(page):
    """A line of the source that changes makes the page that quotes it red."""
    lines = list(quoted_lines(page))
    assert lines
    for code, files in lines:
        assert any(" ".join(code.split()) in " ".join(file.split()) for file in files), code


def test_every_page_is_in_an_index():
    """In that of its folder, and this one in the first."""
    pages = {page for page in PAGES if page.startswith("docs/")}
    index = {page: "docs/index.md" if page.endswith("/index.md") else f"{Path(page).parent}/index.md" for page in pages}
    named = {page for page in pages if f"]({Path(page).relative_to(Path(index[page]).parent)})" in read(index[page])}
    assert pages - named == {"docs/index.md"}


@pytest.mark.parametrize("page", PAGES)
def test_recipes_exist(page):
    known = {"/".join(name.split("/")[:depth]) for name in list_recipes() for depth in (1, 2, 3)}
    papers = "|".join({name.partition("/")[0] for name in list_recipes() if "/" in name})
    for name in re.findall(rf"(?<!models/)\b(?:{papers})/[\w./-]+", read(page)):
        assert re.sub(r"\.$|/$|\.yaml$", "", name) in known, name


def check_flags(command: str, arguments: list[str]) -> None:
    """Check that a command has the options, or takes them as values of a recipe."""
    commands = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    assert command in commands, f"torchcaps {command}"
    own = commands[command]
    for flag in (argument.partition("=")[0] for argument in arguments if re.match("--[a-z]", argument)):
        is_value = own.get_default("takes_overrides") and OVERRIDE.fullmatch(flag)
        assert flag in own._option_string_actions or is_value, f"torchcaps {command} {flag}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_are_mentioned(page):
    for line in command_lines(page):
        arguments = words(line, "torchcaps")
        if arguments:
            options, rest = parser().parse_known_args(arguments)  # exits if an argument is missing
            check_flags(options.command, rest)
    for span in spans(page):
        arguments = words(span, "torchcaps") if span.startswith("torchcaps ") else None
        if arguments and not arguments[0].isupper():  # not COMMAND
            check_flags(arguments[0], arguments[1:])


def overridden(page: str) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """Recipes of our own, whether in their small versions, with the values that a page's commands override."""
    for line in command_lines(page):
        arguments = words(line, "torchcaps")
        options, overrides = parser().parse_known_args(arguments) if arguments else (None, [])
        if overrides and options.recipe in list_recipes():
            options.tokens = overrides
            yield options.recipe, options.small, tuple(changes_in(options))


@pytest.mark.parametrize(("name", "small", "overrides"), dict.fromkeys(x for page in PAGES for x in overridden(page)))
def test_recipes_have_the_values_that_are_overridden(name, small, overrides, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torchcaps"])  # Lightning warns of pytest's own arguments
    recipe_parser(logs=False).parse_object(Values.of(load_recipe(name, small), overrides).merged)


@pytest.mark.parametrize("page", PAGES)
def test_modules_make_targets_and_files_exist(page):
    code = [*command_lines(page), *spans(page)]
    for line in code:
        for module in re.findall(r"python -m (torchcaps[\w.]*)", line):
            assert "NAME" in module or importlib.util.find_spec(module), line
        for target in re.findall(r"^make ([\w./-]+)", line):
            assert re.search(rf"^{re.escape(target)}:", read("Makefile"), flags=re.MULTILINE), line
        for path in re.findall(r"(?<![\w/.])(?:torchcaps|tests|docs)/[\w/.-]+", line):
            assert (ROOT / path).exists(), path


def imports_at_the_top(parent: ast.AST) -> Iterator[ast.ImportFrom]:
    """Imports that run with a module, also those inside `with`, `try` and `if`; not those for type checkers alone."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ImportFrom):
            yield node
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.With | ast.Try | ast.ExceptHandler | ast.If) and not for_types:
            yield from imports_at_the_top(node)


def test_imports_point_one_way():
    """No arrow up, and no cycle. Imports inside functions do not count."""
    order = ("utils", "capsules", "ops", "routing", "nn", "functional testing models", "data recipes", "measures")
    order += ("explain", "training", "runs", "reproduce search bench", "deploy evaluate", "live", "cli")
    ranks = {f"torchcaps.{part}": rank for rank, parts in enumerate(order) for part in parts.split()}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "torchcaps").rglob("*.py")
    }

    def rank_of(module: str) -> int | None:
        return ranks.get(".".join(module.split(".")[:2]))

    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        for node in imports_at_the_top(ast.parse(path.read_text(encoding="utf-8"))):
            home = node.module or ""
            if home.startswith("torchcaps"):
                inner = {f"{home}.{x.name}" for x in node.names} & modules.keys()
                graph.setdefault(name, set()).update((inner or {home}) - {name})
                up, here = rank_of(home), rank_of(name)
                assert up is None or here is None or up <= here, f"{name} imports {home}"
    TopologicalSorter(graph).prepare()


def test_every_public_name_is_there_once():
    for module in (torchcaps, torchcaps.functional):
        assert len(module.__all__) == len(set(module.__all__))


def test_the_core_imports_torch_alone():
    code = "import sys, torch; before = set(sys.modules); import torchcaps, torchcaps.testing; "
    code += "print(*{m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(run.stdout.split()) <= {"torchcaps", "torch"}, run.stdout
