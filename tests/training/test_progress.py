"""Lines that tell the progress of a training, and the size of its log."""

from types import SimpleNamespace

import pytest
import torch
from commands import call

from torchcaps.training.progress import ProgressLines


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines_of(
    monkeypatch, capfd, steps: int, lines: ProgressLines, first: int = 0, each: int = 1, **values
) -> list[str]:
    """Return the lines printed during batches of 10 seconds, with a step after `each` of them."""
    now = 1000.0
    monkeypatch.setattr("torchcaps.training.progress.time", SimpleNamespace(monotonic=lambda: now))
    metrics = {"train/loss": torch.tensor(0.25), "train/accuracy": 0.5}
    trainer = SimpleNamespace(
        global_step=first, current_epoch=0, max_epochs=2, estimated_stepping_batches=40, progress_bar_metrics=metrics
    )
    vars(trainer).update(values)
    capfd.readouterr()
    lines.on_train_start(trainer, None)
    for batch in range(steps * each):
        now += 10
        trainer.global_step += (batch + 1) % each == 0
        lines.on_train_batch_end(trainer, None, None, None, batch)
    printed = capfd.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_lines_tell_how_far_a_training_is(monkeypatch, capfd):
    assert lines_of(monkeypatch, capfd, 17, ProgressLines()) == [
        "epoch 1 of 2, step 6 of 40, 0:05:40 left, train/loss 0.2500, train/accuracy 0.5000",
        "epoch 1 of 2, step 12 of 40, 0:04:40 left, train/loss 0.2500, train/accuracy 0.5000",
    ]
    # The time left is estimated from the steps of this process only.
    (line,) = lines_of(monkeypatch, capfd, 6, ProgressLines(), first=24)
    assert line.startswith("epoch 1 of 2, step 30 of 40, 0:01:40 left")
    endless = {"max_epochs": -1, "estimated_stepping_batches": float("inf"), "progress_bar_metrics": {}}
    assert lines_of(monkeypatch, capfd, 2, ProgressLines(20), first=9_999, **endless) == ["epoch 1, step 10,001"]
    # With steps of several batches, none is complete at first: nothing is divided by zero.
    assert lines_of(monkeypatch, capfd, 1, ProgressLines(10), first=5, each=2)[0].startswith("epoch 1 of 2, step 5 of")
    other = ProgressLines()
    other.disable()  # Lightning calls this in all processes but the first
    assert lines_of(monkeypatch, capfd, 20, other) == []


def test_the_lines_and_the_log_of_a_training(capfd, monkeypatch):
    """Without a terminal, no progress bar is drawn."""
    monkeypatch.setattr(ProgressLines.__init__, "__defaults__", (0.0,))
    arguments = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2"]
    arguments += ["--trainer.limit_train_batches=2", "--trainer.limit_test_batches=1"]
    assert call("train", "quickstart", *arguments) == 0
    printed = capfd.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("epoch ")]
    assert [line.partition(", train/")[0].rpartition(", ")[0] for line in lines] == [
        f"epoch {epoch} of 2, step {step} of 4" for epoch, step in ((1, 1), (1, 2), (2, 3), (2, 4))
    ]
    assert all("train/loss" in line for line in lines)
    assert "test/accuracy: " in printed.out
    assert len(printed.out + printed.err) < 10_000
