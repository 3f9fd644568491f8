"""`torchcaps train --seeds`: several trainings in one process."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from commands import PAIRS, call, checkpoint, error_of
from interruptions import newest

from torchcaps.cli import train
from torchcaps.cli.table import as_text

RUN = ["quickstart", *PAIRS]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_seed_is_a_run_of_its_own(capfd):
    assert call("train", *RUN, "--seeds", "3", "5") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("seed ")] == ["seed 3", "seed 5"]
    assert call("train", *RUN, "--seed_everything=5", "--runs", "alone") == 0
    ours, alone = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (checkpoint(Path("runs"), 1), checkpoint(Path("alone")))
    )
    assert all(torch.equal(ours[name], alone[name]) for name in alone)
    assert lines[-4].split() == ["mean", "standard", "deviation", "seed", "3", "seed", "5"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[-3:]}
    mean, deviation, *values = rows["test/accuracy"]
    first, second = map(float, values)
    assert float(mean) == pytest.approx((first + second) / 2, abs=1e-4)
    assert float(deviation) == pytest.approx(abs(first - second) / 2**0.5, abs=1e-4)
    each = [float(line.split()[1]) for line in lines if line.startswith("test/loss: ")]
    assert [float(value) for value in rows["test/loss"][2:]] == pytest.approx(each)


def test_a_training_is_freed_before_the_next_one(monkeypatch):
    """On a GPU the samples of the first would leave less room for the second."""
    build, models, alive = train._training, [], []

    def building(options):
        alive.append([model() is not None for model in models])
        built = build(options)
        models.append(weakref.ref(built.model))
        return built

    monkeypatch.setattr(train, "_training", building)
    gc.disable()
    try:
        assert call("train", *RUN, "--seeds", "3", "5") == 0
    finally:
        gc.enable()
    assert alive == [[], [False]]


def test_one_seed_has_no_deviation(capfd):
    assert call("train", *RUN, "--seeds", "3") == 0
    for line in capfd.readouterr().out.splitlines()[-3:]:
        _, mean, value = line.split()
        assert mean == value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "1", "1"], "--seeds must be different numbers, got 1 1"),
        (["--seeds", "1", "--seed_everything=2"], "--seeds and --seed_everything both choose the seed"),
        (["--seeds", "1", "--ckpt_path", "last"], "--seeds begins trainings, and a run that goes on has a seed"),
        (["--seeds", "3", "-1"], "--seeds must be from 0 to 4294967295, got -1"),
    ],
)
def test_bad_seeds(options, said, capfd):
    assert said in error_of(capfd, "train", *RUN, *options)
    assert not Path("runs").exists()


def test_a_signal_says_how_all_go_on(capfd):
    interrupt = ["--allow_code", "--trainer.callbacks+=interruptions.Interrupt", "--trainer.callbacks.step=1"]
    assert call("train", *RUN, "--seeds", "3", "5", "6", *interrupt) == 143
    said = capfd.readouterr().err.splitlines()[-1]
    match = re.search(r"to continue: (.*) --seed_everything=3 --ckpt_path (\S+); then: (.*) --seeds 5 6$", said)
    assert match
    assert match[1] == match[3]
    assert Path(match[2]).is_file()
    assert newest("runs")["global_step"] == 2


def test_what_is_done_before_an_error_is_not_lost(monkeypatch, capfd):
    train_once, done = train._train, []

    def second_fails(options):
        if done:
            raise ValueError("the disk is full")
        done.append(train_once(options))
        return done[0]

    monkeypatch.setattr(train, "_train", second_fails)
    assert call("train", *RUN, "--seeds", "3", "5", "6") == 2
    printed = capfd.readouterr()
    assert "the disk is full" in printed.err
    assert printed.out.splitlines()[-4].split() == ["mean", "seed", "3"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.98765, "0.9877"), (0.0, "0.0000"), (1.2e-9, "1.2e-09"), (5911368192.0, "5.911e+09")]
)
def test_metrics_of_any_size_are_readable(value, text):
    assert as_text(value) == text
