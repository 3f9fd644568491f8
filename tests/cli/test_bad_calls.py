"""Wrong calls of all kinds: status 2, one line that says what is wrong, nothing run, and no folder of a run left."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call, checkpoint, error_of

from torchcaps.data import DataError, Encoder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SHORT = ["--trainer.max_epochs=3", "--trainer.limit_train_batches=2", "--trainer.log_every_n_steps=1"]
SHORT += ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


def bad(capfd, *arguments: str) -> str:
    message = error_of(capfd, *arguments)
    assert not [path for path in Path().rglob("*") if path.name.startswith(("version_", "smoke_", "owned"))]
    return message


# Values


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("--trainer.devices two", "devices.* int > 0"),
        pytest.param("--trainer.devices 9999999999999", "cannot be built: MemoryError", marks=pytest.mark.slow),
        ("--trainer.val_check_interval 0", "val_check_interval must be a number of batches, at least 1, or a fraction"),
        pytest.param(
            "--trainer.accumulate_grad_batches 0",
            "accumulate_grad_batches must be at least 1, got 0",
            marks=pytest.mark.slow,
        ),
        ("--seed_everything -1", "seed_everything must be from 0 to 4294967295, got -1"),
        pytest.param(
            "--trainer.callbacks 5",
            r"--trainer.callbacks 5: expected Callback, as \{class_path: MODULE.NAME\}, got '5'",
            marks=pytest.mark.slow,
        ),
        ("--trainer.callbacks [EarlyStoping]", "there is no Callback called 'EarlyStoping'"),
        pytest.param(
            "--trainer.callbacks torchcaps.training.OneCycl",
            "there is no 'torchcaps.training.OneCycl'",
            marks=pytest.mark.slow,
        ),
        ("--trainer.callbacks+=torchcaps.training.SpreadMargin", "SpreadMargin needs a SpreadLoss as model.loss"),
        pytest.param(
            "--trainer.callbacks+=EarlyStopping",
            "=EarlyStopping: the following arguments are required: monitor",
            marks=pytest.mark.slow,
        ),
        ("--data LabeledData", "LabeledData is a base of data sets and has no data: choose a data set"),
        ("--model.optimizer.lr null", "model.optimizer or model.scheduler cannot be built: '<='"),
        pytest.param("--model.optimizer.lr x", "--model.optimizer.lr x: Expected a float", marks=pytest.mark.slow),
        ("--model.scheduler torch.optim.lr_scheduler.ReduceLROnPlateau", "model.scheduler cannot be ReduceLROnPlateau"),
        ("--model.network capsnet_mnist", "with their module: torchcaps.models.sabour2017.capsnet_mnist"),
        ("--trainer.limit_test_batches 0", "no batch to test on"),
        ("--trainer.limit_train_batches 0", "limit_train_batches must be above 0, got 0"),
        ("-x 5", "unexpected argument '-x'"),
    ],
)
def test_values(capfd, overrides, said):
    assert re.search(said, bad(capfd, "train", "quickstart", *SHORT, *overrides.split()))


MONITOR = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor "
CONVOLUTION = "--model.reconstruction_weight 0 --model.network torch.nn.Conv2d --model.network.in_channels 1 "


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (f"{MONITOR}val/nope", "EarlyStopping monitors 'val/nope', which is not logged; did you mean val/loss"),
        (f"{MONITOR}val/loss", "EarlyStopping monitors 'val/loss', and there is no validation: set data.val_size"),
        (f"{MONITOR}val/loss --data.val_size 64 --trainer.limit_val_batches 0", "and there is no validation"),
        (
            f"{CONVOLUTION} --model.network.out_channels 1 --model.network.kernel_size 30",
            "the network does not fit the samples: .*Kernel size can't be greater",
        ),
    ],
)
def test_values_that_are_found_when_the_first_step_begins(capfd, overrides, said):
    assert re.search(said, bad(capfd, "train", "quickstart", *SHORT, *overrides.split()))


def test_a_monitor_that_is_logged():
    arguments = [*SHORT, "--trainer.max_epochs=1", *f"{MONITOR}val/loss --data.val_size 64".split()]
    assert call("train", "quickstart", *arguments, "--trainer.limit_test_batches=1") == 0


# Files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: {network: {init_args: 5}}", "model.network.init_args must have values of its own, .*, got 5"),
        ("model: {network: {class_path: [a]}}", r"class_path must be the name of a class or a function, got \['a'\]"),
        (
            "model: {network: {class_path: {a: 1}}}",
            r"class_path must be the name of a class or a function, got \{'a': 1",
        ),
        ("model: {network: [a, b]}", "model.network: expected Module, as"),
        ("model: {network: 5}", "model.network: expected Module, as"),
        ("trainer: {callbacks: 5}", r"trainer.callbacks: expected Callback, as \{class_path: MODULE.NAME\}, got 5"),
        ("trainer: {callbacks: [[]]}", r"trainer.callbacks\[0\]: expected Callback, as"),
        ("trainer: {callbacks: [{class_path: EarlyStoping}]}", r"callbacks\[0\]: there is no Callback called 'EarlyS"),
        (
            "trainer: {callbacks: [{class_path: ModelCheckpoint}, {class_path: Timer, init_args: {patence: 1}}]}",
            r"mine.yaml: trainer.callbacks\[1\].patence: there is no 'patence'",
        ),
        (
            "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: train/loss, patience: many}}]}",
            r"mine.yaml: trainer.callbacks\[0\].patience: expected int, got 'many'",
        ),
        (
            "trainer: {callbacks: [{class_path: EarlyStopping, monitor: a}]}",
            r"callbacks\[0\].monitor: arguments of a c",
        ),
        ("model: {5: 6}", 'mine.yaml: model: names must be texts, got 5: if it is one, write "5"'),
        ("trainer: {on: 6}", "mine.yaml: trainer: names must be texts, got True"),
        ("model: &a {network: *a}", r"an alias \(\*NAME\) stands inside of what it names"),
        ("trainer: {callbacks: &a [*a]}", r"an alias \(\*NAME\) stands inside of what it names"),
        ("model: " + "{a: " * 2000 + "1" + "}" * 2000, "its values are nested too deeply"),
        (
            "model:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
            "it has more than 100,000 values",
        ),
        ("trainer: !!python/object/apply:os.system ['touch owned']", "could not determine a constructor for the tag"),
    ],
)
def test_files(capfd, content, said):
    Path("mine.yaml").write_text(f"extends: quickstart\n{content}\n")
    assert re.search(said, bad(capfd, "train", "mine.yaml", *SHORT))


@pytest.mark.parametrize(
    ("extends", "said"),
    [
        ("nothere.yaml", "mine.yaml extends nothere.yaml: no file nothere.yaml"),
        ("quikstart", "mine.yaml extends quikstart: no recipe 'quikstart'; did you mean quickstart"),
        ("[quickstart]", r"mine.yaml: extends must be RECIPE or RECIPE --small, got \['quickstart'\]"),
        ("''", "mine.yaml: extends must be RECIPE or RECIPE --small, got ''"),
    ],
)
def test_what_a_file_extends(capfd, extends, said):
    Path("mine.yaml").write_text(f"extends: {extends}\n")
    assert re.search(said, bad(capfd, "train", "mine.yaml"))


def test_the_place_of_a_wrong_name_is_said(capfd):
    """An override is blamed for its own names, and not the recipe."""
    Path("mine.yaml").write_text("extends: quickstart\n")
    message = bad(capfd, "train", "mine.yaml", "--model.loss", "torchcaps.MarginLos")
    assert message.startswith("torchcaps: --model.loss torchcaps.MarginLos: there is no 'MarginLos' in ")
    Path("mine.yaml").write_text("extends: quickstart\nmodel: {loss: torchcaps.MarginLos}\n")
    assert bad(capfd, "train", "mine.yaml").startswith("torchcaps: mine.yaml: there is no 'MarginLos' in ")


# Checkpoints


class Payload:
    def __reduce__(self):
        return os.system, ("touch owned",)


def processed(state: dict[str, Any], epochs: Any) -> None:
    state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] = epochs


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a payload": lambda state: state.update(more=Payload()),
    "a payload among the weights": lambda state: state["state_dict"].update(more=Payload()),
    "ints": lambda state: state.update(state_dict=dict.fromkeys(state["state_dict"], 3)),
    "a list": lambda state: state.update(state_dict=[1]),
    "nothing": lambda state: state.update(state_dict=None),
    "other shapes": lambda state: state.update(state_dict=dict.fromkeys(state["state_dict"], torch.zeros(3))),
    "no weights": lambda state: state.pop("state_dict"),
    "one more": lambda state: state["state_dict"].update(more=torch.zeros(3)),
}
OF_THE_TRAINING: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a later epoch": lambda state: processed(state, 8),
    "no epoch": lambda state: processed(state, "x"),
    "no loops": lambda state: state.pop("loops"),
    "other loops": lambda state: state.update(loops={"fit_loop": 5}),
    "no optimizer": lambda state: state.pop("optimizer_states"),
    "an optimizer of nothing": lambda state: state.update(optimizer_states=[5]),
    "callbacks of nothing": lambda state: state.update(callbacks=5),
    "another optimizer": lambda state: state["optimizer_states"][0]["param_groups"][0].update(params=[0]),
    "no version": lambda state: state.pop("pytorch-lightning_version"),
    "another version": lambda state: state.update({"pytorch-lightning_version": "x.y"}),
}


@pytest.mark.parametrize("command", ["test", pytest.param("train", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGES)
def test_checkpoints_of_other_things(capfd, trained, command, name):
    state = torch.load(checkpoint(trained), weights_only=True)
    CHANGES[name](state)
    torch.save(state, "bad.ckpt")
    arguments = SHORT if command == "train" else []
    assert "bad.ckpt is " in bad(capfd, command, "quickstart", "--ckpt_path", "bad.ckpt", *arguments)


@pytest.mark.parametrize("name", OF_THE_TRAINING)
def test_checkpoints_that_cannot_be_resumed(capfd, trained, name):
    state = torch.load(checkpoint(trained), weights_only=True)
    OF_THE_TRAINING[name](state)
    torch.save(state, "bad.ckpt")
    message = bad(capfd, "train", "quickstart", "--ckpt_path", "bad.ckpt", *SHORT)
    assert message.startswith("torchcaps: bad.ckpt ")
    if name == "a later epoch":
        assert message.endswith(
            "has finished 8 epochs, and this training ends after 3: give --trainer.max_epochs 8 or more"
        )


@pytest.mark.parametrize("damage", ["empty", "cut", "header", "text", "folder"])
def test_damaged_checkpoints(capfd, trained, damage):
    whole = checkpoint(trained).read_bytes()
    path = Path("bad.ckpt")
    if damage == "folder":
        path.mkdir()
    else:
        changed = {"empty": b"", "cut": whole[:-99], "header": bytes(9) + whole[9:], "text": b"a text"}
        path.write_bytes(changed[damage])
    assert "bad.ckpt" in bad(capfd, "test", "quickstart", "--ckpt_path", "bad.ckpt")


def test_no_checkpoint_given(capfd):
    assert "no checkpoint ." in bad(capfd, "train", "quickstart", "--ckpt_path", "", *SHORT)


# Many


OPTIONS = {
    "trainer": (
        "devices=0 devices=-3 devices=1.5 devices=[] max_epochs=x max_epochs=-5 max_epochs=1e400 max_steps=-7 "
        "min_epochs=-1 max_time=x max_time=00:00 val_check_interval=-1 val_check_interval=nan "
        "check_val_every_n_epoch=0 limit_train_batches=-1 limit_val_batches=2.5 overfit_batches=-1 "
        "accumulate_grad_batches=-1 gradient_clip_val=-1 gradient_clip_algorithm=x log_every_n_steps=-1 "
        "num_sanity_val_steps=-2 precision=99 accelerator=x strategy=x strategy=[1] num_nodes=0 profiler=x "
        "deterministic=x fast_dev_run=-1 callbacks=[null] callbacks={a:1} logger=x logger=[5] plugins=x "
        "plugins=[5] reload_dataloaders_every_n_epochs=-1 sync_batchnorm=x max_epoch=3 callbacks.a=3 "
    ),
    "model": (
        "classes=0 classes=x classes=9 network=x network=. network=a..b network={a:1} network=torch.nn "
        "network=null loss=5 network=torch.nn.Linear network=torchcaps network=torchcaps. network.iterations=0 "
        "network.iterations=true loss=null loss=torch.optim.Adam optimizer=Adan optimizer=torch.nn.Linear "
        "optimizer.lr=-1 optimizer.lrr=1 scheduler=5 scheduler.gamma=x scheduler_interval=day "
        "reconstruction_weight=-1 labels_per_image=11 feedback=x mixup=-1 top_k=0 nope=1 network.class_path=[a] "
        "network.init_args=5 "
    ),
    "data": (
        "batch_size=0 batch_size=[ batch_size=true num_workers=-1 shift=-1 shift=100 val_size=-1 resize=0 resize=3 "
        "nope=1 "
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("override", [f"--{part}.{text}" for part, texts in OPTIONS.items() for text in texts.split()])
def test_many_values(capfd, override):
    assert bad(capfd, "train", "quickstart", *SHORT, override)


@pytest.mark.slow
def test_a_process_that_ends_in_one_line():
    Path("mine.yaml").write_text(
        "extends: quickstart\nmodel: {loss: {class_path: subprocess.getoutput, init_args: {cmd: a}}}"
    )
    run = subprocess.run(
        [sys.executable, "-m", "torchcaps", "train", "mine.yaml"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert run.returncode == 2
    assert run.stdout == ""
    (said,) = run.stderr.splitlines()
    assert said.startswith(
        "torchcaps: mine.yaml: model.loss: subprocess.getoutput is not among the classes of torchcaps"
    )


# What a second reader found


def test_a_checkpoint_says_what_it_was_trained_with_wherever_it_lies(trained, capfd):
    saved = checkpoint(trained)
    shutil.copy(saved, "alone.ckpt")
    Path("link.ckpt").symlink_to(saved)
    for path in ("alone.ckpt", "link.ckpt"):
        said = error_of(capfd, "test", "quickstart", "--ckpt_path", path, "--model.network.iterations", "1")
        assert "was trained with model.network.init_args.iterations = 3, and now it is 1" in said
    for option in (["--model.optimizer.lr=0.5"], ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"]):
        said = bad(capfd, "train", "quickstart", *SHORT, "--ckpt_path", "alone.ckpt", *option)
        assert "was trained with model.optimizer" in said
    said = bad(capfd, "train", "quickstart", *SHORT, "--ckpt_path", "alone.ckpt", "--trainer.max_steps", "1")
    assert "alone.ckpt has taken 4 steps, and this training ends after 1" in said


def test_values_in_a_checkpoint_that_are_none(trained, capfd):
    content = torch.load(checkpoint(trained), weights_only=True)
    for wrong in ("[1]", "{", 3):
        torch.save({**content, "recipe": wrong}, "wrong.ckpt")
        said = error_of(capfd, "test", "quickstart", "--ckpt_path", "wrong.ckpt")
        assert "wrong.ckpt does not hold the values of a recipe" in said
    del content["recipe"]
    torch.save(content, "none.ckpt")
    said = error_of(capfd, "test", "quickstart", "--ckpt_path", "none.ckpt")
    assert "none.ckpt does not hold the values of a recipe" in said


def test_a_key_that_stands_twice(capfd):
    Path("twice.yaml").write_text("extends: quickstart\ntrainer: {max_epochs: 1, max_epochs: 3}\n")
    assert "the key 'max_epochs' stands twice" in bad(capfd, "recipes", "twice.yaml")


@pytest.mark.slow
def test_a_file_beside_a_recipe_is_not_imported():
    Path("wandb.py").write_text("open('executed', 'w')")
    Path("mine.yaml").write_text(
        "extends: quickstart\ntrainer: {logger: {class_path: lightning.pytorch.loggers.WandbLogger}}\n"
    )
    ended = subprocess.run([sys.executable, "-m", "torchcaps", "train", "mine.yaml"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert not Path("executed").exists()


def test_a_folder_of_an_encoder_runs_no_code(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *asked: "y")  # transformers asks whether to run the code
    Path("evil").mkdir()
    names = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    Path("evil/config.json").write_text(json.dumps({"model_type": "evil", "auto_map": names}))
    Path("evil/tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokens", None]}}))
    Path("evil/evil.py").write_text(f"open({str(Path('executed').resolve())!r}, 'w')")
    with pytest.raises(DataError, match="evil is not a folder from which transformers can load"):
        Encoder("evil", cache="kept").embed(["a text"])
    assert not Path("executed").exists()


def test_a_file_of_results_that_is_no_text(capfd):
    Path("runs").mkdir()
    Path("runs/results.csv").write_bytes(b"\xff\xff")
    assert "results.csv is not a file of results" in error_of(capfd, "reproduce", "--list", "--runs", "runs")
