"""`torchcaps search` with Optuna: what it leaves, and how it goes on after it was stopped or killed."""

import multiprocessing
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from commands import call, error_of
from searches import FOLDER, RECIPE, table, trial, write_recipe

from torchcaps.data import LabeledData
from torchcaps.recipes import load_recipe
from torchcaps.search.plan import Plan
from torchcaps.search.trial import Reports, Trial, best_of, read_trials, run_trial, write_trial
from torchcaps.training.build import Training
from torchcaps.utils.files import write_text_whole
from torchcaps.utils.signals import StopSignals

pytest.importorskip("optuna")
from torchcaps.search.with_optuna import search_with_optuna

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    """A folder with a recipe and a search of it that was never stopped. Tests change nothing in it."""
    folder, before = tmp_path_factory.mktemp("searched"), Path.cwd()
    os.chdir(folder)
    try:
        write_recipe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LabeledData, "test_dataloader", None)  # a search does not use the test set
            assert call("search", "mine.yaml") == 0
    finally:
        os.chdir(before)
    return folder


def interrupt(monkeypatch, validation: int, how: str) -> None:
    """Send this process a signal in a validation, counted over all trials from 1 on."""
    original, count = Reports.on_validation_end, [0]

    def on_validation_end(self, trainer, pl_module):
        original(self, trainer, pl_module)
        count[0] += not trainer.sanity_checking
        if count[0] == validation and not trainer.sanity_checking:
            os.kill(os.getpid(), getattr(signal, how))

    monkeypatch.setattr(Reports, "on_validation_end", on_validation_end)


def test_what_a_search_leaves(searched):
    rows = table(searched / FOLDER)
    assert [row["number"] for row in rows] == ["0", "1", "2"]
    assert {row["state"] for row in rows} == {"complete"}
    assert {row["epochs"] for row in rows} == {"2"}
    for row in rows:
        assert 0.001 <= float(row["model.optimizer.lr"]) <= 0.01
        assert row["model.network.iterations"] in "12"
        assert int(row["data.batch_size"]) in (16, 32, 48, 64)
        assert (searched / row["folder"] / "version_0" / "metrics.csv").exists()
        values = yaml.safe_load((searched / row["folder"] / "version_0" / "config.yaml").read_text())
        assert values["data"]["init_args"]["batch_size"] == int(row["data.batch_size"])
        assert values["model"]["optimizer"]["init_args"]["lr"] == float(row["model.optimizer.lr"])
    assert (searched / FOLDER / "search.png").read_bytes().startswith(b"\x89PNG")
    best = max(rows, key=lambda row: float(row["val/accuracy"]))
    kept = [path.relative_to(searched).parts[3] for path in searched.rglob("last.ckpt")]
    assert kept == [f"trial_{best['number']}"]


def test_the_study_can_be_opened_with_optuna(searched):
    import optuna

    file = f"sqlite:///{searched / FOLDER / 'study.db'}"
    study = optuna.load_study(study_name=None, storage=file)
    assert [found.value for found in study.trials] == [float(row["val/accuracy"]) for row in table(searched / FOLDER)]


def test_the_best_recipe_trains_as_the_best_trial_did(searched, monkeypatch, capfd):
    monkeypatch.chdir(searched)
    best = FOLDER / "best.yaml"
    row = max(table(), key=lambda row: float(row["val/accuracy"]))
    then = yaml.safe_load((Path(row["folder"]) / "version_0" / "config.yaml").read_text())
    training = Training(load_recipe(str(best)), [])
    now = training.values
    assert {**now, "trainer": {**now["trainer"], "logger": True}} == {
        **then,
        "trainer": {**then["trainer"], "logger": True},
    }
    training.trainer.fit(training.model, training.datamodule)
    assert float(training.trainer.callback_metrics["val/accuracy"]) == pytest.approx(float(row["val/accuracy"]))
    assert call("train", str(best), "--smoke", "--runs", str(searched / "elsewhere")) == 0


def stripped(folder: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "folder"} for row in table(folder)]


def test_a_search_that_was_stopped_goes_on_as_if_it_was_not(searched, monkeypatch, capfd):
    """It is stopped in the last validation of its second trial, after which nothing is left to train."""
    write_recipe()
    with monkeypatch.context() as patch:
        interrupt(patch, 4, "SIGINT")
        assert call("search", "mine.yaml", "--trials", "3") == 130
    (command,) = re.findall(r"stopped by SIGINT; to continue: torchcaps (.*)", capfd.readouterr().err)
    assert command == "search mine.yaml --resume --trials 3"
    assert [row["state"] for row in table()] == ["complete"]
    assert call(*shlex.split(command)) == 0
    assert stripped(FOLDER) == stripped(searched / FOLDER)
    assert trial(1) == trial(1, searched / FOLDER)
    for name in ("best.yaml", "search.png"):
        assert (FOLDER / name).read_bytes() == (searched / FOLDER / name).read_bytes()


