"""Files that are written and checked in a hidden folder, and then moved to their place."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchcaps.utils.files import sync_folder


@contextmanager
def whole_files(path: Path) -> Iterator[Path]:
    """Give the path of the same name in a hidden folder beside `path`. When the context ends without an error, the file
    there, and those whose names begin with its name, are moved to their place; otherwise nothing is left."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}.") as folder:
        yield Path(folder) / path.name
        files = [file for file in Path(folder).iterdir() if file.name.startswith(path.name)]
        for file in sorted(files, reverse=True):  # the file itself is the last one
            with file.open("r+b") as written:
                os.fsync(written.fileno())
            file.replace(path.with_name(file.name))
    sync_folder(path.parent)
