"""Frozen encoders of Hugging Face: hidden states of all layers for all tokens of texts."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import torch
from filelock import FileLock, Timeout
from lightning import Trainer

from torchcaps.data.embeddings import Embeddings, EmbeddingStore
from torchcaps.data.files import DataError
from torchcaps.data.notes import progress_bar, say
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import counted, one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import make_folder, user_path
from torchcaps.utils.hub import refuse_kernels

TOKENS_AT_ONCE = 4096  # in a batch of the encoder, with padding
SECONDS = 10  # to wait for an answer of the Hub


class Encoder:
    """A frozen Hugging Face model that embeds texts: the hidden states of all layers for every token.

    The hidden states are the input of the first layer and the output of every layer, as the model returns them with
    `output_hidden_states`. For a model with an encoder and a decoder they are those of the encoder. The model's
    tokenizer makes the tokens, special ones included. Some tokenizers, such as GPT-2's, put no special token at the
    end; a text then gets the end-of-text token, as in the code of Heinsen 2019.

    Each text is embedded once and kept in half precision, in an `EmbeddingStore` for the model and its revision, which
    all data sets share. An interrupted run keeps what it has computed, and a second run waits for the first. The
    processes of one run divide the new texts among themselves. The model is loaded only if there is a new text.

    Args:
        name: name of a model on the Hugging Face Hub, or path of a folder with a model.
        revision: branch, tag or complete commit hash of a model on the Hub; None for its main branch. With a commit
            hash, a downloaded model needs no request to the Hub. Not for a folder, which is identified by its files.
        cache: folder for the embeddings of all encoders; None for `embeddings` in pooch's cache.
        truncate: whether a text of more tokens than the model takes is cut to its first tokens. Otherwise it is an
            error.

    Raises:
        DataError: the model cannot be loaded, a text is too long for it, half precision cannot hold its states, the
            disk is full, or kept embeddings are damaged.
        ImportError: transformers is not installed.

    Reference:
        Heinsen 2019, section 4.1.
    """

    @checked
    def __init__(
        self,
        name: str,
        revision: str | None = None,
        cache: str | os.PathLike[str] | None = None,
        truncate: bool = False,
    ) -> None:
        with needs("text"):
            import transformers  # noqa: F401  # fail now, not after the data is read
        if os.path.isdir(user_path(name)):
            name = str(user_path(name))
        self.name, self.revision = name, identity(name, revision)
        self.truncate = truncate
        place = user_path(cache) if cache else Path(pooch.os_cache("torchcaps")) / "embeddings"
        slug = re.sub(r"[^\w.-]+", "-", Path(self.name).name if os.path.isdir(self.name) else self.name)
        self.folder = place / f"{slug}-{hashlib.sha256(self.revision.encode()).hexdigest()[:16]}"

    def embed(self, texts: Sequence[str], trainer: Trainer | None = None) -> Embeddings:
        """Return the embeddings of one or more texts. New texts are computed and kept.

        Args:
            texts: texts, in any order and number.
            trainer: Trainer whose processes all call this with the same texts. Each of them computes a part of the new
                texts. None if this process computes all.
        """
        if not texts:
            raise DataError("no text to embed: at least one is needed")
        store = EmbeddingStore(self.folder, takes_cut=self.truncate)
        try:
            store.read()
            if trainer is not None and trainer.world_size > 1:
                self._compute_parts(texts, store, trainer)
            # Also where several machines do not share the folder, and each of them has some of the texts.
            if any(text not in store for text in texts):
                with self._lock_folder():
                    store.read()  # another run may have added them
                    if new := _new(texts, store):
                        self._compute(new, store)
        except OSError as error:
            advice = "free disk space, make the folder writable, or choose another"
            raise DataError(f"{one_line(error)}: {advice}") from None
        return store.of(texts)

    def _compute_parts(self, texts: Sequence[str], store: EmbeddingStore, trainer: Trainer) -> None:
        """Compute this process's part of the new texts, and wait until the other processes have computed theirs."""

        def any_process(decision: bool) -> bool:
            return trainer.strategy.reduce_boolean_decision(decision, all=False)

        if not any_process(any(text not in store for text in texts)):
            return
        with self._lock_folder() if trainer.is_global_zero else nullcontext():
            any_process(False)  # waits for the first process, which waits for other runs
            # A part depends on all texts, not on those that are new: the other processes already add some.
            part = sorted(set(texts), key=lambda text: (len(text), text))[trainer.global_rank :: trainer.world_size]
            store.read()
            if new := _new(part, store):
                self._compute(new, store, trainer.strategy.root_device)
            any_process(False)
        store.read()

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Wait until no other run computes embeddings, and remove what a killed one has left unfinished."""
        make_folder(self.folder)
        lock = FileLock(self.folder / "run.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waits for another run that computes embeddings in {self.folder}")
            lock.acquire()
        try:
            for path in self.folder.glob(".*.unfinished.safetensors"):
                path.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    @torch.inference_mode()
    def _compute(self, texts: list[str], store: EmbeddingStore, device: torch.device | None = None) -> None:
        model, tokenizer = self._load()
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model.to(device)
        ids, cut = self._tokenized(texts, model, tokenizer)
        total = sum(map(len, ids))
        with progress_bar() as progress:
            bar = progress.add_task(f"embedding {counted(len(texts), 'text')}", total=total)
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
                    raise DataError(
                        f"{self.name} has hidden states that are NaN or too large for half precision: choose another"
                    )
                if not progress.tasks[bar].completed:
                    self._check_room(total * states[0].numel() * 2)
                store.add([texts[i] for i in batch], tokens, states, [cut[i] for i in batch])
                progress.advance(bar, sum(tokens))

    def _load(self) -> tuple[Any, Any]:
        """Return the model, in evaluation mode and single precision, and its tokenizer."""
        from transformers import AutoModel, AutoTokenizer

        try:
            with quiet_download():
                options = download_options(self.name, self.revision.rpartition("@")[2])
                tokenizer = AutoTokenizer.from_pretrained(self.name, **options)
                model = AutoModel.from_pretrained(self.name, dtype=torch.float32, **options)
        except Exception as error:  # transformers raises many kinds of errors for damaged files
            raise _no_model(self.name, error) from None
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        return model.eval(), tokenizer

    def _tokenized(self, texts: list[str], model: Any, tokenizer: Any) -> tuple[list[list[int]], list[bool]]:
        """Return the tokens of each text, and whether the text was cut to these."""
        special = set(tokenizer.all_special_ids)
        end = tokenizer.eos_token_id
        places = getattr(model.config, "max_position_embeddings", None) or np.inf
        padding = getattr(getattr(getattr(model, "embeddings", None), "position_embeddings", None), "padding_idx", None)
        if padding is not None:
            places -= padding + 1  # RoBERTa and its kin count positions from there
        most = min(tokenizer.model_max_length, places)

        def lacks_end(text_ids: list[int]) -> bool:
            return end is not None and not (text_ids and text_ids[-1] in special)

        def with_end(text_ids: list[int]) -> list[int]:
            return [*text_ids, end] if lacks_end(text_ids) else text_ids

        ids: list[list[int]] = tokenizer(texts, verbose=False).input_ids
        cut = [self.truncate and len(with_end(text_ids)) > most for text_ids in ids]
        for i in np.flatnonzero(cut):
            room = most - lacks_end(ids[i])
            ids[i] = tokenizer(texts[i], truncation=True, max_length=room, verbose=False).input_ids
        ids = [with_end(text_ids) for text_ids in ids]
        for text, text_ids in zip(texts, ids, strict=True):
            if not 0 < len(text_ids) <= most:
                way = "shorten" if text_ids else "leave out"
                raise DataError(
                    f"{self.name} takes texts of 1 to {most} tokens, and {text[:40]!r}... has {len(text_ids)}: "
                    f"choose another encoder, or {way} the text"
                )
        if any(cut):
            say(f"cut {sum(cut):,} of {counted(len(texts), 'text')} to the {most:,} tokens that the encoder takes")
        return ids, cut

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise DataError(
                f"{self.folder}: the embeddings need {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: free disk "
                "space, or choose another folder, fewer texts or a smaller encoder"
            )


def _new(texts: Iterable[str], store: EmbeddingStore) -> list[str]:
    """Return the texts that a store does not have, each once."""
    return sorted({text for text in texts if text not in store})


def identity(name: str, revision: str | None) -> str:
    """Return what identifies a model: its name and commit, or a hash of the files in its folder."""
    folder = Path(name)
    if os.path.isdir(folder):
        if revision is not None:
            raise ValueError(f"revision is for models on the Hub, and {name} is a folder: leave it out")
        content = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".txt", ".model", ".safetensors", ".bin") and path.is_file():
                with path.open("rb") as file:
                    content.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return content.hexdigest()
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        with needs("text"):
            from huggingface_hub import hf_hub_download
        offline = not is_reachable(name, revision)
        try:
            config = hf_hub_download(name, "config.json", revision=revision, local_files_only=offline)
        except (OSError, ValueError) as error:
            raise _no_model(name, ConnectionError("the Hub does not answer") if offline else error) from None
        revision = Path(config).parent.name  # the Hub's cache names this folder after the commit
    return f"{name}@{revision}"


def is_reachable(name: str, revision: str | None) -> bool:
    """Ask the Hub once for a model, and return whether it answers.

    The functions of huggingface_hub that download would ask six times, with pauses, before they give up.
    """
    with needs("text"):
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=SECONDS)
    except (HfHubHTTPError, ValueError):
        return True  # an answer, or a name that no model can have
    except Exception:  # huggingface_hub has used requests and httpx, which have errors of their own
        return False
    return True


@contextmanager
def quiet_download() -> Iterator[None]:
    """Let transformers show no bars within this context."""
    from transformers import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def download_options(name: str, commit: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a folder, or for the commit of a model on the Hub."""
    from transformers import PretrainedConfig

    options: dict[str, Any] = {"trust_remote_code": False}  # not even asked for: a recipe may name the folder
    if not os.path.isdir(name):
        options |= {"revision": commit, "local_files_only": not is_reachable(name, commit)}
    refuse_kernels(PretrainedConfig.get_config_dict(name, **options)[0])
    return options


