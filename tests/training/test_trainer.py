"""The meaning of the trainer's arguments does not depend on what was imported before."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from torchcaps.training.monitors import how_to_validate

CODE = """
import warnings
warnings.simplefilter("ignore")
{first}
from torchcaps.recipes import load_recipe
from torchcaps.training.build import Training
from torchcaps.training.values import Values

recipe = load_recipe("quickstart")
for value in ("1", "1.0", "0.5", "0", "7"):
    values = Values.of(recipe, {{"trainer.limit_test_batches": value}})
    print(repr(Training(values).trainer.limit_test_batches))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import rich.console"])  # it made Lightning read 1 as 1.0
def test_limits_are_read_as_they_are_written(first):
    command = [sys.executable, "-c", CODE.format(first=first)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "1.0", "0.5", "0", "7"]


@pytest.mark.parametrize(
    ("data", "batches", "said"),
    [
        (SimpleNamespace(val_size=0), 1.0, "set data.val_size to more than 0"),
        (SimpleNamespace(val_share=0), 1.0, "set data.val_share to more than 0"),
        (SimpleNamespace(images=SimpleNamespace(val_share=0)), 1.0, "set data.images.val_share to more than 0"),
        (SimpleNamespace(val_share=0.1, split="split.csv"), 1.0, "take a data.split that has a part `val`"),
        (SimpleNamespace(val_size=9), 0, "set trainer.limit_val_batches to more than 0"),
    ],
)
def test_what_gives_a_training_a_validation(data, batches, said):
    assert how_to_validate(SimpleNamespace(limit_val_batches=batches), data) == said
