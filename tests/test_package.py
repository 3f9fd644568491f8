"""The package: its version, its files, and the workflows that test and publish it."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import torchcaps

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA = PROJECT["tool"]["setuptools"]["package-data"]["torchcaps"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ["3.11", "3.12", "3.13"]


def test_the_version_is_that_of_the_newest_release():
    release = re.search(r"^## (\d+\.\d+\.\d+)\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert release, "CHANGELOG.md has no heading of a release, such as ## 0.2.0"
    assert torchcaps.__version__ == release[1]
    assert f"version: {torchcaps.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "torchcaps._version.__version__"}


def test_the_page_for_citing_has_every_paper_and_the_version():
    page = (ROOT / "docs" / "project" / "citing.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f"version = {{{torchcaps.__version__}}}" in page
    (of_the_readme,) = re.findall(r"@software{.*?\n}\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert of_the_readme in page
    entries = [block for block in page.split("\n\n") if "title = " in block]
    for paper in citation["references"]:
        (entry,) = (block for block in entries if f"title = {{{{{paper['title']}}}}}," in block)
        assert f"year = {{{paper['year']}}}" in entry
        assert all(author["family-names"] in entry for author in paper["authors"])
    keys = re.findall(r"^@\w+{(\w+),$", page, re.MULTILINE)
    assert [f"`{key}`" for key in keys if key != "torchcaps"] == re.findall(r"\| (`\w+`) \|$", page, re.MULTILINE)


def test_every_file_of_the_package_is_packed():
    package = ROOT / "torchcaps"
    packed = {pattern: {path for path in package.glob(pattern) if path.is_file()} for pattern in DATA}
    assert all(packed.values()), packed
    built = {
        ".py",
        ".pyc",
        ".cpp",
        ".h",
        ".so",
        ".lock",
    }  # code and locks; MANIFEST.in has the C++
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in built}
    assert files - set().union(*packed.values()) <= {package / "ops" / "native" / "why_not.txt"}


def test_the_tests_run_on_every_python_that_is_declared():
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert declared == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    assert tests["jobs"]["tests"]["strategy"]["matrix"]["python"] == PYTHONS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_exact_versions_and_may_only_read(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", action), action
    for target in re.findall(r"run: make (\S+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


@pytest.mark.slow
def test_what_is_in_the_wheel_and_in_the_source_distribution(tmp_path):
    """Built without a compiler, in a minute. `.ci/run` builds and installs the wheel with kernels."""
    environment = {**os.environ, "CC": "no-compiler", "CXX": "no-compiler"}
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], env=environment, check=True)
    (wheel,), (sources,) = tmp_path.glob("*-py3-none-any.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        information = f"torchcaps-{torchcaps.__version__}.dist-info"
        metadata = message_from_bytes(archive.read(f"{information}/METADATA"))
    package = ROOT / "torchcaps"
    files = {path for pattern in ["**/*.py", *DATA] for path in package.glob(pattern) if path.is_file()}
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    assert {name.partition("/")[0] for name in names} == {"torchcaps", information}
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    assert links
    assert all(link.startswith(("https:", "#")) for link in links), links
    with tarfile.open(sources) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "constraints.txt", "torchcaps/ops/native/kernels.cpp", "torchcaps/ops/native/vector.h"} <= inner
    assert not any(name.startswith(("tests", "docs")) for name in inner)
