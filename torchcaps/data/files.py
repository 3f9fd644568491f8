"""Published files by their hash: a copy of the user's own, or one downloaded once."""

import os
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import pooch


class DataError(RuntimeError):
    """A data file is missing, corrupt or not what its name says. The message is one line."""

    def __init__(self, message: str) -> None:
        # Of an error in a worker, a DataLoader makes one here whose message is the traceback there, ours at its end.
        super().__init__(message.rpartition(f"\n{__name__}.DataError: ")[2].strip())


def own_folder(root: str | None, folder: str) -> Path | None:
    """The user's own folder of a data set; None without a root."""
    root = root or os.environ.get("TORCHCAPS_DATA")
    return Path(root).expanduser() / folder if root else None


@dataclass(frozen=True)
class CanonicalFile:
    """A file that a data set is published as.

    It is taken from `<root>/<folder>/<name>`; where it is not there, from pooch's cache, into which it is
    downloaded and checked against its hash. A local file that is well-formed but has another hash is used, with
    a warning; one that is corrupt is an error, never silently replaced. A root is the folder of all data sets;
    None stands for the environment variable TORCHCAPS_DATA.

    Args:
        folder, name: where it lies below a root.
        digest: the published hash in hexadecimal, an md5 or a sha256.
        urls: where it can be had, asked in turn; none for a file that comes only inside an archive.
    """

    folder: str
    name: str
    digest: str
    urls: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str:
        return {32: "md5", 64: "sha256"}[len(self.digest)]

    def place(self, root: str | None) -> Path | None:
        """Where the user's own copy is looked for; None without a root."""
        folder = own_folder(root, self.folder)
        return folder / self.name if folder else None

    def find(self, root: str | None) -> Path:
        """The local file, or a downloaded one. Raises DataError if neither can be had."""
        place = self.place(root)
        return place if place is not None and place.exists() else self._download(place)

    def warn_of_other_hash(self, path: Path) -> None:
        """For a file that has proved well-formed."""
        found = pooch.file_hash(str(path), alg=self.algorithm)
        if found != self.digest:
            warnings.warn(
                f"{path} has {self.algorithm} {found}, the published file has {self.digest}: using it all the same",
                stacklevel=3,
            )

    def corrupt(self, path: Path, problem: str) -> DataError:
        """The error to raise for the file at `path`."""
        advice = "replace the file" + (", or remove it to have it downloaded" if self.urls else "")
        return DataError(f"{path}: {problem}; the {self.algorithm} should be {self.digest}: {advice}")

    def _download(self, place: Path | None) -> Path:
        cache = pooch.os_cache("torchcaps") / self.folder
        failures = []
        for url in self.urls:
            try:
                # pooch writes to a temporary file and moves it only when its hash is right.
                return Path(pooch.retrieve(url, f"{self.algorithm}:{self.digest}", fname=self.name, path=cache))
            except (OSError, ValueError) as error:
                # requests raises OSErrors; pooch raises a ValueError when the hash is wrong.
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
                failures.append(f"{url} ({reason})")
        here = f"{place}" if place else f"DIR/{self.folder}/{self.name} and set TORCHCAPS_DATA=DIR"
        raise DataError(
            f"cannot download {self.name} ({self.algorithm} {self.digest}): put it at {here}; "
            f"tried {', '.join(failures)}"
        )
