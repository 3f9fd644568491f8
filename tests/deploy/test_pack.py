"""Packing weights for the package: the file and the card of a short training."""

import re
import sys
from pathlib import Path

import pytest
import torch
from commands import TINY, call

from torchcaps import Prediction
from torchcaps.data import Digits
from torchcaps.deploy import pack
from torchcaps.models import create_model, pretrained
from torchcaps.models.pretrained import read_tensors
from torchcaps.recipes import load_recipe

# Lightning's own imports and deprecations under this torch are out of our hands.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The checkpoint of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    assert call("train", "pretrained/digits", "--runs", str(folder), "--trainer.max_epochs", "1", *TINY) == 0
    return folder / "pretrained" / "digits" / "version_0" / "checkpoints" / "last.ckpt"


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    """An empty folder in place of the package's."""
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "weights")
    monkeypatch.setattr(pack, "FOLDER", tmp_path / "weights")
    return tmp_path / "weights"


def changed(run: Path, folder: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a checkpoint with other tensors, whose names have __ for the dot."""
    content = torch.load(run, weights_only=True)
    content["state_dict"] |= {f"network.{name.replace('__', '.')}": value for name, value in tensors.items()}
    torch.save(content, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def test_the_file_and_the_card(run, weights, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pack", "pretrained/digits", str(run), "--limit", "Drawn by hand.", "--commit=C"])
    pack.main()
    assert sorted(path.name for path in weights.iterdir()) == [
        "capsnet_digits.digits.md",
        "capsnet_digits.digits.safetensors",
    ]
    state = torch.load(run, weights_only=True)["state_dict"]
    network = create_model("capsnet_digits", pretrained="digits")
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[f"network.{name}"].half().float())
    _, about = read_tensors(weights / "capsnet_digits.digits.safetensors")
    assert about["recipe"] == "pretrained/digits"
    card = (weights / "capsnet_digits.digits.md").read_text()
    assert card in capsys.readouterr().out
    assert "| commit | C |" in card
    assert "- Drawn by hand.\n" in card
    assert "1,437 training images, 360 test images, 10 classes" in card
    data = Digits()
    data.setup("test")
    (said,) = re.findall(r"\| test accuracy \| ([\d.]+)% with this file", card)
    assert float(said) / 100 == pytest.approx(pack.accuracy(network, data), abs=5e-5)


class Two(torch.nn.Module):
    """Takes every image for a two."""

    def forward(self, images):
        return Prediction(torch.eye(10)[2].expand(len(images), -1))


def test_the_accuracy_is_counted_over_the_test_set():
    data = Digits(batch_size=100)
    data.setup("test")
    assert pack.accuracy(Two(), data) == pytest.approx((data.test_set.labels == 2).double().mean().item())


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            {"conv__bias": torch.full((128,), 1e6)},
            r"conv.bias has numbers that are infinite in half precision: .*1e\+06",
        ),
        ({"conv__bias": torch.zeros(7)}, "changed.ckpt has the weights of another network: conv.bias"),
        ({"more": torch.zeros(7)}, "changed.ckpt has the weights of another network: more"),
    ],
)
def test_a_checkpoint_that_does_not_fit(run, weights, tmp_path, tensors, said):
    with pytest.raises(ValueError, match=said):
        pack.pack(load_recipe("pretrained/digits"), changed(run, tmp_path, **tensors))
    assert not weights.exists()


def test_weights_that_are_too_large(run, weights, monkeypatch):
    monkeypatch.setattr(pack, "MOST_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"capsnet_digits have 1,364,352 bytes, and the package takes 1,000,000"):
        pack.pack(load_recipe("pretrained/digits"), run)
    assert not weights.exists()


def test_bad_input_is_one_line(weights, tmp_path, monkeypatch):
    (tmp_path / "bad.ckpt").write_text("no checkpoint")
    for arguments, said in (
        (["pretrained/digits", str(tmp_path / "bad.ckpt")], "torchcaps: .*bad.ckpt is not a checkpoint"),
        (["pretrained/digits", str(tmp_path / "none.ckpt")], "torchcaps: .*none.ckpt is not a checkpoint"),
        (["pretrained/digit", str(tmp_path / "bad.ckpt")], "torchcaps: no recipe 'pretrained/digit'; did you mean"),
    ):
        monkeypatch.setattr(sys, "argv", ["pack", *arguments])
        with pytest.raises(SystemExit, match=said) as error:
            pack.main()
        assert "\n" not in str(error.value)
