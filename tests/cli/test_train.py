"""`torchcaps train`: runs, checkpoints to continue from, and recipes that cannot be trained."""

import re
from pathlib import Path

import pytest
import torch
from commands import PAIRS, TINY, call, checkpoint, error_of
from encoders import make_encoder

from torchcaps.recipes import load_recipe

# Lightning's own imports and deprecations under this torch are out of our hands.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_train_leaves_logs_configuration_and_checkpoint(trained):
    run = trained / "quickstart" / "version_0"
    assert (run / "metrics.csv").read_text().count("\n") > 2
    assert list(run.glob("events.out.tfevents.*"))
    assert "capsnet_digits" in (run / "config.yaml").read_text()
    state = torch.load(checkpoint(trained), weights_only=True)
    assert state["global_step"] == 4


def test_train_prints_the_test_accuracy(capfd):
    assert call("train", "quickstart", "--trainer.max_epochs", "1", *TINY) == 0
    out = capfd.readouterr().out
    assert "test/accuracy: 0." in out
    assert "run: runs/quickstart/version_0" in out


def test_resume_from_the_last_checkpoint(trained):
    arguments = ("train", "quickstart", "--ckpt_path", str(checkpoint(trained)), "--trainer.max_epochs", "4", *TINY)
    assert call(*arguments) == 0
    assert call("train", "quickstart", "--ckpt_path", "last", "--trainer.max_epochs", "5", *TINY) == 0
    state = torch.load(checkpoint(Path("runs"), 1), weights_only=True)
    assert (state["epoch"], state["global_step"]) == (4, 10)  # three more epochs after the two


def test_smoke_can_be_overridden(capfd):
    assert call("train", "quickstart", "--smoke", "--data.batch_size", "3", "--trainer.limit_train_batches", "4") == 0
    state = torch.load("runs/quickstart/smoke_0/checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 4
    assert "batch_size: 3" in Path("runs/quickstart/smoke_0/config.yaml").read_text()


def test_last_is_never_of_a_smoke_run(capfd):
    assert call("train", "quickstart", "--trainer.fast_dev_run", "true") == 0
    assert list(Path().iterdir()) == []  # nor is there anything of Lightning's own
    assert call("train", "quickstart", "--smoke") == 0
    assert "no checkpoint under runs/quickstart" in error_of(capfd, "test", "quickstart", "--ckpt_path", "last")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_quickstart_learns_the_digits(capfd, seed):
    assert call("train", "quickstart", "--seed_everything", str(seed)) == 0
    (accuracy,) = re.findall(r"test/accuracy: (0\.\d+)", capfd.readouterr().out)
    assert float(accuracy) >= 0.98


def test_a_recipe_of_your_own(capfd):
    Path("mine.yaml").write_text("extends: quickstart\nmodel: {optimizer: {init_args: {lr: 0.01}}}\n")
    assert [path.name for path in load_recipe("mine.yaml").files] == ["quickstart.yaml", "mine.yaml"]
    assert call("train", "mine.yaml", "--trainer.max_epochs", "1", *TINY) == 0
    assert "lr: 0.01" in Path("runs/mine/version_0/config.yaml").read_text()


def test_unknown_names(capfd):
    assert "did you mean sabour2017/table1/cnn" in error_of(capfd, "train", "sabour2017/table1/cmn")
    assert "choose one of sabour2017/table1/cnn, " in error_of(capfd, "train", "sabour2017")
    assert "it is now called sabour2017/table1/capsnet" in error_of(capfd, "train", "sabour2017/mnist")
    assert "it is now called tsai2020/table1/cifar10-cnn --small" in error_of(
        capfd, "train", "tsai2020/small/cifar10-pooling"
    )
    assert "quickstart has no small version" in error_of(capfd, "train", "quickstart", "--small")
    assert "no file mine.yaml" in error_of(capfd, "train", "mine.yaml")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (["--trainer.max_epoch", "3"], "--trainer.max_epoch 3: there is no 'max_epoch'; did you mean max_epochs"),
        (["--trainer.max_epochs", "three"], "--trainer.max_epochs three: expected int or None, got 'three'"),
        (["--trainer.precision", "99"], "--trainer.precision 99: expected 64, 32, 16, .*bf16 or None, got '99'"),
        (["--model.network.iteration", "3"], "--model.network.iteration 3: there is no 'iteration'; did you mean iter"),
        (["--model.network.decoder=4"], "--model.network.decoder=4: expected bool, got '4'"),
        (["--model.network.iterations", "0"], r"iterations .* 0\b"),
        (["--model.network.iterations=2", "--data.batch_size=x"], "torchcaps: --data.batch_size=x: expected int, got"),
        (["--model.network.decoder", "false"], r"reconstruction_weight=0\.005 .*decoder"),
        (
            ["--model.loss", "Loss"],
            "--model.loss Loss: there is no Module called 'Loss': correct the name, or add its mod",
        ),
        (["--model.network", "capsnet_mnist"], "with their module: torchcaps.models.sabour2017.capsnet_mnist"),
        (["--data", "MarginLoss"], "--data MarginLoss: there is no LabeledData called 'MarginLoss'"),
        (["--model.network", "torchcaps.models.shallow_cnn", "--model.network.channels", "x"], "x: expected int, got"),
        (["--data", "FashionMNIST", "--data.rot", "x"], "--data.rot x: there is no 'rot'; did you mean root"),
        (["--data.batch_size", "["], "expected int, got"),
        (["--data.batch_size", "true"], "expected int, got 'true'"),
        (["--trainer.max_epochs", "x", "--data.batch_size", "y"], "--trainer.max_epochs x: expected int or None"),
        (["--data", "torchcaps.MarginLoss"], "--data torchcaps.MarginLoss: .* subclass of LabeledData"),
        (["--data.batch_size", "0"], r"batch_size .* 0\b"),
        (["--data.resise", "9"], "--data.resise 9: there is no 'resise'; did you mean resize"),
        (["--modle.classes", "9"], "--modle.classes 9: "),
        (["--seed_everything", "x"], "--seed_everything x: expected int or bool, got 'x'"),
        (["nine"], "unexpected argument 'nine': give values of the recipe as --NAME VALUE"),
    ],
)
def test_bad_values(capfd, override, said):
    assert re.search(said, error_of(capfd, "train", "quickstart", *override))
    assert list(Path().iterdir()) == []


