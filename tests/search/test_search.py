"""`torchcaps search`: what it leaves, how it goes on after it was stopped or killed, and how processes share it."""

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from commands import call, error_of
from pictures import draw_digits

from torchcaps.data import DataError, LabeledData
from torchcaps.recipes import load_recipe
from torchcaps.training.build import Training
from torchcaps.training.overrides import overrides_of
from torchcaps.training.values import Values
from torchcaps.utils.signals import StopSignals

pytest.importorskip("optuna")
import optuna

from torchcaps.search import study as studies
from torchcaps.search.plan import Plan, check, read_plan
from torchcaps.search.results import _write_recipe, best_of
from torchcaps.search.study import EXPECTED_STORAGE, Reports

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ROOT = Path(__file__).parents[2]
RECIPE = """
extends: quickstart
search:
  metric: val/accuracy
  trials: 3
  values:
    model.optimizer.lr: {low: 1e-3, high: 1e-2, log: true}
    model.network.iterations: {choices: [1, 2]}
    data.batch_size: {low: 16, high: 70, step: 16}
data: {init_args: {val_size: 100}}
trainer: {max_epochs: 2, limit_train_batches: 2, limit_val_batches: 1}
"""
LR = "model.optimizer.lr"
LR_SPACE = "{low: 1e-3, high: 1e-2, log: true}"
FOLDER = Path("runs/mine/search_0")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE)


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    """A folder with a search that was never stopped. Tests change nothing in it."""
    folder, before = tmp_path_factory.mktemp("searched"), Path.cwd()
    os.chdir(folder)
    try:
        Path("mine.yaml").write_text(RECIPE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LabeledData, "test_dataloader", None)  # a search does not use the test set
            assert call("search", "mine.yaml") == 0
    finally:
        os.chdir(before)
    return folder


def table(folder: Path = FOLDER) -> list[dict[str, str]]:
    """Return the rows of a search's table."""
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


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
    assert [(row["number"], row["state"], row["epochs"]) for row in rows] == [(n, "complete", "2") for n in "012"]
    for row in rows:
        assert 0.001 <= float(row[LR]) <= 0.01
        assert int(row["data.batch_size"]) in (16, 32, 48, 64)
        values = yaml.safe_load((searched / row["folder"] / "version_0" / "config.yaml").read_text())
        assert values["data"]["init_args"]["batch_size"] == int(row["data.batch_size"])
        assert values["model"]["network"]["init_args"]["iterations"] == int(row["model.network.iterations"])
        assert values["model"]["optimizer"]["init_args"]["lr"] == float(row[LR])
    for name in ("history.png", "values.png"):
        assert (searched / FOLDER / name).read_bytes().startswith(b"\x89PNG")
    best = max(rows, key=lambda row: float(row["val/accuracy"]))
    kept = [path.relative_to(searched).parts[3] for path in searched.rglob("last.ckpt")]
    assert kept == [f"trial_{best['number']}"]
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{searched / FOLDER / 'study.db'}")
    assert [trial.value for trial in study.trials] == [float(row["val/accuracy"]) for row in rows]


def test_the_best_recipe_trains_as_the_best_trial_did(searched, monkeypatch):
    monkeypatch.chdir(searched)
    row = max(table(), key=lambda row: float(row["val/accuracy"]))
    then = yaml.safe_load((Path(row["folder"]) / "version_0" / "config.yaml").read_text())
    training = Training(Values.of(load_recipe(str(FOLDER / "best.yaml"))))
    for part in ("seed_everything", "model", "data"):
        assert training.values[part] == then[part]
    training.trainer.fit(training.model, training.datamodule)
    assert float(training.trainer.callback_metrics["val/accuracy"]) == pytest.approx(float(row["val/accuracy"]))


