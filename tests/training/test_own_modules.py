"""Recipes with networks, routings, losses and data of modules in their folders."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import call, error_of
from PIL import Image

import torchcaps
from torchcaps.models import create_model, registry
from torchcaps.recipes import Recipe, load_recipe
from torchcaps.training import Report
from torchcaps.training.build import Training
from torchcaps.training.overrides import read_overrides
from torchcaps.training.values import Values

TINY = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_test_batches=1"]
TINY += ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
CODE = "--allow_code"
ROOT = Path(torchcaps.__file__).parent.parent

NETWORK = """
from torch import nn
from torchcaps import CapsNet, register_model
from torchcaps.capsules import Prediction

class Line(nn.Module):
    def __init__(self, classes: int = 10):
        super().__init__()
        self.line = nn.Linear(64, classes)

    def forward(self, images):
        return Prediction(self.line(images.flatten(1)))

@register_model
def few_capsules(primary_types: int = 2) -> CapsNet:
    return CapsNet(1, 8, channels=4, kernel_size=3, primary_types=primary_types, primary_pose=4,
                   primary_kernel_size=3, class_pose=4, decoder=(8,))

def unannotated():
    return Line()
"""
NETWORK_WITHOUT = """
from torch import nn
from torchcaps import Prediction

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 10)

    def forward(self, images):
        return Prediction(self.line(images.flatten(1)))
"""
README_NETWORK = """
from torchcaps import CapsNet, Routing

class MyNet(CapsNet):
    def __init__(self, routing: Routing):
        super().__init__(1, 8, 10, routing, channels=4, kernel_size=3, primary_types=2, primary_kernel_size=3)
"""
ROUTING = """
from torchcaps import DynamicRouting

class MyRouting(DynamicRouting):
    def __init__(self, iterations: int = 7):
        super().__init__(iterations=iterations)
"""
REST = """
from torch import nn
from torchcaps.data import Digits

class MyData(Digits):
    pass

class MyLoss(nn.CrossEntropyLoss):
    pass
