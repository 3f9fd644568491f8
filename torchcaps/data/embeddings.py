"""Embeddings of texts on disk: kept once computed, memory-mapped when used."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.utils.arguments import checked
from torchcaps.utils.files import write_whole

# A record of the index: the text's key, the row of its first token in states.f16, and its number of tokens.
RECORD = np.dtype([("key", "V16"), ("start", "<i8"), ("tokens", "<i8")])


class Embeddings:
    """Memory-mapped float16 embeddings of n texts. Pickling stores the path, not the data.

    Attributes:
        states: embeddings of all tokens in the store, `(tokens, layers, width)` float16, memory-mapped.
        start: index in `states` of each text's first token, `(n,)`.
        tokens: number of tokens of each text, `(n,)`.
    """

    @checked
    def __init__(self, path: Path, shape: tuple[int, int, int], start: np.ndarray, tokens: np.ndarray) -> None:
        self._path, self._shape, self.start, self.tokens = path, shape, start, tokens

    @cached_property
    def states(self) -> np.ndarray:
        return np.memmap(self._path, np.float16, mode="r", shape=self._shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "states"}

    def padded(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch of texts.

        Returns:
            Embeddings `(batch, longest, layers, width)` float16, 0 for padding, and a mask `(batch, longest)` float32,
            1 for a token and 0 for padding.
        """
        tokens = self.tokens[indices]
        embeddings = np.zeros((len(indices), tokens.max(), *self.states.shape[1:]), np.float16)
        for text_states, start, count in zip(embeddings, self.start[indices], tokens, strict=True):
            text_states[:count] = self.states[start : start + count]
        mask = np.arange(tokens.max()) < tokens[:, None]
        return torch.from_numpy(embeddings), torch.from_numpy(mask.astype(np.float32))


class EmbeddingStore:
    """A folder with embeddings of texts, to which more can be added.

    `add` first writes embeddings to `states.f16`. Only when they are on the disk does it write their records to
    `index.bin`. Everything in the index is therefore complete, and reading needs no lock. Adding takes a lock; it first
    removes what an interrupted process has left beyond the end of the index.

    Embeddings of a text that was cut are kept apart from those of the whole text.

    Args:
        folder: the folder, which need not exist.
        takes_cut: whether a text counts as one of the store's if it is there only as a cut text.

    Raises:
        DataError: a file in the folder is damaged.
    """

    def __init__(self, folder: Path, takes_cut: bool = False) -> None:
        self.folder, self.takes_cut = folder, takes_cut
        self._about, self._index, self._states = folder / "about.json", folder / "index.bin", folder / "states.f16"
        self._where: dict[bytes, tuple[int, int]] = {}  # of a text's key: first token, number of tokens
        self._shape: tuple[int, int] | None = None  # layers, width
        self._count, self._end = 0, 0  # texts and tokens

    def read(self) -> None:
        """Read what is new in the index."""
        if not self._index.exists():
            return
        records = np.fromfile(self._index, RECORD, offset=self._count * RECORD.itemsize)  # without an unfinished last
        ends = self._end + records["tokens"].cumsum()
        self._count, self._end = self._count + len(records), int(ends[-1]) if len(records) else self._end
        if (records["tokens"] < 1).any() or (records["start"] != ends - records["tokens"]).any():
            raise self._damaged(self._index, "its records do not follow each other")
        try:
            about = json.loads(self._about.read_text(encoding="utf-8"))
            self._shape = int(about["layers"]), int(about["width"])
            size = self._states.stat().st_size
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(self._about, f"it or states.f16 cannot be read ({type(error).__name__})") from None
        if size < self._bytes():
            raise self._damaged(self._states, "it is shorter than the index says")
        where = zip(records["start"].tolist(), records["tokens"].tolist(), strict=True)
        self._where.update(zip(records["key"].tolist(), where, strict=True))

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Lock the folder and read the index again: within this context `add` may be called. Other processes wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            self.read()
            for path, size in ((self._states, self._bytes()), (self._index, self._count * RECORD.itemsize)):
                if path.exists() and path.stat().st_size != size:
                    os.truncate(path, size)
            yield

    def __contains__(self, text: str) -> bool:
        return self._find(text) is not None

    def _find(self, text: str) -> tuple[int, int] | None:
        """Return a text's first token and number of tokens, or None if the store does not have it."""
        found = self._where.get(_key(text))
        return self._where.get(_key(text, cut=True)) if found is None and self.takes_cut else found

    def add(self, texts: list[str], tokens: list[int], states: Tensor, cut: Sequence[bool] | None = None) -> None:
        """Add texts. Call it within `adding()`.

        Args:
            texts: texts that the store does not have.
            tokens: number of tokens of each text.
            states: embeddings of all these tokens, `(sum(tokens), layers, width)` float16.
            cut: whether each text was cut to these tokens; None if none was.
        """
        records = np.zeros(len(texts), RECORD)
        keys = list(map(_key, texts, cut or [False] * len(texts)))
        records["key"] = keys
        records["tokens"] = tokens
        records["start"] = self._end + np.cumsum([0, *tokens[:-1]])
        if self._shape is None:
            self._shape = states.shape[1], states.shape[2]
            about = json.dumps({"layers": states.shape[1], "width": states.shape[2]})
            write_whole(self._about, lambda unfinished: unfinished.write_text(about, encoding="utf-8"))
        for path, content in ((self._states, states.numpy()), (self._index, records)):
            with path.open("ab") as file:
                file.write(content.tobytes())
                file.flush()
                os.fsync(file.fileno())
        for key, start, count in zip(keys, records["start"].tolist(), tokens, strict=True):
            self._where[key] = start, count
        self._count, self._end = self._count + len(texts), self._end + sum(tokens)

    def of(self, texts: Sequence[str]) -> Embeddings:
        """Return the embeddings of texts that the store has."""
        assert self._shape is not None  # it has at least one text
        where = np.array([self._find(text) for text in texts]).reshape(-1, 2)
        return Embeddings(self._states, (self._end, *self._shape), where[:, 0], where[:, 1])

    def _bytes(self) -> int:
        """Return the size of `states.f16` that the index implies."""
        return 2 * self._end * math.prod(self._shape or (0,))

    def _damaged(self, path: Path, problem: str) -> DataError:
        return DataError(f"{path}: {problem}: remove its folder to have the embeddings computed again")


def _key(text: str, cut: bool = False) -> bytes:
    # No text in UTF-8 begins with the byte 255.
    return hashlib.sha256((b"\xff" if cut else b"") + text.encode()).digest()[:16]
