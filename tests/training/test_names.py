"""What a recipe may name without `--allow_code`: nothing else is imported, built or run."""

import argparse
import json
import pkgutil
import sys
from pathlib import Path

import pytest
import torch
from commands import error_of
from lightning.pytorch.callbacks import EarlyStopping

import torchcaps
from torchcaps.cli import train
from torchcaps.recipes import load_recipe
from torchcaps.training.build import Training
from torchcaps.training.names import check_name, known_names_only

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SAID = (
    "is not among the classes of torchcaps, torch, lightning and torchmetrics that every recipe may name: add --allow"
)
BESIDE = (
    "from pathlib import Path\nfrom torch import nn\n\nPath('owned').touch()\n\nclass Thing(nn.Identity):\n    pass\n"
)
CALL = {"cmd": "touch owned"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("beside.py").write_text(BESIDE)
    yield
    sys.modules.pop("beside", None)


def write(**values: object) -> str:
    Path("mine.yaml").write_text(json.dumps({"extends": "quickstart", **values}))
    return "mine.yaml"


def imported(name: str) -> object:
    """Import a name as the parser does: `torch.os.system` is `system` of the module `os` that `torch` has imported."""
    return pkgutil.resolve_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "subprocess.getoutput",
        "os.system",
        "builtins.exec",
        "beside.Thing",
        "jsonargparse.set_parsing_settings",
        "torch.os.system",  # re-exported
        "torchcaps.cli.os.system",
        "torch.multiprocessing.Process",
        "torch.hub.load",  # functions
        "torch.load",
        "torch.jit.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.nn.functional.relu",
        "torchcaps.cli.main",
        "torchcaps.utils.files.write_text_whole",
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",  # runs a command when built
        "torch.package.PackageImporter",
        "lightning.pytorch.cli.LightningCLI",
        "lightning.fabric.strategies.launchers.subprocess_script._SubprocessScriptLauncher",
        "torch._inductor.codecache.CppCodeCache",
        "torchcaps.__main__.run",
    ],
)
def test_names_that_need_the_option(name):
    with known_names_only(), pytest.raises(ValueError, match=SAID):
        check_name(name, imported)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.optim.Adam", torch.optim.Adam),
        ("torch.optim.lr_scheduler.StepLR", torch.optim.lr_scheduler.StepLR),
        ("torch.nn.CrossEntropyLoss", torch.nn.CrossEntropyLoss),
        ("torchcaps.DynamicRouting", torchcaps.DynamicRouting),
        ("torchcaps.models.capsnet_digits", torchcaps.models.capsnet_digits),
        ("torchcaps.squash", torchcaps.squash),
        ("lightning.pytorch.callbacks.EarlyStopping", EarlyStopping),
    ],
)
def test_names_that_every_recipe_may_have(name, expected):
    with known_names_only():
        assert check_name(name, imported) is expected


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("beside.Thing", lambda name: {"model": {"network": name}}),
        ("subprocess.getoutput", lambda name: {"model": {"network": {"class_path": name, "init_args": CALL}}}),
        ("torch.os.system", lambda name: {"model": {"optimizer": {"class_path": name, "init_args": CALL}}}),
        ("beside.Thing", lambda name: {"model": {"feedback": name}}),
        ("subprocess.getoutput", lambda name: {"data": {"class_path": name, "init_args": CALL}}),
        ("beside.Thing", lambda name: {"trainer": {"callbacks": [{"class_path": name, "init_args": CALL}]}}),
        (
            "subprocess.getoutput",
            lambda name: {"trainer": {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"setup": name}}]}},
        ),
        ("beside.Thing", lambda name: {"small": {"model": {"loss": {"class_path": name, "init_args": CALL}}}}),
    ],
)
def test_nothing_is_run(capfd, name, place):
    values = place(name)
    small = ["--small"] if "small" in values else []
    assert f"{name} {SAID}" in error_of(capfd, "train", write(**values), *small)
    assert sorted(path.name for path in Path().iterdir()) == ["beside.py", "mine.yaml"]


SPEC = json.dumps({"class_path": "subprocess.getoutput", "init_args": CALL})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--model.network=subprocess.getoutput", "--model.network.cmd=touch owned"], SAID),
        (["--model.network", SPEC], SAID),
        (["--model", f"{{network: {SPEC}}}"], "--model: there is no network"),
        (["--model.network", "other.yaml"], SAID),  # a file with a class
        (["--model.network.help", "beside.Thing"], SAID),
        (["--data", "beside.Thing"], SAID),
        (["--trainer.callbacks+=beside.Thing"], SAID),
        (["--config", "other.yaml"], "--config is no option"),
        (["-c", "other.yaml"], "-c is no option"),
    ],
)
def test_nothing_is_run_by_an_override(capfd, overrides, said):
    Path("other.yaml").write_text(SPEC)
    assert said in error_of(capfd, "train", "quickstart", *overrides)
    assert sorted(path.name for path in Path().iterdir()) == ["beside.py", "other.yaml"]


@pytest.mark.parametrize("command", ["test", "explain"])
def test_other_commands_have_the_same_rule(capfd, command):
    recipe = write(model={"loss": "beside.Thing"})
    assert f"model.loss: beside.Thing {SAID}" in error_of(capfd, command, recipe, "--ckpt_path", "last")
    assert not Path("owned").exists()
    assert "no checkpoint under" in error_of(capfd, command, recipe, "--ckpt_path", "last", "--allow_code")
    assert Path("owned").exists()


def test_the_option_is_in_the_command_that_resumes(capfd):
    options = argparse.Namespace(recipe="mine.yaml", small=False, smoke=True, allow_code=True, runs="r")
    options.ckpt_path, options.model = None, "capsnet_mnist"
    assert "train mine.yaml --smoke --allow_code --model capsnet_mnist" in train._resume_command(options, [], Path("r"))


def test_a_parser_outside_of_trainings_may_import_all():
    """The guard is on within a training only, and in the thread that builds it."""
    assert check_name("json.dumps", imported) is json.dumps
    Training(load_recipe("quickstart"), [])
    assert check_name("json.dumps", imported) is json.dumps
