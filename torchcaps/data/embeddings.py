"""Embeddings of texts on disk: kept once computed, memory-mapped when used."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line
from torchcaps.utils.files import write_whole

KEY_BYTES = 16  # of the hash of a text
ADVICE = "remove it to have its embeddings computed again"


class Embeddings:
    """Memory-mapped float16 embeddings of n texts. Pickling stores the paths, not the data.

    Args:
        files: files of an `EmbeddingStore`.
        places: index of a text's file, index of its first token in it, and its number of tokens, `(n, 3)`.
    """

    @checked
    def __init__(self, files: list[Path], places: np.ndarray) -> None:
        self._files, self._places = files, places
        self._opened: dict[int, Any] = {}
        self._finite: set[tuple[int, int]] = set()  # places that were read before

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens of each text, `(n,)`."""
        return self._places[:, 2]

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of layers, and width of an embedding."""
        _, layers, width = self._states(self._places[0, 0]).get_shape()
        return layers, width

    def padded(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch of texts.

        Returns:
            Embeddings `(batch, longest, layers, width)` float16, 0 for padding, and a mask `(batch, longest)` float32,
            1 for a token and 0 for padding.

        Raises:
            DataError: an embedding is NaN or infinite.
        """
        tokens = torch.from_numpy(self.tokens[indices])
        longest = int(tokens.max())
        embeddings = torch.zeros(len(indices), longest, *self.sizes, dtype=torch.float16)
        for states, (file, start, count) in zip(embeddings, self._places[indices].tolist(), strict=True):
            states[:count] = self._states(file)[start : start + count]
            if (file, start) not in self._finite and not states[:count].isfinite().all():
                raise DataError(f"{self._files[file]}: has embeddings that are NaN or infinite: {ADVICE}")
            self._finite.add((file, start))
        return embeddings, (torch.arange(longest) < tokens[:, None]).float()

    def _states(self, file: int) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self._files[file], "pt").get_slice("states")
        return self._opened[file]


class EmbeddingStore:
    """A folder with embeddings of texts, to which more can be added.

    Each `add` writes one file, completely or not at all. Reading and adding therefore need no lock, and two processes
    may add at once; a text that both add is kept twice.

    Embeddings of a text that was cut are kept apart from those of the whole text.

    Args:
        folder: the folder, which need not exist.
        takes_cut: whether a text counts as one of the store's if it is there only as a cut text.

    Raises:
        DataError: a file in the folder is damaged.
    """

    def __init__(self, folder: Path, takes_cut: bool = False) -> None:
        self.folder, self.takes_cut = folder, takes_cut
        self._files: list[Path] = []
        self._sizes: list[int] = []  # layers and width
        self._places: dict[bytes, tuple[int, int, int]] = {}  # of a text's key: file, first token, number of tokens

    def read(self) -> None:
        """Read the files that are new in the folder."""
        for path in sorted(set(self.folder.glob("[!.]*.safetensors")) - set(self._files)):
            try:
                with safe_open(path, "np") as part:
                    keys, tokens, states = part.get_tensor("keys"), part.get_tensor("tokens"), part.get_slice("states")
                    count, *sizes = states.get_shape()
                    if keys.dtype != np.uint8 or keys.shape != (len(tokens), KEY_BYTES) or states.get_dtype() != "F16":
                        raise ValueError("it has other types or shapes than embeddings of texts")
                    counts = tokens.tolist() if tokens.dtype == np.int64 else []  # a sum in int64 may overflow
                    if min(counts, default=0) < 1 or sum(counts) != count:
                        raise ValueError("its numbers of tokens do not agree")
                    if len(sizes) != 2 or not all(sizes) or sizes != (self._sizes or sizes):
                        raise ValueError("its embeddings do not have the layers and the width of all others")
            except Exception as error:  # damaged bytes make safetensors raise several kinds of errors
                raise DataError(f"{path}: cannot be read ({one_line(error)}): {ADVICE}") from None
            self._sizes = sizes
            starts = tokens.cumsum() - tokens
            for key, start, count in zip(keys, starts.tolist(), counts, strict=True):
                self._places.setdefault(key.tobytes(), (len(self._files), start, count))
            self._files.append(path)

    def __contains__(self, text: str) -> bool:
        return self._place(text) is not None

    def _place(self, text: str) -> tuple[int, int, int] | None:
        place = self._places.get(_key(text))
        return self._places.get(_key(text, cut=True)) if place is None and self.takes_cut else place

    def add(self, texts: list[str], tokens: list[int], states: Tensor, cut: Sequence[bool] | None = None) -> None:
        """Add texts.

        Args:
            texts: texts that the store does not have.
            tokens: number of tokens of each text.
            states: embeddings of all these tokens, `(sum(tokens), layers, width)` float16.
            cut: whether each text was cut to these tokens; None if none was.
        """
        keys = b"".join(map(_key, texts, cut or [False] * len(texts)))
        content = {
            "keys": torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(len(texts), -1),
            "tokens": torch.tensor(tokens),
            "states": states.contiguous(),
        }
        path = self.folder / f"{hashlib.sha256(keys).hexdigest()[:32]}.safetensors"
        write_whole(path, lambda unfinished: unfinished.write_bytes(save(content)))
        self.read()

    def of(self, texts: Sequence[str]) -> Embeddings:
        """Return the embeddings of texts that the store has."""
        return Embeddings(self._files, np.array([self._place(text) for text in texts]).reshape(-1, 3))


def _key(text: str, cut: bool = False) -> bytes:
    # No text in UTF-8 begins with the byte 255.
    return hashlib.sha256((b"\xff" if cut else b"") + text.encode()).digest()[:KEY_BYTES]
