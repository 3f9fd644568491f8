"""Wrong calls of all kinds: status 2, one line that says what is wrong, nothing run, and no folder of a run left."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, call, checkpoint, error_of
from encoders import make_encoder

from torchcaps.data import DataError, Encoder

SHORT = ["--trainer.max_epochs=3", "--trainer.limit_train_batches=2", "--trainer.log_every_n_steps=1"]
SHORT += ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


def bad(capfd, *arguments: str) -> str:
    message = error_of(capfd, *arguments)
    assert not [path for path in Path().rglob("*") if path.name.startswith(("version_", "smoke_", "owned"))]
    return message


# Overrides of the quickstart, with a part of the message.
OVERRIDES = [
    ("--trainer.max_epochs three", "--trainer.max_epochs three: expected int or None, got three"),
    ("--trainer.max_epochs=1e3", "--trainer.max_epochs=1e3: expected int or None, got 1e3"),
    ("--model.optimizer.lr abc", "--model.optimizer.lr abc: expected float, got abc"),
    ("--trainer.precision 99", "--trainer.precision 99: expected .*bf16.*, got 99"),
    ("--model.network.decoder=4", "--model.network.decoder=4: expected bool, got 4"),
    ("--trainer.max_epoch 3", "--trainer.max_epoch 3: there is no 'max_epoch'; did you mean max_epochs"),
    ("--model.network.iterations 0", r"iterations .* 0\b"),
    ("--model.network.decoder false", r"reconstruction_weight=0\.005 .*decoder"),
    ("--model.loss torchcaps.MarginLos", "--model.loss torchcaps.MarginLos: there is no 'MarginLos' in "),
    ("--model.network capsnet_mnist", "named with their module: torchcaps.models.sabour2017.capsnet_mnist"),
    ("--data torchcaps.MarginLoss", "--data torchcaps.MarginLoss: .* subclass of LabeledData"),
    ("--data LabeledData", "LabeledData is a base of data sets and has no data: choose a data set"),
    ("--data.batch_size [", "--data.batch_size .: expected int"),
    ("--model.classes 9", "Digits has 10 classes"),
    ("--model.optimizer.lr -1", "model.optimizer or model.scheduler cannot be built: Invalid learning rate"),
    ("--model.scheduler torch.optim.lr_scheduler.ReduceLROnPlateau", "model.scheduler cannot be ReduceLROnPlateau"),
    ("--model.loss.weight [1.0,19.0]", "weight .*: class weights are given as --model.class_weights balanced, or as "),
    ("--model.loss.weight balanced", "balanced: class weights are given as --model.class_weights balanced, or as "),
    ("--model.class_weights [1,19]", "class_weights must have one number for each of 10 classes, got 2: give so many"),
    (
        "--model.class_weights even",
        "--model.class_weights even: expected 'balanced' or a list of float or None, got even",
    ),
    (
        "--model.loss torch.nn.HuberLoss --model.class_weights balanced",
        "class_weights='balanced' need a loss with a buffer `weight`, .* HuberLoss has none: choose CrossEntropyLoss",
    ),
    ("--trainer.callbacks 5", r"--trainer.callbacks 5: expected Callback, as \{class_path: MODULE.NAME\}, got 5"),
    ("--trainer.callbacks+=EarlyStopping", "=EarlyStopping: the following arguments are required: monitor"),
    ("--trainer.callbacks+=torchcaps.training.SpreadMargin", "SpreadMargin needs a SpreadLoss as model.loss"),
    (
        "--trainer.callbacks+=torchcaps.training.Report --trainer.devices 2 --trainer.strategy ddp_spawn",
        "cannot have Report in spawned processes, .* use trainer.strategy ddp",
    ),
    ("--trainer.callbacks+=LearningRateFinder", "cannot have LearningRateFinder: .* use torchcaps search"),
    (
        "--trainer.callbacks+=StochasticWeightAveraging --trainer.callbacks.swa_lrs 0.01",
        "cannot have StochasticWeightAveraging: the weights that it averages at the end would be in no checkpoint",
    ),
    (
        "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath kept",
        "ModelCheckpoint cannot have a dirpath: checkpoints lie in the folder of the run",
    ),
    (
        "--model.scheduler torch.optim.lr_scheduler.OneCycleLR --model.scheduler.max_lr 0.01 "
        "--model.scheduler.total_steps 9 --model.optimizer.lr 0.1",
        "model.optimizer.lr cannot change anything: .* give --model.scheduler.max_lr",
    ),
    (
        "--trainer.strategy deepspeed_stage_2",
        "trainer.strategy cannot be DeepSpeed, .*: use trainer.strategy ddp, or fsdp on GPUs",
    ),
    (
        "--trainer.plugins lightning.pytorch.plugins.DeepSpeedPrecision --trainer.plugins.precision 32-true",
        "trainer.plugins cannot be DeepSpeed",
    ),
    ("--trainer.strategy dpp", r"trainer.strategy: there is no 'dpp'; did you mean ddp\b"),
    ("--trainer.max_time 1:30:00", "trainer.max_time must be days, hours, minutes and seconds, .*, got '1:30:00'"),
    ("--trainer.devices two", "trainer.devices must be auto, or a number of at least 1, .*, got 'two'"),
    ("--trainer.devices 0", "trainer.devices must be auto, or a number of at least 1, .*, got '?0"),
    ("--trainer.val_check_interval 0", "val_check_interval must be a number of batches, at least 1, or a fraction"),
    ("--trainer.accumulate_grad_batches 0", "accumulate_grad_batches must be at least 1, got 0"),
    ("--trainer.limit_test_batches 0", "no batch to test on"),
    ("--trainer.limit_test_batches -1", "limit_test_batches must be a number of batches, or a fraction .*, got -1"),
    ("--trainer.limit_val_batches 1.5", r"limit_val_batches must be a number of batches, .* to 1\.0, got 1\.5"),
    ("--seed_everything -1", "seed_everything must be from 0 to 4294967295, got -1"),
    ("--seed_everything", "--seed_everything has no value"),
    ("--model.network torchcap.models.capsnet_digits", "is no class of .*: correct the name, or allow its code to run"),
    ("--data.root my data", "unexpected argument 'data': give values .* as --NAME VALUE, and a VALUE with spaces in q"),
    ("--lr 0.1", r"unknown argument --lr; did you mean --model.optimizer.lr\?"),
    ("--modle.optimizer.lr 0.1", r"unknown argument --modle.optimizer.lr; did you mean --model.optimizer.lr\?"),
    ("--max_epochs 3", r"unknown argument --max_epochs; did you mean --trainer.max_epochs\?"),
    ("--trainer.max_epochs 0", "trainer.max_epochs and max_steps must be above 0: to test alone, use `torchcaps test`"),
    ("--modl capsnet_mnist", r"unknown argument --modl; did you mean --model\?"),
    ("--config other.yaml", "unknown argument --config"),
    # Found when the first step begins.
    ("--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/nope", "did you mean val/loss"),
    (
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss",
        "no validation: set data.val_size to mo",
    ),
    (
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss --data.val_size 64 "
        "--trainer.limit_val_batches 0",
        "no validation: set trainer.limit_val_batches to more than 0",
    ),
    ("--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/accuracy", "set its mode to max"),
    (
        "--model.reconstruction_weight 0 --model.network torch.nn.Conv2d --model.network.in_channels 1 "
        "--model.network.out_channels 1 --model.network.kernel_size 30",
        "the network does not fit the samples: .*Kernel size can't be greater",
    ),
    ("--model.labels_per_image null --model.reconstruction_weight 0", "labels_per_image=None"),
    (
        "--model.network torchcaps.models.capsnet_digits --model.network.classes 9",
        "network .* 9 .*classes=10",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), OVERRIDES)
def test_overrides(capfd, overrides, said):
    assert re.search(said, bad(capfd, "train", "quickstart", *SHORT, *shlex.split(overrides)))


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has one")
def test_an_accelerator_that_is_not_there(capfd):
    said = bad(capfd, "train", "quickstart", *SHORT, "--trainer.accelerator", "mps")
    assert "trainer.accelerator must be auto, cpu, or one that this machine has, got 'mps'" in said


# Contents of a file that extends the quickstart, with a part of the message.
FILES = [
    ("model: {network: {init_args: {iteration: 3}}}", "mine.yaml: model.network.iteration: there is no 'iteration'"),
    ("model: {network: {iterations: 5}}", "mine.yaml: model.network.iterations: arguments of a class stand in its in"),
    ("model: {network: {class_path: torchcaps.models.capsnet_digits, init_arg: {}}}", "did you mean init_args"),
    ("model: {network: {init_args: 5}}", "mine.yaml: model.network: must have values of its own, .*, got 5"),
    ("model: {network: {init_args: [5]}}", "mine.yaml: model.network: must have values of its own, .*, got .5"),
    ("model: {network: {class_path: {a: 1}}}", "model.network: must be the name of a class or a function, got "),
    ("model: {network: [a, b]}", r"model.network\[0\]: there is no Module called 'a'"),
    ("trainer: {callbacks: [[]]}", "trainer.callbacks: expected a list of Callback or Callback or None, got"),
    (
        "trainer: {callbacks: [{class_path: ModelCheckpoint}, {class_path: Timer, init_args: {patence: 1}}]}",
        r"mine.yaml: trainer.callbacks\[1\].patence: there is no 'patence'",
    ),
    (
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: train/loss, patience: many}}]}",
        r"mine.yaml: trainer.callbacks\[0\].patience: expected int, got many",
    ),
    ("trainer: 3", "mine.yaml: trainer must have values of its own, {NAME: VALUE}, got 3"),
    (
        "trainer: {strategy: {class_path: lightning.pytorch.strategies.DeepSpeedStrategy}}",
        "trainer.strategy cannot be DeepSpeed, whose checkpoints are folders that no command reads: use",
    ),
    ("trainer: {on: 6}", "mine.yaml: trainer: names must be texts, got True: write it in quotes if it is one"),
    ("trainer: {max_epochs: 1, max_epochs: 3}", "the key 'max_epochs' stands twice"),
    ("trainer: [", "mine.yaml cannot be read as a recipe: "),
    (
        "trainer: !!python/object/apply:os.system ['touch owned']",
        r"a tag \(tag:yaml.org,2002:python/object/apply:os.system\) cannot be used",
    ),
    # What would take minutes, or end the process.
    ("trainer: {logger: !!set {this.s}}", r"a tag \(tag:yaml.org,2002:set\) cannot be used: leave it out"),
    ("seed_everything: !!int ''", r"a tag \(tag:yaml.org,2002:int\) cannot be used"),
    ("seed_everything: " + "1:" * 60 + "1", "a number has more than 100 characters: 1:1:1"),
    ("seed_everything: 2001-99-99", r"month must be in 1\.\.12"),
    ("seed_everything: 2001-01-01", "must be a text, a number, a list or a dictionary, got a date"),
    ('title: "\\e]0;x"\ntitel: "\\e[2J"', "unknown key"),
    ("model: &a {network: *a}", r"an alias \(\*NAME\) or a merge key \(<<\) cannot be used: write the values out"),
    ("model: " + "[" * 200_000, "its values are nested too deeply, in more than 50 levels"),
    (f"model: {{loss: '{'[' * 200_000}'}}", "mine.yaml: model.loss: its values are nested too deeply"),
    ("".join(f"k{i}: 1\n" for i in range(20_000)), "mine.yaml: unknown key 'k0'"),
    (f"title: {'x' * 1_000_000}", "it is longer than 1,000,000 characters"),
]


@pytest.mark.parametrize(("content", "said"), FILES, ids=range(len(FILES)))
def test_files(capfd, content, said):
    Path("mine.yaml").write_text(f"extends: quickstart\n{content}\n")
    assert re.search(said, bad(capfd, "train", "mine.yaml", *SHORT))


def test_many_files_that_extend_each_other_and_a_file_of_zeros(capfd):
    for number in range(40):
        Path(f"p{number}.yaml").write_text(f"extends: q{number}.yaml\n")
        Path(f"q{number}.yaml").write_text(f"extends: p{number + 1}.yaml --small\n")
    assert "is one of more than 20 files that extend each other" in bad(capfd, "recipes", "p0.yaml")
    os.truncate(os.open("zeros.yaml", os.O_CREAT | os.O_WRONLY), 2**40)
    assert "zeros.yaml cannot be read: it is larger than 4,000,000 bytes" in bad(capfd, "recipes", "zeros.yaml")


# Whole commands, with a part of the message. `{run}` is a whole checkpoint of the quickstart, `{runs}` its runs.
COMMANDS = [
    ("trian quickstart", "invalid choice: 'trian'"),
    ("train", "the following arguments are required: RECIPE; see torchcaps train --help"),
    ("reproduce --hours x", "--hours"),
    ("models vgg*", "no model matches 'vgg.*'"),
    ("recipes zhao2019/table2/resnet20-averag", "did you mean zhao2019/table2/resnet20-average"),
    ("train sabour2017", "choose one of sabour2017/section5.2/affnist-cnn, "),
    ("train quickstart --small", "quickstart has no small version"),
    ("train mine.yaml", "no file mine.yaml"),
    ("train a\nb.yaml", "no file a b.yaml"),
    ("train \udcff.yaml", "no file"),
    ("train sabour2017/table1/cnn --trainer.max_steps 1", "nowhere/mnist.*train-images-idx3-ubyte.gz"),
    ("train heinsen2019/table1/heinsen --small --trainer.callbacks.warmup 3", r"warmup .* 3\.0\b"),
    ("train quickstart --ckpt_path ''", "has no checkpoint of a run"),
    ("train {run} --trainer.max_epochs 1", "has finished 2 epochs, and this training ends after 1: give --trainer.max"),
    (
        "train {run} --model.optimizer.lr=0.5",
        "was trained with model.optimizer.init_args.lr = 0.002, and now it is 0.5",
    ),
    ("test {run} --model.network.iterations 1", "iterations = 3, and now it is 1: leave out what changes it"),
    ("test {run} --data.ten_crop true", "ten_crop needs resize"),
    ("test quickstart --runs {runs} --ckpt_path best", "has no best checkpoint: its recipe keeps none"),
    ("explain {run} --shuffled nope", "--shuffled: there is no nope: give a checkpoint, or the folder of a run"),
    ("explain {run} --shuffled empty", "--shuffled: empty has no checkpoint of a run: give the folder of a run"),
    ("explain empty", "empty has no checkpoint of a run: give the folder of a run, such as runs/quickstart/version_0"),
    ("explain {runs}", " has no checkpoint of a run: give the folder of a run"),
    ("test {runs}/quickstart/version_9", "and .*/quickstart has no 'version_9': it has version_0$"),
    ("test {run}x.ckpt", "there is no checkpoint .*x.ckpt: give the path of a .ckpt file, or the folder of a run"),
    (
        "test quickstart --runs elsewhere",
        "elsewhere/quickstart has no checkpoint of a run: train first, or give the --ru",
    ),
    ("explain saved", "saved has no model.safetensors: expected a folder that `save_pretrained` wrote"),
    ("show saved", "saved has no model.safetensors|saved/config.json does not hold the values"),
]


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_commands(capfd, trained, monkeypatch, command, said):
    monkeypatch.setenv("TORCHCAPS_DATA", "nowhere")
    monkeypatch.setattr("pooch.retrieve", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    Path("empty").mkdir()
    Path("saved").mkdir()
    Path("saved/config.json").write_text("{}")
    command = command.replace("{run}", str(checkpoint(trained))).replace("{runs}", str(trained))
    arguments = shlex.split(command.replace("\n", "'\n'"))
    assert re.search(said, bad(capfd, *arguments))


# Checkpoints


class Payload:
    def __reduce__(self):
        return os.system, ("touch owned",)


def processed(state: dict[str, Any], epochs: Any) -> None:
    state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] = epochs


def valued(state: dict[str, Any], path: tuple[str, ...], **changes: Any) -> None:
    """Change values of the recipe."""
    values = json.loads(state["recipe"])
    functools.reduce(dict.__getitem__, path, values).update(changes)
    state["recipe"] = json.dumps(values)


def named(state: dict[str, Any], **loss: Any) -> None:
    valued(state, ("model",), loss=loss)


def changed(state: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change all weights."""
    state["state_dict"] = {name: change(value) for name, value in state["state_dict"].items()}