@pytest.mark.slow
def test_a_search_that_was_killed_loses_nothing_that_was_finished(searched, monkeypatch, capfd):
    """It is killed in the second epoch of its second trial, which continues after the first epoch."""
    write_recipe()

    def killed():
        torch.set_num_threads(1)  # the OpenMP runtime of a forked process must not start threads
        interrupt(monkeypatch, 4, "SIGKILL")
        call("search", "mine.yaml")

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    assert [found.state for found in (Trial(**trial(0)), Trial(**trial(1)))] == ["complete", "running"]
    assert [row["state"] for row in table()] == ["complete"]
    first = (FOLDER / "trial_0" / "trial.json").stat().st_mtime_ns
    assert call("search", "mine.yaml", "--resume") == 0
    assert stripped(FOLDER) == stripped(searched / FOLDER)
    assert (FOLDER / "trial_0" / "trial.json").stat().st_mtime_ns == first
    parts = [path.relative_to(FOLDER).as_posix() for path in sorted(FOLDER.glob("trial_*/version_*"))]
    assert parts == ["trial_0/version_0", "trial_1/version_0", "trial_1/version_1", "trial_2/version_0"]
    epochs = (FOLDER / "trial_1" / "version_1" / "metrics.csv").read_text()
    assert len([line for line in epochs.splitlines()[1:] if line.startswith("0,")]) == 0


@pytest.mark.slow
def test_a_finished_search_can_have_more_trials(searched, capfd):
    write_recipe()
    shutil.copytree(searched / "runs", "runs")
    before = (FOLDER / "trials.csv").read_text()
    assert call("search", "mine.yaml", "--resume") == 0
    assert (FOLDER / "trials.csv").read_text() == before
    assert call("search", "mine.yaml", "--resume", "--trials", "4") == 0
    assert (FOLDER / "trials.csv").read_text().startswith(before)
    assert len(table()) == 4


def test_a_search_goes_on_with_what_it_began_with(searched, capfd):
    shutil.copytree(searched / "runs", "runs")
    write_recipe()
    message = error_of(capfd, "search", "mine.yaml", "--resume", "--trainer.max_epochs", "3")
    assert "runs/mine/search_0 began with overrides = [], and now it is ['--trainer.max_epochs', '3']" in message
    assert "began with with = optuna" in error_of(capfd, "search", "mine.yaml", "--resume", "--with", "ray")
    write_recipe(RECIPE.replace("high: 1e-2", "high: 1e-1"))
    message = error_of(capfd, "search", "mine.yaml", "--resume")
    assert "search.values.model.optimizer.lr.high = 1e-2, and now it is 1e-1: give the same as then, or" in message
    write_recipe(RECIPE.replace("val_size: 100", "val_size: 101"))
    assert "values.data.init_args.val_size = 100, and now it is 101" in error_of(
        capfd, "search", "mine.yaml", "--resume"
    )
    write_text_whole(FOLDER / "search.json", "{")
    assert "search.json is not what a search wrote" in error_of(capfd, "search", "mine.yaml", "--resume")


def test_two_processes_do_not_work_on_one_search(searched, capfd):
    from filelock import FileLock

    shutil.copytree(searched / "runs", "runs")
    write_recipe()
    with FileLock(FOLDER / "lock"):
        said = error_of(capfd, "search", "mine.yaml", "--resume", "--trials", "9")
    assert said == "torchcaps: another process works on runs/mine/search_0: wait for it, or begin a new search"


@pytest.mark.slow
def test_failed_trials_do_not_end_a_search(capfd):
    write_recipe(RECIPE.replace("{low: 1e-3, high: 1e-2, log: true}", "{choices: [0.002, 1e30]}"))
    assert call("search", "mine.yaml") == 0
    rows = table()
    assert {row["state"] for row in rows} == {"complete", "failed"}
    for row in rows:
        assert (row["state"] == "failed") == (row["model.optimizer.lr"] == "1e30")
        assert row["error"].startswith("the loss is nan at step ") == (row["state"] == "failed")
    assert "lr: 0.002\n" in (FOLDER / "best.yaml").read_text()
    assert re.search(r"trial \d: model.optimizer.lr=1e30 .*: failed: the loss is nan at step", capfd.readouterr().out)


def test_a_search_without_a_complete_trial(capfd):
    write_recipe(RECIPE.replace("{low: 1e-3, high: 1e-2, log: true}", "{choices: [1e29, 1e30]}"))
    capfd.readouterr()
    assert call("search", "mine.yaml", "--trials", "1") == 2
    err = capfd.readouterr().err.strip()
    assert err.startswith("torchcaps: none of 1 trials came to its end; trial 0 said: the loss is nan at step")
    assert not (FOLDER / "best.yaml").exists()
    assert (FOLDER / "search.png").exists()


