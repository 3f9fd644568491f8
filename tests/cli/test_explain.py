"""`torchcaps explain`: the figures of a checkpoint."""

import re
from pathlib import Path

import pytest
from commands import PAIRS, TINY, call, checkpoint, error_of

from torchcaps.explain import axes

# Lightning's own imports and deprecations under this torch are out of our hands.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


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


def test_no_figures_of_a_cnn(capfd, mnist_of_noise, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(mnist_of_noise))
    small = ["--model.network=ConvNet", "--model.network.channels=[2,2,2]", "--model.network.hidden=[4,4]"]
    options = ["--trainer.max_steps", "1", "--data.batch_size", "2", "--trainer.limit_test_batches", "1"]
    assert call("train", "sabour2017/table1/cnn", *small, *options) == 0
    assert "not for a ConvNet" in error_of(capfd, "explain", "sabour2017/table1/cnn", *small, "--ckpt_path", "last")


@pytest.fixture
def drawn(monkeypatch):
    """The figures of dynamics that are written."""
    figures = []
    write = axes.write
    monkeypatch.setattr(axes, "write", lambda figure, path: (figures.append(figure), write(figure, path))[1])
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
