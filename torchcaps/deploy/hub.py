"""Trained networks as folders, and on the Hugging Face Hub: `save_pretrained`, `from_pretrained`, `push_to_hub`.

A folder has three files. Nothing in them is executed.

    config.json         values of the recipe, temperature, facts of the training
    model.safetensors   parameters and buffers of the network
    README.md           model card
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchcaps.deploy.card import model_card
from torchcaps.deploy.trained import Trained
from torchcaps.models.pretrained import read_tensors, write_tensors
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import write_text_whole

CONFIG, WEIGHTS, CARD = FILES = ("config.json", "model.safetensors", "README.md")
EXPECTED = "expected a folder that `save_pretrained` wrote"


@checked
def save_pretrained(
    trained: Trained | str | os.PathLike[str], folder: str | os.PathLike[str], license: str = "unknown"
) -> Path:
    """Write a trained network to a folder that `from_pretrained` reads.

    Args:
        trained: the network, or the path of a checkpoint.
        folder: the folder; created if it is missing. Its `config.json`, `model.safetensors` and `README.md` are
            replaced, other files stay.
        license: license of the weights, by its name on the Hub, for example "mit".

    Returns:
        The folder.

    Raises:
        ValueError: the checkpoint cannot be read, or `folder` is a file.
        ImportError: safetensors is not installed.
    """
    trained, folder = _trained(trained), Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give the path of a folder")
    _write(trained, folder, model_card(trained, str(folder), license))
    return folder


@checked
def from_pretrained(
    name: str | os.PathLike[str],
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    allow_code: bool = False,
) -> Trained:
    """Read a trained network from a folder or from the Hugging Face Hub.

    The environment variable HF_ENDPOINT names another hub than huggingface.co.

    Args:
        name: path of a folder that `save_pretrained` wrote, or the name of a repository on the Hub, `user/name`.
        revision: branch, tag or commit of the repository; None for `main`.
        token: token for private repositories; None for the one that `hf auth login` has stored.
        cache_dir: folder for downloaded files; None for that of `huggingface_hub`.
        allow_code: whether its recipe may name classes and functions of any package, which then run.

    Raises:
        ValueError: there is no such folder or repository, or it does not hold a network of this library.
        ImportError: safetensors, or huggingface_hub for a repository, is not installed.
    """
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"{folder} is a file: {EXPECTED}; `Trained.load` reads a checkpoint")
    if not folder.is_dir():
        folder = _download(os.fspath(name), revision, token, cache_dir)
    elif revision is not None:
        raise ValueError(f"{folder} is a folder, which has no revisions: leave out revision={revision!r}")
    config = _config(folder / CONFIG)
    try:
        state, _ = read_tensors(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {WEIGHTS}: {EXPECTED}") from error
    about = {**config.get("about", {}), "temperature": config.get("temperature")}
    return Trained.built(folder, config["values"], state, about, allow_code)


@checked
def push_to_hub(
    trained: Trained | str | os.PathLike[str],
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload a network of torchcaps",
    license: str = "unknown",
) -> str:
    """Upload a trained network to the Hugging Face Hub, as one commit. A missing repository is created.

    The environment variable HF_ENDPOINT names another hub than huggingface.co.

    Args:
        trained: the network, or the path of a checkpoint.
        repo_id: name of the repository, `user/name`; `name` alone for one of your own.
        private: whether a new repository is private; None for the default of its owner.
        token: token that may write; None for the one that `hf auth login` has stored.
        revision: branch of the commit, which is created if it is missing; None for `main`.
        commit_message: message of the commit.
        license: see `save_pretrained`.

    Returns:
        The address of the commit.

    Raises:
        ValueError: the checkpoint cannot be read, or the Hub refuses the upload or cannot be reached.
        ImportError: safetensors or huggingface_hub is not installed.
    """
    with needs("hub"):
        from huggingface_hub import CommitOperationAdd, HfApi

    trained = _trained(trained)
    api = HfApi(endpoint=_endpoint(), token=token, library_name="torchcaps")
    with tempfile.TemporaryDirectory() as place, _errors_of_the_hub(f"cannot upload to {repo_id}"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):  # a pull request has its branch already
            api.create_branch(repo, branch=revision, exist_ok=True)
        _write(trained, Path(place), model_card(trained, repo, license))
        files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=Path(place, name)) for name in FILES]
        return str(api.create_commit(repo, files, commit_message=commit_message, revision=revision).commit_url)


def _write(trained: Trained, folder: Path, card: str) -> None:
    about = {name: value for name, value in trained.about.items() if name != "temperature"}
    config = {"values": trained.values, "temperature": trained.temperature, "about": about}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    write_tensors(folder / WEIGHTS, trained.network.state_dict())
    write_text_whole(folder / CARD, card)
    write_text_whole(folder / CONFIG, f"{text}\n")


def _trained(source: Trained | str | os.PathLike[str]) -> Trained:
    return source if isinstance(source, Trained) else Trained.load(os.fspath(source))


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _download(
    name: str, revision: str | None, token: str | bool | None, cache_dir: str | os.PathLike[str] | None
) -> Path:
    """Download the files of a repository to the cache, if they are not there, and return their folder."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise ValueError(f"there is no folder {name}: {EXPECTED}, or the name of a repository, `user/name`")
    with needs("hub"):
        from huggingface_hub import snapshot_download

    with _errors_of_the_hub(f"there is no folder {name}, and the repository cannot be read"):
        found = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
            endpoint=_endpoint(),
            allow_patterns=list(FILES),
            library_name="torchcaps",
        )
    return Path(found)


@contextmanager
def _errors_of_the_hub(what: str) -> Iterator[None]:
    """Within this context all errors are ValueErrors of one line."""
    try:
        yield
    except Exception as error:  # of huggingface_hub, of its HTTP client and of the network: many types
        raise ValueError(f"{what} ({type(error).__name__}: {one_line(error)[:300]})") from error


def _config(path: Path) -> dict[str, Any]:
    """Read config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}: {EXPECTED}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {one_line(error)}): {EXPECTED}") from error
    kinds = {"values": dict, "about": dict, "temperature": int | float | None}
    if not isinstance(config, dict) or not isinstance(config.get("values"), dict):
        raise ValueError(f"{path} does not hold the values of a recipe: {EXPECTED}")
    for name, kind in kinds.items():
        if name in config and not isinstance(config[name], kind):
            raise ValueError(f"{path}: {name} is not what `save_pretrained` writes, got {str(config[name])[:60]!r}")
    temperature = config.get("temperature")
    if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{path}: temperature must be above 0, got {temperature}")
    config["temperature"] = None if temperature is None else float(temperature)
    return config
