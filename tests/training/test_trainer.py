"""The meaning of the trainer's arguments does not depend on what was imported before."""

import subprocess
import sys

import pytest

CODE = """
import warnings
warnings.simplefilter("ignore")
{first}
from torchcaps.recipes import load_recipe
from torchcaps.training.build import Training

recipe = load_recipe("quickstart")
for value in ("1", "1.0", "0.5", "0", "7"):
    print(repr(Training(recipe, ["--trainer.limit_test_batches", value]).trainer.limit_test_batches))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import rich.console"])  # it made Lightning read 1 as 1.0
def test_limits_are_read_as_they_are_written(first):
    command = [sys.executable, "-c", CODE.format(first=first)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "1.0", "0.5", "0", "7"]
