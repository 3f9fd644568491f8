"""Trained networks as folders and on a hub: a server on this machine that speaks its protocol, no network."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import TINY, call, checkpoint
from hub_server import TOKEN, running_hub
from safetensors.torch import load_file, save_file

from torchcaps.deploy import Trained, from_pretrained, push_to_hub, save_pretrained

# Lightning's own imports and deprecations under this torch are out of our hands.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

IMAGES = torch.rand(3, 1, 8, 8)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The checkpoint of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    assert call("train", "quickstart", "--runs", str(folder), "--trainer.max_epochs", "1", *TINY) == 0
    return checkpoint(folder)


@pytest.fixture(scope="module")
def trained(run) -> Trained:
    found = Trained.load(str(run))
    about = {"recipe": "quickstart", "command": "torchcaps train quickstart --trainer.max_epochs 1"}
    return Trained(found.network, found.data, found.values, 1.5, {**about, "metrics": {"test/accuracy": 0.25}})


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return save_pretrained(trained, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "folder"))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # Xet is a protocol of its own
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


def assert_same(found: Trained, expected: Trained) -> None:
    torch.testing.assert_close(found.probabilities(IMAGES), expected.probabilities(IMAGES), rtol=0, atol=0)
    assert not found.network.training
    assert found.names == expected.names
    assert found.values == expected.values
    assert found.temperature == expected.temperature
    assert type(found.data) is type(expected.data)


# Folders


def test_a_folder_gives_the_same_network(trained, saved):
    assert sorted(path.name for path in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert_same(from_pretrained(saved), trained)
    assert_same(Trained.load(str(saved)), trained)
    assert from_pretrained(saved).about["metrics"] == {"test/accuracy": 0.25}


def test_a_checkpoint_is_saved_by_its_path(run, tmp_path):
    save_pretrained(str(run), tmp_path / "new" / "folder")
    assert_same(from_pretrained(tmp_path / "new" / "folder"), Trained.load(str(run)))


def test_a_folder_is_saved_again(saved, trained, folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "config.json").write_text("{")
    save_pretrained(saved, folder)
    assert_same(from_pretrained(folder), trained)
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_card(saved, trained, tmp_path):
    text = (saved / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    values = yaml.safe_load(head)
    assert values["library_name"] == "torchcaps"
    assert values["license"] == "unknown"
    assert values["pipeline_tag"] == "image-classification"
    (result,) = values["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "name": "test accuracy", "value": 0.25}]
    assert "# capsnet_digits on Digits" in body
    assert f"from_pretrained({str(saved)!r})" in body
    assert "    torchcaps train quickstart --trainer.max_epochs 1\n" in body
    assert "| metrics test/accuracy | 0.2500 |" in body
    assert f"{sum(p.numel() for p in trained.network.parameters()):,} parameters" in body
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in body
    assert "| temperature of the softmax | 1.5 |" in body
    save_pretrained(trained, tmp_path, license="mit")
    assert "license: mit\n" in (tmp_path / "README.md").read_text()


def test_text_from_elsewhere_stays_in_its_cell_of_the_card(trained, tmp_path):
    about = {"recipe": "a\n\n# b | c", "metrics": {"x\n---\ny": 1}}
    save_pretrained(Trained(trained.network, trained.data, trained.values, None, about), tmp_path)
    body = (tmp_path / "README.md").read_text().split("---\n", 2)[2]
    assert "    torchcaps train a # b \\| c\n" in body
    assert "| metrics x --- y | 1 |\n" in body


# A hub


def test_a_round_trip_over_the_hub(hub, trained, tmp_path):
    url = push_to_hub(trained, "somebody/digits", token=TOKEN, commit_message="A first one")
    assert url.startswith(f"{hub.address}/somebody/digits/commit/")
    repository = hub.repositories["somebody/digits"]
    assert sorted(repository.commits[repository.branches["main"]]) == ["README.md", "config.json", "model.safetensors"]
    assert b"from_pretrained('somebody/digits')" in repository.commits[repository.branches["main"]]["README.md"]
    assert len(hub.large) == 1  # the weights were uploaded as a large file
    assert_same(from_pretrained("somebody/digits", cache_dir=tmp_path), trained)
    before = len(hub.requests)
    assert_same(from_pretrained("somebody/digits", cache_dir=tmp_path), trained)
    assert not any("/resolve/" in line for line in hub.requests[before:])  # the files are in the cache


def test_a_private_repository_of_ones_own(hub, trained, tmp_path):
    push_to_hub(trained, "digits", private=True, token=TOKEN)
    assert hub.repositories["somebody/digits"].private
    with pytest.raises(ValueError, match="somebody/digits, and the repository cannot be read .RepositoryNotFoundError"):
        from_pretrained("somebody/digits", cache_dir=tmp_path)
    assert_same(from_pretrained("somebody/digits", token=TOKEN, cache_dir=tmp_path), trained)


def test_revisions(hub, trained, saved, tmp_path):
    push_to_hub(trained, "somebody/digits", token=TOKEN)
    other = Trained(trained.network, trained.data, trained.values, 3.0, {})
    push_to_hub(other, "somebody/digits", token=TOKEN, revision="warm")
    assert from_pretrained("somebody/digits", cache_dir=tmp_path).temperature == 1.5
    assert from_pretrained("somebody/digits", revision="warm", cache_dir=tmp_path).temperature == 3.0
    commit = hub.repositories["somebody/digits"].branches["warm"]
    assert from_pretrained("somebody/digits", revision=commit, cache_dir=tmp_path).temperature == 3.0
    with pytest.raises(ValueError, match="RevisionNotFoundError"):
        from_pretrained("somebody/digits", revision="none", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="is a folder, which has no revisions"):
        from_pretrained(saved, revision="main")


def test_a_hub_that_refuses_or_does_not_answer(hub, trained, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"cannot upload to somebody/digits \(HfHubHTTPError: .*401") as error:
        push_to_hub(trained, "somebody/digits", token="hf_wrong")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot upload to not a name"):
        push_to_hub(trained, "not a name", token=TOKEN)
    assert not hub.repositories
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="there is no folder some/body, and the repository cannot be read") as error:
        from_pretrained("some/body", cache_dir=tmp_path)
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
        (named("os.system"), "os.system is not among the classes"),
        (named("torch.hub.load"), "torch.hub.load is not among the classes"),
        (named("mine.Network"), "mine.Network is not among the classes"),
        (lambda config: config["values"].pop("data"), "its network or its data cannot be built"),
        (lambda config: config["values"].update(model=[]), "its network or its data cannot be built"),
        (lambda config: config.pop("values"), "does not hold the values of a recipe"),
        (lambda config: config.update(temperature=0), "temperature must be above 0, got 0"),
        (lambda config: config.update(temperature=float("nan")), "temperature must be above 0, got nan"),
        (lambda config: config.update(temperature="2"), "temperature is not what `save_pretrained` writes"),
        (lambda config: config.update(about=[1]), "about is not what `save_pretrained` writes"),
        (
            lambda config: config["values"]["model"]["network"]["init_args"].update(decoder=False),
            "weights do not fit its network",
        ),
    ],
)
def test_values_that_cannot_be_used(folder, change, said):
    edit(folder, change)
    with pytest.raises(ValueError, match=said) as error:
        from_pretrained(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_code_of_ones_own_runs_only_where_it_is_allowed(folder, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torchcaps.models import capsnet_digits\n"
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class Network(capsnet_digits.__wrapped__.__annotations__['return']):\n"
        "    def __init__(self):\n"
        "        super().__init__(1, 8, channels=128, kernel_size=3, primary_types=16, primary_kernel_size=3,\n"
        "                         primary_stride=1, decoder=(256, 512))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    edit(folder, named("mine.Network"))
    with pytest.raises(ValueError, match="add --allow_code|is not among"):
        from_pretrained(folder)
    assert not (tmp_path / "ran").exists()
    assert type(from_pretrained(folder, allow_code=True).network).__name__ == "Network"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", "config.json is damaged"),
        ("config.json", b"\xff\xfe", "config.json is damaged"),
        ("config.json", b"[" * 100_000, "config.json is damaged"),
        ("config.json", b"[]", "does not hold the values of a recipe"),
        ("config.json", None, "has no config.json"),
        ("model.safetensors", b"", "model.safetensors is damaged"),
        ("model.safetensors", b"\xff" * 100, "model.safetensors is damaged"),
        ("model.safetensors", None, "has no model.safetensors"),
    ],
)
def test_damaged_files(folder, name, content, said):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_truncated_weights(folder):
    whole = (folder / "model.safetensors").read_bytes()
    for length in (7, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="model.safetensors is damaged"):
            from_pretrained(folder)


def test_weights_of_another_shape(folder):
    state = load_file(folder / "model.safetensors")
    save_file({**state, "conv.weight": torch.zeros(4, 1, 3, 3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="weights do not fit its network: .*conv.weight") as error:
        from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_hostile_repository(hub, tmp_path):
    values = {"model": {"network": {"class_path": "os.system", "init_args": {}}}, "data": {}}
    hub.put("some/body", config_json=json.dumps({"values": values}).encode(), model_safetensors=b"", evil_py=b"1/0")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        from_pretrained("some/body", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("evil.py"))  # only the three files are downloaded
    hub.put("any/body", README_md=b"")
    with pytest.raises(ValueError, match="has no config.json"):
        from_pretrained("any/body", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["nothing", "./no/folder", "/no/folder", "a/b/c", ""])
def test_what_is_no_folder_and_no_repository(name):
    with pytest.raises(ValueError, match="there is no folder|has no config.json"):
        from_pretrained(name)


def test_a_file_in_the_way(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match="is a file: expected a folder that `save_pretrained` wrote; `Trained.load` reads"
    ):
        from_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="is a file: give the path of a folder"):
        save_pretrained(trained, tmp_path / "file")
    with pytest.raises(ValueError, match="there is no file"):
        save_pretrained(str(tmp_path / "missing.ckpt"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
