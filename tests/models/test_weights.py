"""The package's trained weights: each file loads, is small and is as accurate as its card says, and bad input."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call, error_of
from safetensors.torch import load_file

from torchcaps import data as data_sets
from torchcaps.data import ImageData
from torchcaps.models import create_model, pretrained
from torchcaps.models.pretrained import FOLDER, list_weights, read_tensors, write_tensors
from torchcaps.recipes import list_recipes, load_recipe

FILES = sorted(path.name.removesuffix(".safetensors") for path in FOLDER.glob("*.safetensors"))
ROOT = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")
NEEDED = {"mnist": "mnist", "affine-mnist": "mnist", "fashion-mnist": "fashion-mnist", "cifar10": "cifar-10"}
SAMPLE = 300

each_file = pytest.mark.parametrize("file", FILES)


def built(file: str) -> tuple[Any, ImageData]:
    """The network of a file, and the data of its recipe."""
    model, _, data = file.partition(".")
    values = load_recipe(f"pretrained/{data}").config["data"]
    kind = getattr(data_sets, values["class_path"].rpartition(".")[2])
    files = {} if data == "digits" else {"root": str(ROOT), "check_hashes": False}
    return create_model(model, pretrained=data), kind(**values["init_args"], **files)


def test_there_are_weights_for_five_data_sets():
    assert {file.partition(".")[2] for file in FILES} == {"digits", *NEEDED}
    assert {name.partition("/")[2] for name in list_recipes() if name.startswith("pretrained/")} == {"digits", *NEEDED}


@each_file
def test_a_file_is_small_and_whole(file):
    path = FOLDER / f"{file}.safetensors"
    assert path.stat().st_size < 2_000_000
    state, about = read_tensors(path)
    assert {value.dtype for value in state.values()} <= {torch.float16, torch.int64}
    model, _, data = file.partition(".")
    assert about["model"] == model
    assert load_recipe(f"pretrained/{data}").config["model"]["network"]["class_path"] == f"torchcaps.models.{model}"
    network = create_model(model, pretrained=data)
    assert not network.training
    assert {value.dtype for value in network.parameters()} == {torch.float32}
    assert sum(value.numel() for value in network.parameters()) < 1_000_000
    loaded = network.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in state.items())


@each_file
def test_a_card_says_what_the_file_is(file):
    card = (FOLDER / f"{file}.md").read_text(encoding="utf-8")
    model, _, data = file.partition(".")
    count = sum(value.numel() for value in create_model(model, pretrained=data).parameters())
    for text in (
        f'create_model("{model}", pretrained="{data}")',
        f": {count:,} parameters |",
        f"| command | `torchcaps train pretrained/{data}` |",
        f"| file | {(FOLDER / f'{file}.safetensors').stat().st_size:,} bytes |",
        "| license | MIT",
        "## Limits",
    ):
        assert text in card


@each_file
def test_the_accuracy_is_that_of_the_card(file):
    """On all 360 test images of the digits, and on the first 300 of the others, if their files are at hand."""
    data = file.partition(".")[2]
    if data != "digits" and not (ROOT / NEEDED[data]).is_dir():
        pytest.skip(f"no {NEEDED[data]} in {ROOT} (set TORCHCAPS_DATA to the folder of data sets)")
    (said,) = re.findall(r"\| test accuracy \| ([\d.]+) % ", (FOLDER / f"{file}.md").read_text(encoding="utf-8"))
    network, samples = built(file)
    samples.setup("test")
    count = len(samples.test_set) if data == "digits" else SAMPLE
    images, labels = samples.test_set.__getitems__(list(range(count)))
    with torch.inference_mode():
        right = (network(images).evidence.argmax(1) == labels).double().mean().item()
    share = float(said) / 100
    if data == "digits":
        assert right == pytest.approx(share, abs=0.5 / 360)
    else:  # four standard deviations of the mean of a sample
        assert right == pytest.approx(share, abs=4 * (share * (1 - share) / SAMPLE) ** 0.5)


def test_the_only_weights_and_one_of_several():
    assert list_weights("capsnet_digits") == ["digits"]
    only = create_model("capsnet_digits", pretrained=True)
    torch.testing.assert_close(only.state_dict(), create_model("capsnet_digits", pretrained="digits").state_dict())
    assert list_weights("capsnet_small") == ["fashion-mnist", "mnist"]
    with pytest.raises(
        ValueError, match="several trained weights of 'capsnet_small': say pretrained='fashion-mnist' or"
    ):
        create_model("capsnet_small", pretrained=True)
    digits, clothes = (create_model("capsnet_small", pretrained=data) for data in ("mnist", "fashion-mnist"))
    assert not torch.equal(digits.conv.weight, clothes.conv.weight)


def test_arguments_that_fit_the_weights_may_be_given():
    network = create_model("capsnet_small", pretrained="mnist", classes=10, iterations=3, image_size=28)
    assert network.image_shape == (1, 28, 28)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "said"),
    [
        (
            "capsnet_digits",
            {"iterations": 2},
            ValueError,
            "were trained with iterations=3, got 2: leave out iterations",
        ),
        ("capsnet_small", {"classes": 5}, ValueError, "capsnet_small.mnist were trained with classes=10, got 5"),
    ],
)
def test_arguments_that_contradict_the_weights(name, arguments, error, said):
    with pytest.raises(error, match=said) as found:
        create_model(name, pretrained="digits" if name == "capsnet_digits" else "mnist", **arguments)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "given", "error", "said"),
    [
        ("capsnet_small", "mnits", ValueError, "no weights of 'capsnet_small' for 'mnits'; did you mean .*mnist"),
        ("capsnet_mnist", True, ValueError, "no trained weights of 'capsnet_mnist': .*choose one of capsnet_digits, "),
        ("capsnet", True, ValueError, "no model 'capsnet'; did you mean"),
    ],
)
def test_weights_that_are_not_there(name, given, error, said):
    with pytest.raises(error, match=said):
        create_model(name, pretrained=given)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder with the digits' weights alone, which a test may damage."""
    path = tmp_path / "capsnet_digits.digits.safetensors"
    path.write_bytes((FOLDER / path.name).read_bytes())
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
    return path


