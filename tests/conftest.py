"""Data for tests."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers that share their cores are many times slower than one by one

import torch

if not torch.cuda.is_available():
    # Before Triton is imported, which Lightning does too: kernels then run in Python, on any device.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from noise import accept_hashes, write_all, write_idx_files
from parts import measured, parts_of, read_part, write_measured


def _patch_the_language_once() -> None:
    """Let Triton's interpreter replace the functions of its language once for each kernel, and not again for each
    function that the kernel calls, which is half the time of a test."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # other versions than 3.6 to 3.8
        return
    patch, done = interpreter._patch_lang, set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            done.clear()
            super().restore()

    def patch_once(fn):
        scope = Scope()
        modules = {id(x) for x in fn.__globals__.values() if x is interpreter.tl or x is interpreter.tl.core}
        if not modules <= done:
            done.update(modules)
            scope._changes = patch(fn)._changes
        return scope

    interpreter._patch_lang = patch_once


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _patch_the_language_once()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=read_part, help="such as 3/10: this part of the chosen tests, all equally long")
    parser.addoption("--write-seconds", action="store_true", help="write the CPU seconds of tests into their table")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-seconds"):
        config.pluginmanager.register(Seconds(), "seconds")


class Seconds:
    """Writes into the table of parts how many seconds each test took of the processors, child processes included."""

    def __init__(self) -> None:
        self.start, self.taken = 0.0, dict[str, float]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.start = sum(os.times()[:4])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.when == "teardown":
            item.user_properties.append(("seconds", sum(os.times()[:4]) - self.start))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.taken[report.nodeid] = dict(report.user_properties)["seconds"]

    def pytest_sessionfinish(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            write_measured(self.taken)


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_what_is_newer(items)
    if config.getoption("--part"):
        part, count = config.getoption("--part")
        parts = parts_of([item.nodeid for item in items], count, measured())
        config.hook.pytest_deselected(items=[item for item, its in zip(items, parts, strict=True) if its != part])
        items[:] = [item for item, its in zip(items, parts, strict=True) if its == part]


def _skip_what_is_newer(items: list[pytest.Item]) -> None:
    """Skip what is promised for newer versions of PyTorch only, see docs/backends.md."""
    if torch.__version__ < torch.torch_version.TorchVersion("2.7"):
        skip = pytest.mark.skip(reason="PyTorch 2.6 cannot compile or export the layers")
        old = pytest.mark.skip(reason="the interpreter of Triton 3.2 lacks a type of numbers")
        for item in items:
            if "compile" in item.name or "export" in item.name:
                item.add_marker(skip)
            runs_kernels = item.path.name in ("test_layers.py", "test_operators.py") and "triton" in item.name
            runs_kernels |= item.path.name == "test_device_check.py" and "small" in getattr(item, "fixturenames", ())
            if item.path.name in ("test_kernels.py", "test_launches.py", "test_parents.py") or runs_kernels:
                item.add_marker(old)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test draws the same numbers whichever tests came before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def mnist_of_noise(tmp_path_factory) -> Iterator[Path]:
    """A data root with sixteen images of noise in the format of MNIST, whose hashes count as the published ones."""
    root = tmp_path_factory.mktemp("data")
    write_idx_files(root / "mnist")
    with pytest.MonkeyPatch.context() as patch:
        accept_hashes(patch, root)
        yield root


@pytest.fixture(scope="session")
def images_of_noise(mnist_of_noise: Path) -> Path:
    """A data root with a few samples of noise in the format of every data set that comes in files."""
    write_all(mnist_of_noise)
    return mnist_of_noise
