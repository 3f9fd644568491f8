"""What every set of labelled texts shares: frozen embeddings instead of words."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor

from torchcaps.data.embeddings import Embeddings, Encoder
from torchcaps.data.labelled import Batch, LabelledData, LabelledSet


class TextSet(LabelledSet):
    """Texts, embedded, and their labels (n,) int64; a batch is ((embeddings, mask), labels), see
    `Embeddings.padded`."""

    def __init__(self, texts: Sequence[str], embeddings: Embeddings, labels: Tensor) -> None:
        self.texts, self.embeddings, self.labels = texts, embeddings, labels

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.embeddings.padded(indices), self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        states, start, tokens = self.embeddings
        return type(self)(
            [self.texts[i] for i in indices], Embeddings(states, start[indices], tokens[indices]), self.labels[indices]
        )


class TextData(LabelledData):
    """Base of the labelled sets of texts, each text given as what a frozen encoder makes of it.

    A subclass sets `classes` and implements `read`. With a Trainer or without one:

        data.setup("test")
        for (embeddings, mask), labels in data.test_dataloader(): ...

    where embeddings are float16 of shape (batch, tokens, layers, width), the mask is float32 of shape (batch, tokens),
    1 for a token and 0 for padding, and labels are int64 of shape (batch,). The Trainer's hook brings embeddings to
    the precision of the run, on the device. Training batches are shuffled.

    `setup` embeds what has not been embedded before, see `Encoder`: layers x width x 2 bytes for a token.

    Args:
        encoder: a model of the Hugging Face Hub, or a folder that has one.
        revision: see `Encoder`.
        cache: folder for the embeddings; see `Encoder`.
        batch_size: texts in a batch.
        num_workers: worker processes.

    Raises:
        ValueError: an argument is out of range.
        DataError: in `setup`, if the texts or the encoder cannot be had; see `Encoder`.
    """

    def __init__(
        self,
        encoder: str = "gpt2-large",
        revision: str | None = None,
        cache: str | None = None,
        batch_size: int = 20,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.encoder, self.revision, self.cache = encoder, revision, cache

    def read(self, stage: str) -> tuple[list[str], Tensor]:
        """The texts of "fit", "validate" or "test", and their labels (n,) int64."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Read and embed what `stage` needs: "fit" the training and the validation set, "validate" the latter, "test"
        the test set, None all."""
        if stage in ("fit", None) and self.train_set is None:
            self.train_set = self._embedded("fit")
        if stage in ("fit", "validate", None) and self.val_set is None:
            self.val_set = self._embedded("validate")
        if stage in ("test", None) and self.test_set is None:
            self.test_set = self._embedded("test")

    def _embedded(self, stage: str) -> TextSet:
        texts, labels = self.read(stage)
        return TextSet(texts, Encoder(self.encoder, self.revision, self.cache).embed(texts), labels)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        (embeddings, mask), *rest = batch
        assert self.trainer is not None  # who calls this
        dtype: Any = self.trainer.lightning_module.dtype
        return (embeddings.to(dtype), mask.to(dtype)), *rest
