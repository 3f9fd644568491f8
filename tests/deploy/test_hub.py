"""Trained networks as folders and on a hub, whose client is replaced: no test reaches a network."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from torchcaps.deploy import from_pretrained, push_to_hub, save_pretrained
from torchcaps.runs import Run

IMAGES = torch.rand(3, 1, 8, 8)
FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def trained(run) -> Run:
    about = {"recipe": "quickstart", "command": "torchcaps train quickstart --trainer.max_epochs 1"}
    return with_facts(Run.find(run), 1.5, {**about, "metrics": {"test/accuracy": 0.25}})


def with_facts(run: Run, temperature: float | None, facts: dict[str, Any]) -> Run:
    return replace(run, checkpoint=replace(run.checkpoint, temperature=temperature, facts=facts))


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return save_pretrained(trained, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "folder"))


def assert_same(loaded: Run, expected: Run) -> None:
    torch.testing.assert_close(loaded.probabilities(IMAGES), expected.probabilities(IMAGES), rtol=0, atol=0)
    assert not loaded.network().training
    assert loaded.names == expected.names
    assert loaded.values == expected.values
    assert loaded.temperature == expected.temperature
    assert type(loaded.data()) is type(expected.data())


def refused(said: str, *arguments, **options) -> str:
    with pytest.raises(ValueError, match=said) as error:
        from_pretrained(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# Folders


def test_a_folder_gives_the_same_network(run, trained, saved, tmp_path):
    assert sorted(path.name for path in saved.iterdir()) == FILES
    assert_same(from_pretrained(saved), trained)
    assert_same(Run.find(saved), trained)
    assert from_pretrained(saved).facts["metrics"] == {"test/accuracy": 0.25}
    save_pretrained(str(run), tmp_path / "new" / "folder")  # a checkpoint by its path
    assert_same(from_pretrained(tmp_path / "new" / "folder"), Run.find(run))


def test_a_folder_is_saved_again(saved, trained, folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "config.json").write_text("{")
    save_pretrained(saved, folder)
    assert_same(from_pretrained(folder), trained)
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_card(saved, trained, tmp_path):
    card = huggingface_hub.ModelCard.load(saved / "README.md")
    data, body = card.data, card.text
    assert (data.library_name, data.license, data.pipeline_tag) == ("torchcaps", "unknown", "image-classification")
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_name, result.metric_value) == ("accuracy", "test accuracy", 0.25)
    assert "# capsnet_digits on Digits" in body
    assert f"from_pretrained({str(saved)!r})" in body
    assert "    torchcaps train quickstart --trainer.max_epochs 1\n" in body
    assert "| metrics test/accuracy | 0.2500 |" in body
    assert f"{sum(p.numel() for p in trained.network().parameters()):,} parameters" in body
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in body
    assert "| temperature of the softmax | 1.5 |" in body
    about = {"recipe": "a\n\n# b | c", "metrics": {"x\n---\ny": 1}}  # text from elsewhere stays in its cell
    save_pretrained(with_facts(trained, None, about), tmp_path, license="mit")
    body = (tmp_path / "README.md").read_text()
    assert "license: mit\n" in body
    assert "    torchcaps train a # b \\| c\n" in body
    assert "| metrics x --- y | 1 |\n" in body


def test_a_temperature_can_be_fitted_on_scores(folder):
    scores = from_pretrained(folder).scores(IMAGES)
    assert not scores.requires_grad
    temperature = torch.ones(1, requires_grad=True)
    (scores / temperature).logsumexp(1).sum().backward()
    assert temperature.grad.isfinite().all()


def test_scores_that_are_nan_are_no_probabilities(folder):
    trained = from_pretrained(folder)
    trained.network().conv.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="gives scores that are NaN or infinite: its weights or its inputs"):
        trained.probabilities(IMAGES)


# A hub


@pytest.fixture
def hub(monkeypatch, tmp_path) -> SimpleNamespace:
    """A hub whose repositories are folders. Calls with arguments that the true client does not have fail."""
    root = tmp_path / "hub"

    def create_repo(repo_id, **options):
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"somebody/{repo_id}")

    def upload_folder(*, repo_id, folder_path, revision, **options):
        shutil.copytree(folder_path, root / repo_id / (revision or "main"))
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def snapshot_download(repo_id, *, revision, **options):
        if not (root / repo_id / (revision or "main")).is_dir():
            raise LookupError("no such\nrepository")
        return str(root / repo_id / (revision or "main"))

    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.side_effect, api.upload_folder.side_effect = create_repo, upload_folder
    client = create_autospec(huggingface_hub.HfApi, return_value=api)
    download = create_autospec(huggingface_hub.snapshot_download, side_effect=snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", client)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub")
    return SimpleNamespace(api=api, client=client, download=download)


def test_a_round_trip_over_the_hub(hub, trained, tmp_path):
    url = push_to_hub(trained, "digits", private=True, token="mine", commit_message="A first one")
    assert url == "https://hub/somebody/digits/commit/1"
    hub.client.assert_called_once_with(endpoint="https://hub", token="mine", library_name="torchcaps")
    hub.api.create_repo.assert_called_once_with("digits", private=True, exist_ok=True)
    hub.api.create_branch.assert_not_called()
    assert hub.api.upload_folder.call_args.kwargs["commit_message"] == "A first one"
    assert_same(from_pretrained("somebody/digits", token="mine", cache_dir=tmp_path), trained)
    options = hub.download.call_args.kwargs
    assert sorted(options["allow_patterns"]) == FILES  # nothing else of a repository is downloaded
    assert (options["token"], options["cache_dir"], options["endpoint"]) == ("mine", str(tmp_path), "https://hub")
    assert "from_pretrained('somebody/digits')" in (tmp_path / "hub/somebody/digits/main/README.md").read_text()


def test_revisions(hub, trained, saved):
    push_to_hub(trained, "somebody/digits")
    push_to_hub(with_facts(trained, 3.0, {}), "somebody/digits", revision="warm")
    hub.api.create_branch.assert_called_once_with("somebody/digits", branch="warm", exist_ok=True)
    assert from_pretrained("somebody/digits").temperature == 1.5
    assert from_pretrained("somebody/digits", revision="warm").temperature == 3.0
    assert "(LookupError: no such repository)" in refused(
        "the repository somebody/digits", "somebody/digits", revision="none"
    )
    refused("is a folder, which has no revisions", saved, revision="main")


def test_a_hub_that_does_not_answer(trained, tmp_path, monkeypatch):
    """By its true client."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused(
        "there is no folder some/body, and the repository some/body cannot be read", "some/body", cache_dir=tmp_path
    )
    for name in ("some/body", "not a name"):
        with pytest.raises(ValueError, match=f"cannot upload to {name}") as error:
            push_to_hub(trained, name, token="mine")
        assert "\n" not in str(error.value)


