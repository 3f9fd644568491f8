"""Trained networks as folders, and on the Hugging Face Hub: `save_pretrained`, `from_pretrained`, `push_to_hub`.

A folder has three files. Nothing in them is executed.

    config.json         values of the recipe, temperature, facts of the training
    model.safetensors   parameters and buffers of the network
    README.md           model card
"""

import json
import os
import tempfile
from pathlib import Path

from torchcaps.deploy.card import model_card
from torchcaps.models.pretrained import write_tensors
from torchcaps.recipes import Recipe
from torchcaps.recipes.values import with_source
from torchcaps.runs import Checkpoint, Run
from torchcaps.runs.checkpoint import A_FOLDER, CARD, CONFIG, WEIGHTS
from torchcaps.runs.hub import convert_hub_errors, downloaded, endpoint
from torchcaps.utils.arguments import checked
from torchcaps.utils.extras import needs
from torchcaps.utils.files import user_path, write_text_whole


@checked
def save_pretrained(
    run: Run | str | os.PathLike[str], folder: str | os.PathLike[str], license: str = "unknown"
) -> Path:
    """Write a trained network to a folder that `from_pretrained` reads.

    Args:
        run: the run, or where it is found, see :meth:`torchcaps.runs.Run.find`.
        folder: the folder; created if it is missing. Its `config.json`, `model.safetensors` and `README.md` are
            replaced, other files stay.
        license: license of the weights, by its name on the Hub, for example "mit".

    Returns:
        The folder.

    Raises:
        ValueError: the checkpoint cannot be read, or `folder` is a file.
        ImportError: huggingface_hub is not installed.
    """
    run, folder = _run(run), user_path(folder)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ValueError(f"{folder} is a file: give the path of a folder")
    _write(run, folder, place=str(folder), license=license)
    return folder


@checked
def from_pretrained(
    name: str | os.PathLike[str],
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    allow_code: bool = False,
) -> Run:
    """Read a trained network from a folder or from the Hugging Face Hub.

    The environment variable HF_ENDPOINT names another hub than huggingface.co.

    Args:
        name: path of a folder that `save_pretrained` wrote, or the name of a repository on the Hub, `user/name` or
            `user/name@revision`.
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
        raise ValueError(f"{folder} is a file: {A_FOLDER}; `Run.find` reads a checkpoint")
    if os.path.isdir(folder) and not os.path.isfile(folder / CONFIG):
        raise ValueError(f"{folder} has no {CONFIG}: {A_FOLDER}; `Run.find` finds the run in the folder of a training")
    if os.path.isdir(folder) and revision is not None:
        raise ValueError(f"{folder} is a folder, which has no revisions: leave out revision={revision!r}")
    if not os.path.isdir(folder):
        if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
            raise ValueError(f"there is no folder {name}: {A_FOLDER}, or the name of a repository, `user/name`")
        try:
            folder = downloaded(name, revision, token, None if cache_dir is None else os.fspath(cache_dir))
        except ValueError as error:
            raise ValueError(f"there is no folder {name}, and {error}") from error
    checkpoint = Checkpoint.read(folder)
    recipe = Recipe(str(folder), checkpoint.files, with_source(checkpoint.values, str(folder)))
    run = Run(checkpoint, recipe, allow_code)
    run.network()  # a network that does not fit is an error now
    return run


@checked
def push_to_hub(
    run: Run | str | os.PathLike[str],
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
        run: the run, or where it is found, see :meth:`torchcaps.runs.Run.find`.
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

    run = _run(run)
    api = HfApi(endpoint=endpoint(), token=token, library_name="torchcaps")
    with tempfile.TemporaryDirectory() as folder, convert_hub_errors(f"cannot upload to {repo_id}"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):  # a pull request has its branch already
            api.create_branch(repo, branch=revision, exist_ok=True)
        _write(run, Path(folder), place=repo, license=license)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=commit_message)
        return str(commit.commit_url)


def _write(run: Run, folder: Path, place: str, license: str) -> None:
    card = model_card(run, place, license)
    about = {name: value for name, value in run.facts.items() if name != "temperature"}
    config = {"values": run.values, "temperature": run.temperature, "about": about}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    write_tensors(folder / WEIGHTS, run.network().state_dict())
    write_text_whole(folder / CONFIG, f"{text}\n")  # at once: that of an earlier network does not fit these weights
    write_text_whole(folder / CARD, card)


def _run(source: Run | str | os.PathLike[str]) -> Run:
    return source if isinstance(source, Run) else Run.find(source)
