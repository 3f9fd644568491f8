"""Nobody's first network sticks at chance in silence, see `tests/helpers/complaints.py`."""

import os

import pytest
import torch
from complaints import CELLS, play

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_it_learns_or_has_said_why_not(cell):
    if cell.data == "Fashion-MNIST" and "TORCHCAPS_DATA" not in os.environ:
        pytest.skip("needs Fashion-MNIST: set TORCHCAPS_DATA")
    torch.set_default_dtype(torch.float32)
    accuracy, learns, said = play(cell)
    assert learns or said, f"sticks at {accuracy:.2f} in silence"