def test_a_bad_value_of_a_callback(capfd):
    message = error_of(capfd, "train", "heinsen2019/table1/heinsen", "--small", "--trainer.callbacks.warmup", "3")
    assert re.search(r"warmup .* 3\.0\b", message)


def test_a_bad_value_that_only_the_trainer_knows(capfd):
    assert re.search("devices.* int > 0", error_of(capfd, "train", "quickstart", "--trainer.devices", "two"))
    assert error_of(capfd, "train", "quickstart", "--ckpt_path", "last").endswith("`torchcaps train quickstart` first")
    assert "Digits has 10 classes" in error_of(capfd, "train", "quickstart", "--model.classes", "9")
    assert not list(Path().rglob("version_*"))  # nor has any taken a number


def test_no_such_device(capfd):
    if not torch.cuda.is_available():
        assert "gpu" in error_of(capfd, "train", "quickstart", "--trainer.accelerator", "gpu")


def test_recipes_beside_each_other(capfd):
    Path("mine").mkdir()
    Path("mine/base.yaml").write_text("extends: quickstart\n")
    Path("mine/row.yaml").write_text("extends: base.yaml\n")
    assert [path.name for path in load_recipe("mine/row.yaml").files] == ["quickstart.yaml", "base.yaml", "row.yaml"]
    Path("mine/base.yaml").write_text("extends: row.yaml\n")
    assert "mine/row.yaml extends itself" in error_of(capfd, "train", "mine/row.yaml")


def test_not_yaml(capfd):
    Path("bad.yaml").write_text("model: [")
    assert "bad.yaml is not valid YAML" in error_of(capfd, "train", "bad.yaml")
    Path("bad.yaml").write_text("just words")
    assert "bad.yaml is not a recipe" in error_of(capfd, "train", "bad.yaml")