def test_a_search_that_was_stopped_goes_on_as_if_it_was_not(searched, monkeypatch, capfd):
    """It is stopped in the last validation of its second trial, after which nothing is left to train."""
    with monkeypatch.context() as patch:
        interrupt(patch, 4, "SIGINT")
        assert call("search", "mine.yaml", "--trials", "3", "--trainer.min_epochs", "1") == 130
    (command,) = re.findall(r"stopped by SIGINT; to continue: torchcaps (.*)", capfd.readouterr().err)
    assert command == "search mine.yaml --resume --trials 3 --trainer.min_epochs 1"
    assert [row["state"] for row in table()] == ["complete"]
    assert call(*shlex.split(command.replace("epochs 1", "epochs=1"))) == 0  # the same, spelled in another way
    assert table() == table(searched / FOLDER)
    assert not (FOLDER / "trial_1" / "version_1" / "metrics.csv").exists()  # it was not trained again


def test_a_search_goes_on_with_what_it_began_with(searched, capfd):
    shutil.copytree(searched / "runs", "runs")
    before = (FOLDER / "trials.csv").read_text()
    assert call("search", "mine.yaml", "--resume") == 0  # nothing is left
    assert (FOLDER / "trials.csv").read_text() == before
    resume = ("search", "mine.yaml", "--resume")
    began = "the search in runs/mine/search_0 began with other overrides or values of the recipe: give the same as then"
    assert began in error_of(capfd, *resume, "--trainer.max_epochs", "3")
    for old, new in (("high: 1e-2", "high: 1e-1"), ("val_size: 100", "val_size: 101")):
        Path("mine.yaml").write_text(RECIPE.replace(old, new))
        assert f"{began} (overrides: none), or begin a new one" in error_of(capfd, *resume)
    Path("mine.yaml").write_text(RECIPE)
    Path("runs/mine/search_shared/trial_0").mkdir(parents=True)
    said = "runs/mine/search_shared has trials of a search in another storage"
    assert said in error_of(capfd, "search", "mine.yaml", "--storage", "study.log")
    (FOLDER / "study.db").write_bytes(b"no database")
    said = error_of(capfd, *resume)
    assert "cannot be opened (" in said
    assert said.endswith(f": {EXPECTED_STORAGE}")


