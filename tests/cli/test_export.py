"""`torchcaps export`: files of a trained network that run without torchcaps, and wrong calls."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from commands import call, checkpoint, error_of
from disks import files_of_at_most

from torchcaps.runs import Run


@pytest.mark.slow
def test_an_onnx_file_of_a_checkpoint(trained, capfd):
    path = str(checkpoint(trained))
    assert call("export", "quickstart", "--ckpt_path", path, "--out", "new/digits.onnx") == 0
    said = capfd.readouterr().out
    assert re.search(
        r"^new/digits.onnx: 1,9\d\d,\d{3} bytes, largest difference from the network: \d\.\de-\d+$", said, re.M
    )
    session = onnxruntime.InferenceSession("new/digits.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list("0123456789")
    network = Run.find(path)
    images = torch.rand(3, 1, 8, 8)
    (scores,) = session.run(["scores"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), network.scores(images), rtol=1e-4, atol=1e-6)


def test_safetensors_are_read_again(trained, capfd, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    path = str(checkpoint(trained))
    assert call("export", "quickstart", "--ckpt_path", path, "--to", "safetensors", "--out", "~/kept-1.0") == 0
    assert "kept-1.0: the same weights as those of the network" in capfd.readouterr().out
    os.chdir("kept-1.0")
    assert call("export", ".", "--to", "safetensors") == 0
    state = Run.find(path).network().state_dict()
    for name, value in Run.find("../kept-1.0-safetensors").network().state_dict().items():
        assert value.equal(state[name])


@pytest.mark.slow
def test_a_program_is_beside_its_checkpoint(trained, capfd):
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/mine.ckpt").write_bytes(checkpoint(trained).read_bytes())
    arguments = ("--ckpt_path", "run/checkpoints/mine.ckpt", "--to", "torch", "--decoder")
    assert call("export", "quickstart", *arguments) == 0
    assert "run/checkpoints/mine.pt2: 2," in capfd.readouterr().out
    code = (
        "import sys; sys.modules['torchcaps'] = None; import torch; "
        "scores, images = torch.export.load('run/checkpoints/mine.pt2').module()(torch.rand(3, 1, 8, 8)); "
        "assert scores.shape == (3, 10) and images.shape == (3, 1, 8, 8)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["mine.ckpt", "mine.pt2"]


def test_wrong_options(capfd):
    def said(*options: str) -> str:
        return error_of(capfd, "export", "quickstart", *options)

    assert "invalid choice: 'tflite' (choose from" in said("--to", "tflite")
    assert "--decoder is for --to onnx and torch" in said("--decoder", "--to", "safetensors")
    assert "--out must end in .pt2 for --to torch, got a.onnx" in said("--to", "torch", "--out", "a.onnx")
    assert "unknown argument --half" in said("--half")
    assert "runs/quickstart has no checkpoint of a run: train first, or give the --runs" in said()
    assert "no checkpoint gone.ckpt" in said("--ckpt_path", "gone.ckpt")
    Path("noise.ckpt").write_bytes(b"no checkpoint at all")
    assert "noise.ckpt is damaged" in said("--ckpt_path", "noise.ckpt")
    assert [path.name for path in Path().iterdir()] == ["noise.ckpt"]


def test_places_that_cannot_be_written(trained, capfd):
    arguments = ("export", "quickstart", "--ckpt_path", str(checkpoint(trained)), "--out")
    Path("file").touch()
    Path("folder.onnx").mkdir()
    assert "file/a.onnx cannot be written: " in error_of(capfd, *arguments, "file/a.onnx")
    assert "--out folder.onnx is a folder: give the path of a file" in error_of(capfd, *arguments, "folder.onnx")
    assert "file is a file" in error_of(capfd, *arguments, "file", "--to", "safetensors")
    Path("another").mkdir()
    for name in ("README.md", "model.safetensors", "config.json"):  # as in every folder of the Hub
        Path("another", name).write_text("{}")
    said = error_of(capfd, *arguments, "another", "--to", "safetensors")
    assert "another has a config.json that an export would write over" in said
    for content in ("[" * 100_000, '["values"]', '{"values": 3}'):
        Path("another/config.json").write_text(content)
        assert error_of(capfd, *arguments, "another", "--to", "safetensors") == said
    assert Path("another/README.md").read_text() == "{}"
    assert sorted(path.name for path in Path().iterdir()) == ["another", "file", "folder.onnx"]


@pytest.mark.parametrize("name", ["a.onnx", "a.pt2", "a-safetensors"])
def test_a_full_disk(trained, capfd, name):
    """Files may have up to 100 kB."""
    kind = {".onnx": "onnx", ".pt2": "torch"}.get(Path(name).suffix, "safetensors")
    path = name if Path(name).suffix else f"{name}/model.safetensors"
    with files_of_at_most(10**5):
        line = error_of(capfd, "export", str(checkpoint(trained)), "--to", kind, "--out", name)
    assert line == f"torchcaps: cannot write {path}: File too large"
    assert not [file for file in Path().rglob("*") if file.is_file()]


def test_a_decoder_that_is_not_there(trained, capfd):
    content = torch.load(checkpoint(trained), weights_only=True)
    values = json.loads(content["recipe"])
    values["model"]["network"]["init_args"]["decoder"] = False
    state = {name: value for name, value in content["state_dict"].items() if ".decoder." not in name}
    torch.save({**content, "recipe": json.dumps(values), "state_dict": state}, "none.ckpt")
    message = error_of(capfd, "export", "quickstart", "--ckpt_path", "none.ckpt", "--decoder")
    assert "this CapsNet has no decoder: leave out the decoder" in message
