"""Values of own masks on the command line: colors that YAML would take for numbers, and values that later runs read."""

from pathlib import Path

import numpy as np
import pytest
from commands import call, error_of
from PIL import Image

from torchcaps.runs import Run

COLORS = np.array([[0, 0, 0], [128, 0, 0], [0x12, 0x34, 0x56]], np.uint8)
QUICK = ["--data.num_workers", "0", "--data.size", "16", "--model", "unet", "--model.network.channels", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of nine pictures and masks in three colors, whose names have digits alone."""
    monkeypatch.chdir(tmp_path)
    for place in ("images", "masks"):
        (tmp_path / "data" / place).mkdir(parents=True)
    for i in range(9):
        mask = np.random.default_rng(i).integers(0, 3, (16, 16))
        Image.fromarray((mask * 100).astype(np.uint8)).save(tmp_path / "data" / "images" / f"{i}.png")
        Image.fromarray(COLORS[mask]).save(tmp_path / "data" / "masks" / f"{i}.png")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ([], ["000000", "123456", "800000"]),
        (["--data.values", '["800000", "000000", "123456"]'], ["800000", "000000", "123456"]),
        (["--data.ignore", "000000"], ["123456", "800000"]),
        (["--data.ignore", '"000000"'], ["123456", "800000"]),
        (["--data.values", '["123456", "800000"]', "--data.ignore", "000000"], ["123456", "800000"]),
    ],
)
def test_colors_stay_colors_in_a_run(folder, options, values):
    train = ["train", "own/masks", "--data.folder", str(folder), *QUICK, *options, "--trainer.max_epochs", "1"]
    assert call(*train) == 0
    (folder / "masks").rename(folder / "gone")  # what a run knows of its classes needs no files
    data = Run.find("own/masks").data()
    assert (data.values, data.names, data.classes) == (values, values, len(values))
    assert {tuple(color) for color in data.palette.tolist()} == {tuple(bytes.fromhex(value)) for value in values}
    (folder / "gone").rename(folder / "masks")
    assert call("test", "own/masks") == 0


def test_colors_without_quotes_are_refused(folder, capfd):
    train = ["train", "own/masks", "--data.folder", str(folder), *QUICK]
    assert 'as colors in quotes, such as ["000000", "ff0000"]' in error_of(
        capfd, *train, "--data.values", "[123456, 800000]"
    )
