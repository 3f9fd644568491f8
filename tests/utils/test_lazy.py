"""Packages import their modules when a name is first used."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import torchcaps
from torchcaps.utils.lazy import exports

PACKAGES = ("torchcaps", *(f"torchcaps.{name}" for name in ("data", "evaluate", "explain", "runs", "training")))


def imported_by(code: str) -> set[str]:
    """Return the modules that are there after some code in a new process."""
    code += "; import sys; print(*sys.modules)"
    root = Path(torchcaps.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert not run.returncode, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_found_and_listed(package):
    module = import_module(package)
    assert set(module.__all__) == set(exports(package)) - {"__version__", "testing"}
    assert set(module.__all__) <= set(dir(module))
    for name, home in exports(package).items():
        value = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        assert getattr(module, name) is value


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_that_of_a_module(package):
    """The import of such a module would put it in place of what is exported."""
    modules = {path.stem for path in Path(str(import_module(package).__file__)).parent.iterdir()}
    assert not {name for name, home in exports(package).items() if home != package} & modules


def test_a_name_that_is_not_there():
    for package in PACKAGES:
        with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'Nothing'$"):
            _ = import_module(package).Nothing


def test_modules_are_attributes_of_their_package_and_names_come_all_at_once():
    code = "from torchcaps.data import *; import torchcaps.data as data; assert data.mnist.MNIST is MNIST"
    assert "torchcaps.data.mnist" in imported_by(code)


def test_a_package_imports_nothing_slow():
    for package in PACKAGES:
        modules = imported_by(f"import {package}")
        assert package in modules
        assert not modules & {"torch", "lightning", "numpy"}


def test_what_a_training_may_not_need_is_not_imported():
    modules = imported_by("import torchcaps.training.build")
    assert "torchcaps.training.build" in modules
    assert not modules & {"kornia", "sklearn", "tensorboard", "torchcaps.data.mnist", "torchcaps.explain"}
