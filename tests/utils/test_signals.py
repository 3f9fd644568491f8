"""Signals that stop a command, wherever it is: also while it imports."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchcaps
from torchcaps.utils.signals import Stopped, StopSignals

# What imports a library, as numpy and PyTorch do: it goes on after any error, and is then not whole.
LIBRARY = """
import os, signal, time
whole = False
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    whole = True
except BaseException:
    pass
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_signal_within_an_import_is_handled_after_it():
    Path("a_library.py").write_text(LIBRARY)

    def imports() -> None:
        importlib.import_module("a_library")
        time.sleep(60)  # the signal comes again, and ends this

    with StopSignals(), pytest.raises(Stopped, match="143"):
        imports()
    assert sys.modules.pop("a_library").whole


def test_a_signal_in_a_script_that_is_itself_imported():
    Path("a_script.py").write_text(
        "import os, signal\nfrom torchcaps.utils.signals import StopSignals\n"
        "with StopSignals():\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    with pytest.raises(Stopped, match="143"):
        importlib.import_module("a_script")


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may have been started with SIGINT ignored
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from torchcaps.__main__ import run
sys.argv = ["torchcaps", "models"]
run()
"""


@pytest.mark.parametrize("module", ["torchcaps.cli", "torchcaps.cli.search", "filelock"])
def test_ctrl_c_while_a_command_begins(module):
    code = INTERRUPTED.format(module=module)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "torchcaps: stopped by SIGINT\n")


def test_nothing_is_imported_before_ctrl_c_is_handled():
    """Until then an interrupt is a traceback."""
    code = "import os, sys; before = set(sys.modules); import torchcaps.__main__; print(*set(sys.modules) - before)"
    environment = {**os.environ, "PYTHONPATH": str(Path(torchcaps.__file__).parents[1])}
    # Without `site`, which imports more where the package is installed as editable.
    ended = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment)
    assert sorted(ended.stdout.split()) == ["torchcaps", "torchcaps.__main__"], ended.stderr
