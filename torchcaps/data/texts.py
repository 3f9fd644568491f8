"""What every set of labelled texts shares: frozen embeddings instead of words."""

import math
from collections.abc import Callable
from functools import cached_property
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.embeddings import Embeddings, Encoder
from torchcaps.data.files import DataError
from torchcaps.data.labelled import Batch, LabelledData, LabelledSet
from torchcaps.data.order import Order


class TextSet(LabelledSet):
    """Texts, embedded, and their labels (n,) int64; a batch is ((embeddings, mask), labels), see
    `Embeddings.padded`."""

    def __init__(self, embeddings: Embeddings, labels: Tensor) -> None:
        self.embeddings, self.labels = embeddings, labels

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.embeddings.padded(indices), self.labels[indices]


class ByLength(Order):
    """Every sample once in an epoch, in a random order where those of a batch are of about equal length.

    Of so many batches at a time, taken at random, the samples are sorted by their length, and the batches shuffled.
    Several processes take whole batches in turn; where there are too few for the last turn, the first ones come again.
    """

    POOL = 50

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        seed: int,
        processes: int = 1,
        rank: int = 0,
        position: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        super().__init__(len(lengths), batch_size, seed, processes, rank, position)
        self.lengths = torch.from_numpy(lengths)

    def __len__(self) -> int:
        if self.num_replicas == 1:
            return self.samples
        batches = math.ceil(self.samples / self.batch_size)
        return math.ceil(batches / self.num_replicas) * self.batch_size

    def of_process(self, epoch: int) -> Tensor:
        batches = self._batches(self.generator(epoch))
        turns = math.ceil(len(batches) / self.num_replicas)
        return torch.cat(list(islice(cycle(batches), self.rank, turns * self.num_replicas, self.num_replicas)))

    def _batches(self, generator: torch.Generator) -> list[Tensor]:
        found: list[Tensor] = []
        for pool in torch.randperm(self.samples, generator=generator).split(self.POOL * self.batch_size):
            batches = pool[self.lengths[pool].argsort()].split(self.batch_size)
            whole = [batch for batch in batches if len(batch) == self.batch_size]
            found += [whole[i] for i in torch.randperm(len(whole), generator=generator).tolist()]
            found += batches[len(whole) :]  # at the end, or it would shift all that follow
        return found


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
        max_texts: of each part so many texts at most, evenly spaced, to see that all runs.
        group_by_length: training batches are of texts of about equal length, so that less of a batch is padding.
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
        max_texts: int | None = None,
        group_by_length: bool = False,
        batch_size: int = 20,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if max_texts is not None and max_texts < 1:
            raise ValueError(f"max_texts must be None or at least 1, got {max_texts}")
        self.encoder, self.revision, self.cache = encoder, revision, cache
        self.max_texts, self.group_by_length = max_texts, group_by_length

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

    def order(self) -> Order:
        if not self.group_by_length:
            return super().order()
        texts = self._loaded("fit")
        assert isinstance(texts, TextSet)
        return ByLength(texts.embeddings.tokens, **self.order_options())

    def _embedded(self, stage: str) -> TextSet:
        texts, labels = self.read(stage)
        if self.max_texts and self.max_texts < len(texts):
            some = torch.linspace(0, len(texts) - 1, self.max_texts).long()
            texts, labels = [texts[i] for i in some], labels[some]
        self._check_network(texts[:1])
        return TextSet(self._encoder.embed(texts), labels)

    def _check_network(self, some: list[str]) -> None:
        """That the network takes the encoder's states is seen on one text, for all of them may take hours."""
        network = getattr(getattr(self.trainer, "lightning_module", None), "network", None)
        wanted = getattr(network, "layers", None), getattr(network, "width", None)
        if None in wanted:
            return
        given = tuple(self._encoder.embed(some).states.shape[1:])
        if given != wanted:
            raise DataError(
                f"the encoder {self.encoder} has {given[0]} layers of {given[1]}, and the network takes "
                f"{wanted[0]} of {wanted[1]}: set model.network.layers={given[0]} and model.network.width={given[1]}"
            )

    @cached_property
    def _encoder(self) -> Encoder:
        # One for all parts: to know which model it is may need the Hub, or all its weights to be hashed.
        return Encoder(self.encoder, self.revision, self.cache)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        (embeddings, mask), *rest = batch
        assert self.trainer is not None  # who calls this
        dtype: Any = self.trainer.lightning_module.dtype
        return (embeddings.to(dtype), mask.to(dtype)), *rest
