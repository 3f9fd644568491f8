"""Running commands in tests: on real digits, in a folder of the test's own."""

import warnings
from pathlib import Path

from torchcaps.cli import main

TINY = ["--trainer.limit_train_batches", "2", "--trainer.limit_test_batches", "1"]
PAIRS = ["--data.batch_size", "2", "--trainer.max_epochs", "1", *TINY]


def call(*arguments: str) -> int:
    """Run a command and return its status. Warnings are those of Lightning and its imports with this torch."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        return main(list(arguments))


def error_of(capfd, *arguments: str) -> str:
    """Run a command that must end with status 2 and one line on stderr; return the line."""
    capfd.readouterr()
    assert call(*arguments) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("torchcaps: ")
    assert len(lines) == 1, lines
    return lines[0]


def checkpoint(folder: Path, version: int = 0) -> Path:
    """Return the last checkpoint of a run of the quickstart."""
    return folder / "quickstart" / f"version_{version}" / "checkpoints" / "last.ckpt"
