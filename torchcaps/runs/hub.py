"""Folders of `save_pretrained` in repositories of the Hugging Face Hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchcaps.runs.checkpoint import CARD, CONFIG, WEIGHTS
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs

HUB = "hub:"  # before the name of a repository, where a source of a run may also be a recipe or a path


def downloaded(
    name: str, revision: str | None = None, token: str | bool | None = None, cache_dir: str | None = None
) -> Path:
    """Download a repository, `user/name` or `user/name@revision`, unless the cache has it, and return its folder.

    Raises:
        ValueError: the repository cannot be read.
        ImportError: huggingface_hub is not installed.
    """
    name, _, at = name.partition("@")
    with needs("hub"):
        from huggingface_hub import snapshot_download

    with convert_hub_errors(f"the repository {name} cannot be read"):
        folder = snapshot_download(
            name,
            revision=revision or at or None,
            token=token,
            cache_dir=cache_dir,
            endpoint=endpoint(),
            allow_patterns=[CONFIG, WEIGHTS, CARD],
            library_name="torchcaps",
        )
    return Path(folder)


def endpoint() -> str | None:
    """Return the address of another hub than huggingface.co, if the environment names one."""
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def convert_hub_errors(what: str) -> Iterator[None]:
    """Within this context, every error is raised as a ValueError of one line."""
    try:
        yield
    except Exception as error:  # of huggingface_hub, of its HTTP client and of the network: many types
        raise ValueError(f"{what} ({type(error).__name__}: {one_line(error)[:300]})") from error
