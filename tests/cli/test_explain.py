"""`torchcaps explain`: the figures of a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from commands import PAIRS, TINY, call, checkpoint, error_of
from encoders import make_encoder

from torchcaps.cli.explain import _checkpoints, _title
from torchcaps.explain import figures as all_figures
from torchcaps.recipes import Recipe
from torchcaps.runs import Checkpoint, Run
from torchcaps.runs.places import folder_of


def test_explain_a_checkpoint(capfd):
    Path("mine.yaml").write_text(
        "extends: quickstart\n"
        "model: {network: {class_path: torchcaps.CapsNet, init_args: {image_size: 8, channels: 4, kernel_size: 3,\n"
        "  primary_types: 2, primary_kernel_size: 3, class_pose: 2, decoder: [8]}}}\n"  # a row of panels for each pose
    )
    assert call("train", "mine.yaml", "--trainer.max_epochs", "1", *TINY) == 0
    assert call("explain", "mine.yaml", "--ckpt_path", "last", "--figures", "drawn") == 0
    written = sorted(path.name for path in Path("drawn").iterdir())
    assert written == ["credit.png", "dynamics.png", "index.html", "perturbations.png", "reconstructions.png"]
    said = capfd.readouterr().out
    assert "figure: drawn/credit.png" in said
    assert said.splitlines()[-1] == "page: drawn/index.html"


@pytest.mark.slow
def test_explain_a_routing_pool(images_of_noise, monkeypatch, capfd):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    recipe = ("zhao2019/table1/fashion-mnist-routing", "--small")
    assert call("train", *recipe, *PAIRS) == 0
    assert call("explain", *recipe, "--ckpt_path", "last", "--figures", "drawn") == 0
    written = ["credit.png", "heatmaps-of-groups.png", "heatmaps.png", "index.html"]
    assert sorted(path.name for path in Path("drawn").iterdir()) == written
    picture = "drawn/heatmaps.png"
    assert call("explain", *recipe, "--ckpt_path", "last", "--figures", "mine", "--image", picture, picture) == 0
    assert sorted(path.name for path in Path("mine").iterdir()) == ["heatmaps-of-pictures.png", "index.html"]
    assert "figure: mine/heatmaps-of-pictures.png" in capfd.readouterr().out
    arguments = ("explain", *recipe, "--ckpt_path", "last", "--image")
    assert "none.png is not a picture" in error_of(capfd, *arguments, "none.png")
    Path("text.png").write_text("no picture")
    assert "text.png is not a picture" in error_of(capfd, *arguments, "text.png")


def content(folder: str | Path) -> dict:
    """The content of the page in a folder."""
    page = (Path(folder) / "index.html").read_text(encoding="utf-8")
    return json.loads(page.split('type="application/json"')[1].split(">", 1)[1].split("</script>")[0])


def test_a_network_without_capsules_has_a_page(capfd, mnist_of_noise, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(mnist_of_noise))
    small = ["--model.network.channels=[2,2,2]", "--model.network.hidden=[4,4]"]
    options = ["--trainer.max_steps", "1", "--data.batch_size", "2", "--trainer.limit_test_batches", "1"]
    assert call("train", "sabour2017/table1/cnn", *small, *options) == 0
    assert call("explain", "sabour2017/table1/cnn", *small, "--figures", "drawn") == 0
    assert [path.name for path in Path("drawn").iterdir()] == ["index.html"]
    found = content("drawn")
    Path("mine").mkdir()
    next(Path("runs").rglob("last.ckpt")).rename("mine/alone.ckpt")
    assert call("explain", "mine/alone.ckpt", "--samples", "2") == 0
    assert Path("mine/figures/index.html").is_file()
    assert not found["layers"]
    assert "no capsule layer" in found["limits"][0]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written, by the names of their files."""
    figures = {}
    write = all_figures.write
    monkeypatch.setattr(
        all_figures, "write", lambda figure, path: (figures.update({path.name: figure}), write(figure, path))[1]
    )
    return figures


def titles(figure) -> list[str]:
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


