"""Lines that tell the progress of a training, and the size of its log."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from torchcaps.cli import main
from torchcaps.training.progress import ProgressLines

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Clock:
    """A clock that only moves when a test sets `now`."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("torchcaps.training.progress.time", SimpleNamespace(monotonic=lambda: self.now))


def progress(monkeypatch, capfd, steps: int, lines: ProgressLines, first: int = 0, **values) -> list[str]:
    """Return the lines printed during `steps` steps of 10 seconds."""
    clock = Clock(monkeypatch)
    metrics = {"train/loss": torch.tensor(0.25), "train/accuracy": 0.5}
    trainer = SimpleNamespace(
        global_step=first, current_epoch=0, max_epochs=2, estimated_stepping_batches=40, progress_bar_metrics=metrics
    )
    vars(trainer).update(values)
    capfd.readouterr()
    lines.on_train_start(trainer, None)
    for batch in range(steps):
        clock.now += 10
        trainer.global_step += 1
        lines.on_train_batch_end(trainer, None, None, None, batch)
    printed = capfd.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_a_line_tells_how_far_it_is(monkeypatch, capfd):
    lines = progress(monkeypatch, capfd, 17, ProgressLines())
    assert lines == [
        "epoch 1 of 2, step 6 of 40, 0:05:40 left, train/loss 0.2500, train/accuracy 0.5000",
        "epoch 1 of 2, step 12 of 40, 0:04:40 left, train/loss 0.2500, train/accuracy 0.5000",
    ]


def test_lines_of_a_resumed_run(monkeypatch, capfd):
    """The time left is estimated from the steps of this process only."""
    (line,) = progress(monkeypatch, capfd, 6, ProgressLines(), first=24)
    assert line.startswith("epoch 1 of 2, step 30 of 40, 0:01:40 left")


def test_lines_of_a_run_without_an_end(monkeypatch, capfd):
    values = {"max_epochs": -1, "estimated_stepping_batches": float("inf"), "progress_bar_metrics": {}}
    assert progress(monkeypatch, capfd, 2, ProgressLines(20), first=9_999, **values) == ["epoch 1, step 10,001"]


def test_lines_of_steps_of_several_batches(monkeypatch, capfd):
    """Before the first step is complete the estimate must not divide by zero."""
    lines = ProgressLines(10)
    clock = Clock(monkeypatch)
    trainer = SimpleNamespace(
        global_step=5, current_epoch=0, max_epochs=2, estimated_stepping_batches=40, progress_bar_metrics={}
    )
    lines.on_train_start(trainer, None)
    clock.now += 10
    lines.on_train_batch_end(trainer, None, None, None, 0)
    assert capfd.readouterr().err.startswith("epoch 1 of 2, step 5 of 40, ")


def test_other_processes_say_nothing(monkeypatch, capfd):
    lines = ProgressLines()
    lines.disable()
    assert progress(monkeypatch, capfd, 20, lines) == []
    lines.enable()
    assert len(progress(monkeypatch, capfd, 20, lines)) == 3


def test_the_log_of_a_training_is_small(capfd):
    """Without a terminal, no progress bar is drawn."""
    arguments = ["train", "quickstart", "--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
    with warnings.catch_warnings():
        assert main([*arguments, "--trainer.limit_train_batches=5"]) == 0
    printed = capfd.readouterr()
    assert "test/accuracy: " in printed.out
    assert len(printed.out + printed.err) < 10_000


@pytest.mark.slow
def test_the_log_of_the_demo_is_small():
    command = [sys.executable, "-m", "torchcaps", "train", "quickstart", "--trainer.max_epochs=2"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert ran.returncode == 0
    assert len(ran.stdout) < 10_000, ran.stdout


def test_lines_in_a_training(capfd, monkeypatch):
    monkeypatch.setattr(ProgressLines.__init__, "__defaults__", (0.0,))
    arguments = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2"]
    arguments += ["--trainer.limit_train_batches=2", "--trainer.limit_test_batches=1"]
    with warnings.catch_warnings():
        assert main(["train", "quickstart", *arguments]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("epoch ")]
    assert [line.partition(", train/")[0].rpartition(", ")[0] for line in lines] == [
        f"epoch {epoch} of 2, step {step} of 4" for epoch, step in ((1, 1), (1, 2), (2, 3), (2, 4))
    ]
    assert all("train/loss" in line for line in lines)
