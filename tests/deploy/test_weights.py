"""Packing weights for the package: the file and the card of a short training."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from torchcaps.data import Digits
from torchcaps.models import create_model, pretrained
from torchcaps.models.pretrained import read_tensors
from torchcaps.recipes import load_recipe

spec = importlib.util.spec_from_file_location("pack_weights", Path(__file__).parents[2] / "docs" / "weights.py")
pack = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    """An empty folder in place of the package's."""
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "weights")
    monkeypatch.setattr(pack, "FOLDER", tmp_path / "weights")
    return tmp_path / "weights"


def test_the_file_and_the_card(run, weights, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pack", "pretrained/digits", str(run), "--limit", "Drawn by hand."])
    pack.main()
    names = ["capsnet_digits.digits.md", "capsnet_digits.digits.safetensors"]
    assert sorted(path.name for path in weights.iterdir()) == names
    state = torch.load(run, weights_only=True)["state_dict"]
    network = create_model("capsnet_digits", pretrained="digits")
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[f"network.{name}"].half().float())
    _, about = read_tensors(weights / "capsnet_digits.digits.safetensors")
    assert about["recipe"] == "pretrained/digits"
    card = (weights / "capsnet_digits.digits.md").read_text()
    assert card in capsys.readouterr().out
    assert "- Drawn by hand.\n" in card
    assert "1,437 training images, 360 test images, 10 classes" in card
    data = Digits(batch_size=100)
    data.setup("test")
    images, labels = data.test_set.__getitems__(list(range(360)))
    accuracy = (network(images).evidence.argmax(1) == labels).double().mean().item()
    assert pack.accuracy(network, data) == pytest.approx(accuracy)
    (printed,) = re.findall(r"\| test accuracy \| ([\d.]+) % with this file", card)
    assert float(printed) / 100 == pytest.approx(accuracy, abs=5e-5)


def test_weights_that_cannot_be_packed(run, weights, tmp_path, monkeypatch):
    content = torch.load(run, weights_only=True)
    content["state_dict"]["network.conv.bias"] = torch.full((128,), 1e6)
    torch.save(content, tmp_path / "large.ckpt")
    (tmp_path / "bad.ckpt").write_text("no checkpoint")
    for recipe, checkpoint, said in (
        ("pretrained/digits", tmp_path / "large.ckpt", r"conv.bias has .* infinite in half precision: .*1e\+06"),
        ("pretrained/cifar10", run, "has a .*capsnet_digits, and pretrained/cifar10 trains another network"),
        ("pretrained/digits", tmp_path / "bad.ckpt", "bad.ckpt is damaged, or not a checkpoint"),
    ):
        with pytest.raises(ValueError, match=said):
            pack.pack(load_recipe(recipe), checkpoint)
    monkeypatch.setattr(pack, "MOST_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"capsnet_digits have 1,364,352 bytes, and the package takes 1,000,000"):
        pack.pack(load_recipe("pretrained/digits"), run)
    monkeypatch.setattr(sys, "argv", ["pack", "pretrained/digit", str(run)])
    with pytest.raises(SystemExit, match="^torchcaps: no recipe 'pretrained/digit'; did you mean"):
        pack.main()
    assert not weights.exists()
