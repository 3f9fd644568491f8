"""Trained networks as folders, and on the Hugging Face Hub: `save_pretrained`, `from_pretrained`, `push_to_hub`.

A folder has three files. Nothing in them is executed.

    config.json         values of the recipe, temperature, facts of the training
    model.safetensors   parameters and buffers of the network
    README.md           model card
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchcaps.deploy.card import model_card
from torchcaps.deploy.trained import A_FOLDER, CARD, CONFIG, FILES, WEIGHTS, Trained
from torchcaps.models.pretrained import write_tensors
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import user_path, write_text_whole


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
        ImportError: huggingface_hub is not installed.
    """
    trained, folder = _trained(trained), user_path(folder)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ValueError(f"{folder} is a file: give the path of a folder")
    _write(trained, folder, place=str(folder), license=license)
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
        allow_code: whether its recipe may name classes and functions of any package, and of modules in a folder of
            yours. Their code then runs.

    Raises:
        ValueError: there is no such folder or repository, or it does not hold a network of this library.
        ImportError: huggingface_hub, which a repository needs, is not installed.
    """
    name, folder = os.fspath(name), user_path(name)
    if os.path.isfile(folder):
        raise ValueError(f"{folder} is a file: {A_FOLDER}; `Trained.load` reads a checkpoint")
    if os.path.isdir(folder) and revision is not None:
        raise ValueError(f"{folder} is a folder, which has no revisions: leave out revision={revision!r}")
    if not os.path.isdir(folder):
        if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
            raise ValueError(f"there is no folder {name}: {A_FOLDER}, or the name of a repository, `user/name`")
        with needs("hub"):
            from huggingface_hub import snapshot_download

        with _errors_of_the_hub(f"there is no folder {name}, and the repository cannot be read"):
            cache = None if cache_dir is None else os.fspath(cache_dir)
            folder = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    token=token,
                    cache_dir=cache,
                    endpoint=_endpoint(),
                    allow_patterns=list(FILES),
                    library_name="torchcaps",
                )
            )
    return Trained.load(folder, allow_code)


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
        ImportError: huggingface_hub is not installed.
    """
    with needs("hub"):
        from huggingface_hub import HfApi

    trained = _trained(trained)
    api = HfApi(endpoint=_endpoint(), token=token, library_name="torchcaps")
    with tempfile.TemporaryDirectory() as folder, _errors_of_the_hub(f"cannot upload to {repo_id}"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):  # a pull request has its branch already
            api.create_branch(repo, branch=revision, exist_ok=True)
        _write(trained, Path(folder), place=repo, license=license)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=commit_message)
        return str(commit.commit_url)


def _write(trained: Trained, folder: Path, place: str, license: str) -> None:
    card = model_card(trained, place, license)
    about = {name: value for name, value in trained.about.items() if name != "temperature"}
    config = {"values": trained.values, "temperature": trained.temperature, "about": about}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    write_tensors(folder / WEIGHTS, trained.network.state_dict())
    write_text_whole(folder / CONFIG, f"{text}\n")  # at once: that of an earlier network does not fit these weights
    write_text_whole(folder / CARD, card)


def _trained(source: Trained | str | os.PathLike[str]) -> Trained:
    return source if isinstance(source, Trained) else Trained.load(os.fspath(source))


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _errors_of_the_hub(what: str) -> Iterator[None]:
    """Within this context all errors are ValueErrors of one line."""
    try:
        yield
    except Exception as error:  # of huggingface_hub, of its HTTP client and of the network: many types
        raise ValueError(f"{what} ({type(error).__name__}: {one_line(error)[:300]})") from error
