"""What every set of labelled samples shares: its parts, and batches of them."""

from typing import Any, Self

import numpy as np
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

Batch = tuple[Any, ...]  # inputs, a tensor or a tuple of them; labels; and what a set has beside them


class LabelledSet(Dataset[Batch]):
    """Samples and their labels (n,) int64, wherever the samples are. A DataLoader asks for a whole batch at a time."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        inputs, *rest = self.__getitems__([index])
        alone = tuple(of_batch[0] for of_batch in inputs) if isinstance(inputs, tuple) else inputs[0]
        return alone, *(of_batch[0] for of_batch in rest)

    def __getitems__(self, indices: list[int]) -> Batch:
        raise NotImplementedError

    def subset(self, indices: np.ndarray) -> Self:
        raise NotImplementedError


def _as_is(batch: Any) -> Any:
    # __getitems__ has already made one batch of it. A named function, so that workers can pickle it.
    return batch


class LabelledData(LightningDataModule):
    """Base of the labelled sets, of images and of texts: loaders of a training, a validation and a test set.

    A subclass sets `classes`, and in `setup` those of `train_set`, `val_set` and `test_set` that the stage needs.
    Training batches are shuffled.

    Args:
        batch_size: samples in a batch; the last batch of an epoch may be smaller.
        num_workers: worker processes.

    Raises:
        ValueError: an argument is out of range.
    """

    classes: int

    def __init__(self, batch_size: int = 128, num_workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}")
        self.batch_size, self.num_workers = batch_size, num_workers
        self.train_set: LabelledSet | None = None
        self.val_set: LabelledSet | None = None
        self.test_set: LabelledSet | None = None

    @property
    def names(self) -> list[str]:
        """What the classes are called: by default their indices."""
        return [str(label) for label in range(self.classes)]

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.part("fit"), shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self._loader(self.part("validate"))

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.part("test"))

    def part(self, stage: str) -> Dataset[Batch]:
        """What the loader of a stage reads: "fit", "validate" or "test"."""
        return self._loaded(stage)

    def _loaded(self, stage: str) -> LabelledSet:
        samples = {"fit": self.train_set, "validate": self.val_set, "test": self.test_set}[stage]
        if samples is None:
            raise RuntimeError(f'the data is not loaded yet: call data.setup("{stage}") first')
        return samples

    def _loader(
        self, samples: Dataset[Batch], shuffle: bool = False, sampler: Sampler[int] | None = None
    ) -> DataLoader[Batch]:
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            shuffle=shuffle,
            sampler=sampler,
            collate_fn=_as_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
