"""The command line, end to end on real digits, and what it says to bad input."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from encoders import make_encoder

from torchcaps.cli import main
from torchcaps.data.embeddings import RECORD
from torchcaps.explain import pictures
from torchcaps.recipes import list_recipes, load_recipe

# Outside our hands: Lightning's own imports and deprecations under this torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TINY = ["--trainer.limit_train_batches", "2", "--trainer.limit_test_batches", "1"]
PAIRS = ["--data.batch_size", "2", "--trainer.max_epochs", "1", *TINY]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> int:
    with warnings.catch_warnings():
        return main(list(arguments))


def error_of(capfd, *arguments: str) -> str:
    capfd.readouterr()
    assert call(*arguments) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("torchcaps: ")
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with one run of two epochs of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert call("train", "quickstart", "--runs", str(folder), "--trainer.max_epochs", "2", *TINY) == 0
    return folder


def checkpoint(folder: Path, version: int = 0) -> Path:
    return folder / "quickstart" / f"version_{version}" / "checkpoints" / "last.ckpt"


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
    arguments = ("train", "quickstart", "--runs", str(trained), "--ckpt_path", "last", "--trainer.max_epochs", "5")
    assert call(*arguments, *TINY) == 0
    state = torch.load(checkpoint(trained, 1), weights_only=True)
    assert (state["epoch"], state["global_step"]) == (4, 10)  # three more epochs after the two


def test_test_a_checkpoint(trained, capfd):
    assert call("test", "quickstart", "--ckpt_path", str(checkpoint(trained)), "--runs", "elsewhere") == 0
    assert "test/accuracy: 0." in capfd.readouterr().out
    assert not Path("elsewhere").exists()
    assert list(Path().iterdir()) == []


def test_explain_a_checkpoint(capfd):
    Path("mine.yaml").write_text(
        "extends: quickstart\n"
        "model: {network: {class_path: torchcaps.CapsNet, init_args: {image_size: 8, channels: 4, kernel_size: 3,\n"
        "  primary_types: 2, primary_kernel_size: 3, class_pose: 2, decoder: [8]}}}\n"  # a row of panels for each pose
    )
    assert call("train", "mine.yaml", "--trainer.max_epochs", "1", *TINY) == 0
    assert call("explain", "mine.yaml", "--ckpt_path", "last", "--figures", "drawn") == 0
    written = sorted(path.name for path in Path("drawn").iterdir())
    assert written == ["coefficients.png", "perturbations.png", "reconstructions.png"]
    assert "figure: drawn/coefficients.png" in capfd.readouterr().out


def test_explain_a_routing_pool(images_of_noise, monkeypatch, capfd):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    recipe = ("zhao2019/table1/fashion-mnist-routing", "--small")
    assert call("train", *recipe, *PAIRS) == 0
    assert call("explain", *recipe, "--ckpt_path", "last", "--figures", "drawn") == 0
    assert sorted(path.name for path in Path("drawn").iterdir()) == ["heatmaps-of-groups.png", "heatmaps.png"]
    picture = "drawn/heatmaps.png"
    assert call("explain", *recipe, "--ckpt_path", "last", "--figures", "mine", "--image", picture, picture) == 0
    assert [path.name for path in Path("mine").iterdir()] == ["heatmaps-of-pictures.png"]
    assert "figure: mine/heatmaps-of-pictures.png" in capfd.readouterr().out
    arguments = ("explain", *recipe, "--ckpt_path", "last", "--image")
    assert "none.png is not a picture" in error_of(capfd, *arguments, "none.png")
    Path("text.png").write_text("no picture")
    assert "text.png is not a picture" in error_of(capfd, *arguments, "text.png")


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


def test_recipes_and_models_are_listed(capfd):
    assert call("recipes") == 0
    out = capfd.readouterr().out
    assert all(name in out for name in list_recipes())
    assert "0.25 ± 0.005" in out
    assert call("models", "capsnet_m*") == 0
    out = capfd.readouterr().out
    assert "8,215,568" in out
    assert "convnet" not in out


def test_a_recipe_of_your_own(capfd):
    Path("mine.yaml").write_text("extends: quickstart\nmodel: {optimizer: {init_args: {lr: 0.01}}}\n")
    assert [path.name for path in load_recipe("mine.yaml").files] == ["quickstart.yaml", "mine.yaml"]
    assert call("train", "mine.yaml", "--trainer.max_epochs", "1", *TINY) == 0
    assert "lr: 0.01" in Path("runs/mine/version_0/config.yaml").read_text()


# Bad input: one line, status 2


def test_unknown_names(capfd):
    assert "did you mean sabour2017/table1/cnn" in error_of(capfd, "train", "sabour2017/table1/cmn")
    assert "choose one of sabour2017/table1/cnn, " in error_of(capfd, "train", "sabour2017")
    assert "it is now called sabour2017/table1/capsnet" in error_of(capfd, "train", "sabour2017/mnist")
    assert "it is now called tsai2020/table1/cifar10-cnn --small" in error_of(
        capfd, "train", "tsai2020/small/cifar10-pooling"
    )
    assert "quickstart has no small version" in error_of(capfd, "train", "quickstart", "--small")
    assert "no file mine.yaml" in error_of(capfd, "train", "mine.yaml")
    assert "no model matches 'vgg*'" in error_of(capfd, "models", "vgg*")
    assert "unknown argument --all" in error_of(capfd, "recipes", "--all")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (["--trainer.max_epoch", "3"], "max_epoch"),
        (["--trainer.max_epochs", "three"], "three"),
        (["--data.batch_size", "0"], r"batch_size .* 0\b"),
        (["--model.network.iterations", "0"], r"iterations .* 0\b"),
        (["--model.network.decoder", "false"], r"reconstruction_weight=0\.005 .*decoder"),
    ],
)
def test_bad_values(capfd, override, said):
    assert re.search(said, error_of(capfd, "train", "quickstart", *override))
    assert list(Path().iterdir()) == []


def test_a_bad_value_of_a_callback(capfd):
    message = error_of(capfd, "train", "heinsen2019/table1/heinsen", "--small", "--trainer.callbacks.warmup", "3")
    assert re.search(r"warmup .* 3\.0\b", message)


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


def test_bad_checkpoints(capfd, trained):
    assert "no checkpoint under runs/quickstart" in error_of(capfd, "test", "quickstart", "--ckpt_path", "last")
    assert "no checkpoint gone.ckpt" in error_of(capfd, "test", "quickstart", "--ckpt_path", "gone.ckpt")
    Path("noise.ckpt").write_bytes(b"no checkpoint at all")
    assert "noise.ckpt is damaged" in error_of(capfd, "test", "quickstart", "--ckpt_path", "noise.ckpt")
    whole = checkpoint(trained).read_bytes()
    Path("half.ckpt").write_bytes(whole[: len(whole) // 2])
    assert "half.ckpt is damaged" in error_of(capfd, "test", "quickstart", "--ckpt_path", "half.ckpt")
    other = ("test", "sabour2017/table1/capsnet", "--ckpt_path", str(checkpoint(trained)))
    message = error_of(capfd, *other)
    assert re.search(r"architecture .*sabour2017/table1/capsnet.* \(128, 1, 3, 3\).* \(256, 1, 9, 9\)", message)


def test_a_checkpoint_trained_otherwise(capfd):
    assert call("train", "quickstart", "--model.network.iterations", "1", "--trainer.max_epochs", "1", *TINY) == 0
    said = "was trained with model.network.init_args.iterations = 1, and now it is 3"
    assert said in error_of(capfd, "test", "quickstart", "--ckpt_path", "last")
    assert call("test", "quickstart", "--ckpt_path", "last", "--model.network.iterations", "1") == 0
    override = ("--model.network.iterations", "1", "--model.optimizer.lr", "0.5")
    assert "optimizer.init_args.lr" in error_of(capfd, "train", "quickstart", "--ckpt_path", "last", *override)


def test_no_figures_of_a_cnn(capfd, mnist_of_noise, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(mnist_of_noise))
    small = ["--model.network=ConvNet", "--model.network.channels=[2,2,2]", "--model.network.hidden=[4,4]"]
    options = ["--trainer.max_steps", "1", "--data.batch_size", "2", "--trainer.limit_test_batches", "1"]
    assert call("train", "sabour2017/table1/cnn", *small, *options) == 0
    assert "not for a ConvNet" in error_of(capfd, "explain", "sabour2017/table1/cnn", *small, "--ckpt_path", "last")


def test_no_pickle_is_executed(capfd, trained):
    class Evil:
        def __reduce__(self):
            return (Path("owned").touch, ())

    torch.save({"state_dict": {}, "extra": Evil()}, "evil.ckpt")
    assert "cannot" not in error_of(capfd, "train", "quickstart", "--ckpt_path", "evil.ckpt")
    assert not Path("owned").exists()


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
    (index,) = (tmp_path / "cache").glob("embeddings/*/index.bin")
    assert index.stat().st_size == RECORD.itemsize


def test_a_loss_that_is_not_finite(capfd):
    options = ["--model.optimizer.lr", "1e30", "--trainer.max_epochs", "1", *TINY]
    message = error_of(capfd, "train", "quickstart", "--trainer.enable_progress_bar", "false", *options)
    assert "the loss is nan at step 1: " in message


# Crops, predictions, and the hardest classes of them


def test_ten_crops_of_any_recipe(trained, capfd):
    arguments = (
        "test",
        "quickstart",
        "--ckpt_path",
        str(checkpoint(trained)),
        "--trainer.enable_progress_bar",
        "false",
    )
    crops = ("--data.resize", "10", "--data.ten_crop", "true")
    assert call(*arguments, *crops) == 0  # a decoder has no part in it
    assert "test/accuracy: 0." in capfd.readouterr().out
    assert "ten_crop needs resize" in error_of(capfd, *arguments, "--data.ten_crop", "true")
    assert "--data.resise 10: there is no 'resise'; did you mean resize" in error_of(
        capfd, *arguments, "--data.resise", "10"
    )
    assert "at least 8 pixels, got 7" in error_of(capfd, *arguments, "--data.resize", "7")


def test_predictions_are_written_whole(trained, capfd, monkeypatch):
    arguments = ("test", "quickstart", "--ckpt_path", str(checkpoint(trained)), "--predictions")
    assert call(*arguments, "new/found.csv") == 0
    out = capfd.readouterr().out
    assert "predictions: new/found.csv" in out
    head, *rows = Path("new/found.csv").read_text().splitlines()
    assert head == "label,prediction"
    assert len(rows) == 360
    assert [row[0] for row in rows[:10]] == list("7637732893")  # the test images in order
    right = sum(label == prediction for label, _, prediction in rows)
    assert f"test/accuracy: {right / 360:.4f}" in out
    monkeypatch.setattr(Path, "replace", lambda *arguments: (_ for _ in ()).throw(OSError("no space")))
    assert "no space" in error_of(capfd, *arguments, "other.csv", "--trainer.enable_progress_bar", "false")
    assert [path.name for path in Path().iterdir()] == ["new"]


def test_predictions_that_cannot_be_had(trained, capfd, images_of_noise, monkeypatch):
    arguments = ("test", "quickstart", "--ckpt_path", str(checkpoint(trained)), "--predictions")
    assert "--predictions . is a folder" in error_of(capfd, *arguments, ".")
    devices = ("--trainer.accelerator", "cpu", "--trainer.devices", "2")
    assert "add --trainer.devices 1" in error_of(capfd, *arguments, "found.csv", *devices)
    several = ("--model.labels_per_image", "2", "--model.reconstruction_weight", "0")
    assert "--predictions is for images of one class each" in error_of(capfd, *arguments, "found.csv", *several)
    assert list(Path().iterdir()) == []


def test_the_hardest_classes_of_photographs(images_of_noise, monkeypatch, capfd):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    Path("mine.yaml").write_text(
        "extends: zhao2019/table1/cifar10-routing --small\n"
        "data: {class_path: torchcaps.data.ImageNet, init_args: {size: 32, resize: 36}}\n"
    )
    assert call("train", "mine.yaml", *PAIRS, "--data.jitter", "0.2", "--data.flip", "true") == 0
    arguments = ("test", "mine.yaml", "--ckpt_path", "last", "--data.ten_crop", "true", "--predictions", "found.csv")
    assert call(*arguments) == 0
    rows = Path("found.csv").read_text().splitlines()
    assert len(rows) == 21
    assert {row.split(",")[0] for row in rows[1:]} == {f"n{label:08}" for label in range(10)}
    assert {row.split(",")[1] for row in rows[1:]} <= {f"n{label:08}" for label in range(10)}
    capfd.readouterr()
    assert call("hardest", "found.csv", "--classes", "4") == 0
    out = capfd.readouterr().out
    assert out.startswith("# the 4 hardest of 10 classes: top-1 accuracy 0.00 to ")
    assert call("hardest", "found.csv", "--classes", "4", "--out", "hard/four.txt") == 0
    assert Path("hard/four.txt").read_text() == out
    assert capfd.readouterr().out == "classes: hard/four.txt\n"
    # And trained on.
    assert call("train", "mine.yaml", *PAIRS, "--data.class_list", "hard/four.txt") == 0
    assert call("explain", "mine.yaml", "--ckpt_path", "last", "--figures", "drawn") == 0
    assert {path.name for path in Path("drawn").iterdir()} == {"heatmaps.png", "heatmaps-of-groups.png"}


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
    assert "no gone.txt and no" in error_of(capfd, *arguments, "--data.class_list", "gone.txt")


@pytest.mark.parametrize(
    ("content", "count", "said"),
    [
        ("", "1", "has no column label"),
        ("label,guess\na,b\n", "1", "has no column prediction"),
        ("label,prediction\na,b\n", "2", r"classes .* 2\b"),
        ("label,prediction\na,b\n", "0", r"classes .* 0\b"),
    ],
)
def test_bad_predictions(capfd, content, count, said):
    Path("found.csv").write_text(content)
    assert re.search(said, error_of(capfd, "hardest", "found.csv", "--classes", count, "--out", "list.txt"))
    assert "gone.csv: cannot be read" in error_of(capfd, "hardest", "gone.csv", "--classes", "1")
    assert "unknown argument --all" in error_of(capfd, "hardest", "found.csv", "--classes", "1", "--all")
    assert [path.name for path in Path().iterdir()] == ["found.csv"]


# Routing dynamics


@pytest.fixture
def drawn(monkeypatch):
    """The figures of dynamics that are written."""
    figures = []
    write = pictures.write
    monkeypatch.setattr(pictures, "write", lambda figure, path: (figures.append(figure), write(figure, path))[1])
    return figures


def titles(figure) -> list[str]:
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


def test_explain_routing_dynamics_of_each_epoch(capfd, drawn):
    each = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_top_k=-1"]  # as the help has it
    assert call("train", "quickstart", "--trainer.max_epochs", "3", *TINY, *each) == 0
    folder = Path("runs/quickstart/version_0/checkpoints")
    assert len(list(folder.glob("epoch=*-step=?.ckpt"))) == 3
    every = [str(path) for path in sorted(folder.glob("*.ckpt"), reverse=True)]  # with `last`, and out of order
    assert len(every) > 3
    arguments = ("explain", "quickstart", "--images", "40", "--ckpt_path")
    assert call(*arguments, *every, "--dynamics", "class_capsules") == 0
    assert "figure: runs/quickstart/version_0/figures/dynamics.png" in capfd.readouterr().out
    assert [path.name for path in (folder.parent / "figures").iterdir()] == ["dynamics.png"]
    assert titles(drawn[0]) == ["after epoch 1", "after epoch 2", "after epoch 3"]
    first, _, third = ([bar.get_height() for bar in axis.patches] for axis in drawn[0].axes[:3])
    assert first != third
    assert call(*arguments, "last", "--figures", "mine", "--dynamics") == 0
    assert Path("mine/dynamics.png").is_file()
    assert titles(drawn[1]) == ["after epoch 3"]
    assert [bar.get_height() for bar in drawn[1].axes[0].patches] == third
    assert call("explain", "quickstart", "--ckpt_path", "last", "--dynamics", "--images", "39") == 0
    assert [bar.get_height() for bar in drawn[2].axes[0].patches] != third


def test_explain_routing_dynamics_of_steps_within_an_epoch(capfd, drawn):
    each = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_top_k=-1"]
    steps = ["--trainer.max_epochs", "1", "--trainer.callbacks.every_n_train_steps=1"]
    assert call("train", "quickstart", *TINY, *each, *steps) == 0
    every = [str(path) for path in Path("runs/quickstart/version_0/checkpoints").glob("*.ckpt")]
    assert call("explain", "quickstart", "--images", "9", "--ckpt_path", *every, "--dynamics") == 0
    assert titles(drawn[0]) == ["after step 1", "after step 2"]


def test_explain_routing_dynamics_of_all_layers(images_of_noise, monkeypatch, drawn):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    recipe = ("tsai2020/table1/cifar10-em", "--small")
    assert call("train", *recipe, *PAIRS) == 0
    assert call("explain", *recipe, "--ckpt_path", "last", "--images", "3", "--dynamics") == 0
    rows = [axis.get_ylabel().splitlines()[0] for axis in drawn[0].axes[:3]]
    assert rows == ["capsules.layers.0", "capsules.layers.1", "capsules.layers.2"]
    assert titles(drawn[0]) == ["after epoch 1"] * 3


def test_bad_routing_dynamics(capfd, trained, images_of_noise, monkeypatch):
    arguments = ("explain", "quickstart", "--ckpt_path", str(checkpoint(trained)))
    message = error_of(capfd, *arguments, "--dynamics", "capsules")
    assert re.search("CapsNet .*'capsules'.* class_capsules", message)
    assert re.search(r"--images .* 0\b", error_of(capfd, *arguments, "--dynamics", "--images", "0"))
    for more in ([str(checkpoint(trained))], ["--images", "3"]):
        assert re.search("--ckpt_path.*--images.*--dynamics", error_of(capfd, *arguments, *more))
    assert re.search("--dynamics .*--image ", error_of(capfd, *arguments, "--dynamics", "--image", "digit.png"))
    assert "no checkpoint gone.ckpt" in error_of(capfd, *arguments, "gone.ckpt", "--dynamics")
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    recipe = ("zhao2019/table1/fashion-mnist-max", "--small")
    assert call("train", *recipe, *PAIRS) == 0
    message = error_of(capfd, "explain", *recipe, "--ckpt_path", "last", "--dynamics")
    assert "no capsule layer" in message