def optimizer(state: dict[str, Any], change: Callable[[torch.Tensor], Any]) -> None:
    """Change what the optimizer knows of the first parameter."""
    kept = state["optimizer_states"][0]["state"][0]
    kept["exp_avg"] = change(kept["exp_avg"])


CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("read safely", lambda state: state.update(more=Payload())),
    ("read safely", lambda state: state["state_dict"].update(more=Payload())),
    ("read safely", lambda state: state.pop("state_dict")),
    ("not what `torchcaps train` writes", lambda state: state.update(state_dict=dict.fromkeys(state["state_dict"], 3))),
    ("another network", lambda state: state.update(state_dict=dict.fromkeys(state["state_dict"], torch.zeros(3)))),
    ("another network", lambda state: state["state_dict"].update(more=torch.zeros(3))),
    ("does not hold the values of a recipe", lambda state: state.pop("recipe")),
    ("does not hold the values of a recipe", lambda state: state.update(recipe="[" * 100_000)),
    ("does not hold the values of a recipe", lambda state: state.update(recipe='{"a": ' * 600 + "1" + "}" * 600)),
    ("has numbers of type torch.int8 there, expected torch.float32", lambda state: changed(state, torch.Tensor.char)),
    *[("has values that are NaN", lambda state: changed(state, lambda x: x * torch.nan))] * 3,  # of each command
    ("its epoch is not what `torchcaps train` writes", lambda state: state.update(epoch=10**30)),
    ("its global_step is not what `torchcaps train` writes", lambda state: state.update(global_step=-1)),
    ("subprocess.getoutput is no class of", lambda state: named(state, class_path="subprocess.getoutput")),
    *[("must have values of its own", lambda state: valued(state, ("data",), init_args=[1]))] * 3,
    ("there is no 'images'", lambda state: valued(state, ("data", "init_args"), images={"init_args": [1]})),
    ("its trainer has no values", lambda state: valued(state, (), trainer=[1])),
]
OF_THE_TRAINING: list[Callable[[dict[str, Any]], Any]] = [
    lambda state: processed(state, 8),
    lambda state: processed(state, "x"),
    lambda state: processed(state, "1"),
    lambda state: processed(state, -1),
    lambda state: processed(state, True),
    lambda state: processed(state, 10**30),
    lambda state: processed(state, float("inf")),
    lambda state: state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"].update(ready=10**30),
    lambda state: state["loops"]["fit_loop"]["epoch_loop.batch_progress"].update(is_last_batch="x"),
    lambda state: state.pop("loops"),
    lambda state: state.update(loops={"fit_loop": 5}),
    lambda state: state.pop("optimizer_states"),
    lambda state: state.update(optimizer_states=[5]),
    lambda state: state.update(optimizer_states=[]),
    lambda state: state.update(optimizer_states=state["optimizer_states"] * 2),
    lambda state: state.update(lr_schedulers=[]),
    lambda state: state["optimizer_states"][0].update(state={}),
    lambda state: optimizer(state, torch.Tensor.char),
    lambda state: optimizer(state, torch.Tensor.to_sparse),
    lambda state: optimizer(state, lambda x: x * torch.nan),
    lambda state: optimizer(state, lambda x: x[:3]),  # an error of the first step
    lambda state: state.update(Digits={"seed": "x"}),
    lambda state: state.update(Digits={"seed": 0, "batch_size": 0}),
    lambda state: state.update(callbacks=5),
    lambda state: state["optimizer_states"][0]["param_groups"][0].update(params=[0]),
    lambda state: state.pop("pytorch-lightning_version"),
    lambda state: state.update({"pytorch-lightning_version": "x.y"}),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_checkpoints_of_other_things(capfd, trained, number):
    said, change = CHANGES[number]
    state = torch.load(checkpoint(trained), weights_only=True)
    change(state)
    torch.save(state, "bad.ckpt")
    commands = ["test", "explain", "train"]
    assert said in bad(capfd, commands[number % 3], "bad.ckpt")


@pytest.mark.parametrize("number", range(len(OF_THE_TRAINING)))
def test_checkpoints_that_cannot_be_resumed(capfd, trained, number):
    state = torch.load(checkpoint(trained), weights_only=True)
    OF_THE_TRAINING[number](state)
    torch.save(state, "bad.ckpt")
    assert bad(capfd, "train", "quickstart", "--ckpt_path", "bad.ckpt", *SHORT).startswith("torchcaps: bad.ckpt ")


@pytest.mark.parametrize(("name", "text"), [("RANK", "²"), ("SLURM_PROCID", "1_0"), ("WORLD_SIZE", "")])
def test_variables_of_launchers(capfd, monkeypatch, name, text):
    """The libraries that train make numbers of them as they are imported."""
    monkeypatch.setenv(name, text)
    said = bad(capfd, "train", "quickstart", *SHORT)
    assert f"the environment variable {name} must be a whole number, got {text!r}: unset it" in said


def test_options_that_a_run_or_a_checkpoint_has_decided(capfd, trained):
    path = checkpoint(trained)
    said = bad(capfd, "test", str(path), "--ckpt_path", "best")
    assert f"{path} is no run with several checkpoints: leave out --ckpt_path best" in said
    assert "leave out --ckpt_path last" in bad(capfd, "explain", str(path), "--ckpt_path", "last")
    run = str(path.parent.parent)
    assert f"{run} is small or not, as it was trained: leave out --small" in bad(capfd, "train", run, "--small")


def test_damaged_checkpoints(capfd, trained):
    whole = checkpoint(trained).read_bytes()
    for content in (b"", whole[:-99], bytes(9) + whole[9:], b"a text"):
        Path("bad.ckpt").write_bytes(content)
        assert "bad.ckpt is damaged" in bad(capfd, "test", "bad.ckpt")


# Code that must not run, and other files


@pytest.mark.slow
def test_a_process_that_ends_in_one_line():
    """And a module beside a recipe is not imported, also where the package itself imports a module of this name."""
    Path("wandb.py").write_text("open('executed', 'w')")
    for trainer in ("logger: {class_path: lightning.pytorch.loggers.WandbLogger}", "logger: {class_path: wandb.Run}"):
        Path("mine.yaml").write_text(f"extends: quickstart\ntrainer: {{{trainer}}}\n")
        command = [sys.executable, "-m", "torchcaps", "train", "mine.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1), ended.stderr
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
    assert "results.csv is not a text in UTF-8 (byte 0)" in error_of(capfd, "reproduce", "--list", "--runs", "runs")


def test_a_network_that_does_not_fit_the_encoder(capfd, tmp_path, images_of_noise, monkeypatch):
    """It is said before all is embedded."""
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache")
    encoder = make_encoder(tmp_path / "bert")
    message = error_of(capfd, "train", "heinsen2019/table3/heinsen", "--small", f"--data.encoder={encoder}", *SHORT)
    assert re.search(r"bert .*3 .*8\b.* 7 .*384.*model\.network\.layers=3\b", message)
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) < 5000


def test_bad_photographs(tmp_path, monkeypatch, capfd):
    Path("mine.yaml").write_text(
        "extends: zhao2019/table1/cifar10-routing --small\n"
        "data: {class_path: torchcaps.data.ImageNet, init_args: {size: 32, resize: 36, num_workers: 0}}\n"
    )
    arguments = ("train", "mine.yaml", "--smoke", "--trainer.enable_progress_bar", "false")
    monkeypatch.setenv("TORCHCAPS_DATA", "nowhere")
    assert "no ImageNet: put its images at nowhere/imagenet/" in error_of(capfd, *arguments)
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    for part in ("train", "val"):
        Path("imagenet", part, "n01").mkdir(parents=True)
        Path("imagenet", part, "n01", "a.JPEG").write_text("no image")
    assert "imagenet/train/n01/a.JPEG is not a picture that can be read" in error_of(capfd, *arguments)
    assert "gone.txt cannot be read: " in error_of(capfd, *arguments, "--data.class_list", "gone.txt")


def test_a_loss_that_is_not_finite(capfd):
    said = error_of(capfd, "train", "quickstart", *SHORT, "--model.optimizer.lr", "1e30")
    assert re.search(
        "the loss is nan at step 1: .*; try a lower learning rate, or try float32 if you train in half", said
    )


def test_a_monitor_that_is_logged():
    monitor = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss --data.val_size 64"
    assert call("train", "quickstart", "--trainer.max_epochs=1", *monitor.split(), *TINY) == 0


def test_classes_of_lightning_that_hand_their_options_on():
    loggers = (f"{{class_path: {name}, init_args: {{save_dir: logs}}}}" for name in ("CSVLogger", "TensorBoardLogger"))
    options = [f"--trainer.logger=[{', '.join(loggers)}]", "--trainer.callbacks+=RichProgressBar"]
    options += ["--trainer.enable_progress_bar=true", "--trainer.profiler=simple"]
    assert call("train", "quickstart", *TINY, "--trainer.max_epochs=1", *options) == 0
    assert call("test", "quickstart", "--ckpt_path=last", *TINY) == 0
