"""The examples run as they are, only for fewer epochs, and what they train learns."""

import importlib.util
import shlex
from pathlib import Path
from types import ModuleType

import pooch
import pytest
import torch
from encoders import make_encoder

from torchcaps.cli import parser
from torchcaps.recipes import load_recipe

EXAMPLES = Path(__file__).parents[1] / "examples"

# Warnings of Lightning's own code with this version of torch, and its advice about workers.
lightning = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_calls_commands_and_rows_that_exist():
    demo = example("demo")
    assert all(load_recipe(row).title for row in demo.ROWS)
    for command in demo.COMMANDS:
        options, unknown = parser().parse_known_args(shlex.split(command))
        assert options.run
        assert not unknown


def test_own_network():
    example("own_network").main(steps=1)  # that it runs; the slow test checks that it learns


@pytest.mark.slow
def test_own_network_learns():
    assert example("own_network").main(steps=200) > 0.85  # after 100 steps rounding alone moves it by 10 points


def test_own_routing():
    assert example("own_routing").main(epochs=2) > 0.8


@pytest.mark.slow
def test_routing_pool(monkeypatch):
    find_spec = importlib.util.find_spec  # no download, whatever is installed
    hidden = ("torchvision", "timm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name not in hidden and find_spec(name, *rest))
    assert example("routing_pool").main(epochs=1) > 0.3


@lightning
def test_sentiment(tmp_path, monkeypatch):
    """With an encoder of random weights: the two words decide."""
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    sentiment = example("sentiment")
    words = [f"{'very ' * (i // 2 % 7)}{'good' if i % 2 else 'bad'}{' film' * (i // 14)}" for i in range(42)]
    rows = [f"{text},{'positive' if 'good' in text else 'negative'}" for text in words]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    encoder = make_encoder(tmp_path / "bert")
    metrics = sentiment.main(str(tmp_path / "a.csv"), epochs=20, encoder=str(encoder), cache=str(tmp_path / "kept"))
    assert metrics["test/accuracy"] > 0.75
    assert sentiment.INVENTED.read_text().count("positive") == 30


def test_slot_attention(tmp_path):
    assert example("slot_attention").main(str(tmp_path / "slots.png"), steps=60) < 1.7
    assert (tmp_path / "slots.png").stat().st_size > 10_000


def test_drawings_are_compared_in_the_better_order():
    slots = example("slot_attention")
    true = slots.pairs(slots.digits(train=False), 8)
    swapped = torch.cat([true[:4], true[4:].flip(1)])
    assert torch.equal(slots.in_order(0.9 * swapped, true), 0.9 * true)
    assert torch.equal(slots.overlay(true) > 0, (true > 0).any(1))