def check_sizes(name: str, trainer: Trainer | None, sizes: Callable[[], tuple[int, int]]) -> None:
    """Check that a Trainer's network takes the states of an encoder.

    Args:
        name: name of the encoder.
        trainer: the Trainer, or None.
        sizes: function that returns the encoder's number of layers and width. It is called if the network says what it
            takes.

    Raises:
        DataError: the network takes other states.
    """
    network = getattr(getattr(trainer, "lightning_module", None), "network", None)
    wanted = getattr(network, "layers", None), getattr(network, "width", None)
    if None not in wanted and (actual := sizes()) != wanted:
        raise DataError(
            f"the encoder {name} has {actual[0]} layers of {actual[1]}, and the network takes {wanted[0]} of "
            f"{wanted[1]}: set model.network.layers={actual[0]} and model.network.width={actual[1]}"
        )


def _no_model(name: str, error: Exception) -> DataError:
    reason = f"{type(error).__name__}: {one_line(error)[:160]}"
    if os.path.isdir(name):
        return DataError(
            f"{name} is not a folder from which transformers can load a model and its tokenizer ({reason})"
        )
    if not isinstance(error, OSError):  # such as a package that its tokenizer needs
        return DataError(f"the encoder {name!r} cannot be loaded ({reason}): mend this, or choose another encoder")
    return DataError(
        f"the encoder {name!r} is not a folder with a model, not in Hugging Face's cache, and cannot be downloaded "
        f"({reason}): go online once, check its name, or give a folder with its configuration, weights and tokenizer"
    )


def _batches(ids: list[list[int]]) -> Iterator[list[int]]:
    """Yield batches of texts, given by indices, with about equal lengths, so there is little padding.

    The longest texts come first: if they need too much memory, the error comes at once.
    """
    batch: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True):
        if batch and len(ids[batch[0]]) * (len(batch) + 1) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
