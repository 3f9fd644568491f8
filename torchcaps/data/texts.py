"""Base of the labeled text sets: texts as embeddings of a frozen encoder."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.embeddings import Embeddings
from torchcaps.data.encoder import Encoder, check_sizes
from torchcaps.data.labeled import Batch, LabeledData, LabeledSet
from torchcaps.data.order import ByLength, Order, evenly_chosen
from torchcaps.utils.arguments import Count, CountOrZero, checked


class TextSet(LabeledSet):
    """Embedded texts with labels (n,) int64. A batch is ((embeddings, mask), labels), see `Embeddings.padded`."""

    device = torch.device("cpu")

    @checked
    def __init__(self, embeddings: Embeddings, labels: Tensor) -> None:
        self.embeddings, self.labels = embeddings, labels

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        return self.embeddings.padded([*map(int, indices)]), self.labels[indices]


class TextData(LabeledData):
    """Base of the labeled text sets. Batches have embeddings of a frozen encoder in place of texts.

    A subclass sets `classes` and implements `read`. It works with a Trainer and without one:

        data.setup("test")
        for (embeddings, mask), labels in data.test_dataloader(): ...

    Embeddings are float16 of shape (batch, tokens, layers, width). The mask is float32 of shape (batch, tokens), 1 for
    a token and 0 for padding. Labels are int64 of shape (batch,). With a Trainer, a hook converts embeddings to the
    precision of the run, on the device. Training batches are shuffled.

    `setup` computes embeddings of texts that the cache does not have, see `Encoder`; several processes compute a part
    each. A token takes layers x width x 2 bytes on the disk.

    Args:
        encoder: name of a model on the Hugging Face Hub, or path of a folder with a model.
        revision: see `Encoder`.
        cache: folder for the embeddings, see `Encoder`.
        max_texts: largest number of texts in each part, for a quick trial; they are evenly spaced. None for all.
        group_by_length: whether the texts of a training batch have about equal lengths, which saves padding.
        batch_size: texts in a batch.
        num_workers: worker processes of each loader.
        shuffle_labels: whether to shuffle the training labels and the validation labels, see `LabeledData`.

    Raises:
        ValueError: an argument is out of range.
        DataError: in `setup`, if the texts or the encoder are missing or damaged; see `Encoder`.
    """

    truncate = False  # whether texts that are too long for the encoder are cut, see `Encoder`

    @checked
    def __init__(
        self,
        encoder: str = "gpt2-large",
        revision: str | None = None,
        cache: str | None = None,
        max_texts: Count | None = None,
        group_by_length: bool = False,
        batch_size: Count = 20,
        num_workers: CountOrZero = 0,
        shuffle_labels: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, shuffle_labels)
        self.encoder, self.revision, self.cache = encoder, revision, cache
        self.max_texts, self.group_by_length = max_texts, group_by_length

    def read(self, stage: str) -> tuple[list[str], Tensor]:
        """Return the texts for "fit", "validate" or "test", and their labels (n,) int64."""
        raise NotImplementedError

    def order(self) -> Order:
        if not self.group_by_length:
            return super().order()
        texts = self._loaded("fit")
        assert isinstance(texts, TextSet)
        return ByLength(texts.embeddings.tokens, **self.order_options())

    def _set(self, stage: str) -> TextSet:
        texts, labels = self.read(stage)
        some = self._chosen(len(texts))
        texts, labels = [texts[i] for i in some], labels[some]
        # On one text, because embedding all may take hours.
        check_sizes(self.encoder, self.trainer, lambda: self._encoder.embed(texts[:1], self.trainer).sizes)
        return TextSet(self._encoder.embed(texts, self.trainer), labels)

    def _chosen(self, count: int) -> list[int]:
        """Return the indices of at most `max_texts` of a part's texts."""
        return evenly_chosen(count, count if self.max_texts is None else self.max_texts)

    @cached_property
    def _encoder(self) -> Encoder:
        # One for all parts: identifying a model needs a request to the Hub or a hash of all its weights.
        return Encoder(self.encoder, self.revision, self.cache, self.truncate)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        (embeddings, mask), *rest = batch
        assert self.trainer is not None  # the Trainer calls this hook
        dtype: Any = self.trainer.lightning_module.dtype
        return (embeddings.to(dtype), mask.to(dtype)), *rest
