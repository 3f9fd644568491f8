"""Files that data sets are published as: found in the user's folder or downloaded once, and checked by their hash."""

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import pooch

from torchcaps.utils.files import user_path


class DataError(RuntimeError):
    """A data file is missing, corrupt or not what its name says. The message is one line."""

    def __init__(self, message: str) -> None:
        # A DataLoader raises a worker's error again, with the worker's traceback as the message: keep only our line,
        # which is at its end.
        super().__init__(message.rpartition(f"\n{__name__}.DataError: ")[2].strip())


_downloads_forbidden: ContextVar[bool] = ContextVar("downloads_forbidden", default=False)


@contextmanager
def forbid_downloads() -> Iterator[None]:
    """Within this context, data sets download and render nothing: a missing file is a DataError."""
    token = _downloads_forbidden.set(True)
    try:
        yield
    finally:
        _downloads_forbidden.reset(token)


def raise_if_no_downloads(path: Path) -> None:
    """Raise DataError if missing files must not be downloaded or rendered now."""
    if _downloads_forbidden.get():
        raise DataError(f"{path} is not there")


def check_regular(path: Path, advice: str) -> None:
    """Raise DataError with the advice if a path is not that of a regular file: reading a FIFO waits for its writer."""
    if not path.is_file():
        raise DataError(f"{path}: cannot be read (it is not a regular file): {advice}")


def own_folder(root: str | None, folder: str) -> Path | None:
    """Return the user's folder for a data set, or None without a root.

    Args:
        root: folder of all data sets; None for the environment variable TORCHCAPS_DATA.
        folder: name of the data set's folder in it.
    """
    root = root or os.environ.get("TORCHCAPS_DATA")
    return user_path(root) / folder if root else None


@dataclass(frozen=True)
class CanonicalFile:
    """A published file of a data set, with its hash.

    Its place is `<root>/<folder>/<name>`. The root is the folder of all data sets; None stands for the environment
    variable TORCHCAPS_DATA. A file that is missing there is downloaded once into pooch's cache.

    Args:
        folder, name: folder and name of the file below a root.
        digest: published hash in hexadecimal, an md5 or a sha256.
        urls: addresses to download it from, tried in turn; none for a file that comes only inside an archive.
    """

    folder: str
    name: str
    digest: str
    urls: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str:
        """Name of the hash function: "md5" or "sha256"."""
        return {32: "md5", 64: "sha256"}[len(self.digest)]

    @property
    def advice(self) -> str:
        """What to do about a wrong file."""
        return "replace the file" + (", or remove it to have it downloaded" if self.urls else "")

    def place(self, root: str | None) -> Path | None:
        """Return the path of the user's own copy, which may not exist; None without a root."""
        folder = own_folder(root, self.folder)
        return folder / self.name if folder else None

    def find(self, root: str | None) -> Path:
        """Return the path of the local file or of the downloaded one. Raise DataError if there is neither."""
        place = self.place(root)
        if place is None or not place.exists():
            return self._download(place)
        check_regular(place, self.advice)
        return place

    def check(self, path: Path) -> None:
        """Raise DataError if the file at `path` does not have the published hash."""
        digest = pooch.file_hash(str(path), alg=self.algorithm)
        if digest != self.digest:
            raise DataError(
                f"{path}: has {self.algorithm} {digest}, and the published file has {self.digest}: {self.advice}; to "
                "read it as it is, set check_hashes to false"
            )

    def _download(self, place: Path | None) -> Path:
        cache = pooch.os_cache("torchcaps") / self.folder
        if _downloads_forbidden.get() and (cache / self.name).exists():
            return Path(cache / self.name)
        raise_if_no_downloads(cache / self.name)
        failures = []
        for url in self.urls:
            try:
                # pooch downloads to a temporary file, and renames it only if its hash is right.
                return Path(pooch.retrieve(url, f"{self.algorithm}:{self.digest}", fname=self.name, path=cache))
            except (OSError, ValueError) as error:
                # requests raises OSErrors, pooch a ValueError for a wrong hash.
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
                failures.append(f"{url} ({reason})")
        destination = f"{place}" if place else f"DIR/{self.folder}/{self.name} and set TORCHCAPS_DATA=DIR"
        raise DataError(
            f"cannot download {self.name} ({self.algorithm} {self.digest}): put it at {destination}; "
            f"tried {', '.join(failures) or 'no address, it comes inside an archive'}"
        )
