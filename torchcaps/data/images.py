"""What every set of labelled images shares, in memory or on disk: splits, batches, augmentation."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from kornia.augmentation import ColorJitter, RandomCrop
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

from torchcaps.data.files import DataError
from torchcaps.data.labelled import Batch, LabelledData, LabelledSet

# Not the run's seed: every run must hold out the same images, or validation scores could not be compared.
VAL_SEED = 0


class ImageSet(LabelledSet):
    """Images (n, c, h, w) kept as uint8, labels (n,) int64; read as float32 images in [0, 1] and labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __getitems__(self, indices: list[int]) -> Batch:
        # Two gathers instead of 128 small tensors.
        return self.images[indices].float() / 255, self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        return type(self)(self.images[indices], self.labels[indices])


class ImageData(LabelledData):
    """Base of the labelled image sets.

    A subclass sets `classes` and `shape`, `padding` if zeros do not fit its images, and implements `load`. With a
    Trainer or without one:

        data.setup("test")
        for images, labels in data.test_dataloader(): ...

    where images are float32 in [0, 1] of shape (batch, c, h, w) and labels int64 of shape (batch,).
    Training batches are shuffled. They alone are augmented. The Trainer's hook does that, and resizes and crops, on
    the device; a loop of your own calls `data.augment(images)` in training, `data.centre(images)` in validation and
    `data.crops(images)` in the test.

    Args:
        batch_size: images in a batch; the last batch of an epoch may be smaller.
        shift: in training, every image moves by its own whole number of pixels, uniform over -shift..shift,
            down and again across; what moves in is zero, if the set's `padding` is not another.
        val_size: so many training images are held out for validation, by a stratified split that is the same
            in every run. With 0 the training set is whole and there is no validation.
        num_workers: worker processes. 0 is right here: a batch costs less than handing it between processes.
        flip: in training, every image is mirrored left to right with probability 1/2.
        resize: images are enlarged, bilinearly, until their shorter side has so many pixels, and cropped back to
            `shape`: in training each at its own place, uniformly over all, also over those that `shift` adds;
            else at the centre. None leaves them as they are.
        jitter: in training, brightness, contrast and saturation of every image are multiplied by its own numbers,
            uniform over 1 - jitter..1 + jitter, and its hue turns by up to this part of a circle each way.
        ten_crop: in the test, every image becomes ten: the four corners and the centre of what `resize` enlarged it
            to, in the order top left, top right, bottom left, bottom right, centre, and the mirror images of these.
            Batches then have shape (batch, 10, c, h, w).

    Raises:
        ValueError: an argument is out of range.
        DataError: in `setup`, if the data is not as it should be or too little for `val_size`.
    """

    shape: tuple[int, int, int]
    padding = "constant"  # what `shift` moves in: "constant" for zeros, "replicate" for the image's edge

    def __init__(
        self,
        batch_size: int = 128,
        shift: int = 0,
        val_size: int = 0,
        num_workers: int = 0,
        flip: bool = False,
        resize: int | None = None,
        jitter: float = 0.0,
        ten_crop: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers)
        channels, height, width = self.shape
        if not 0 <= shift < min(height, width):
            raise ValueError(f"shift must be from 0 to {min(height, width) - 1} pixels, got {shift}")
        if val_size < 0:
            raise ValueError(f"val_size must be 0 or more, got {val_size}")
        if resize is not None and resize < min(height, width):
            raise ValueError(f"resize must be None or at least {min(height, width)} pixels, got {resize}")
        if not 0 <= jitter <= 0.5:
            raise ValueError(f"jitter must be from 0 to 0.5, got {jitter}")
        if jitter and channels != 3:
            raise ValueError(f"jitter is for images in colour, and these have {channels} channels: set it to 0")
        if ten_crop and resize is None:
            raise ValueError(
                f"ten_crop needs resize, the side of what the crops are taken from: set it to more than "
                f"{min(height, width)} pixels"
            )
        self.shift, self.flip, self.val_size = shift, flip, val_size
        self.resize, self.jitter, self.ten_crop = resize, jitter, ten_crop
        # Padding by `shift` and cropping at random back to the size is the shift. "slice" is exact to the
        # pixel, kornia's other mode interpolates.
        self._crop = RandomCrop(
            (height, width), padding=shift, padding_mode=self.padding, same_on_batch=False, cropping_mode="slice"
        )
        self._jitter = ColorJitter(jitter, jitter, jitter, jitter)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        """The training or the test set: images (n, c, h, w) uint8 and labels (n,) int64."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Load what `stage` needs: "fit" and "validate" the training set, "test" the test set, None both."""
        if stage in ("fit", "validate", None) and self.train_set is None:
            images = self._images(train=True)
            if self._validates:
                kept, held_out = self._split(images)
                self.val_set = self._for_validation(images.subset(held_out))
                images = images.subset(kept)
            self.train_set = images
        if stage in ("test", None) and self.test_set is None:
            self.test_set = self._images(train=False)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return super().val_dataloader() if self._validates else []

    @property
    def _validates(self) -> bool:
        return self.val_size > 0

    def _images(self, train: bool) -> LabelledSet:
        """What `load` gives. A set that does not fit in memory overrides this instead."""
        return ImageSet(*self.load(train))

    def _for_validation(self, images: LabelledSet) -> LabelledSet:
        """The validation images made of the training images that are held out."""
        return images

    def _split(self, images: LabelledSet) -> Sequence[np.ndarray]:
        """Which of the training images are trained on, and which are held out."""
        labels = images.labels
        most = len(labels) - self.classes  # stratified: either part needs room for every class
        if not self.classes <= self.val_size <= most:
            raise DataError(
                f"val_size must be 0 or from {self.classes} to {most} for {len(labels)} training images "
                f"of {self.classes} classes, got {self.val_size}"
            )
        return train_test_split(np.arange(len(labels)), test_size=self.val_size, stratify=labels, random_state=VAL_SEED)

    def augment(self, images: Tensor) -> Tensor:
        """Images (n, c, h, w) as in training, each cropped, shifted, mirrored and jittered on its own, by the default
        generator of torch; on their own device."""
        images = self._enlarged(images)
        if self.shift or self.resize:
            images = self._crop(images)
        if self.flip:
            mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(-1), images)
        if self.jitter:
            images = self._jitter(images)
        return images

    def centre(self, images: Tensor) -> Tensor:
        """Images (n, c, h, w) as in validation: the centre of each, (n, *shape)."""
        images = self._enlarged(images)
        return images if self.resize is None else self._at_places(images)[-1]

    def crops(self, images: Tensor) -> Tensor:
        """Images (n, c, h, w) as in the test: the centre of each, (n, *shape); with `ten_crop` all its crops,
        (n, 10, *shape)."""
        if not self.ten_crop:
            return self.centre(images)
        crops = torch.stack(self._at_places(self._enlarged(images)), 1)
        return torch.cat([crops, crops.flip(-1)], 1)

    def _at_places(self, images: Tensor) -> list[Tensor]:
        """The four corners and the centre of enlarged images, each (n, *shape)."""
        height, width = self.shape[1:]
        down, right = images.shape[-2] - height, images.shape[-1] - width
        places = ((0, 0), (0, right), (down, 0), (down, right), (down // 2, right // 2))
        return [images[..., top : top + height, left : left + width] for top, left in places]

    def _enlarged(self, images: Tensor) -> Tensor:
        """Images (n, c, h, w) as floats, and as large as `resize` says."""
        if images.dtype == torch.uint8:
            images = images.float() / 255
        if self.resize is None:
            return images
        height, width = self.shape[1:]
        sides = [round(side * self.resize / min(height, width)) for side in (height, width)]
        return interpolate(images, sides, mode="bilinear")

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        images, *rest = batch
        assert self.trainer is not None  # who calls this
        if images.dtype == torch.uint8:
            # Lightning has brought to the precision of the run only what came as floats.
            images = (images.float() / 255).to(self.trainer.lightning_module.dtype)
        if self.trainer.training:
            return self.augment(images), *rest
        return self.crops(images) if self.trainer.testing else self.centre(images), *rest
