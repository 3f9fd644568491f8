"""What every set of labelled images held in memory shares: splits, batches, augmentation."""

from typing import Any

import numpy as np
import torch
from kornia.augmentation import RandomCrop
from lightning import LightningDataModule
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torchcaps.data.files import DataError

Batch = tuple[Tensor, ...]  # images, labels, and what a set has beside them

# Not the run's seed: every run must hold out the same images, or validation scores could not be compared.
VAL_SEED = 0


class ImageSet(Dataset[Batch]):
    """Images (n, c, h, w) kept as uint8, labels (n,) int64; read as float32 images in [0, 1] and labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index].float() / 255, self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        # A DataLoader calls this with a whole batch of indices: two gathers instead of 128 small tensors.
        return self.images[indices].float() / 255, self.labels[indices]


def _as_is(batch: Any) -> Any:
    # __getitems__ has already made one batch of it. A named function, so that workers can pickle it.
    return batch


class ImageData(LightningDataModule):
    """Base of the labelled image sets that fit in memory.

    A subclass sets `classes` and `shape` and implements `load`. With a Trainer or without one:

        data.setup("test")
        for images, labels in data.test_dataloader(): ...

    where images are float32 in [0, 1] of shape (batch, c, h, w) and labels int64 of shape (batch,).
    Training batches are shuffled. They alone are augmented, by the Trainer's hook and on the device; a loop of
    your own calls `data.augment(images)`.

    Args:
        batch_size: images in a batch; the last batch of an epoch may be smaller.
        shift: in training, every image moves by its own whole number of pixels, uniform over -shift..shift,
            down and again across; what moves in is zero.
        val_size: so many training images are held out for validation, by a stratified split that is the same
            in every run. With 0 the training set is whole and there is no validation.
        num_workers: worker processes. 0 is right here: a batch costs less than handing it between processes.
        flip: in training, every image is mirrored left to right with probability 1/2.

    Raises:
        ValueError: an argument is out of range.
        DataError: in `setup`, if the data is not as it should be or too little for `val_size`.
    """

    classes: int
    shape: tuple[int, int, int]

    def __init__(
        self,
        batch_size: int = 128,
        shift: int = 0,
        val_size: int = 0,
        num_workers: int = 0,
        flip: bool = False,
    ) -> None:
        super().__init__()
        height, width = self.shape[1:]
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= shift < min(height, width):
            raise ValueError(f"shift must be from 0 to {min(height, width) - 1} pixels, got {shift}")
        if val_size < 0:
            raise ValueError(f"val_size must be 0 or more, got {val_size}")
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}")
        self.batch_size, self.shift, self.flip = batch_size, shift, flip
        self.val_size, self.num_workers = val_size, num_workers
        self.train_set: ImageSet | None = None
        self.val_set: ImageSet | None = None
        self.test_set: ImageSet | None = None
        # Padding by `shift` and cropping at random back to the size is the shift. "slice" is exact to the
        # pixel, kornia's other mode interpolates.
        self._crop = RandomCrop((height, width), padding=shift, same_on_batch=False, cropping_mode="slice")

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        """The training or the test set: images (n, c, h, w) uint8 and labels (n,) int64."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Load what `stage` needs: "fit" and "validate" the training set, "test" the test set, None both."""
        if stage in ("fit", "validate", None) and self.train_set is None:
            images, labels = self.load(train=True)
            if self.val_size:
                kept, held_out = self._split(labels)
                self.val_set = ImageSet(self._for_validation(images[held_out]), labels[held_out])
                images, labels = images[kept], labels[kept]
            self.train_set = ImageSet(images, labels)
        if stage in ("test", None) and self.test_set is None:
            self.test_set = ImageSet(*self.load(train=False))

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.part("fit"), shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self._loader(self.part("validate")) if self.val_size else []

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.part("test"))

    def part(self, stage: str) -> Dataset[Batch]:
        """What the loader of a stage reads: "fit", "validate" or "test"."""
        return self._loaded(stage)

    def _loaded(self, stage: str) -> ImageSet:
        images = {"fit": self.train_set, "validate": self.val_set, "test": self.test_set}[stage]
        if images is None:
            raise RuntimeError(f'the images are not loaded yet: call data.setup("{stage}") first')
        return images

    def _for_validation(self, images: Tensor) -> Tensor:
        """The validation images made of the training images (n, c, h, w) uint8 that are held out."""
        return images

    def _split(self, labels: Tensor) -> list[np.ndarray]:
        most = len(labels) - self.classes  # stratified: either part needs room for every class
        if not self.classes <= self.val_size <= most:
            raise DataError(
                f"val_size must be 0 or from {self.classes} to {most} for {len(labels)} training images "
                f"of {self.classes} classes, got {self.val_size}"
            )
        return train_test_split(np.arange(len(labels)), test_size=self.val_size, stratify=labels, random_state=VAL_SEED)

    def _loader(
        self, images: Dataset[Batch], shuffle: bool = False, sampler: Sampler[int] | None = None
    ) -> DataLoader[Batch]:
        return DataLoader(
            images,
            batch_size=self.batch_size,
            shuffle=shuffle,
            sampler=sampler,
            collate_fn=_as_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def augment(self, images: Tensor) -> Tensor:
        """Float images (n, c, h, w), each shifted and mirrored on its own, as in training; on their own device."""
        if self.shift:
            images = self._crop(images)
        if self.flip:
            mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(-1), images)
        return images

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        images, *rest = batch
        if self.trainer is not None and self.trainer.training:
            images = self.augment(images)
        return images, *rest
