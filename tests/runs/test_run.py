"""A run as an object: found in each of its forms, used, and trained on."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TINY, call

from torchcaps.deploy import from_pretrained, save_pretrained
from torchcaps.recipes import load_recipe
from torchcaps.runs import Run
from torchcaps.training import Report, Training, Values
from torchcaps.training.overrides import overrides_of, read_overrides

IMAGES = torch.rand(3, 1, 8, 8)
QUIET = {"trainer.enable_progress_bar": False, "trainer.accelerator": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with one run of two epochs of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    assert call("train", "quickstart", "--runs", str(folder), "--trainer.max_epochs", "2", *TINY) == 0
    return folder


@pytest.fixture(scope="module")
def found(runs) -> Run:
    return Run.find("quickstart", runs=runs)


@pytest.fixture(scope="module")
def saved(found, tmp_path_factory) -> Path:
    return save_pretrained(found, tmp_path_factory.mktemp("saved"))


def test_every_source_gives_the_same_network(found, runs, saved, tmp_path, monkeypatch):
    version, last = runs / "quickstart" / "version_0", runs / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    (tmp_path / "alone.ckpt").write_bytes(last.read_bytes())
    downloads = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, revision, **_: downloads.append((name, revision)) or saved
    )
    monkeypatch.setenv("TORCHCAPS_RUNS", str(runs))
    sources = ("quickstart", version, last, tmp_path / "alone.ckpt", saved, "hub:somebody/digits@warm")
    for source in sources:
        run = Run.find(source)
        torch.testing.assert_close(run.probabilities(IMAGES), found.probabilities(IMAGES), rtol=0, atol=0)
        assert run.values == found.values
        assert (run.names, run.network_name) == ([str(digit) for digit in range(10)], "capsnet_digits")
    assert downloads == [("somebody/digits", "warm")]
    assert found.path == last
    assert found.folder == version


def test_a_checkpoint_keeps_no_state_of_the_optimizer(found, tmp_path):
    assert "optimizer_states" in torch.load(found.path, weights_only=True)
    assert not {"optimizer_states", "lr_schedulers"} & found.checkpoint.training.keys()
    state = torch.load(found.path, weights_only=True)
    del state["optimizer_states"]
    torch.save(state, tmp_path / "without.ckpt")
    run = Run.find(tmp_path / "without.ckpt")
    torch.testing.assert_close(run.probabilities(IMAGES), found.probabilities(IMAGES), rtol=0, atol=0)
    with pytest.raises(ValueError, match="without.ckpt is not a checkpoint of a training: it has no optimizer_states"):
        run.training({"trainer.max_epochs": 3}, resume=True)


def test_what_is_built_is_built_once(found):
    assert found.network() is found.network()
    assert found.data() is found.data()
    assert not found.network().training


def test_curves(found, tmp_path):
    assert found.curves()["accuracy"]["training"][0] == [1, 2]
    (tmp_path / "alone.ckpt").write_bytes(found.path.read_bytes())
    assert Run.find(tmp_path / "alone.ckpt").curves() == {}


def test_a_run_goes_on_beside_the_one_before(found, runs):
    training = found.training({"trainer.max_epochs": 3, **QUIET}, resume=True)
    assert training.run_folder == runs / "quickstart" / "version_1"
    training.fit()
    last = Run.find("quickstart", "last", runs=runs)
    assert last.folder == training.run_folder
    assert (last.checkpoint.step, last.checkpoint.epoch) == (6, 2)
    assert last.curves()["accuracy"]["training"][0] == [1, 2, 3]


def test_a_longer_training_says_that_its_cycle_moves(found, tmp_path, capfd):
    run = Run.find(shutil.copytree(found.folder, tmp_path / "run"))
    changes = {"trainer.callbacks": "torchcaps.training.OneCycle", **QUIET}
    run.training(changes, resume=True)
    assert "OneCycle" not in capfd.readouterr().err
    run.training({"trainer.max_epochs": 3, **changes}, resume=True)
    said = "trainer.max_epochs = 2, and now it is 3: the learning rate jumps, because OneCycle"
    assert said in capfd.readouterr().err


def test_a_run_goes_on_after_its_newest_checkpoint(found, tmp_path):
    folder = shutil.copytree(found.folder, tmp_path / "run")
    shutil.copy(folder / "checkpoints" / "previous.ckpt", folder / "checkpoints" / "best.ckpt")
    changes = {"trainer.max_epochs": 3, **QUIET}
    run = Run.find(folder)
    assert run.path.name == "best.ckpt"
    assert run.training(changes, resume=True).resumed.name == "last.ckpt"
    assert Run.find(folder, "best").training(changes, resume=True).resumed.name == "best.ckpt"


def test_nested_values_are_merged(found):
    values = found.training({"trainer": {"max_epochs": 3}, "data.batch_size": np.int64(16), **QUIET}).values
    assert values["trainer"]["max_epochs"] == 3
    assert values["trainer"]["limit_train_batches"] == 2  # as in the run
    assert values["data"]["init_args"]["batch_size"] == 16
    with pytest.raises(
        ValueError, match="values are given by their names, such as trainer.max_epochs, got '--trainer.m"
    ):
        found.training({"--trainer.max_epochs": 3})
    with pytest.raises(TypeError, match="overrides must be"):
        found.training("trainer.max_epochs=3")


def test_a_run_is_tested(found, saved, runs):
    metrics = found.training(QUIET).test()
    assert Run.find(saved).training(QUIET).test() == metrics
    assert len(list(runs.glob("quickstart/version_*"))) <= 2  # a test writes no run


def test_a_list_of_the_trainer_is_added_to(found, saved):
    """Also where the run was read by from_pretrained, and of values without a trainer."""
    changes = read_overrides(["--trainer.callbacks+=torchcaps.training.Report"])
    without = {name: value for name, value in found.values.items() if name != "trainer"}
    alone = replace(found, checkpoint=replace(found.checkpoint, values=without))
    for run in (found, from_pretrained(saved), alone):
        assert run.fresh_values(changes).merged["trainer"]["callbacks"] == ["torchcaps.training.Report"]


def test_values_for_a_training_of_its_own(found):
    training = Training(found.fresh_values({"model.optimizer.lr": 0.5, **QUIET}))
    assert training.values["model"]["optimizer"]["init_args"]["lr"] == 0.5
    assert training.values["trainer"]["max_epochs"] == 2  # as in the run
    state = training.model.network.state_dict()
    assert not all(torch.equal(state[name], value) for name, value in found.checkpoint.network_state.items())


def test_what_cannot_be(found, saved, runs, tmp_path):
    with pytest.raises(ValueError, match="iterations = 3, and now it is 1: leave out what changes it"):
        found.training({"model.network.iterations": 1})
    with pytest.raises(ValueError, match="lr = 0.002, and now it is 0.5: leave out what changes it"):
        found.training({"model.optimizer.lr": 0.5}, resume=True)
    with pytest.raises(ValueError, match="has finished 2 epochs, and this training ends after 1"):
        Run.find(found.path).training({"trainer.max_epochs": 1}, resume=True)
    with pytest.raises(ValueError, match="is a folder of `save_pretrained`, without the training: give a run or a che"):
        Run.find(saved).training(resume=True)
    with pytest.raises(ValueError, match="is no run with several checkpoints: leave out --ckpt_path best"):
        Run.find(saved, "best")
    with pytest.raises(ValueError, match="has no checkpoint of a run: give the folder of a run"):
        Run.find(tmp_path)
    with pytest.raises(ValueError, match="there is no 'max_epoch'; did you mean max_epochs"):
        found.training({"trainer.max_epoch": 3})
    assert len(list(runs.glob("quickstart/version_*"))) <= 2


def test_values_are_merged_in_python_as_on_a_command_line():
    tokens = ["--trainer.max_epochs", "3", "--model.optimizer.lr=0.5", "--trainer.callbacks+=EarlyStopping"]
    tokens += ["--trainer.callbacks.monitor", "train/loss"]
    changes = {"trainer.max_epochs": 3, "model.optimizer.lr": 0.5}
    changes["trainer.callbacks"] = [{"class_path": "EarlyStopping", "init_args": {"monitor": "train/loss"}}]
    recipe = load_recipe("quickstart")
    by_tokens, by_names = Training(Values.of(recipe, read_overrides(tokens))), Training(Values.of(recipe, changes))
    assert by_tokens.values == by_names.values
    (folder,) = overrides_of({"data.folder": Path("pictures")})
    assert folder.tokens == ("--data.folder=pictures",)


def test_data_may_be_given_as_an_option_alone():
    recipe = load_recipe("quickstart")
    without = replace(recipe, values={name: value for name, value in recipe.values.items() if name != "data"})
    training = Training(Values.of(without, {"data": "torchcaps.data.Digits", **QUIET}))
    assert type(training.datamodule).__name__ == "Digits"


def test_an_error_of_something_else_is_none_of_the_checkpoint(found, monkeypatch):
    changes = {"trainer.max_epochs": 3, "trainer.callbacks": "torchcaps.training.Report", **QUIET}
    data = {"trainer.val_check_interval": 1000, "trainer.num_sanity_val_steps": 0}
    with pytest.raises(ValueError, match="^ ?`val_check_interval` .1000. must be less than or equal to"):
        Run.find(found.path).training({**changes, **data}, resume=True).fit()

    def fail(*_, **__):
        raise KeyError("of a callback")

    monkeypatch.setattr(Report, "on_train_batch_end", fail)
    with pytest.raises(KeyError, match="of a callback"):
        Run.find(found.path).training(changes, resume=True).fit()