@pytest.mark.slow
def test_explain_a_training_epoch_by_epoch(capfd, drawn):
    each = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_top_k=-1"]  # as the help has it
    assert call("train", "quickstart", "--trainer.max_epochs", "3", *TINY, *each) == 0
    folder = Path("runs/quickstart/version_0/checkpoints")
    assert len(list(folder.glob("epoch=*-step=?.ckpt"))) == 3
    every = [str(path) for path in sorted(folder.glob("*.ckpt"), reverse=True)]  # with `last`, and out of order
    assert len(every) > 3
    assert call("explain", "quickstart", "--samples", "40", "--ckpt_path", *every) == 0
    assert "page: runs/quickstart/version_0/figures/index.html" in capfd.readouterr().out
    labels = ["after epoch 1", "after epoch 2", "after epoch 3"]
    assert titles(drawn["dynamics.png"]) == labels
    first, _, third = ([bar.get_height() for bar in axis.patches] for axis in drawn["dynamics.png"].axes[:3])
    assert first != third
    found = content("runs/quickstart/version_0/figures")
    assert [snapshot["label"] for snapshot in found["snapshots"]] == labels
    assert [snapshot["tested"] for snapshot in found["snapshots"]] == [40] * 3
    facts = dict(found["facts"])
    assert facts["recipe"] == "quickstart"
    assert facts["data"] == "Digits"
    assert facts["network"].startswith("capsnet_digits, ")
    assert found["curves"]["loss"][0]["x"] == [1, 2, 3]
    captions = dict(found["figures"])
    assert captions["credit.png"] == "where each class takes its input from"
    assert captions["dynamics.png"] == "how long votes are, and how well they agree with the parents"
    # The last checkpoint alone gives what it gave among the others.
    assert call("explain", "quickstart", "--samples", "40", "--figures", "mine") == 0
    assert titles(drawn["dynamics.png"]) == ["after epoch 3"]
    assert [bar.get_height() for bar in drawn["dynamics.png"].axes[0].patches] == third
    assert content("mine")["snapshots"][0]["accuracy"] == found["snapshots"][2]["accuracy"]


@pytest.mark.slow
def test_explain_all_layers(images_of_noise, monkeypatch, drawn):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    recipe = ("tsai2020/table1/cifar10-em", "--small")
    assert call("train", *recipe, *PAIRS) == 0
    assert call("explain", *recipe, "--samples", "3", "--figures", "drawn") == 0
    rows = [axis.get_ylabel().splitlines()[0] for axis in drawn["dynamics.png"].axes[:3]]
    names = ["capsules.layers.0", "capsules.layers.1", "capsules.layers.2"]
    assert rows == names
    found = content("drawn")
    assert [layer["name"] for layer in found["layers"]] == names
    assert [maps["layer"] for maps in found["snapshots"][0]["examples"][0]["maps"]] == names


@pytest.mark.slow
def test_explain_texts(tmp_path):
    reviews = [f"{word} film number {i}" for i in range(30) for word in ("great", "awful")]
    lines = ["text,label", *(f"{text},{int(text.startswith('great'))}" for text in reviews)]
    Path("reviews.csv").write_text("\n".join(lines))
    options = ["--data.file", "reviews.csv", "--data.cache", str(tmp_path / "cache")]
    options += ["--data.encoder", str(make_encoder(tmp_path / "bert"))]
    assert call("train", "own/texts", *options, "--trainer.max_epochs", "2") == 0
    assert call("explain", "own/texts", *options, "--samples", "4", "--figures", "drawn") == 0
    found = content("drawn")
    assert found["inputs"] == "texts"
    example = found["snapshots"][0]["examples"][0]
    assert example["words"][:3:2] in (["great", "number"], ["awful", "number"])
    for shares in example["word_shares"]:
        assert len(shares) == len(example["words"])
        assert 0 < sum(shares) <= 1.0001  # the rest belongs to tokens that are no words
    tree = example["trees"][1]
    assert tree["parts"][0]["parts"][0]["name"] in example["words"]
    assert [path.name for path in Path("drawn").iterdir()] == ["index.html"]


