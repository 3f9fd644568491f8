"""`torchcaps test`: checkpoints, ten crops, predictions."""

import re
from pathlib import Path

import pytest
import torch
from commands import PAIRS, TINY, call, checkpoint, error_of

# Lightning's own imports and deprecations under this torch are out of our hands.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_test_a_checkpoint(trained, capfd):
    assert call("test", "quickstart", "--ckpt_path", str(checkpoint(trained)), "--runs", "elsewhere") == 0
    assert "test/accuracy: 0." in capfd.readouterr().out
    assert not Path("elsewhere").exists()
    assert list(Path().iterdir()) == []


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


def test_no_pickle_is_executed(capfd, trained):
    class Evil:
        def __reduce__(self):
            return (Path("owned").touch, ())

    torch.save({"state_dict": {}, "extra": Evil()}, "evil.ckpt")
    message = error_of(capfd, "train", "quickstart", "--ckpt_path", "evil.ckpt")
    assert "evil.ckpt is not a checkpoint that can be read safely" in message
    assert not Path("owned").exists()


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


def test_bad_uses_of_predictions(trained, capfd):
    arguments = ("test", "quickstart", "--ckpt_path", str(checkpoint(trained)), "--predictions")
    assert "--predictions . is a folder" in error_of(capfd, *arguments, ".")
    several = ("--model.labels_per_image", "2", "--model.reconstruction_weight", "0")
    assert "--predictions is for images of one class each" in error_of(capfd, *arguments, "found.csv", *several)
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_photographs(images_of_noise, monkeypatch):
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
    assert call("train", "mine.yaml", *PAIRS, "--data.class_list", "h-imagenet.txt") == 0
    assert call("explain", "mine.yaml", "--ckpt_path", "last", "--figures", "drawn") == 0
    written = {"credit.png", "heatmaps.png", "heatmaps-of-groups.png", "index.html"}
    assert {path.name for path in Path("drawn").iterdir()} == written
