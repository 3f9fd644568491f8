"""Fixtures that make the tests of data independent of this machine's files and network."""

import os
from pathlib import Path

import pooch
import pytest
import requests

from torchcaps.data import notes

REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_said", set())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every download fail. The list records the requested addresses."""
    asked: list[str] = []

    def retrieve(url: str, *args: object, **kwargs: object) -> str:
        asked.append(url)
        raise requests.exceptions.ConnectionError("Name or service not known\nand a second line")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    return asked


@pytest.fixture
def real(request: pytest.FixtureRequest) -> str:
    """The data root with the real files that a test names (`parametrize("real", [...], indirect=True)`)."""
    if not (REAL / request.param).exists():
        pytest.skip(f"no {request.param} in {REAL} (set TORCHCAPS_DATA to the folder of data sets)")
    return str(REAL)
