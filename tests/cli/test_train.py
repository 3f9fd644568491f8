"""`torchcaps train` and `torchcaps test`: runs, and what later commands know of them."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import PAIRS, TINY, call, checkpoint, error_of

from torchcaps.recipes import load_recipe


def test_a_run(trained):
    run = trained / "quickstart" / "version_0"
    assert (run / "metrics.csv").read_text().count("\n") > 2
    assert list(run.glob("events.out.tfevents.*"))
    assert "capsnet_digits" in (run / "config.yaml").read_text()
    assert torch.load(checkpoint(trained), weights_only=True)["global_step"] == 4


def test_a_run_without_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert call("train", "quickstart", "--smoke") == 0
    files = {path.name for path in Path("runs/quickstart/smoke_0").iterdir()}
    assert files == {"checkpoints", "config.yaml", "metrics.csv"}


def test_a_recipe_of_your_own(capfd):
    Path("mine").mkdir()
    Path("mine/base.yaml").write_text("extends: quickstart\nmodel: {optimizer: {init_args: {lr: 0.01}}}\n")
    Path("mine/row.yaml").write_text("extends: base.yaml\n")
    assert [path.name for path in load_recipe("mine/row.yaml").files] == ["quickstart.yaml", "base.yaml", "row.yaml"]
    assert call("train", "mine/row.yaml", "--trainer.max_epochs", "1", *TINY) == 0
    out = capfd.readouterr().out
    assert "test/accuracy: 0." in out
    assert "run: runs/mine/row/version_0" in out
    assert "lr: 0.01" in Path("runs/mine/row/version_0/config.yaml").read_text()
    Path("mine/base.yaml").write_text("extends: row.yaml\n")
    assert "mine/row.yaml extends itself" in error_of(capfd, "train", "mine/row.yaml")


def test_a_run_is_continued_from_its_last_checkpoint_its_folder_or_a_file(trained):
    """The values are those of the run: the length of an epoch is not given again."""
    shutil.copytree(trained, "runs")
    Path("saved").mkdir()
    shutil.copy(checkpoint(trained), "saved/alone.ckpt")
    assert call("train", "quickstart", "--ckpt_path", "last", "--trainer.max_epochs", "3") == 0
    assert call("train", "runs/quickstart/version_1", "--trainer.max_epochs", "4") == 0
    assert call("train", "saved/alone.ckpt", "--trainer.max_epochs", "3") == 0
    last = [checkpoint(Path("runs"), version) for version in (1, 2)] + [
        Path("runs/alone/version_0/checkpoints/last.ckpt")
    ]
    states = [torch.load(path, weights_only=True) for path in last]
    assert [(state["epoch"], state["global_step"]) for state in states] == [(2, 6), (3, 8), (2, 6)]
    for name, value in states[0]["state_dict"].items():
        assert value.equal(states[2]["state_dict"][name])


def test_a_run_is_tested_by_its_recipe_its_folder_or_a_file(trained, capfd):
    file = str(checkpoint(trained))
    ways = [[file], [str(trained / "quickstart" / "version_0")], [str(trained / "quickstart")]]
    ways += [["quickstart", "--runs", str(trained)], ["quickstart", "--ckpt_path", file, "--runs", "elsewhere"]]
    said = []
    for way in ways:
        assert call("test", *way) == 0
        said.append(capfd.readouterr().out)
    assert len(set(said)) == 1
    assert "test/accuracy: 0." in said[0]
    assert list(Path().iterdir()) == []
    assert call("test", file, "--data.resize", "10", "--data.ten_crop", "true") == 0  # overrides still work
    assert capfd.readouterr().out != said[0]


def test_a_run_with_other_values_than_its_recipe(capfd):
    changed = ("--model.network.iterations", "1", "--data", "torchcaps.data.Digits", "--data.val_size", "64")
    assert call("train", "quickstart", *changed, "--trainer.max_epochs", "1", *TINY) == 0
    assert call("test", "quickstart") == 0
    content = torch.load(checkpoint(Path("runs")), weights_only=True)
    assert json.loads(content["recipe"])["model"]["network"]["init_args"]["iterations"] == 1


def test_smoke_runs(capfd):
    assert call("train", "quickstart", "--trainer.fast_dev_run", "true") == 0
    assert list(Path().iterdir()) == []  # nor is there anything of Lightning's own
    assert call("train", "quickstart", "--smoke", "--data.batch_size", "3", "--trainer.limit_train_batches", "4") == 0
    state = torch.load("runs/quickstart/smoke_0/checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 4
    assert "batch_size: 3" in Path("runs/quickstart/smoke_0/config.yaml").read_text()
    assert "runs/quickstart has no checkpoint of a run" in error_of(capfd, "test", "quickstart", "--ckpt_path", "last")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_quickstart_learns_the_digits(capfd, seed):
    assert call("train", "quickstart", "--seed_everything", str(seed)) == 0
    (accuracy,) = re.findall(r"test/accuracy: (0\.\d+)", capfd.readouterr().out)
    assert float(accuracy) >= 0.98


def test_the_small_version_of_a_recipe(images_of_noise, monkeypatch, capfd):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    recipe = ("zhao2019/table1/fashion-mnist-max", "--small")
    assert call("train", *recipe, *PAIRS) == 0
    run = Path("runs/zhao2019/table1/fashion-mnist-max-small/version_0")
    assert f"run: {run}" in capfd.readouterr().out
    assert "channels: 32" in (run / "config.yaml").read_text()
    assert call("test", *recipe, "--ckpt_path", "last") == 0
    message = error_of(capfd, "test", recipe[0], "--ckpt_path", "last")  # of the full recipe there is none
    assert message.endswith("has no checkpoint of a run: train first, or give the --runs and --small of its training")


@pytest.mark.slow
def test_photographs(images_of_noise, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    Path("mine.yaml").write_text(
        "extends: zhao2019/table1/cifar10-routing --small\n"
        "data: {class_path: torchcaps.data.ImageNet, init_args: {size: 32, resize: 36}}\n"
    )
    assert call("train", "mine.yaml", *PAIRS, "--data.jitter", "0.2", "--data.flip", "true") == 0
    assert call("test", "mine.yaml", "--ckpt_path", "last", "--data.ten_crop", "true") == 0
    assert call("explain", "mine.yaml", "--ckpt_path", "last", "--figures", "drawn") == 0
    written = {"credit.png", "heatmaps.png", "heatmaps-of-groups.png", "index.html"}
    assert {path.name for path in Path("drawn").iterdir()} == written