# Damaged and hostile folders


def edit(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def named(path: str):
    def change(config):
        config["values"]["model"]["network"] = {"class_path": path, "init_args": {}}

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (named("os.system"), "os.system is no class of"),
        (named("mine.Network"), "mine.Network is no class of"),
        (lambda config: config["values"].pop("data"), "does not hold the values of a recipe"),
        (lambda config: config.pop("values"), "does not hold the values of a recipe"),
        *(
            (lambda config, value=value: config.update(temperature=value), "temperature must be a number from 0.001 to")
            for value in (0, 1e-300, 1e-5, 1e300, 10**400, float("nan"), True, "1", [1])
        ),
        (lambda config: config.update(about=[1]), "about must hold facts by name"),
        (lambda config: config["values"]["data"].update(init_args=[1]), "must have values of its own"),
        (
            lambda config: config["values"]["model"]["network"]["init_args"].update(decoder=False),
            "has the weights of another network",
        ),
    ],
)
def test_values_that_cannot_be_used(folder, change, said):
    edit(folder, change)
    assert str(folder) in refused(said, folder)


def test_code_of_ones_own_runs_only_where_it_is_allowed(folder, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torchcaps import CapsNet\n"
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class Network(CapsNet):\n"
        "    def __init__(self):\n"
        "        super().__init__(1, 8, channels=128, kernel_size=3, primary_types=16, primary_kernel_size=3,\n"
        "                         primary_stride=1, decoder=(256, 512))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    edit(folder, named("mine.Network"))
    refused("mine.Network is no class of", folder)
    assert not (tmp_path / "ran").exists()
    assert type(from_pretrained(folder, allow_code=True).network()).__name__ == "Network"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", "config.json cannot be read as JSON"),
        ("config.json", b"[" * 100_000, "config.json cannot be read as JSON"),
        ("config.json", None, "has no config.json"),
        ("model.safetensors", b"", "model.safetensors is damaged"),
        ("model.safetensors", None, "has no model.safetensors"),
    ],
)
def test_damaged_files(folder, name, content, said):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    refused(said, folder)


def test_truncated_weights(folder):
    whole = (folder / "model.safetensors").read_bytes()
    for length in (7, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        refused("model.safetensors is damaged", folder)


def test_weights_of_another_shape(folder):
    state = load_file(folder / "model.safetensors")
    save_file({**state, "conv.weight": torch.zeros(4, 1, 3, 3)}, folder / "model.safetensors")
    refused("has the weights of another network: .*conv.weight", folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: (x * 100).to(torch.int8), "conv.weight has numbers of type torch.int8 there"),
        (lambda x: x * torch.nan, "conv.weight has values that are NaN"),
    ],
)
def test_weights_that_are_no_numbers_of_a_network(folder, change, said):
    state = load_file(folder / "model.safetensors")
    save_file({**state, "conv.weight": change(state["conv.weight"])}, folder / "model.safetensors")
    refused(said, folder)


@pytest.mark.parametrize("name", ["nothing", "./no/folder", "/no/folder", "a/b/c", "", "a" * 5000])
def test_what_is_no_folder_and_no_repository(name):
    refused("there is no folder|has no config.json", name)


def test_a_file_in_the_way(trained, tmp_path):
    (tmp_path / "file").write_text("")
    refused("is a file: expected a folder that `save_pretrained` wrote; `Run.find` reads", tmp_path / "file")
    with pytest.raises(ValueError, match="is a file: give the path of a folder"):
        save_pretrained(trained, tmp_path / "file")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        save_pretrained(str(tmp_path / "missing.ckpt"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
