"""A short training that the tests of this folder share."""

from pathlib import Path

import pytest
from commands import TINY, call, checkpoint


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The checkpoint of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    assert call("train", "quickstart", "--runs", str(folder), "--trainer.max_epochs", "1", *TINY) == 0
    return checkpoint(folder)