@pytest.mark.slow
def test_shuffled_labels_are_shown_beside(capfd):
    assert call("train", "quickstart", "--trainer.max_epochs", "1", *TINY) == 0
    shuffled = ["--data.shuffle_labels", "true", "--runs", "shuffled"]
    assert call("train", "quickstart", "--trainer.max_epochs", "1", *TINY, *shuffled) == 0
    assert call("explain", "quickstart", "--samples", "20", "--figures", "drawn", "--shuffled", "shuffled") == 0
    names = [control["name"] for control in content("drawn")["snapshots"][0]["controls"]]
    assert names[-1] == "Shuffled labels"
    arguments = ("explain", "quickstart", "--samples", "20", "--shuffled")
    assert "was not trained with --data.shuffle_labels true" in error_of(capfd, *arguments, "runs")
    assert "empty has no checkpoint of a run" in error_of(capfd, *arguments, str(Path("empty").mkdir() or "empty"))
    assert "gone.ckpt" in error_of(capfd, *arguments, "gone.ckpt")


def test_figures_lie_beside_a_checkpoint():
    assert folder_of(Path("runs/mine/version_0/checkpoints/last.ckpt")) == Path("runs/mine/version_0")
    assert folder_of(Path("models/mine.ckpt")) == Path("models")
    Path("saved").mkdir()
    assert folder_of(Path("saved")) == Path("saved")


def test_the_title_is_the_folder_of_the_run(tmp_path):
    def title(path: str, name: str = "mine", runs: str = "runs") -> str:
        return _title(Run(Checkpoint(Path(path), {}, {}, {}), Recipe(name, (), {}), runs=Path(runs)))

    assert title("runs/own/images/version_0/checkpoints/best.ckpt") == "own/images/version_0"
    assert title("there/own/images/version_0/checkpoints/best.ckpt", runs="there") == "own/images/version_0"
    assert title(f"{tmp_path}/there/mine/version_2/checkpoints/last.ckpt") == "there/mine/version_2"
    assert title("../far/away/mine/version_2/checkpoints/last.ckpt") == "mine/version_2"
    assert title("alone.ckpt") == "/".join(tmp_path.parts[-2:])
    assert title("cache/models", "hub:user/name") == "hub:user/name"


def test_bad_calls(capfd, trained):
    arguments = ("explain", "quickstart", "--ckpt_path", str(checkpoint(trained)))
    assert "--samples must be at least 2, got 0" in error_of(capfd, *arguments, "--samples", "0")
    assert "no checkpoint gone.ckpt" in error_of(capfd, *arguments, "gone.ckpt")
    assert "none.png is not a picture" in error_of(capfd, *arguments, "--image", "none.png")


def test_weights_that_are_not_finite(capfd, trained):
    content = torch.load(checkpoint(trained), weights_only=True)
    content["state_dict"]["network.conv.bias"].fill_(torch.nan)
    torch.save(content, "nan.ckpt")
    assert call("explain", "quickstart", "--ckpt_path", "nan.ckpt", "--samples", "9", "--figures", "drawn") == 2
    assert "network.conv.bias has values that are NaN" in capfd.readouterr().err
    assert not Path("drawn").exists()


def test_a_page_has_eight_checkpoints_at_most(capfd):
    """Evenly spaced, the first and the last among them."""
    states = [{"global_step": epoch, "epoch": epoch} for epoch in range(15)]
    of_epochs = [Checkpoint(Path(f"{x['epoch']}.ckpt"), {}, {}, {}, training=x) for x in states]
    runs = [Run(checkpoint, Recipe("mine", (), {})) for checkpoint in of_epochs]
    assert [run.path.stem for _, run in _checkpoints(runs)] == ["0", "2", "4", "6", "8", "10", "12", "14"]
    assert "8 of 15 checkpoints, evenly spaced, are shown" in capfd.readouterr().err
    assert len(_checkpoints(runs[:8])) == 8
    assert not capfd.readouterr().err
