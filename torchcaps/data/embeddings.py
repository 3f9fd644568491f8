"""What a frozen encoder makes of texts: computed once, kept on disk, mapped into memory."""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.extras import needs
from torchcaps.files import write_whole

TOKENS_AT_ONCE = 4096
RECORD = np.dtype([("key", "V16"), ("start", "<i8"), ("tokens", "<i8")])


class Embeddings:
    """Of n texts, in half precision, where they lie on disk; what is pickled is the way there.

    Attributes:
        states: of all tokens that were there, `(tokens, layers, width)` float16, memory-mapped.
        start, tokens: where those of each text begin, and how many they are, `(n,)`.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int], start: np.ndarray, tokens: np.ndarray) -> None:
        self._path, self._shape, self.start, self.tokens = path, shape, start, tokens

    @cached_property
    def states(self) -> np.ndarray:
        return np.memmap(self._path, np.float16, mode="r", shape=self._shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "states"}

    def padded(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch of texts: embeddings `(batch, longest, layers, width)` float16, 0 at padding, and a mask
        `(batch, longest)` float32, 1 for a token."""
        tokens = self.tokens[indices]
        embeddings = np.zeros((len(indices), tokens.max(), *self.states.shape[1:]), np.float16)
        for of_text, start, count in zip(embeddings, self.start[indices], tokens, strict=True):
            of_text[:count] = self.states[start : start + count]
        mask = np.arange(tokens.max()) < tokens[:, None]
        return torch.from_numpy(embeddings), torch.from_numpy(mask.astype(np.float32))


