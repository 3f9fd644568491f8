"""What a recipe may name without `--allow_code`: nothing else is imported, built or run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import error_of
from lightning.pytorch.callbacks import EarlyStopping

import torchcaps
from torchcaps.training.names import Names, Refused
from torchcaps.training.signatures import UNKNOWN

SAID = (
    "is no class of torchcaps, torch, lightning and torchmetrics: correct the name, or allow its code to run, by "
    "--allow_code or allow_code=True"
)
BESIDE = (
    "from pathlib import Path\nfrom torch import nn\n\nPath('owned').touch()\n\nclass Thing(nn.Identity):\n    pass\n"
)
CALL = {"cmd": "touch owned"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("beside.py").write_text(BESIDE)
    yield
    sys.modules.pop("beside", None)


@pytest.mark.parametrize(
    "name",
    [
        "subprocess.getoutput",
        "builtins.exec",
        "beside.Thing",
        "jsonargparse.set_parsing_settings",
        "torch.os.system",  # re-exported
        "torchcaps.cli.os.system",
        "torch.multiprocessing.Process",
        "torch.hub.load",  # functions
        "torch.utils.cpp_extension.load_inline",
        "torch.nn.functional.relu",
        "torchcaps.cli.main",
        "torchcaps.utils.files.write_text_whole",
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",  # runs a command when built
        "torch.package.PackageImporter",
        "lightning.fabric.strategies.launchers.subprocess_script._SubprocessScriptLauncher",
        "torch._inductor.codecache.CppCodeCache",
        "torchcaps.__main__.run",
    ],
)
def test_names_that_need_the_option(name):
    with pytest.raises(Refused, match=SAID):
        Names(allow_code=False).find(name, UNKNOWN)
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
    assert Names(allow_code=False).find(name, UNKNOWN) is expected


PART = {"class_path": "subprocess.getoutput", "init_args": CALL}
TEXT = json.dumps(PART)
HOOK = [{"class_path": "LambdaCallback", "init_args": {"setup": "beside.Thing"}}]
VALUES = [
    {"model": {"network": "beside.Thing"}},
    {"model": {"network": PART}},
    {"model": {"network": TEXT}},
    {"model": {"network": TEXT.replace(", ", ",\t")}},
    {"model": {"network": "class_path: beside.Thing"}},
    {"model": {"network": "'beside.Thing'"}},
    {"model": {"network": json.dumps(json.dumps(TEXT))}},
    {"model": {"network": {"class_path": "torch.nn.Identity", "dict_kwargs": {"a": json.dumps(json.dumps(TEXT))}}}},
    {"model": {"network": '{"class_path": "torch.nn.Identity", "class_path": "beside.Thing"}'}},
    {"model": {"network": {"class_path": "torch.nn.Identity", "dict_kwargs": {"a": "beside.Thing"}}}},
    {"model": {"network": {"class_path": "torch.nn.Identity", "init_args.a": "beside.Thing"}}},
    {"model": {"network.class_path": "beside.Thing"}},
    {"model": {"network": "other.yaml"}},
    {"model": {"network": "./other.yaml"}},
    {"model": {"optimizer": {"class_path": "torch.os.system", "init_args": CALL}}},
    {"model": {"feedback": "beside.Thing"}},
    {"data": PART},
    {"data": {"init_args": {"shift": PART}}},
    {"trainer": {"callbacks": [PART]}},
    {"trainer": {"callbacks": HOOK}},
    {"trainer": {"callbacks": json.dumps(HOOK)}},
    {"trainer": {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": "beside.Thing\u2118"}}]}},
    {"trainer": {"logger": ["beside.Thing"]}},
    {"trainer": {"logger": "!!set {beside.Thing}"}},
    {"seed_everything": PART},
]


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_nothing_is_imported_that_a_recipe_names(capfd, number):
    Path("other.yaml").write_text(TEXT)
    Path("mine.yaml").write_text(json.dumps({"extends": "quickstart", **VALUES[number]}))
    error_of(capfd, "train", "mine.yaml")
    assert "beside" not in sys.modules
    assert sorted(path.name for path in Path().iterdir()) == ["beside.py", "mine.yaml", "other.yaml"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--model.network=subprocess.getoutput", "--model.network.cmd=touch owned"], SAID),
        (["--model.network", TEXT], SAID),
        (["--model", f"{{network: {TEXT}}}"], "--model: there is no network"),
        (["--model.network", "other.yaml"], SAID),  # a file with a class
        (["--model.network.help", "beside.Thing"], "there is no 'help'"),
        (["--data", "beside.Thing"], SAID),
        (["--trainer.callbacks+=beside.Thing"], SAID),
        (["--trainer.callbacks+=[beside.Thing]"], SAID),
        (["--config", "other.yaml"], "unknown argument --config"),
        (["-c", "other.yaml"], "-c is no option"),
    ],
)
def test_nothing_is_imported_that_an_override_names(capfd, overrides, said):
    Path("other.yaml").write_text(TEXT)
    assert said in error_of(capfd, "train", "quickstart", *overrides)
    assert "beside" not in sys.modules
    assert sorted(path.name for path in Path().iterdir()) == ["beside.py", "other.yaml"]


def test_names_of_files_and_columns_are_no_names_of_code(capfd):
    """`beside.csv` would be found as a module if it were one."""
    said = error_of(capfd, "train", "own/texts", "--data.file=beside.csv", "--data.label=os.path", "--data.text=a.b")
    assert "beside.csv cannot be read: No such file or directory" in said
    assert "beside" not in sys.modules


def test_the_option(capfd):
    Path("mine.yaml").write_text(json.dumps({"extends": "quickstart", "model": {"loss": "beside.Thing"}}))
    assert f"mine.yaml: model.loss: beside.Thing {SAID}" in error_of(capfd, "train", "mine.yaml")
    assert not Path("owned").exists()
    error_of(capfd, "train", "mine.yaml", "--allow_code", "--data.batch_size", "0")
    assert Path("owned").exists()


def test_texts_that_look_like_aliases_or_tags_of_yaml():
    """They may be names of folders or of columns: there would be no way to give these."""
    for text in ("*x", "!x"):
        Names(allow_code=False).check(text, str | None)
        with pytest.raises(Refused, match="cannot be used"):
            Names(allow_code=False).check(text, int | str)


def test_classes_are_known_by_their_own_name_before_they_are_imported():
    code = """
from lightning import Callback
from torchcaps.data import LabeledData
from torchcaps.training.names import Names
print(Names(False).find("SVHN", LabeledData).__module__, Names(False).find("OneCycle", Callback).__module__)
"""
    root = Path(torchcaps.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert run.stdout.split() == ["torchcaps.data.svhn", "torchcaps.training.one_cycle"], run.stderr