"""
CAPSNET = "torchcaps.CapsNet"
SMALL = {"image_size": 8, "channels": 4, "kernel_size": 3, "primary_types": 2, "primary_kernel_size": 3}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Run each test in its own folder, and forget the modules that it imports, as if it had its own process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))
    before = dict(sys.modules)
    Path("mine").mkdir()
    yield
    for name in set(sys.modules) - set(before):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path.resolve())):
            del sys.modules[name]


def write(path: str, network: object = "network.few_capsules", **model: object) -> str:
    """Write a recipe with a small network, and return its path."""
    content = {"extends": "quickstart", "model": {"network": network, "reconstruction_weight": 0, **model}}
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(json.dumps(content))
    return path


def build(path: str, *overrides: str) -> Training:
    return Training(Values.of(load_recipe(path), read_overrides(list(overrides)), allow_code=True))


def test_a_network_beside_a_recipe(capfd):
    Path("mine/network.py").write_text(NETWORK)
    recipe = write("mine/digits.yaml")
    assert call("train", recipe, "--smoke", CODE) == 0
    assert "run: runs/mine/digits/smoke_0" in capfd.readouterr().out
    assert call("train", recipe, CODE, *TINY) == 0
    assert "run: runs/mine/digits/version_0" in capfd.readouterr().out
    assert "network.few_capsules" in Path("runs/mine/digits/version_0/config.yaml").read_text()
    assert call("train", str(Path(recipe).resolve()), CODE, *TINY, "--trainer.max_epochs=2", "--ckpt_path", "last") == 0
    assert call("test", recipe, CODE, "--ckpt_path", "last") == 0
    assert call("explain", recipe, CODE, "--samples", "9", "--ckpt_path", "last") == 0
    assert "figure: runs/mine/digits/version_1/figures/credit.png" in capfd.readouterr().out
    assert [path.name for path in Path().iterdir() if path.name != "mine"] == ["runs"]
    assert type(create_model("few_capsules")) is torchcaps.CapsNet


def test_a_run_finds_the_modules_of_its_recipe(capfd):
    Path("mine/network.py").write_text(NETWORK_WITHOUT)
    recipe = write("mine/digits.yaml", "network.Plain", loss="torch.nn.CrossEntropyLoss")
    assert call("train", recipe, CODE, *TINY) == 0
    assert "trains Plain: 650 parameters" in capfd.readouterr().out
    run, picture, folder = "runs/mine/digits/version_0", "digit.png", "folder"
    Image.new("L", (8, 8)).save(picture)
    for arguments in (
        ["test", run],
        ["predict", recipe, picture],
        ["predict", f"{run}/checkpoints/last.ckpt", picture],
        ["export", run, "--to", "safetensors", "--out", folder],
    ):
        sys.path.remove(str(Path("mine").resolve()))  # as in a new process
        del sys.modules["network"]
        assert call(*arguments, CODE) == 0
    sys.path.remove(str(Path("mine").resolve()))
    del sys.modules["network"]
    assert "there is no module 'network'" in error_of(capfd, "predict", folder, picture, CODE)
    Path(folder, "network.py").write_text(NETWORK_WITHOUT)
    assert call("predict", folder, picture, CODE) == 0


def test_data_and_loss_beside_a_recipe():
    Path("mine/rest.py").write_text(REST)
    Path("mine/network.py").write_text(NETWORK)
    write("mine/digits.yaml", {"class_path": "network.Line"}, loss="rest.MyLoss")
    cli = build("mine/digits.yaml", "--data=rest.MyData", "--trainer.callbacks+=Report")
    (report,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, Report)]
    assert "--allow_code" in report.about["command"]
    found = type(cli.model.network), type(cli.model.loss), type(cli.datamodule)
    assert [f"{kind.__module__}.{kind.__name__}" for kind in found] == ["network.Line", "rest.MyLoss", "rest.MyData"]


@pytest.mark.parametrize(
    ("routing", "expected", "iterations"),
    [
        ("DynamicRouting", "DynamicRouting", 3),
        ({"class_path": "DynamicRouting", "init_args": {"iterations": 2}}, "DynamicRouting", 2),
        ({"class_path": "torchcaps.EMRouting", "init_args": {"iterations": 4}}, "EMRouting", 4),
        ({"class_path": "my_routing.MyRouting", "init_args": {"iterations": 2}}, "MyRouting", 2),
    ],
)
def test_names_of_routings(routing, expected, iterations):
    Path("mine/my_routing.py").write_text(ROUTING)
    write("mine/digits.yaml", {"class_path": CAPSNET, "init_args": {**SMALL, "routing": routing}})
    found = build("mine/digits.yaml").model.network.class_capsules.routing
    assert (type(found).__name__, found.iterations) == (expected, iterations)


def test_a_routing_by_an_override():
    """It takes over the arguments of the routing before."""
    Path("mine/my_routing.py").write_text(ROUTING)
    routing = {"class_path": "EMRouting", "init_args": {"iterations": 4}}
    write("mine/digits.yaml", {"class_path": CAPSNET, "init_args": {**SMALL, "routing": routing}})
    found = build("mine/digits.yaml", "--model.network.routing=my_routing.MyRouting").model.network
    assert type(found.class_capsules.routing).__name__ == "MyRouting"
    assert found.class_capsules.routing.iterations == 4


def test_the_recipe_of_the_readme():
    """The recipe names a network and a routing in modules of its folder."""
    *_, recipe = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/training.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    Path("mine/digits.yaml").write_text(recipe)
    Path("mine/my_routing.py").write_text(ROUTING.replace("MyRouting", "TemperedRouting"))
    Path("mine/network.py").write_text(README_NETWORK)
    assert call("train", "mine/digits.yaml", "--smoke", CODE) == 0
    assert [path.name for path in Path("runs/mine/digits").iterdir()] == ["smoke_0"]


def test_a_recipe_that_extends_one_of_another_folder():
    Path("mine/base").mkdir()
    Path("mine/base/network.py").write_text(NETWORK)
    Path("mine/my_routing.py").write_text(ROUTING)
    write("mine/base/base.yaml", "network.Line")
    Path("mine/row.yaml").write_text("extends: base/base.yaml\nmodel: {classes: 10}\n")
    assert type(build("mine/row.yaml").model.network).__module__ == "network"
    assert sys.path[-2:] == [str(Path(folder).resolve()) for folder in ("mine", "mine/base")]


# Where runs are


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("digits.yaml", "digits"),
        ("mine/digits.yaml", "mine/digits"),
        ("./mine/../mine/digits.yml", "mine/digits"),
        ("mine/digits.of.two.yaml", "mine/digits.of.two"),
        ("mine/digits-small.yaml", "mine/digits-small.yaml"),  # mine/digits-small is of mine/digits.yaml --small
        ("{here}/mine/digits.yaml", "mine/digits"),
        ("../other/digits.yaml", "{parent}/other/digits"),
        ("/data/digits.yaml", "data/digits"),
    ],
)
def test_runs_follow_the_path_of_a_recipe(recipe, expected):
    here = Path.cwd()
    parent = here.parent.relative_to(here.anchor)
    recipe = Recipe(recipe.format(here=here), (), {})
    assert recipe.folder == Path(expected.format(parent=parent))
    assert replace(recipe, is_small=True).folder == Path(f"{expected.format(parent=parent)}-small")


def test_no_run_is_outside_the_folder_of_all_runs(capfd):
    write("mine/digits.yaml", "torchcaps.models.capsnet_digits")
    (Path("mine") / "inside").mkdir()
    os.chdir("mine/inside")
    assert call("train", "../digits.yaml", "--smoke") == 0
    assert [path.name for path in Path().iterdir()] == ["runs"]
    for name in ("../recipes/quickstart", str(Path("../digits").resolve())):
        assert "no recipe" in error_of(capfd, "train", name)


# What cannot be imported: one line


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (
            "gone.sub.Net",
            ": model.network: there is no module 'gone': correct the name, put gone.py into {mine}, or install it",
        ),
        ("network.Lin", "model.network: there is no 'Lin' in {mine}/network.py; did you mean Line"),
        ("network.unannotated", "Import path network.unannotated does not correspond to a subclass of Module"),
        (
            "undefined.Net",
            "model.network: needs {mine}/undefined.py, line 2, which cannot be imported: NameError: na",
        ),
        ("needy.Net", "needs {mine}/needy.py, line 1, which cannot be imported: ModuleNotFoundError: No module named"),
        ("taken.capsnet_mnist", "needs {mine}/taken.py, line 3, which cannot be imported: ValueError: the model 'caps"),
    ],
)
def test_a_network_that_cannot_be_imported(capfd, network, said):
    Path("mine/network.py").write_text(NETWORK)
    Path("mine/undefined.py").write_text("\nx = y\n")
    Path("mine/needy.py").write_text("import not_there\n")
    Path("mine/taken.py").write_text(
        "from torchcaps import register_model\n\n@register_model\ndef capsnet_mnist():\n    pass\n"
    )
    said = said.format(mine=Path("mine").resolve())
    assert said in error_of(capfd, "train", CODE, write("mine/digits.yaml", {"class_path": network}))
    assert [path.name for path in Path().iterdir()] == ["mine"]


# Names that are taken


def test_a_module_with_the_name_of_an_installed_one(capfd):
    name = "json"
    path = Path(f"mine/{name}.py")
    path.write_text(NETWORK)
    write("mine/digits.yaml", f"{name}.Line")
    message = error_of(capfd, "train", CODE, "mine/digits.yaml")
    assert f"{path.resolve()} is hidden by another module {name!r}, which is " in message
    assert message.endswith(": give yours a name of its own")


# In other processes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_two_processes(strategy):
    Path("mine/network.py").write_text(NETWORK)
    Path("mine/rest.py").write_text(REST)
    write("mine/digits.yaml", "network.Line", loss="rest.MyLoss")
    Path("run.py").write_text("from torchcaps.cli import run\n\nif __name__ == '__main__':\n    run()\n")
    options = [*TINY, "--data=rest.MyData", "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    command = [sys.executable, "run.py", "train", "mine/digits.yaml", CODE, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert [path.name for path in Path("runs/mine/digits").iterdir()] == ["version_0"]