def test_a_damaged_file(own_folder):
    whole = own_folder.read_bytes()
    for content in (b"", whole[:1000], whole[:-1], b"\xff" * 100):
        own_folder.write_bytes(content)
        with pytest.raises(
            ValueError, match="capsnet_digits.digits.safetensors is damaged, or no safetensors"
        ) as error:
            create_model("capsnet_digits", pretrained=True)
        assert "\n" not in str(error.value)


def test_weights_of_another_network(own_folder):
    _, about = read_tensors(own_folder)
    state = load_file(own_folder)
    write_tensors(own_folder, {**state, "conv.bias": torch.zeros(7)}, about)
    with pytest.raises(ValueError, match=r"another network: conv.bias has shape \(7,\) there, expected \(128,\)"):
        create_model("capsnet_digits", pretrained=True)
    write_tensors(own_folder, {**state, "more": torch.zeros(7)}, about)
    with pytest.raises(ValueError, match=r"another network: more has shape \(7,\) there, expected none"):
        create_model("capsnet_digits", pretrained=True)


def test_without_safetensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=re.escape('safetensors is missing: pip install "torchcaps[train]"')):
        create_model("capsnet_digits", pretrained=True)


def test_the_list_of_models_says_what_they_were_trained_on(capfd):
    assert call("models", "capsnet_*") == 0
    lines = capfd.readouterr().out.splitlines()
    assert re.search(r"^capsnet_small +902,416 +fashion-mnist, mnist +A narrow", "\n".join(lines), re.MULTILINE)
    assert re.search(r"^capsnet_mnist +8,215,568 +CapsNet for", "\n".join(lines), re.MULTILINE)
    assert "no model matches" in error_of(capfd, "models", "none*")