class EmbeddingStore:
    """Embeddings of texts in a folder, to which more can be added.

    What is added goes to `states.f16`, and when it is on disk, to `index.bin`: all that the index knows is whole, so
    that reading needs no lock. Adding does, and begins by cutting off what an interruption has left unfinished.

    Raises:
        DataError: what lies there is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about, self._index, self._states = folder / "about.json", folder / "index.bin", folder / "states.f16"
        self._where: dict[bytes, tuple[int, int]] = {}
        self._shape: tuple[int, int] | None = None  # layers, width
        self._count, self._end = 0, 0  # texts and tokens

    def read(self) -> None:
        """Learn what is there."""
        if not self._index.exists():
            return
        records = np.fromfile(self._index, RECORD)  # an unfinished last one is left out
        ends = records["tokens"].cumsum()
        self._count, self._end = len(records), int(ends[-1]) if len(records) else 0
        if (records["tokens"] < 1).any() or (records["start"] != ends - records["tokens"]).any():
            raise self._damaged(self._index, "its records do not follow each other")
        try:
            about = json.loads(self._about.read_text(encoding="utf-8"))
            self._shape = int(about["layers"]), int(about["width"])
            size = self._states.stat().st_size
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(self._about, f"it or states.f16 cannot be read ({type(error).__name__})") from None
        if size < self._bytes():
            raise self._damaged(self._states, "it is shorter than its index says")
        where = zip(records["start"].tolist(), records["tokens"].tolist(), strict=True)
        self._where = dict(zip(records["key"].tolist(), where, strict=True))

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Add within; others wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            self.read()
            for path, size in ((self._states, self._bytes()), (self._index, self._count * RECORD.itemsize)):
                if path.exists() and path.stat().st_size != size:
                    os.truncate(path, size)
            yield

    def __contains__(self, text: str) -> bool:
        return _key(text) in self._where

    def add(self, texts: list[str], tokens: list[int], states: Tensor) -> None:
        """Texts, how many tokens each has, and the states of all these tokens, `(tokens, layers, width)` float16."""
        records = np.zeros(len(texts), RECORD)
        records["key"] = [_key(text) for text in texts]
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
        for text, start, count in zip(texts, records["start"].tolist(), tokens, strict=True):
            self._where[_key(text)] = start, count
        self._count, self._end = self._count + len(texts), self._end + sum(tokens)

    def of(self, texts: Sequence[str]) -> Embeddings:
        assert self._shape is not None  # there is a text
        where = np.array([self._where[_key(text)] for text in texts]).reshape(-1, 2)
        return Embeddings(self._states, (self._end, *self._shape), where[:, 0], where[:, 1])

    def _bytes(self) -> int:
        return 2 * self._end * math.prod(self._shape or (0,))

    def _damaged(self, path: Path, problem: str) -> DataError:
        return DataError(f"{path}: {problem}: remove its folder to have it made again")


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


class Encoder:
    """An encoder or decoder of Hugging Face, frozen: all hidden states of all tokens of texts.

    They are the input of the first layer and the output of every layer, as the model gives them with
    `output_hidden_states`; of a model with both, those of its encoder. The tokens of a text are those of the model's
    tokenizer, special ones among them; where it puts none of these at the end, as that of GPT-2, the token for the end
    of a text is added, as in the code of Heinsen 2019.

    A text is computed once: it is kept in half precision, in a folder for the model and its revision, whatever data
    set it comes from. An interrupted run has kept what it had computed; a process that comes second waits. As long as
    no text is new, no model is loaded.

    Args:
        name: of a model of the Hugging Face Hub, or the path of a folder that has one.
        revision: of a model of the Hub, a branch, a tag or a whole commit hash; with the last, the Hub is asked for
            nothing that is there already. None is its main branch. Of a folder, its files are what counts.
        cache: folder for the embeddings of all encoders; None is `embeddings` in pooch's cache.

    Raises:
        DataError: the model cannot be had, a text is too long for it, half precision cannot hold its states, there is
            no room for them, or what is kept is damaged.
        ImportError: without transformers.

    Reference:
        Heinsen 2019, section 4.1.
    """

    def __init__(self, name: str, revision: str | None = None, cache: str | os.PathLike[str] | None = None) -> None:
        with needs("text"):
            import transformers  # noqa: F401  # what is missing is said now
        if Path(name).expanduser().is_dir():
            name = str(Path(name).expanduser())
        self.name, self.revision = name, _identity(name, revision)
        place = Path(cache).expanduser() if cache else Path(pooch.os_cache("torchcaps")) / "embeddings"
        slug = re.sub(r"[^\w.-]+", "-", Path(name).name if Path(name).is_dir() else name)
        self.folder = place / f"{slug}-{hashlib.sha256(self.revision.encode()).hexdigest()[:16]}"

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """The states of texts, at least one; those of new ones are computed, and kept."""
        if not texts:
            raise DataError("no text to embed: at least one is needed")
        store = EmbeddingStore(self.folder)
        try:
            store.read()
            if any(text not in store for text in texts):
                with store.adding():
                    if new := sorted({text for text in texts if text not in store}):  # nobody else has added them
                        self._compute(new, store)
        except OSError as error:
            reason = error.strerror or " ".join(str(error).split())
            raise DataError(f"{self.folder}: {reason}: make room, or the folder writable, or choose another") from None
        return store.of(texts)

    @torch.inference_mode()
    def _compute(self, texts: list[str], store: EmbeddingStore) -> None:
        model, tokenizer = self._load()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model.to(device)
        ids = self._tokenized(texts, model, tokenizer)
        total = sum(map(len, ids))
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(f"embedding {len(texts):,} texts", total=total)
            for batch in _batches(ids):
                tokens = [len(ids[i]) for i in batch]
                padded = torch.zeros(len(batch), max(tokens), dtype=torch.long)
                for row, i in zip(padded, batch, strict=True):
                    row[: len(ids[i])] = torch.tensor(ids[i])
                mask = torch.arange(max(tokens)) < torch.tensor(tokens).unsqueeze(1)
                padded, mask = padded.to(device), mask.to(device)
                outputs = model(input_ids=padded, attention_mask=mask.long(), output_hidden_states=True)
                states = torch.stack(outputs.hidden_states, 2)[mask].half().cpu()
                if not states.isfinite().all():
                    raise DataError(f"{self.name} has hidden states that half precision cannot hold, or no numbers")
                if not progress.tasks[bar].completed:
                    self._check_room(total * states[0].numel() * 2)
                store.add([texts[i] for i in batch], tokens, states)
                progress.advance(bar, sum(tokens))

    def _load(self) -> tuple[Any, Any]:
        """The model in evaluation mode, in single precision, and its tokenizer."""
        from transformers import AutoModel, AutoTokenizer, logging

        logging.disable_progress_bar()
        try:
            known = {} if Path(self.name).is_dir() else {"revision": self.revision.rpartition("@")[2]}
            tokenizer = AutoTokenizer.from_pretrained(self.name, **known)
            model = AutoModel.from_pretrained(self.name, dtype=torch.float32, **known)
        except Exception as error:  # there are many ways for files not to be a model
            raise _no_model(self.name, error) from None
        finally:
            logging.enable_progress_bar()
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        return model.eval(), tokenizer

    def _tokenized(self, texts: list[str], model: Any, tokenizer: Any) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, verbose=False).input_ids
        special = set(tokenizer.all_special_ids)
        end = tokenizer.eos_token_id
        if end is not None:
            ids = [of_text if of_text and of_text[-1] in special else [*of_text, end] for of_text in ids]
        most = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or np.inf)
        for text, of_text in zip(texts, ids, strict=True):
            if not 0 < len(of_text) <= most:
                raise DataError(
                    f"{self.name} takes texts of 1 to {most} tokens, and {text[:40]!r}... has {len(of_text)}: "
                    "choose another encoder, or shorten it"
                )
        return ids

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise DataError(
                f"{self.folder}: the embeddings need {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: make room, "
                "choose another folder, fewer texts or a smaller encoder"
            )


def _identity(name: str, revision: str | None) -> str:
    """What tells a model from others: its name and commit, or all that its folder has."""
    folder = Path(name)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision is for models of the Hub, and {name} is a folder: leave it out")
        content = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".txt", ".model", ".safetensors", ".bin"):
                with path.open("rb") as file:
                    content.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return content.hexdigest()
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        with needs("text"):
            from huggingface_hub import hf_hub_download
        try:
            config = hf_hub_download(name, "config.json", revision=revision)
        except (OSError, ValueError) as error:
            raise _no_model(name, error) from None
        revision = Path(config).parent.name  # its folder in the cache is named after the commit
    return f"{name}@{revision}"


def _no_model(name: str, error: Exception) -> DataError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if Path(name).is_dir():
        return DataError(f"{name} is no folder that transformers can read a model and its tokenizer from ({reason})")
    return DataError(
        f"the encoder {name!r} is no folder with a model, nor in the cache of Hugging Face, and cannot be downloaded "
        f"({reason}): go online once, or give a folder with its configuration, weights and tokenizer"
    )


def _batches(ids: list[list[int]]) -> Iterator[list[int]]:
    """Indices of texts of about equal length, so that there is little padding; the longest first: if they need too
    much memory, it shows at once."""
    batch: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True):
        if batch and len(ids[batch[0]]) * (len(batch) + 1) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