def test_missing_data(capfd, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", "nowhere")
    monkeypatch.setattr("pooch.retrieve", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    message = error_of(capfd, "train", "sabour2017/table1/cnn", "--trainer.max_steps", "1")
    assert "train-images-idx3-ubyte.gz" in message
    assert "f68b3c2dcbeaaa9fbdd348bbdeb94873" in message
    assert "nowhere/mnist" in message


def test_data_that_does_not_fit(capfd, images_of_noise, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    options = ["--smoke", "--trainer.enable_progress_bar", "false"]
    message = error_of(
        capfd, "train", "quickstart", *options, "--model.labels_per_image", "null", "--model.reconstruction_weight", "0"
    )
    assert "labels_per_image=None" in message
    message = error_of(capfd, "train", "quickstart", *options, "--data", "torchcaps.data.MNIST")
    assert "(2, 1, 28, 28)" in message
    message = error_of(capfd, "train", "quickstart", *options, "--model.classes", "9")
    assert re.search(r"Digits .*10 .* 9\b.* model\.classes", message)
    message = error_of(capfd, "train", "zhao2019/table2/resnet20-routing", *options, "--model.network.classes", "9")
    assert re.search(r"network .* 9 .*classes=10", message)


def test_a_network_that_does_not_fit_the_encoder(capfd, tmp_path, images_of_noise, monkeypatch):
    """It is said before all is embedded."""
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache")
    encoder = make_encoder(tmp_path / "bert")
    arguments = (
        "train",
        "heinsen2019/table3/heinsen",
        "--small",
        f"--data.encoder={encoder}",
        "--trainer.enable_progress_bar=false",
    )
    message = error_of(capfd, *arguments)
    assert re.search(r"bert .*3 .*8\b.* 7 .*384.*model\.network\.layers=3\b", message)
    assert len(list((tmp_path / "cache").glob("embeddings/*/*.safetensors"))) == 1  # of one text


def test_a_loss_that_is_not_finite(capfd):
    options = ["--model.optimizer.lr", "1e30", "--trainer.max_epochs", "1", *TINY]
    message = error_of(capfd, "train", "quickstart", "--trainer.enable_progress_bar", "false", *options)
    assert "the loss is nan at step 1: " in message


def test_bad_photographs(images_of_noise, tmp_path, monkeypatch, capfd):
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
    assert "imagenet/train/n01/a.JPEG: is not a JPEG or PNG" in error_of(capfd, *arguments)
    assert "neither gone.txt nor" in error_of(capfd, *arguments, "--data.class_list", "gone.txt")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "model: {network: {init_args: {iteration: 3}}}",
            "mine.yaml: model.network.iteration: there is no 'iteration'",
        ),
        (
            "model: {network: {class_path: capsnet_mnist}}",
            "mine.yaml: model.network: classes and functions are named wi",
        ),
        ("data: {init_args: {batch_size: many}}", "mine.yaml: data.batch_size: expected int, got 'many'"),
        ("trainer: {max_epoch: 3}", "mine.yaml: trainer.max_epoch: there is no 'max_epoch'; did you mean max_epochs"),
        ("model: {reconstruction_weight: 5e-4}\ntrainer: {max_epoch: 3}", "mine.yaml: trainer.max_epoch: there is no"),
        (
            "model: {network: {iterations: 5}}",
            "mine.yaml: model.network.iterations: arguments of a class stand in its in",
        ),
        ("title: 5", "mine.yaml: title must be a text, got 5"),
        ("trainer: 3", "mine.yaml: trainer must have values of its own, as in trainer: {NAME: VALUE}, got 3"),
    ],
)
def test_bad_values_in_a_file(capfd, content, said):
    Path("mine.yaml").write_text(f"extends: quickstart\n{content}\n")
    assert said in error_of(capfd, "train", "mine.yaml")


def test_the_small_version_of_a_recipe(images_of_noise, monkeypatch, capfd):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    recipe = ("zhao2019/table1/fashion-mnist-max", "--small")
    assert call("train", *recipe, *PAIRS) == 0
    run = Path("runs/zhao2019/table1/fashion-mnist-max-small/version_0")
    assert f"run: {run}" in capfd.readouterr().out
    assert "channels: 32" in (run / "config.yaml").read_text()
    assert call("test", *recipe, "--ckpt_path", "last") == 0
    message = error_of(capfd, "test", recipe[0], "--ckpt_path", "last")  # of the full recipe there is none
    assert message.endswith("run `torchcaps train zhao2019/table1/fashion-mnist-max` first")
