"""Each test of a command runs in an empty folder."""

from pathlib import Path

import pytest
from commands import TINY, call


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with one run of two epochs of two steps. Tests add no run to it."""
    folder = tmp_path_factory.mktemp("trained")
    assert call("train", "quickstart", "--runs", str(folder), "--trainer.max_epochs", "2", *TINY) == 0
    return folder
