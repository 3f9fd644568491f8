"""A tiny search on the digits: trials of a second."""

import csv
import json
from pathlib import Path
from typing import Any

RECIPE = """
extends: quickstart
search:
  metric: val/accuracy
  trials: 3
  values:
    model.optimizer.lr: {low: 1e-3, high: 1e-2, log: true}
    model.network.iterations: {choices: [1, 2]}
    data.batch_size: {low: 16, high: 64, step: 16}
data: {init_args: {val_size: 100}}
trainer: {max_epochs: 2, limit_train_batches: 2, limit_val_batches: 1}
"""
FOLDER = Path("runs/mine/search_0")


def write_recipe(text: str = RECIPE) -> None:
    Path("mine.yaml").write_text(text)


def table(folder: Path = FOLDER) -> list[dict[str, str]]:
    """Return the rows of a search's table."""
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def trial(number: int, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the file of a trial."""
    return json.loads((folder / f"trial_{number}" / "trial.json").read_text())
