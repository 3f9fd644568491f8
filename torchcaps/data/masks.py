"""Images with a class of each pixel: in memory, moved together with their masks, and made."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.data.images import ImageData, ImageSet
from torchcaps.data.labeled import IGNORED, Batch, LabeledData
from torchcaps.utils.arguments import Count, checked
from torchcaps.utils.memory import free_bytes

VOID = 255  # in masks of bytes: a pixel that does not count


def as_targets(masks: Tensor) -> Tensor:
    """Return masks of bytes as those of a batch: int64, `IGNORED` for `VOID`."""
    return torch.where(masks == VOID, IGNORED, masks.long())


def pixel_counts(masks: Tensor, classes: int) -> Tensor:
    """Return the number of pixels of each class, `(n, classes)` int64, in masks `(n, h, w)` of bytes."""
    return torch.stack([mask.flatten().bincount(minlength=256)[:classes] for mask in masks])


class MaskSet(ImageSet):
    """Images (n, c, h, w) and masks (n, h, w), both uint8 and in memory; 255 in a mask is a pixel that does not count.
    Batches have float32 images in [0, 1] and int64 masks, see `LabeledData`. `labels` are the numbers of pixels of each
    class, (n, classes) int64."""

    @checked
    def __init__(self, images: Tensor, masks: Tensor, labels: Tensor) -> None:
        super().__init__(images, labels)
        self.masks = masks

    def on(self, device: torch.device) -> Self:
        if device == self.device or self.images.nbytes + self.masks.nbytes > free_bytes(device) / 2:
            return self
        return type(self)(*(x.to(device) for x in (self.images, self.masks, self.labels)))

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        images, _ = super().__getitems__(indices)
        return images, as_targets(self.masks[indices])

    def subset(self, indices: np.ndarray) -> Self:
        return type(self)(self.images[indices], self.masks[indices], self.labels[indices])

    def with_shuffled_labels(self, seed: int) -> Self:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return type(self)(self.images, self.masks[order], self.labels[order])


class MaskData(ImageData):
    """Base of images with a class of each pixel.

    Batches are images float32 in [0, 1], `(batch, c, h, w)`, and masks int64, `(batch, h, w)`, with the class of each
    pixel, -100 for a pixel that does not count. With a Trainer, a hook moves training images and their masks together.
    A loop of your own calls `images, masks = data.augmented((images, masks))` in training.

    Args:
        options: those of `ImageData` but `resize` and `ten_crop`.

    Raises:
        ValueError: an argument is out of range.
    """

    target = "masks"

    @checked
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.resize is not None:
            raise ValueError("resize and ten_crop change images and not their masks: leave both out")

    def augmented(self, batch: Batch) -> Batch:
        """Return a training batch, images `(n, c, h, w)` and masks `(n, h, w)`, with the same random changes of both.

        Colors change in the images alone. A pixel does not count where the image was moved in from outside.
        """
        images, masks = batch
        images = self._enlarged(images)
        known = (masks.unsqueeze(1) + 1).clamp_min(0).to(images.dtype)  # 0: does not count
        images, known = self._moved(torch.cat([images, known], 1)).split([images.shape[1], 1], 1)
        images, known = self._changed(images if self._jitter is None else self._jitter(images), known)
        masks = known.squeeze(1).long()
        return images, torch.where(masks == 0, IGNORED, masks - 1)

    def _changed(self, images: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Make further changes of images `(n, c, h, w)` and of `(n, 1, h, w)`, classes counted from 1, or 0."""
        return images, known

    def _padded(self, images: Tensor) -> Tensor:
        images, known = images[:, : self.shape[0]], images[:, self.shape[0] :]
        return torch.cat([super()._padded(images), pad(known, (self.shift,) * 4)], 1)


class Scenes(MaskData):
    """Base of images with masks that are made: each one from a seed of its own, the same in every run.

    A subclass sets `shape` and `classes`, and defines `_scene`.

    Args:
        train_size, test_size: number of training images and of test images.
        options: see `MaskData`; `val_size` is the number of validation images, which are made beside those of the
            training.
    """

    @checked
    def __init__(self, train_size: Count = 2000, test_size: Count = 500, **options: Any) -> None:
        super().__init__(**options)
        self.sizes = {"fit": train_size, "validate": self.val_size, "test": test_size}

    setup = LabeledData.setup  # nothing is held out of the training images

    def _set(self, stage: str) -> MaskSet:
        place = [*self.sizes].index(stage)
        scenes = [self._scene(stage, np.random.default_rng([place, index])) for index in range(self.sizes[stage])]
        images, masks = (torch.from_numpy(np.stack(parts)) for parts in zip(*scenes, strict=True))
        return MaskSet(images.unsqueeze(1), masks, pixel_counts(masks, self.classes))

    def _scene(self, stage: str, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return an image and its mask, both `(height, width)` uint8, for "fit", "validate" or "test"."""
        raise NotImplementedError