def fake(plan, number, values, report, signals=None):
    """A trial whose metric is the value of `model.optimizer.lr` after each of four validations."""
    reported, state = [], "complete"
    while len(reported) < 4 and state == "complete":
        reported.append(values["model.optimizer.lr"])
        state = "pruned" if report(list(reported)) else state
    write_trial(plan.folder_of(number), Trial(number, values, state, reported, len(reported)))
    return Trial(number, values, state, reported, len(reported))


def trials_of(folder: str, trials: int, seed: int = 0) -> list[Trial]:
    """Run a search of such trials and return them."""
    plan = Plan(load_recipe("mine.yaml"), [], "optuna", trials, Path(folder), seed=seed)
    search_with_optuna(plan, StopSignals(), lambda trial: None)
    return read_trials(plan)


@pytest.mark.parametrize(("mode", "prune"), [("max", True), ("min", True), ("max", False)])
def test_bad_trials_end_early(monkeypatch, mode, prune):
    monkeypatch.setattr("torchcaps.search.with_optuna.run_trial", fake)
    head = f"  metric: val/accuracy\n  mode: {mode}\n  prune: {str(prune).lower()}\n"
    write_recipe(RECIPE.replace("  metric: val/accuracy\n", head))
    trials = trials_of("search", 10)
    pruned = [trial for trial in trials if trial.state == "pruned"]
    assert bool(pruned) is prune
    assert [trial.epochs for trial in pruned] == [2] * len(pruned)  # the first validation ends none
    assert all(trial.state == "complete" for trial in trials[:4])
    better = max if mode == "max" else min
    best = better(trials, key=lambda trial: trial.metric)
    plan = Plan(load_recipe("mine.yaml"), [], "optuna", 10, Path("search"))
    assert best_of(plan, trials) == best
    assert best not in pruned


@pytest.mark.slow
def test_the_values_follow_from_the_seed_however_often_a_search_was_stopped(monkeypatch):
    monkeypatch.setattr("torchcaps.search.with_optuna.run_trial", fake)
    write_recipe()
    whole = trials_of("a", 13, seed=5)
    assert trials_of("b", 13, seed=6) != whole
    for trials in (3, 12, 13):  # the first ten are drawn evenly, the others follow from those before
        parts = trials_of("c", trials, seed=5)
    assert parts == whole
    assert len({trial.values["model.optimizer.lr"] for trial in whole}) == 13


def a_plan() -> Plan:
    write_recipe()
    return Plan(load_recipe("mine.yaml"), [], "optuna", 1, FOLDER)


VALUES = {"model.optimizer.lr": 0.002, "model.network.iterations": 1, "data.batch_size": 32}


def test_a_trial_that_is_pruned():
    plan, reports = a_plan(), []
    found = run_trial(plan, 0, VALUES, lambda reported: reports.append(reported) or len(reported) == 1)
    assert (found.state, found.epochs, found.reported) == ("pruned", 1, reports[0])
    assert read_trials(plan) == [found]


def test_a_trial_that_never_validates_has_failed():
    plan = a_plan()
    plan.overrides.append("--trainer.check_val_every_n_epoch=3")
    found = run_trial(plan, 0, VALUES, lambda reported: False)
    assert (found.state, found.error) == (
        "failed",
        "the training ended before its first validation: train longer, or validate more often",
    )


def test_values_that_do_not_fit_make_a_failed_trial():
    found = run_trial(a_plan(), 0, VALUES | {"model.network.iterations": 0}, lambda reported: False)
    assert found.state == "failed"
    assert "iterations" in found.error


@pytest.mark.slow
def test_the_best_recipe_has_the_overrides_too(capfd):
    write_recipe(
        RECIPE.replace("model.network.iterations: {choices: [1, 2]}", "model.optimizer.eps: {choices: [1e-8, 1e-7]}")
    )
    own = ["--model.optimizer=torch.optim.RAdam", "--trainer.callbacks+=EarlyStopping"]
    own += ["--trainer.callbacks.monitor=val/loss", "--trainer.callbacks.patience=9", "--data.shift", "1"]
    assert call("search", "mine.yaml", *own, "--trials", "1") == 0
    best = FOLDER / "best.yaml"
    assert best.read_text().splitlines()[1] == "extends: ../../../mine.yaml"
    (then,) = FOLDER.glob("trial_0/version_0/config.yaml")
    then, now = yaml.safe_load(then.read_text()), Training(load_recipe(str(best)), []).values
    for part in ("model", "data"):
        assert now[part] == then[part]
    assert now["trainer"]["callbacks"] == then["trainer"]["callbacks"]
    assert call("train", str(best), "--smoke") == 0