def test_journals_that_cannot_be_used(tmp_path, capfd):
    plan = read_plan(load_recipe("mine.yaml"))
    study = open_study(plan, "study.log")
    study.tell(study.ask(dict(plan.values)), 0.5)
    journal = Path("study.log")
    text = journal.read_bytes()
    command = ("search", "mine.yaml", "--storage", "study.log")
    for length in (len(text) - 1, len(text) // 2):
        journal.write_bytes(text[:length])
        said = "the storage study.log ends within a line: if no process is writing to it, remove this line to go on"
        assert said in error_of(capfd, *command)
        assert journal.read_bytes() == text[:length]
        journal.write_bytes(text[: text.rindex(b"\n", 0, length) + 1])
        open_study(plan, "study.log").ask(dict(plan.values))
    journal.write_bytes(b'{"a": 1}\n')
    assert "the storage study.log cannot be opened (" in error_of(capfd, *command)
    for content in (b"[" * 100_000 + b"\n", b"[1]\n", b"SQLite format 3\x00 and more", b"a text"):
        journal.write_bytes(content)  # a database, for one, of which no line may be removed
        assert f"the storage study.log is no journal file of Optuna's: {EXPECTED_STORAGE}" in error_of(capfd, *command)
    journal.unlink()
    os.mkfifo(journal)  # nobody writes to it
    assert "the storage study.log is not a regular file" in error_of(capfd, *command)
    with pytest.raises(ValueError, match=r"the storage postgresql://machine/x cannot be opened \("):
        open_study(plan, "postgresql://me:secret@machine/x")


def test_failed_trials_do_not_end_a_search(capfd):
    Path("mine.yaml").write_text(RECIPE.replace(LR_SPACE, "{choices: [0.002, 1e30]}"))
    said = error_of(capfd, "search", "mine.yaml", "--trials", "1")
    assert said.startswith("torchcaps: no trial came to its end; trial 0: the loss is nan at step")
    assert not (FOLDER / "best.yaml").exists()
    assert call("search", "mine.yaml", "--resume", "--trials", "4") == 0
    rows = table()
    assert {row["state"] for row in rows} == {"complete", "fail"}
    for row in rows:
        assert (row["state"] == "fail") == (row[LR] == "1e+30")
        assert row["error"].startswith("the loss is nan at step ") == (row["state"] == "fail")
    assert "lr: 0.002\n" in (FOLDER / "best.yaml").read_text()


def a_plan(folder: str = "search", trials: int = 10, **options) -> Plan:
    return read_plan(load_recipe("mine.yaml"), folder=Path(folder), trials=trials, **options)


def open_study(plan: Plan, where: str = "study.log") -> optuna.Study:
    plan.folder.mkdir(exist_ok=True)
    return studies.open_study(plan, where)


def run(plan: Plan) -> optuna.Study:
    """Run a search or go on with it; return the study."""
    study = open_study(plan, f"{plan.folder}.log")
    for _ in studies.run_study(plan, study, StopSignals()):
        pass
    return study


def four_validations(plan, trial, signals):
    """Train nothing: the metric is the learning rate, after each of four validations."""
    for step in range(4):
        trial.report(trial.params[LR], step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return trial.params[LR]


def test_a_loss_is_lowered_unless_the_recipe_says_otherwise():
    assert a_plan().direction == "maximize"
    Path("mine.yaml").write_text(RECIPE.replace("val/accuracy", "val/loss"))
    assert a_plan().direction == "minimize"
    assert a_plan(mode="max").direction == "maximize"


@pytest.mark.parametrize(("mode", "prune"), [("max", True), ("min", True), ("max", False)])
def test_bad_trials_end_early(monkeypatch, mode, prune):
    monkeypatch.setattr("torchcaps.search.study._train", four_validations)
    head = f"  metric: val/accuracy\n  mode: {mode}\n  prune: {str(prune).lower()}\n"
    Path("mine.yaml").write_text(RECIPE.replace("  metric: val/accuracy\n", head))
    study = run(a_plan())
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert bool(pruned) is prune
    assert [len(trial.intermediate_values) for trial in pruned] == [2] * len(pruned)  # the first validation ends none
    assert all(trial.state.name == "COMPLETE" for trial in study.trials[:4])
    better = max if mode == "max" else min
    assert best_of(study).params == better(study.trials, key=lambda trial: trial.params[LR]).params


def test_an_error_of_the_data_ends_a_search_only_if_no_trial_is_complete(monkeypatch):
    """It is probably that of the values, such as an encoder of another size, if other trials had none."""

    def train(plan, trial, signals):
        if trial.number >= first:
            raise DataError("the encoder has 3 layers")
        return 0.5

    monkeypatch.setattr("torchcaps.search.study._train", train)
    first = 0
    with pytest.raises(DataError, match="the encoder has 3 layers"):
        run(a_plan("a", 3))
    first = 1
    trials = run(a_plan("b", 3)).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "FAIL"]
    assert trials[2].user_attrs["error"] == "the encoder has 3 layers"


def test_a_trial_that_ends_before_its_first_checkpoint_again_and_again_has_failed(monkeypatch):
    def train(plan, trial, signals):
        if trial.number == 0:
            raise OSError("cannot fork")
        return 0.5

    monkeypatch.setattr("torchcaps.search.study._train", train)
    for _ in range(studies.STARTS):
        with pytest.raises(OSError, match="cannot fork"):
            run(a_plan("a", 2))
    trials = run(a_plan("a", 2)).trials
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE"]
    assert trials[0].user_attrs["error"] == "its training began 3 times and ended before a checkpoint: cannot fork"


def test_a_process_that_ends_before_it_asks_for_a_trial_loses_none():
    plan = a_plan(trials=1)
    study = open_study(plan)
    plan.folder_of(0).mkdir()
    trial, lock = studies._take(plan, study)
    assert (trial.number, studies._take(plan, study)) == (0, None)
    lock.release()


def test_the_values_follow_from_the_seed_however_often_a_search_was_stopped(monkeypatch):
    monkeypatch.setattr("torchcaps.search.study._train", four_validations)
    whole = [trial.params for trial in run(a_plan("a", 13, seed=5)).trials]
    for trials in (3, 12, 13):  # the first ten are drawn evenly, the others follow from those before
        study = run(a_plan("b", trials, seed=5))
    assert [trial.params for trial in study.trials] == whole
    assert run(a_plan("c", 13, seed=6)).trials[0].params != whole[0]
    assert len({params[LR] for params in whole}) == 13


def test_encoded_images_of_ones_own_have_one_split(monkeypatch):
    Path("mine.yaml").write_text(
        "extends: heinsen2022/images/cifar10 --small\n"
        "search: {metric: val/accuracy, values: {data.batch_size: {low: 8, high: 16}}}\n"
        "data: {init_args: {images: {class_path: torchcaps.data.ImageFolder, init_args: {folder: pictures}}}}\n"
    )
    plan = a_plan()
    split = plan.folder_of(0) / "version_0" / "split.csv"
    split.parent.mkdir(parents=True)
    split.touch()
    seen = []
    monkeypatch.setattr("torchcaps.search.plan.Training", lambda values: seen.append(values.overrides))
    plan.training({})
    assert [x.tokens for x in seen[0]] == [(f"--data.images.split={split}",)]


def test_numbers_have_no_accuracy_to_search_by(tmp_path):
    draw_digits(tmp_path / "pictures", 0, 10)
    files = [path.name for path in (tmp_path / "pictures").rglob("*.png")]
    Path("t.csv").write_text("file,n\n" + "".join(f"{name},{i}\n" for i, name in enumerate(files)))
    Path("mine.yaml").write_text(
        "extends: own/numbers\n"
        "search: {metric: val/accuracy, values: {model.optimizer.lr: {low: 0.001, high: 0.01}}}\n"
        "data: {init_args: {folder: pictures, table: t.csv, numbers: [n]}}\n"
    )
    with pytest.raises(ValueError, match=r"'val/accuracy', which no validation logs; did you mean val/loss\?"):
        check(a_plan())


def test_the_best_recipe_of_a_linked_folder_extends_what_was_searched():
    Path("elsewhere/deep").mkdir(parents=True)
    Path("runs").symlink_to("elsewhere/deep")
    best: Any = SimpleNamespace(number=0, value=0.5, user_attrs={"recipe": {}})
    path = _write_recipe(a_plan("runs"), best)
    assert load_recipe(str(path)).config["data"]["init_args"]["val_size"] == 100


def test_a_trial_that_never_validates_has_failed():
    (trial,) = run(a_plan(trials=1, overrides=tuple(overrides_of({"trainer.check_val_every_n_epoch": 3})))).trials
    assert trial.state.name == "FAIL"
    assert trial.user_attrs["error"].startswith("the training ended before its first validation: train longer")


def test_each_trial_is_taken_by_one_process():
    plan = a_plan(trials=2)
    study, other = open_study(plan), open_study(plan)
    (first, lock), (second, other_lock) = studies._take(plan, study), studies._take(plan, other)
    assert (first.number, second.number) == (0, 1)
    assert studies._take(plan, study) is studies._take(plan, other) is None
    lock.release()  # as when its process is killed
    again, lock = studies._take(plan, other)
    assert again.number == 0
    other.tell(again, 0.5)
    lock.release()
    other_lock.release()
    shutil.rmtree(plan.folder_of(1))  # the files of another machine are not here
    assert studies._take(plan, study) is None


def test_a_shared_search_that_cannot_work_leaves_no_study(capfd):
    """A study made by the wrong command would keep its mode."""
    error_of(capfd, "search", "mine.yaml", "--storage", "study.log", "--data.val_size=0")
    assert not Path("study.log").exists()


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchcaps", "search", "mine.yaml", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_processes_share_a_search_and_one_is_killed(searched):
    """Another process finishes the trial of the killed one. The trials are those of a search in one process."""
    shared = ("--storage", "study.log", "--trials", "4")
    folder = Path("runs/mine/search_shared")
    killed = start(*shared)
    while not list(folder.glob("trial_*/version_0/checkpoints/last.ckpt")):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    processes = [start(*shared), start(*shared)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    rows = table(folder)
    assert [(row["number"], row["state"]) for row in rows] == [(number, "complete") for number in "0123"]
    assert (folder / "trial_0" / "version_1").exists()
    for row, whole in zip(rows, table(searched / FOLDER), strict=False):
        assert {**row, "folder": ""} == {**whole, "folder": ""}


@pytest.mark.slow
def test_the_best_recipe_has_the_overrides_too():
    Path("mine.yaml").write_text(
        RECIPE.replace("model.network.iterations: {choices: [1, 2]}", "model.optimizer.eps: {choices: [1e-8, 1e-7]}")
    )
    overrides = ["--model.optimizer=torch.optim.RAdam", "--trainer.callbacks+=EarlyStopping"]
    overrides += ["--trainer.callbacks.monitor=val/loss", "--trainer.callbacks.patience=9", "--data.shift", "1"]
    assert call("search", "mine.yaml", *overrides, "--trials", "1") == 0
    best = FOLDER / "best.yaml"
    assert best.read_text().splitlines()[1] == "extends: ../../../mine.yaml"
    (config,) = FOLDER.glob("trial_0/version_0/config.yaml")
    then, now = yaml.safe_load(config.read_text()), Training(Values.of(load_recipe(str(best)))).values
    for part in ("model", "data"):
        assert now[part] == then[part]
    assert now["trainer"]["callbacks"] == then["trainer"]["callbacks"]
    assert call("train", str(best), "--smoke") == 0


def test_the_documentation_shows_the_example():
    page = (ROOT / "docs" / "hyperparameters.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"\n\n(    extends: quickstart\n(?:    .*\n)+)", page)
    comment, _, example = (ROOT / "examples" / "search.yaml").read_text(encoding="utf-8").partition("\n")
    assert comment.startswith("# Ten short trainings")
    assert textwrap.dedent(shown) == example


@pytest.mark.slow
def test_the_example_finds_values_that_learn():
    shutil.copy(ROOT / "examples" / "search.yaml", "search.yaml")
    assert call("search", "search.yaml") == 0
    rows = table(Path("runs/search/search_0"))
    assert len(rows) == 10
    assert max(float(row["val/accuracy"]) for row in rows if row["state"] == "complete") > 0.96


def test_the_head_is_extended_shown_and_ignored_by_training(capfd):
    assert load_recipe("quickstart").search is None
    Path("same.yaml").write_text("extends: mine.yaml\n")
    Path("other.yaml").write_text(
        "extends: mine.yaml\nsearch: {metric: val/loss, mode: min, values: {seed_everything: {low: 0, high: 9}}}\n"
    )
    search, other = read_plan(load_recipe("same.yaml")), read_plan(load_recipe("other.yaml"))
    assert search.values["data.batch_size"] == optuna.distributions.IntDistribution(16, 64, step=16)
    assert search.values[LR] == optuna.distributions.FloatDistribution(0.001, 0.01, log=True)  # 1e-3 is a text in YAML
    assert (other.metric, other.mode, list(other.values)) == ("val/loss", "min", ["seed_everything"])
    assert call("recipes", "mine.yaml") == 0
    assert re.search(r"search:\n  metric: val/accuracy +# mine.yaml", capfd.readouterr().out)
    assert call("train", "mine.yaml", "--smoke") == 0
    assert not list(Path().rglob("search_*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"search": 3}, "mine.yaml: the following arguments are required: search.metric, search.values"),
        ({"metrics": "x"}, "'metrics'"),
        ({"folder": "elsewhere"}, "'folder'"),
        ({"mode": "best"}, "mine.yaml: search.mode: expected 'max' or 'min' or None, got best"),
        ({"trials": 0}, "mine.yaml: search.trials: expected PositiveInt, got 0"),
        ({"prune": "maybe"}, "mine.yaml: search.prune: expected bool, got maybe"),
        ({"values": {}}, "mine.yaml: search.values is empty"),
        ({LR: 0.1}, "mine.yaml: search.values: expected dict, got 0.1"),
        ({LR: {"low": 0.1, "choices": [1, 2]}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"low": 0.1}}, f"{LR} must be {{low: NUMBER, high: NUMBER}}, also with log"),
        ({LR: {"low": "a", "high": 1}}, "mine.yaml: search.values: expected int or float or bool or a list of int or "),
        ({LR: {"low": 0.1, "high": float("inf")}}, "a number is not finite"),
        ({LR: {"low": 2, "high": 1}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"low": 0.0, "high": 1.0, "log": True}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"low": 1.0, "high": 8, "step": -1}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"choices": 3}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"choices": []}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"choices": [1, [2]]}}, "mine.yaml: search.values[1]: expected int or float or bool or str or None"),
        ({"metric": "val/acuracy"}, "search.metric is 'val/acuracy', which no validation logs; did you mean val/accur"),
        ({"metric": "test/accuracy"}, "search.metric is 'test/accuracy', which no validation logs"),
        ({"model.optimizer.rl": {"low": 1, "high": 2}}, "model.optimizer.rl=1: there is no 'rl'; did you mean lr"),
        ({5: {"low": 1, "high": 2}}, "5"),
        ({"config": {"choices": ["a.yaml", "b.yaml"]}}, "config"),
        ({"data.batch_size": {"choices": ["many", 8]}}, "--data.batch_size=many: expected int, got many"),
        ({"data.val_share": {"low": 0.1, "high": 0.3}}, "has data.val_share, and all trials have the split of the"),
    ],
)
def test_bad_heads(capfd, change, said):
    content = yaml.safe_load(RECIPE)
    (key,) = change
    if key == "search":
        content |= change
    elif key in ("metric", "mode", "trials", "prune", "values", "metrics", "folder"):
        content["search"] |= change
    else:
        content["search"]["values"] = change
    Path("mine.yaml").write_text(yaml.safe_dump(content))
    assert said in error_of(capfd, "search", "mine.yaml")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quickstart"], "quickstart has no head `search`: write a recipe that extends it and add search: {metric: "),
        (["mine.yaml", "--trials", "0"], "argument --trials: expected an integer of at least 1, got 0"),
        (["mine.yaml", "--resume"], "no search under runs/mine: leave out --resume to begin one"),
        (["mine.yaml", "--resume", "--storage", "study.log"], "--storage: not allowed with argument --resume"),
        (
            ["mine.yaml", "--storage", "mine.yaml"],
            f"the storage mine.yaml is no journal file of Optuna's: {EXPECTED_STORAGE}",
        ),
        (["mine.yaml", "--storage", "sqlite:///no/folder/x.db"], "cannot be opened ("),
        (["mine.yaml", "--storage", "nosql://machine/x"], "cannot be opened ("),
        (["mine.yaml", "--data.batch_size", "8"], "data.batch_size is searched: leave out --data.batch_size, or take"),
        (
            ["mine.yaml", "--data.val_size=0"],
            "a search needs a validation, and this recipe has none: set data.val_size to more than 0; the test set",
        ),
        (["mine.yaml", "--trainer.limit_val_batches=0"], "trainer.limit_val_batches to more than 0"),
        (
            ["mine.yaml", "--trainer.num_nodes=2", "--trainer.accelerator=cpu"],
            "set trainer.devices and trainer.num_nodes",
        ),
        (["mine.yaml", "--trainer.devices=2", "--trainer.accelerator=cpu"], "a trial trains in one process"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_trial(capfd, arguments, said):
    assert said in error_of(capfd, "search", *arguments)
    assert not Path("runs").exists()
